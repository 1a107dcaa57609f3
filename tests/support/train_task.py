"""A task of a second for the tests of the trainer: a small network with dropout on seeded random batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastformer.apps.train import TrainConfig, Trainer


@dataclass(frozen=True)
class Rows:
    inputs: Tensor  # [B, 6]
    labels: Tensor  # [B]

    @property
    def tokens(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Rows":
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))


class Source:
    """Batches of unequal size; `poison` makes that batch of epoch 0 not a number."""

    def __init__(self, count: int = 7, poison: int | None = None, sizes: tuple[int, int] = (3, 9)) -> None:
        self.count, self.poison, self.sizes = count, poison, sizes

    def batches_in(self, epoch: int) -> int:
        return self.count

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Rows]:
        for index in range(start, self.count):
            random = np.random.default_rng((epoch, index))
            inputs = torch.from_numpy(random.standard_normal((int(random.integers(*self.sizes)), 6), np.float32))
            labels = (inputs.sum(1) > 0).long() + 2 * (inputs[:, 0] > 0).long()
            yield Rows(inputs * float("nan") if (epoch, index) == (0, self.poison) else inputs, labels)


@dataclass(frozen=True)
class Architecture:
    width: int = 16


def network(seed: int = 3, dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def summed_loss(model: nn.Module, batch: Rows) -> Tensor:
    return nn.functional.cross_entropy(model(batch.inputs).float(), batch.labels, reduction="sum")


def validate(model: nn.Module) -> dict[str, float]:
    batches = list(Source(2).epoch(1000))
    torch.rand(3)  # a sampling decoder would draw numbers too
    return {"loss": float(sum(summed_loss(model, b) for b in batches)) / sum(b.tokens for b in batches)}


def config(**changes: Any) -> TrainConfig:
    settings = {"lr": 0.01, "warmup_steps": 4, "log_every": 2, "validate_every": 5, "steps": 20, "batch_tokens": 64}
    return TrainConfig(**{**settings, **changes})


def trainer(folder: Path, settings: TrainConfig, source: Any = None, **changes: Any) -> Trainer:
    options: dict[str, Any] = {"validate": validate, "show": False}
    model = changes.pop("model", None) or network()
    if not hasattr(model, "config"):
        model.config = Architecture()
    loss = changes.pop("loss", summed_loss)
    return Trainer(model, loss, source or Source(), settings, folder, **{**options, **changes})


class Clock:
    """Seconds that pass in functions made by `takes`, `slower` times as many on a busy machine."""

    def __init__(self) -> None:
        self.now, self.slower = 1000.0, 1.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose calls take so many seconds."""

        def timed(*arguments: Any) -> Any:
            self.now += seconds * self.slower
            return function(*arguments)

        return timed


class Overflow(torch.autograd.Function):
    """0, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")
