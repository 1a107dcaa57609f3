"""From an op to its kernels: launchers registered as torch ops, and helpers of the autograd Functions around them.

Ops are defined in a Library, where a call takes a fifth of the time of a `custom_op` (docs/kernels/shared.md). A call
that no mode, transform, trace or profiler observes runs the launcher directly. The first call of an op imports Triton.

Kernels have a first derivative only. If a gradient is to be differentiated itself (`create_graph=True`, `torch.func`),
backward differentiates the op's formula in plain PyTorch instead, which is an input of the Function.
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
    current_node,
    dispatch_modes,
    forward_ad,
    functorch_level,
    profiling,
    saved_tensors_hooks,
    tracing_state,
)

Formula = Callable[..., Tensor | tuple[Tensor, ...]]

LAUNCHERS: dict[str, str] = {}  # op -> `PACKAGE.FILE.FUNCTION` in fastformer_kernels
_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, torch.dtype}
_SEEDS = 64  # a step of 6+6 layers takes 62
NAMESPACE = __name__.split(".")[0]  # `fastformer`, or the name under which the package was loaded
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


@cache
def _launcher(module: str, function: str) -> Callable[..., Any]:
    import fastformer_kernels
    from fastformer_kernels.host.plan import planned

    return planned(getattr(importlib.import_module(f"{fastformer_kernels.__name__}.{module}"), function))


def define(schema: str, launcher: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define the op `fastformer::NAME`, and return a function of its arguments that calls it.

    Args:
        schema: `NAME(Tensor x, float eps) -> (Tensor, Tensor)`.
        launcher: `PACKAGE.FILE.FUNCTION` in fastformer_kernels, called with the op's arguments.
        fake: returns empty tensors of the shapes, dtypes and strides of the results; its parameters are arguments of
            the op, named as in the schema.
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

    # On CPU tensors a launcher runs in Triton's interpreter, or raises; `choice.unsupported` excludes other devices.
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
    """Return whether a mode, transform, trace or profiler must see the op, or an argument is a subclass of Tensor."""
    return (
        dispatch_modes() > 0
        or functorch_level() is not None
        or tracing_state() is not None
        or profiling()
        or not {type(x) for x in args} <= _PLAIN
    )


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply(*args)` at less cost; args are all parameters of `forward`, in order.

    `Function.apply` of a Function with `setup_context`, which functorch requires, binds its arguments by name: a third
    of the host time of a fused layer norm. If no gradient is needed, `forward` runs directly.
    """
    compiles = compiling()
    # torch.func and forward-mode differentiation must see the Function even without `requires_grad`.
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
    """Replace repeated tensors by views, because torch.compile (2.13) rejects a Function with one tensor twice."""
    distinct: list[Any] = []
    for x in args:
        distinct.append(x.view_as(x) if isinstance(x, Tensor) and any(x is y for y in distinct) else x)
    return distinct


class _Seeds(threading.local):
    """Unused seeds of a joint draw, by device; None: each seed is drawn alone."""

    unused: dict[torch.device, list[Tensor]] | None = None


_seeds = _Seeds()


@contextmanager
def draw_seeds_together() -> Iterator[None]:
    """Draw the seeds of this thread's dropout masks `_SEEDS` at a time, in place of a kernel each. Blocks nest."""
    before = _seeds.unused
    _seeds.unused = {} if before is None else before
    try:
        yield
    finally:
        _seeds.unused = before


def dropout_seed(x: Tensor) -> Tensor:
    """Draw the seed of one dropout mask, int64 `[1]`, on x's device, so that a CUDA graph draws a new one each time."""
    if compiling() or (joint := _seeds.unused) is None or not torch.is_grad_enabled():
        return _draw(x, 1)
    # Activation checkpointing disables gradients or sets such hooks. In backward it repeats this call from the same
    # state of the generator, which must then give the same seed.
    if saved_tensors_hooks(True) is not None or current_node() is not None:
        return _draw(x, 1)
    unused = joint.get(x.device)
    if not unused:
        # Each seed is aligned to 16 bytes, like a separate tensor: kernels are compiled for the alignment of pointers.
        unused = joint[x.device] = list(_draw(x, 2 * _SEEDS).view(_SEEDS, 2)[:, :1].unbind())
    return unused.pop()


def _draw(x: Tensor, count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=x.device)


def eager_formula(plain: Formula, *others: Tensor | None) -> Formula | None:
    """Return an op's formula in plain PyTorch for second derivatives; None in torch.compile, which supports none.

    Args:
        plain: a function of the op's differentiable inputs.
        others: tensors that `plain` also reads; they must not change before backward.
    """
    if compiling():
        return None
    # Tensors of inference mode have no version; outside of that mode they cannot be changed in place.
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


def needs_double_backward(op: str, formula: Formula | None, seed: Tensor | None = None) -> bool:
    """Return whether a backward pass must be differentiable itself, and so must use `formula`.

    Raises:
        RuntimeError: it must, and the op has a dropout seed, which the formula cannot repeat.
    """
    if formula is None or not torch.is_grad_enabled():
        return False
    if seed is not None:
        raise RuntimeError(f"a second derivative of {op} with dropout needs backend 'reference'")
    return True


def plain_gradients(
    formula: Formula, inputs: Sequence[Tensor | None], needs_grad: Sequence[bool], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `formula(*inputs)`, which are differentiable themselves; None where not needed.

    grads: of the formula's outputs; None for an output that the loss does not use.
    """
    # Views give each input its own gradient, without that of other uses of the same tensor: as another input, or in the
    # computation of another input (weights tied to an embedding, the residual that a sublayer started from).
    inputs = [x if x is None else x.view_as(x) for x in inputs]
    outputs = formula(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    used = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    sources: list[Any] = [x for x, needed in zip(inputs, needs_grad, strict=True) if needed]
    roots, directions = [out for out, _ in used], [grad for _, grad in used]
    gradients = iter(torch.autograd.grad(roots, sources, directions, create_graph=True, allow_unused=True))
    return tuple(next(gradients) if needed else None for needed in needs_grad)
