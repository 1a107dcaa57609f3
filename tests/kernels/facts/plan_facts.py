"""Run by test_plan.py in a process of its own, without the interpreter: what launchers launch with and without memory.

Nothing is compiled: a stand-in for each compiled kernel writes down what it would be launched with. Prints one JSON
object: launcher -> calls, those that were repeated from a plan, and differences; and what hooks of launches see.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import CompiledKernel

import fastformer.functional  # noqa: F401  defines the ops
from benchmarks.codegen.compilation import find_cases
from fastformer.host.autograd_function import LAUNCHERS

sys.setrecursionlimit(10_000)
aten = torch.ops.aten
# They allocate, and move no data: a plan may leave them out, or do the same.
HARMLESS = {
    aten.new_empty.default, aten.promote_types.default, aten.view.dtype, aten.expand.default, aten.transpose.int,
    aten.detach.default,
}  # fmt: skip
_log: list[tuple[Any, ...]] = []
_straight: list[bool] = []  # of each launch, whether it took no hooks along


class Ops(TorchDispatchMode):
    """Collects torch's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


class Compiled:
    """Takes the place of a compiled kernel, with Triton's own ways to its launch."""

    function = packed_metadata = src = metadata = None

    def __init__(self, key: str) -> None:
        self.key = self.name = key

    def _init_handles(self) -> None:
        pass

    __getitem__, launch_metadata = CompiledKernel.__getitem__, CompiledKernel.launch_metadata

    def run(self, x: int, y: int, z: int, stream: int, function: None, metadata: None, info: Any, enter: Any,
            leave: Any, *values: Any) -> None:  # fmt: skip
        _straight.append(enter is None)
        for hook in (enter, leave):
            if hook is not None:
                hook(info)
        _log.append((self.key, (x, y, z), [describe(value) for value in values]))


def storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def describe(x: Any) -> Any:
    if isinstance(x, Tensor):  # a launch takes the address alone
        return storage(x), x.storage_offset() * x.itemsize, x.numel() * x.itemsize
    return type(x).__name__, x


def owned(value: Any, arguments: dict[int, int]) -> Any:
    """Say of a tensor which argument it belongs to, None for allocations, which come back elsewhere."""
    return (arguments.get(value[0]), *value[1:]) if len(value) == 3 else value


def results(found: Any) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype) for x in ([found] if isinstance(found, Tensor) else found)]


def like(x: Tensor, scale: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    """Another tensor of x's shape; all strides but those of 1 are multiplied."""
    strides = [stride if stride == 1 else scale * stride for stride in x.stride()]
    return torch.empty_strided(x.shape, strides, dtype=dtype or x.dtype, device=x.device)


def unaligned(x: Tensor) -> Tensor:
    """A CPU tensor like x that begins in the middle of 16 bytes."""
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return torch.zeros(size + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride())


def others_of(x: Any) -> Iterator[Any]:
    """Yield what a caller may give in place of x, each different in one respect."""
    if isinstance(x, Tensor):
        yield like(x, scale=2)
        yield like(x, dtype=torch.float16 if x.dtype == torch.bfloat16 else torch.bfloat16)
        if x.dim() > 1:
            yield x[: x.shape[0] // 2]
        if x.numel() <= 1 << 14:
            yield unaligned(x)
            yield torch.zeros_like(x, device="cpu")
    elif isinstance(x, bool):
        yield not x
    elif isinstance(x, (int, float)):
        yield 2 * x + 1
    elif isinstance(x, torch.dtype):
        yield torch.float16


def variants(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield calls that differ in one argument, then the call itself: what it remembers must not come from them."""
    for i, x in enumerate(args):
        for other in others_of(x):
            yield (*args[:i], other, *args[i + 1 :])
    yield args


def hooks(call: Callable[[], object]) -> dict[str, Any]:
    """Call what has been launched before, without and with hooks: did it go straight, and what they saw."""
    from triton import knobs

    actual: dict[str, Any] = {}
    seen: list[str] = []

    def see(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    for name, chain in (
        ("none", None),
        ("enter", knobs.runtime.launch_enter_hook),
        ("exit", knobs.runtime.launch_exit_hook),
        ("removed", None),
    ):
        _straight.clear()
        seen.clear()
        if chain is not None:
            chain.add(see)
        call()
        if chain is not None:
            chain.remove(see)
        actual[name] = {"straight": list(_straight), "seen": list(seen)}
    return actual


def main() -> None:
    import triton

    from benchmarks.host import null_driver
    from fastformer_kernels.attention.arguments import Arguments
    from fastformer_kernels.host import launch, plan

    null_driver.install()
    triton.JITFunction._do_compile = lambda self, key, *rest, **more: Compiled(f"{self.__name__} {key}")
    actual: dict[str, dict[str, Any]] = {}
    inside = False
    repeated: list[Any] = []
    repeat = plan.repeat
    plan.repeat = lambda launches, slots: (repeated.append(launches), repeat(launches, slots))[1]

    def run(call: Any, args: tuple[Any, ...], binds: bool) -> tuple[list[Any], list[Any]]:
        _log.clear()
        launch._BINDS = binds
        described = results(call(*args))
        arguments = {storage(x): i for i, x in enumerate(args) if isinstance(x, Tensor)}
        return [(key, grid, [owned(value, arguments) for value in values]) for key, grid, values in _log], described

    def compared(name: str, launcher: Any) -> Any:
        planned = plan.planned(launcher)
        counts = actual[name] = {"calls": 0, "repeated": 0, "differences": []}

        def call(*args: Any) -> None:
            nonlocal inside
            inside = True
            try:
                public = run(launcher, args, False)
            except Exception:  # these arguments do not go together
                inside = False
                return
            counts["calls"] += 1
            ways = {"bound": run(launcher, args, True), "bound again": run(launcher, args, True)}
            ways["watched"] = run(planned, args, True)
            repeated.clear()
            ways["planned"] = run(planned, args, True)
            by_plan = bool(repeated)
            with Ops() as ops:
                launcher(*args)
            if by_plan and (more := ops.seen - HARMLESS):
                counts["differences"].append(f"the plan leaves out {sorted(map(str, more))}")
            for way, (launches, described) in ways.items():
                if (launches, described) != public:
                    counts["differences"].append(f"{way}: {launches} {described}, not {public}"[:2000])
            counts["repeated"] += by_plan
            inside = False

        return call

    modules = {}
    for name in LAUNCHERS.values():
        module, function = name.rsplit(".", 1)
        modules[name] = (importlib.import_module(f"fastformer_kernels.{module}"), function)
    originals = {name: getattr(module, function) for name, (module, function) in modules.items()}
    wrapped = {name: compared(name, original) for name, original in originals.items()}

    def varied(name: str) -> Any:
        def call(*args: Any) -> Any:
            if inside:  # launchers call launchers
                return originals[name](*args)
            seen: set[int] = set()
            # No tensor twice: a plan cannot be made then.
            args = tuple(like(x) if isinstance(x, Tensor) and (id(x) in seen or seen.add(id(x))) else x for x in args)
            for variant in variants(args):
                wrapped[name](*variant)
            return originals[name](*args)

        return call

    for name, (module, function) in modules.items():
        setattr(module, function, varied(name))
    cases = find_cases("benchmarks.codegen.cases")
    for package in sorted({name.split("/")[0] for name, _ in cases}):
        some = [case for name, case in cases if name.startswith(f"{package}/")]
        expected = int(sys.argv[1]) * sum(f".{package}" in f".{name}" for name in LAUNCHERS.values())
        for case in some[:: max(1, len(some) // expected)]:
            case()
    for name, (module, function) in modules.items():
        setattr(module, function, originals[name])
    x = torch.zeros(4, 32)
    for binds in (False, True):  # a Triton that is not known, then one that is
        activate = plan.planned(originals["feed_forward.kernels.activate"])
        lengths = []
        for _ in range(4):
            launches, _ = run(activate, (x, None, "gelu", 0.0), binds)
            lengths.append(len(launches))
        assert lengths == [1] * 4, (binds, lengths)
    launch._BINDS = True
    # Without keys it launches nothing, and writes by itself.
    attend = plan.planned(originals["attention.forward.forward"])
    q, k, v = (torch.zeros(1, 1, n, 16) for n in (4, 0, 0))
    for _ in range(3):
        out, lse = attend(q, k, v, *Arguments(queries=4, keys=0, scale=0.25))
        assert not out.any()
        assert (lse == torch.inf).all()
    normed, weight, get_device = plan.planned(originals["norms.norm.rms_norm"]), torch.ones(32), Tensor.get_device
    for device, by_plan in ((-1, False), (-1, True), (1, False)):  # a plan is for tensors on their devices
        repeated.clear()
        Tensor.get_device = lambda self, device=device: device if self is weight else get_device(self)
        normed(x, weight, 1e-5, torch.float32)
        assert bool(repeated) == by_plan, device
    Tensor.get_device = get_device
    kernel = modules["feed_forward.kernels.activate"][0].add_partials_kernel
    keys = set()
    for warps in (4, 8, 4):
        keys.add(launch.launch(kernel, (1,), x, x, 4, 32, BLOCK_P=64, BLOCK_N=32, num_warps=warps).key)
    assert len(keys) == 2
    assert all("'enable_fp_fusion': True" in key for key in keys)
    doors = {
        "launched": hooks(lambda: launch.launch(kernel, (1,), x, x, 4, 32, BLOCK_P=64, BLOCK_N=32, num_warps=4)),
        "repeated": hooks(lambda: activate(x, None, "gelu", 0.0)),
    }
    print(json.dumps({"launchers": actual, "hooks": doors}))


if __name__ == "__main__":
    main()
