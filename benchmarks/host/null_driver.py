"""A driver for Triton that launches nothing: all that the host does for a GPU, on a machine without one.

Kernels are compiled for an H200, and arguments are bound and specialised; CPU tensors stand for a GPU's. Left out are
the launch itself (Triton's C function, cuLaunchKernel) and the switch of devices. Outputs of kernels have no values.
`tests/compiled` has a driver of this kind whose launches execute the compiled code.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.codegen.compilation import GPUS, Driver, target_of
from benchmarks.codegen.reader import ARCHITECTURES
from fastformer.host.cuda_graphs import Recorded, Step


class _Launcher:
    launched = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        _Launcher.launched += 1


def launched() -> int:
    """Return the number of kernels that would have been launched so far."""
    return _Launcher.launched


class Utilities:
    """The facts that Triton reads about a GPU before a launch."""

    def __init__(self, arch: int) -> None:
        self.gpu = ARCHITECTURES[arch]

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        gpu = self.gpu
        return {"max_shared_mem": gpu.shared_of_block, "multiprocessor_count": gpu.multiprocessors, "warpSize": 32}


class NullDriver(Driver):
    """The driver of `benchmarks.codegen`, which binds arguments, with loads and launches that do nothing."""

    launcher_cls: Any = _Launcher

    def __init__(self, arch: int = 90) -> None:
        super().__init__(arch)
        self.utils = Utilities(arch)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class NullRecorder:
    """A recorder of CUDA graphs that launch nothing."""

    failures = 0

    def warm_up(self, step: Step) -> Any:
        """Run a step."""
        return step()

    def capture(self, step: Step) -> Recorded:
        """Run a step, as capturing it would; its repetition does nothing."""
        return Recorded(lambda: None, step())


def stand_in(driver: NullDriver) -> None:
    """Launch by a driver from here on, with CPU tensors and the facts of its GPU.

    Raises:
        RuntimeError: Triton's interpreter is on.
    """
    from triton import knobs
    from triton.runtime import driver as active

    from fastformer.functional import choice
    from fastformer_kernels.host import launch

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET must be off: the interpreter goes past drivers, and computes")
    active.set_active(driver)
    choice._INTERPRETED = True  # CPU tensors are taken, as the interpreter's are
    gpu = GPUS[driver.arch]
    launch.assumed = launch.Device(target_of(driver.arch), gpu.multiprocessors, gpu.shared_of_block)


def install() -> None:
    """Use `NullDriver` in the rest of this process, in which fastformer's ops then return garbage."""
    stand_in(NullDriver())
    # As on a GPU: torch's own dropout, one kernel, no look at values, and norms in fp32 under autocast.
    setattr(sys.modules["fastformer.functional.dropout"], "drop", _native_dropout)  # noqa: B010
    for op in ("attention", "embedding", "rotary", "linear_cross_entropy"):
        setattr(sys.modules[f"fastformer.functional.{op}.op"], "readable", lambda _: False)  # noqa: B010
    for devices in sys.modules["fastformer.functional.norms.op"].IN_FLOAT32.values():
        devices.add("cpu")


def _native_dropout(x: Tensor, p: float) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if p > 0.0 else x
