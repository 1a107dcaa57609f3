"""From an op to its kernels: launchers registered as torch ops, and what the autograd Functions around them share.

**Registration.** An op has a schema, a launcher and a fake, so that torch.compile, fake tensors and opcheck understand
it; it carries no autograd: the `autograd.Function` beside it does, and all differentiable use goes through that.
Ops are defined by hand in a Library, which costs a fifth of `custom_op` a call, and unlike `triton_op` can be traced
under the interpreter; a call that nobody else looks at goes to the launcher itself. What each way costs stands in
docs/kernels/shared.md. Triton is imported by the first call of an op, never by `import fastformer`.

**Functions.** `Function.apply` of a Function with `setup_context`, which functorch asks for, binds its arguments by
name at every call (`inspect.signature`): a third of the host time of a fused layer norm. Small batches on a GPU wait
for the host. From torch 2.15 on it is the C++ behind both that binds, so that only calls without a gradient are spared.

**Second derivatives.** Kernels have a first derivative only. Where a gradient is itself to be differentiated
(`create_graph=True`, `torch.func`), backward differentiates the plain formula of the op instead, which the op hands
over.
"""

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastformer.modes import (
    compiling,
    dispatch_modes,
    forward_ad,
    functorch_level,
    profiling,
    saved_tensors_hooks,
    tracing_state,
)

Formula = Callable[..., Tensor | tuple[Tensor, ...]]

LAUNCHERS: dict[str, str] = {}  # op -> `ROOM.FILE.FUNCTION` in fastformer_kernels
_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, torch.dtype}
_SEEDS = 64  # a step of 6+6 layers takes 62
NAMESPACE = __name__.split(".")[0]  # `fastformer`, or a name of its own where the package was loaded as another
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


@cache
def _launcher(module: str, function: str) -> Callable[..., Any]:
    import fastformer_kernels
    from fastformer_kernels.host.plan import planned

    return planned(getattr(importlib.import_module(f"{fastformer_kernels.__name__}.{module}"), function))


def define(schema: str, launcher: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define the op `fastformer::NAME`.

    Args:
        schema: `NAME(Tensor x, float eps) -> (Tensor, Tensor)`; what is written to is `Tensor(a!)`.
        launcher: `ROOM.FILE.FUNCTION` in fastformer_kernels, called with the op's arguments.
        fake: takes those of the op's arguments that it names, as the schema does, and returns empty tensors of the
            shapes, dtypes and strides of the results.

    Returns:
        A function of the op's arguments that calls it.
    """
    name, rest = schema.split("(", 1)
    module, function = launcher.rsplit(".", 1)
    names = [argument.split()[-1] for argument in rest.split(") -> ")[0].split(", ")]
    places = [names.index(parameter) for parameter in inspect.signature(fake).parameters]
    LAUNCHERS[name] = launcher
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]

    def run(*args: Any) -> Any:
        return _launcher(module, function)(*args)

    # On CPU tensors a launcher runs in Triton's interpreter, or raises; `choice.unsupported` keeps others away from it.
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl(name, run, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: fake(*[args[i] for i in places]), lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args: Any) -> Any:
        if compiling() or _observed(args):
            return op(*args)
        return _launcher(module, function)(*args)

    return call


def _observed(args: tuple[Any, ...]) -> bool:
    """Whether a mode, a transform, a trace or a profiler is to see the op, or an argument is a tensor with its own."""
    return (
        dispatch_modes() > 0
        or functorch_level() is not None
        or tracing_state() is not None
        or profiling()
        or not {type(x) for x in args} <= _PLAIN
    )


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Do what `function.apply(*args)` does; every parameter of `forward` must be given, in order.

    Where nothing is to be differentiated, `forward` runs by itself.
    """
    compiles = compiling()
    # torch.func and forward-mode differentiation look on even without `requires_grad`.
    if not compiles and (functorch_level() is not None or forward_ad._current_level >= 0):
        return function.apply(*args)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled():
        for x in args:
            if isinstance(x, Tensor) and x.requires_grad:
                if compiles:
                    return function.apply(*_distinct(args))  # type: ignore[no-untyped-call]
                return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return function.forward(*args)


def _distinct(args: tuple[Any, ...]) -> list[Any]:
    """Return a view of what is there before: torch.compile (2.13) takes no Function that is given one tensor twice."""
    found: list[Any] = []
    for x in args:
        found.append(x.view_as(x) if isinstance(x, Tensor) and any(x is y for y in found) else x)
    return found


class _Seeds(threading.local):
    """Seeds that were drawn together, by device; None: each is drawn alone."""

    waiting: dict[torch.device, list[Tensor]] | None = None


_seeds = _Seeds()


@contextmanager
def seeds_together() -> Iterator[None]:
    """Draw the seeds of this thread's dropout masks `_SEEDS` at a time, in place of a kernel each."""
    before, _seeds.waiting = _seeds.waiting, {}
    try:
        yield
    finally:
        _seeds.waiting = before


def dropout_seed(x: Tensor) -> Tensor:
    """Draw the seed of one dropout mask, int64 `[1]`, from the generator of x's device.

    Drawn by torch on the device: `manual_seed`, `fork_rng` and activation checkpointing reproduce it, a CUDA graph
    draws a new one at each replay, and nothing waits.
    """
    if compiling() or _seeds.waiting is None or not torch.is_grad_enabled() or saved_tensors_hooks(True) is not None:
        # Checkpointing, which is such a hook or takes the gradient away, draws again from the generator as it was here.
        return _draw(x, 1)
    waiting = _seeds.waiting.get(x.device)
    if not waiting:
        # Each on 16 bytes, as a tensor of its own would be: kernels are compiled for where a pointer points.
        waiting = _seeds.waiting[x.device] = list(_draw(x, 2 * _SEEDS).view(_SEEDS, 2)[:, :1].unbind())
    return waiting.pop()


def _draw(x: Tensor, count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=x.device)


def eager_formula(plain: Formula, *others: Tensor | None) -> Formula | None:
    """Hand an op's plain formula to its fused Function, for second derivatives; torch.compile has none.

    Args:
        plain: a function of the op's differentiable inputs.
        others: the tensors of the caller that it uses besides, which must be unchanged by then.
    """
    if compiling():
        return None
    # Tensors made in inference mode have no version, and may not be changed where autograd could notice.
    versions = [(x, x._version) for x in others if x is not None and not x.is_inference()]
    if not versions:
        return plain

    def unchanged(*inputs: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        for x, version in versions:
            if x._version != version:
                raise RuntimeError(
                    f"a tensor of shape {list(x.shape)}, needed for a second derivative, was modified by an inplace "
                    f"operation: it is at version {x._version}; expected version {version} instead"
                )
        return plain(*inputs)

    return unchanged


def twice(op: str, formula: Formula | None, seed: Tensor | None = None) -> bool:
    """Whether a backward pass must be differentiable itself, and thus go through `formula`.

    Raises:
        RuntimeError: it must, and the op dropped elements by a seed, which the formula cannot.
    """
    if formula is None or not torch.is_grad_enabled():
        return False
    if seed is not None:
        raise RuntimeError(f"a second derivative of {op} with dropout needs backend 'reference'")
    return True


def plain_gradients(
    formula: Formula, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Differentiate `formula(*inputs)` in a differentiable way.

    Args:
        formula: the op in plain PyTorch, a function of the op's differentiable inputs.
        inputs: those, in order; None where not given.
        wanted: for each, whether its gradient is wanted.
        grads: of the formula's outputs; None where an output plays no part.

    Returns:
        A gradient, or None, for each input.
    """
    # Each gradient is that of one place: not of the other places where the same tensor is given, nor of what another
    # input was made of it (weights tied to an embedding, the residual that a sublayer started from).
    inputs = [x if x is None else x.view_as(x) for x in inputs]
    outputs = formula(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    used = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    sources: list[Any] = [x for x, needed in zip(inputs, wanted, strict=True) if needed]
    roots, directions = [out for out, _ in used], [grad for _, grad in used]
    found = iter(torch.autograd.grad(roots, sources, directions, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in wanted)
