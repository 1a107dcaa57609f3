"""What tests of the fused norms share: the four ops with their inputs and formulas, autocast, few programs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional import choice, dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm
from tests.support.fused_op import DEVICE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One number; ragged, in one tile; more than a tile of rows, the last of them part empty; columns that fill the tile.
SHAPES = [(1, 1), (5, 3, 7), (131, 20), (3, 64)]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def use_one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs, so that each walks over many tiles."""
    norm = pytest.importorskip("fastformer_kernels.norms.tiles")
    device_of = norm.device_of
    monkeypatch.setattr(norm, "device_of", lambda x: device_of(x)._replace(multiprocessors=1))


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Autocast for a GPU, also where there is none; one is then assumed that has kernels."""
    torch.set_autocast_enabled("cuda", True)
    target = choice.target_of
    choice.target_of = lambda device: "sm_90"
    try:
        yield
    finally:
        choice.target_of = target
        torch.set_autocast_enabled("cuda", False)


class Norm(NamedTuple):
    """An op, torch's function, the names of the parameters, and whether it drops out and adds to a residual."""

    op: Callable[..., Tensor | tuple[Tensor, Tensor]]
    of_torch: Callable[..., Tensor]
    parameters: tuple[str, ...]
    adds: bool

    def inputs(self, *shape: int, affine: str = "weight and bias", dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Return x, the residual of an op that adds, and the parameters."""
        rows = [random(*shape, dtype=dtype) for _ in range(1 + self.adds)]
        return [*rows, *(random(shape[-1], dtype=dtype) if name in affine else None for name in self.parameters)]

    def leaves(self, *shape: int) -> list[Tensor]:
        """Return those in fp32, with gradients."""
        return [t.requires_grad_() for t in self.inputs(*shape, dtype=torch.float32)]

    def __call__(self, *inputs: Tensor | None, N: int | tuple[int, ...], eps: float = 1e-5, **options: float):
        """Return the normalised rows, and for an op that adds the sum, too."""
        rows, parameters = inputs[: 1 + self.adds], inputs[1 + self.adds :]
        actual = self.op(*rows, N, *parameters, eps=eps, **options)
        return actual if self.adds else (actual,)

    def formula(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return what torch makes of them, without dropout."""
        rows, parameters = inputs[: 1 + self.adds], inputs[1 + self.adds :]
        s = sum(rows[::-1])
        return (self.of_torch(s, s.shape[-1:], *parameters, eps=1e-5), s)[: 1 + self.adds]


NORMS = {
    "layer_norm": Norm(layer_norm, F.layer_norm, ("weight", "bias"), False),
    "rms_norm": Norm(rms_norm, F.rms_norm, ("weight",), False),
    "dropout_add_layer_norm": Norm(dropout_add_layer_norm, F.layer_norm, ("weight", "bias"), True),
    "dropout_add_rms_norm": Norm(dropout_add_rms_norm, F.rms_norm, ("weight",), True),
}
ALONE, ADDING = ([name for name in NORMS if NORMS[name].adds == adds] for adds in (False, True))
of_adding = pytest.mark.parametrize("norm", ADDING, indirect=True)
of_alone = pytest.mark.parametrize("norm", ALONE, indirect=True)


def combinations() -> list:
    """Return ops, parameters and results, each with each shape and with each dtype, a third of all of these."""
    ways = [("layer_norm", affine, "norm") for affine in ("weight and bias", "weight", "bias", "none")]
    ways += [("rms_norm", "weight", "norm"), ("rms_norm", "none", "norm"), ("dropout_add_layer_norm", "bias", "sum")]
    ways += [("dropout_add_layer_norm", affine, "both") for affine in ("weight and bias", "weight", "none")]
    ways += [("dropout_add_layer_norm", "weight", "norm"), ("dropout_add_rms_norm", "none", "both")]
    ways += [("dropout_add_rms_norm", "weight", results) for results in ("both", "norm", "sum")]
    cases = []
    for i, way in enumerate(ways):
        for j, shape in enumerate(SHAPES):
            dtype = DTYPES[(i + j + 2) % 3]
            cases.append(pytest.param(*way, shape, dtype, id=f"{'-'.join(way)}-shape{j}-{dtype}"))
    return cases
