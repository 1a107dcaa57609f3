"""Which fields of a batch belong together, and how they get to a device: in one transfer, with what lays them out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from fastformer.host.devices import send
from fastformer.packing import Layout

B = TypeVar("B", bound=Any)


class Side(NamedTuple):
    """The fields of a batch that one tensor of lengths lays out: their names."""

    lengths: str  # int64 [B]
    inputs: tuple[str, ...]  # ids that a model reads
    targets: tuple[str, ...] = ()  # ids that it predicts


def on_device(batch: B, sides: Sequence[Side], device: torch.device | str) -> B:
    """Return a batch with its ids on a device; its lengths stay on the CPU.

    On another device than the CPU its attribute `layouts` has the layout of each side, which a model wants: they came
    in the same transfer. It is no field, so that none is left to a batch that `dataclasses.replace` gave other lengths.
    """
    names = [name for side in sides for name in side.inputs + side.targets]
    ids = [getattr(batch, name) for name in names]
    laid_out: tuple[Layout, ...] = batch.layouts
    if not laid_out and torch.device(device).type != "cpu":
        laid_out = tuple(Layout.from_lengths(getattr(batch, side.lengths)) for side in sides)
    sent = send(device, *ids, *(x for layout in laid_out for x in layout.tensors))
    moved = replace(batch, **dict(zip(names, sent, strict=False)))
    parts = [sent[i : i + 4] for i in range(len(ids), len(sent), 4)]
    layouts = tuple(layout.made_of(part) for layout, part in zip(laid_out, parts, strict=True))
    object.__setattr__(moved, "layouts", layouts)  # it is frozen
    return moved
