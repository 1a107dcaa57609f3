"""A driver for Triton that launches nothing: all the host does for a GPU, on a machine without one.

Kernels are compiled for an H200, arguments are bound and specialised, and CPU tensors stand for a GPU's. Left out are
the launch itself (Triton's C function, cuLaunchKernel) and the switch of devices. What kernels should have written is
whatever was in memory. `tests/compiled` has a driver of this kind whose launches execute what was compiled.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.codegen.compilation import GPUS, Driver, target_of
from benchmarks.codegen.reader import ARCHITECTURES
from fastformer.host.autograd_function import LAUNCHERS, _launcher
from fastformer.host.cuda_graphs import Recorded, Step


class _Launcher:
    launched = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        _Launcher.launched += 1


def launched() -> int:
    """How many kernels would have been launched so far."""
    return _Launcher.launched


class Utilities:
    """What Triton asks about a GPU before it launches."""

    def __init__(self, arch: int) -> None:
        self.gpu = ARCHITECTURES[arch]

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        gpu = self.gpu
        return {"max_shared_mem": gpu.shared_of_block, "multiprocessor_count": gpu.multiprocessors, "warpSize": 32}


class NullDriver(Driver):
    """Beyond binding, which the driver of `benchmarks.codegen` is enough for: loads and launches that do nothing."""

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
    """Launch by that driver from here on, with CPU tensors for a GPU's, of which the launchers get its facts.

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
    """Use it from here on, in a process that runs nothing else: our ops then give garbage.

    Raises:
        RuntimeError: Triton's interpreter is on.
    """
    stand_in(NullDriver())
    # As on a GPU: torch's own dropout, one kernel, no look at values, and norms in fp32 under autocast.
    setattr(sys.modules["fastformer.functional.dropout"], "drop", _native_dropout)  # noqa: B010
    for op in ("attention", "embedding", "rotary", "linear_cross_entropy"):
        setattr(sys.modules[f"fastformer.functional.{op}.op"], "readable", lambda _: False)  # noqa: B010
    for devices in sys.modules["fastformer.functional.norms.op"].IN_FLOAT32.values():
        devices.add("cpu")


def _native_dropout(x: Tensor, p: float) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if p > 0.0 else x


# Ops that launch nothing, beside views: those that allocate, or look at what the host knows.
_NONE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh",
    "_unsafe_view", "is_same_size", "promote_types", "_local_scalar_dense", "_record_function_enter_new",
    "_record_function_exit",
}  # fmt: skip
# Zeros and a copy into them; a sort, its bounds and the sums.
_MORE = {"slice_backward": 2, "select_backward": 2, "embedding_dense_backward": 4}
# Tensors of a launch, by the number of lists; blocks of a launch, elements of a block (MultiTensorApply.cuh).
_TENSORS, _BLOCKS, _CHUNK = (110, 64, 48, 36, 30), 320, 65536


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the kernels that ATen's ops would launch on a GPU while it is active.

    An op counts as the kernels that CUDA's has at least: none for views and for what only allocates, one for most, and
    of an op over lists of tensors as many as `multi_tensor_apply` makes of these lengths. Libraries that split products
    or sums launch more. Nothing was counted on a GPU. A backward on CPU tensors runs in this thread, and counts too.

    Attributes:
        aten: launches by the name of their op.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.aten: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an op; one of ours runs in sight, since some use ATen themselves."""
        room, _, name = func._schema.name.partition("::")
        if room == "fastformer" and name in LAUNCHERS:
            with self:
                return _launcher(*LAUNCHERS[name].rsplit(".", 1))(*args)
        self.aten[name] += _kernels(func, name, args)
        return func(*args, **(kwargs or {}))


def _kernels(func: Any, name: str, args: tuple[Any, ...]) -> int:
    if name.startswith(("_foreach_", "_fused_")):
        return _of_lists(name, [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)])
    returned = [x.alias_info for x in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return 0 if is_view or name in _NONE else _MORE.get(name, 1)


def _of_lists(name: str, lists: list[Any]) -> int:
    """The launches of one op over lists of tensors: one a tensor where CUDA's has no kernel for their dtypes."""
    of_lists = [{x.dtype for x in each} for each in lists]
    mixed = any(len(dtypes) > 1 for dtypes in of_lists) or (len(set.union(*of_lists)) > 1 and name != "_foreach_copy_")
    if mixed:
        return len(lists[0])
    most = _TENSORS[min(len(lists), 4) - 1]  # the fifth list of a fused optimiser, its counts, is not walked over
    launches = tensors = blocks = 0
    for x in lists[0]:
        tensors += 1
        for _ in range(-(-x.numel() // _CHUNK)):
            blocks += 1
            if blocks == _BLOCKS:
                launches, tensors, blocks = launches + 1, 1, 0
        if tensors == most:
            launches, tensors, blocks = launches + 1, 0, 0
    return launches + (blocks > 0)


def count(step: Callable[[], object]) -> tuple[int, Counter[str]]:
    """Run a step that ran before: launches of ours, and those of ATen by op."""
    before = launched()
    with Launches() as seen:
        step()
    return launched() - before, seen.aten
