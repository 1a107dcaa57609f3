"""How many kernels a training step launches on a GPU, counted on CPU tensors without one: ours, and those of ATen.

Ours are what reaches the driver (`null_driver`). An op of ATen counts as the kernels that CUDA's has at least: none for
views and for what only allocates, one for most, and of one over lists of tensors as many as `multi_tensor_apply` makes
of these lengths. So libraries that split a product or a sum launch more than is counted; nothing was counted on a GPU.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.host import null_driver
from fastformer.host.autograd_function import LAUNCHERS, _launcher

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
    """Counts while it is active; a backward on CPU tensors runs in the thread that asked for it, and is seen too.

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
    before = null_driver.launched()
    with Launches() as seen:
        step()
    return null_driver.launched() - before, seen.aten
