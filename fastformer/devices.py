"""Tensors and their devices: the check that those of a call are on one, and the copy from the CPU in one transfer.

A kernel takes addresses, and one of another device is an illegal access, or a slow one. So every op asks here, first,
before anything runs. Tensors without dimensions are no exception, though torch takes them from the CPU as numbers: what
our ops take as a number is a Python number.
"""

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor


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


def _refuse(names: tuple[str, ...], found: Sequence[object], required: int) -> NoReturn:
    """Say which is no tensor, or else which is on another device than the first."""
    given = {name: x for i, (name, x) in enumerate(zip(names, found, strict=True)) if i < required or x is not None}
    check_types(tuple(given), *given.values())
    first, *others = ((name, x.device) for name, x in given.items() if isinstance(x, Tensor))
    name, device = next(other for other in others if other[1] != first[1])
    raise DeviceError(f"{name} is on {device}, {first[0]} on {first[1]}: all must be on one device")
