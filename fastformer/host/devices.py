"""Arguments of ops: the check that tensors are on one device, what autocast makes of them, copies from the CPU in one
transfer, and the checks of numbers and choices.

A kernel takes addresses, and one of another device is an illegal access, or a slow one. So every op asks here, first,
before anything runs. Tensors without dimensions are no exception, though torch takes them from the CPU as numbers: what
our ops take as a number is a Python number.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.modes import compiling

_ALIGNMENT = 128  # bytes; what torch's own tensors begin at: kernels are compiled for multiples of 16


class DeviceError(ValueError, RuntimeError):
    """A tensor is on another device than the first of its call; torch answers that with RuntimeError."""


def check_tensors(
    names: tuple[str, ...], first: Tensor, others: Sequence[Tensor] = (), optional: Sequence[Tensor | None] = ()
) -> None:
    """Raise unless all are tensors, and on the device of the first; 0.1 us a tensor.

    Args:
        names: of all of them, in this order.
        first: says which device.
        others: required, too.
        optional: each a tensor or None.

    Raises:
        DeviceError: one is on another device.
        TypeError: one is no tensor.
    """
    try:
        device = first.device
        for x in others:
            if x.device != device:
                _refuse(names, (first, *others, *optional), 1 + len(others))
        for other in optional:
            if other is not None and other.device != device:
                _refuse(names, (first, *others, *optional), 1 + len(others))
    except AttributeError:
        _refuse(names, (first, *others, *optional), 1 + len(others))
    if not isinstance(first, Tensor):  # NumPy's arrays have a device, which is a str
        _refuse(names, (first, *others, *optional), 1 + len(others))


def check_types(names: tuple[str, ...], *tensors: object) -> None:
    """Raise TypeError unless all are tensors, on whatever device: hooks may move them before they meet."""
    for name, x in zip(names, tensors, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a Tensor, not {type(x).__name__}")


def check_masks(names: tuple[str, ...], *masks: object) -> None:
    """Raise TypeError unless each mask is a tensor or None, on whatever device."""
    for name, mask in zip(names, masks, strict=True):
        if mask is not None and not isinstance(mask, Tensor):
            check_types((name,), mask)


def _refuse(names: tuple[str, ...], found: Sequence[object], required: int) -> NoReturn:
    """Say which is no tensor, or else which is on another device than the first."""
    given = {name: x for i, (name, x) in enumerate(zip(names, found, strict=True)) if i < required or x is not None}
    check_types(tuple(given), *given.values())
    first, *others = ((name, x.device) for name, x in given.items() if isinstance(x, Tensor))
    name, device = next(other for other in others if other[1] != first[1])
    raise DeviceError(f"{name} is on {device}, {first[0]} on {first[1]}: all must be on one device")


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of x; it knows no "meta", where nothing is computed."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with x: that of autocast where it is on, which leaves fp64 alone."""
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


class _Copies(threading.local):
    """Of each parameter that was cast together with others: itself, its version then, and its copy."""

    of: dict[int, tuple[Tensor, int, Tensor]] | None = None


copies = _Copies()


def in_autocast(parameter: Tensor | None) -> Any:
    """Return the copy of a parameter in the dtype of autocast where it has one, else itself, which torch then casts."""
    if compiling() or copies.of is None or parameter is None:
        return parameter
    found = copies.of.get(id(parameter))
    if found is None or found[1] != parameter._version:
        return parameter
    device, copy = parameter.device.type, found[2]
    on = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == copy.dtype
    return copy if on else parameter


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear`, with the copies of the parameters in the dtype of autocast where they have some."""
    if compiling() or copies.of is None:
        return F.linear(x, weight, bias)
    return F.linear(x, in_autocast(weight), in_autocast(bias))


def to_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast floating-point tensors to the autocast dtype where autocast is on; custom ops do not see autocast.

    Like autocast, it leaves fp64 as it is.
    """
    device = next(x for x in tensors if x is not None).device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    found = [in_autocast(x) for x in tensors]
    return tuple([x.to(dtype) if x is not None and _is_cast(x) else x for x in found])


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64


class _WithParameters(Protocol):
    def parameters(self) -> Iterator[nn.Parameter]: ...


def device_of(model: _WithParameters) -> torch.device:
    """Where a model is: its first parameter; its parts may be anybody's, and need not show a weight."""
    return next(model.parameters()).device


def send(device: torch.device | str | None, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors on a device: those of a CPU in one transfer, from pinned memory, so that nothing waits.

    What comes of them are views of one piece of memory; of the same tensor given twice, it is the same view. The pinned
    memory is used again only when its copy is done: torch's allocator sees to that, and nobody else ever has it.

    Args:
        device: None for that of the tensors.
        tensors: of any shapes and dtypes, without a gradient; on the device already, they are returned as they are.
    """
    where = None if device is None else torch.device(device)
    if where is None or where.type == "cpu" or not all(x.is_cpu for x in tensors):
        return [x.to(where) for x in tensors]
    unique = {id(x): x for x in tensors}
    filler = torch.empty(_ALIGNMENT, dtype=torch.uint8, device="cpu")
    pieces: list[Tensor] = []
    for x in unique.values():
        pieces += [x.reshape(-1).view(torch.uint8), filler[: -x.nbytes % _ALIGNMENT]]
    sizes = [piece.numel() for piece in pieces]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=where.type == "cuda")
    sent = torch.cat(pieces, out=staged).to(where, non_blocking=True).split(sizes)[::2]  # type: ignore[no-untyped-call]
    views = {key: part.view(x.dtype).view(x.shape) for (key, x), part in zip(unique.items(), sent, strict=True)}
    return [views[id(x)] for x in tensors]


def check_probability(name: str, p: float) -> None:
    """Raise unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
