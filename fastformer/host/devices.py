"""Arguments of ops: devices, casts for autocast, copies from the CPU in one transfer, and checks of numbers.

Every op first checks that its tensors are on one device, because a kernel takes addresses. This holds for tensors
without dimensions, too, which torch's ops accept from the CPU.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastformer.modes import readable

WITHOUT_FP64 = ("mps", "xpu")  # device types: Apple's GPUs have no fp64, nor do some of Intel's
_ALIGNMENT = 128  # bytes, as torch's own tensors: kernels are compiled for multiples of 16


class DeviceError(ValueError, RuntimeError):
    """A tensor is on another device than the first tensor of its call; torch raises RuntimeError for that."""


def check_tensors(
    names: tuple[str, ...], first: Tensor, others: Sequence[Tensor] = (), optional: Sequence[Tensor | None] = ()
) -> None:
    """Raise unless all are tensors on the device of the first, or None if optional; takes 0.1 us a tensor.

    Raises:
        DeviceError: one is on another device.
        TypeError: one is no tensor.
    """
    try:
        device, fit = first.device, isinstance(first, Tensor)  # NumPy's arrays have a device, which is a str
        for x in others:
            fit = fit and x.device == device
        for other in optional:
            fit = fit and (other is None or other.device == device)
    except AttributeError:
        fit = False
    if not fit:
        _refuse(names, (first, *others, *optional), 1 + len(others))


def check_types(names: tuple[str, ...], *tensors: object, optional: bool = False) -> None:
    """Raise TypeError unless all are tensors, or None if optional; devices may differ, because hooks may move them."""
    for name, x in zip(names, tensors, strict=True):
        if not (isinstance(x, Tensor) or (optional and x is None)):
            raise TypeError(f"{name} must be a Tensor, not {type(x).__name__}")


def _refuse(names: tuple[str, ...], tensors: Sequence[object], required: int) -> NoReturn:
    """Raise TypeError for an argument that is no tensor, else DeviceError for a tensor on another device."""
    named = {name: x for i, (name, x) in enumerate(zip(names, tensors, strict=True)) if i < required or x is not None}
    check_types(tuple(named), *named.values())
    first, *others = ((name, x.device) for name, x in named.items() if isinstance(x, Tensor))
    name, device = next(other for other in others if other[1] != first[1])
    raise DeviceError(f"{name} is on {device}, {first[0]} on {first[1]}: all must be on one device")


def autocasts(x: Tensor) -> bool:
    """Return whether autocast is on for the device of x; False on "meta", which autocast does not know."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product with x: autocast's dtype if autocast is on, unless x is fp64."""
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def to_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast tensors to autocast's dtype if autocast is on, which does not cast for custom ops; fp64 stays fp64."""
    device = next(x for x in tensors if x is not None).device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    casts = [x is not None and x.is_floating_point() and x.dtype != torch.float64 for x in tensors]
    return tuple([x.to(dtype) if cast else x for x, cast in zip(tensors, casts, strict=True)])  # type: ignore[union-attr]


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return fp64, or fp32 on a device without fp64."""
    return torch.float32 if device.type in WITHOUT_FP64 else torch.float64


def device_with_fp64(device: torch.device) -> torch.device:
    """Return the device, or the CPU in place of a device without fp64."""
    return torch.device("cpu") if device.type in WITHOUT_FP64 else device


def device_of(model: Any) -> torch.device:
    """Return the device of a model's first parameter; its modules need not have an attribute `weight`."""
    device: torch.device = next(model.parameters()).device
    return device


def send(device: torch.device | str | None, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors on a device: tensors of a CPU in one transfer, from pinned memory, so that nothing waits.

    The results are views of one buffer; a tensor that is passed twice gives the same view twice. Without a device, and
    on the device, tensors are returned unchanged.
    """
    target = None if device is None else torch.device(device)
    if target is None or target.type == "cpu" or not all(x.is_cpu for x in tensors):
        return [x.to(target) for x in tensors]
    unique = {id(x): x for x in tensors}
    sizes = [-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in unique.values()]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=target.type == "cuda")

    def views(buffer: Tensor) -> list[Tensor]:
        parts = zip(buffer.split(sizes), unique.values(), strict=True)  # type: ignore[no-untyped-call]
        return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in parts]

    for view, x in zip(views(staged), unique.values(), strict=True):
        view.copy_(x)
    sent = dict(zip(unique, views(staged.to(target, non_blocking=True)), strict=True))
    return [sent[id(x)] for x in tensors]


def check_probability(name: str, p: float) -> None:
    """Raise unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")


def check_range(
    name: str,
    x: Tensor,
    most: int,
    described: str = "",
    error: type[Exception] = ValueError,
    ignored: int | None = None,
) -> None:
    """Raise `error` unless an int64 tensor holds numbers from 0 to `most`, or `ignored`; checked on the CPU only.

    `described` follows the largest number in the message.
    """
    if not readable(x):
        return
    low, high = (int(end) for end in x.aminmax())
    if low < 0 or high > most:
        wrong = low if low < 0 else high
        if ignored is not None:
            others = x[((x < 0) | (x > most)) & (x != ignored)]
            if not others.numel():
                return
            wrong = int(others[0])
        raise error(f"{name} must lie between 0 and {most}{described}, not {wrong}")
