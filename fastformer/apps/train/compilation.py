"""torch.compile of the model in training: forward and backward as one graph for batches of all shapes.

Only training steps call the compiled model. Validation, checkpoints and the optimizer use the model itself, so a run
may be resumed with or without compilation. Batches have a `Layout` in place of their lengths, which the compiler cannot
read. The loss is not compiled: its large product is a fused op already.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.packing import Layout

INDUCTOR = "inductor"
BACKENDS = (INDUCTOR, "aot_eager", "eager")


def check_compiler(backend: str | None, device: torch.device | str) -> None:
    """Raise ValueError if inductor, torch's compiler, would find no C++ compiler, which it needs for code on a CPU."""
    name = os.environ.get("CXX", "g++")
    if backend == INDUCTOR and torch.device(device).type == "cpu" and shutil.which(name) is None:
        raise ValueError(
            f"compile={backend!r} needs a C++ compiler on a CPU, and {name!r} is not found; install one, name one in "
            "the environment variable CXX, or leave compile unset"
        )


def compiled_loss(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], backend: str
) -> Callable[[nn.Module, Any], Tensor]:
    """Return a loss function that calls the compiled `model`, with the same parameters, whatever model it is passed."""
    compiled: Any = torch.compile(model, dynamic=True, backend=backend)
    return lambda _, batch: loss(compiled, with_layouts(batch))


def with_layouts(batch: Any) -> Any:
    """Return a batch with a layout in place of the lengths of each side, unless it has layouts or names no sides."""
    if getattr(batch, "layouts", ()):
        return batch
    layouts = {
        side.lengths: Layout.from_lengths(getattr(batch, side.lengths), getattr(batch, side.inputs[0]).device)
        for side in getattr(batch, "SIDES", ())
    }
    return replace(batch, **layouts) if layouts else batch
