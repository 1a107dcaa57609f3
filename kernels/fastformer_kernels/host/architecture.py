"""Classes of GPUs with the same matrix units and about as much shared memory, by which tiles and speeds are listed.

Does not import Triton, so that an implementation can be chosen where Triton is not installed.
"""

from importlib import metadata

import torch

_MFMA = ("gfx90a", "gfx942", "gfx950")
# The largest head size whose exact fp32 attention is multiplied on tensor cores, forward and backward, by architecture.
EXACT_ON_TENSOR_CORES = {"sm_90": 128}
_targets: dict[int, str] = {}  # by device; torch.compile warns of functools.cache


def _without_tf32() -> set[str]:
    try:
        lacks_barriers = metadata.version("triton").startswith(("3.6.", "3.7."))
    except metadata.PackageNotFoundError:  # none, or a build of another name
        lacks_barriers = False
    return {"gfx9", "gfx12", "sm_100"} if lacks_barriers else {"gfx9", "gfx12"}


# The architectures on which fp32 is exact whatever torch allows: of AMD's GPUs only gfx942 has tf32. On sm_100, Triton
# 3.6 and 3.7 leave out the barrier between the stores of an operand of tf32 and its product, in attention's backward.
WITHOUT_TF32 = _without_tf32()


def target_of(device: int) -> str:
    """Return the target that kernels are compiled for on a GPU, such as "sm_90" or "gfx942"."""
    if device not in _targets:
        properties = torch.cuda.get_device_properties(device)
        is_amd = torch.version.hip is not None
        name = properties.gcnArchName.partition(":")[0] if is_amd else f"sm_{properties.major}{properties.minor}"
        _targets[device] = name
    return _targets[device]


def architecture_of(target: str) -> str | None:
    """Return the class of a GPU by its target ("sm_90", "gfx942"), or None if the kernels do not run there.

    - sm_80: mma.sync, 163 KiB of shared memory a block.
    - sm_86: mma.sync, 99 KiB. Desktop GPUs: sm_86, sm_89, sm_120 and newer ones.
    - sm_90: wgmma, 227 KiB.
    - sm_100: tcgen05, 227 KiB. sm_100 to sm_110.
    - gfx9: MFMA, 64 lanes a wave, 64 KiB (gfx950: 160). gfx90a, gfx942, gfx950 (MI200, MI300, MI350).
    - gfx12: WMMA, 32 lanes a wave, 64 KiB. gfx11 and gfx12 (RX 7000 and RX 9000).
    """
    if target.startswith("gfx"):
        return "gfx9" if target in _MFMA else "gfx12" if target.startswith(("gfx11", "gfx12")) else None
    capability = int(target.removeprefix("sm_"))
    if capability >= 120 or capability in (86, 89):
        return "sm_86"
    if capability >= 90:
        return "sm_100" if capability >= 100 else "sm_90"
    return "sm_80" if capability >= 80 else None
