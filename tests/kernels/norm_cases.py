"""What tests of the fused norms share: random numbers, autocast, and how to make small inputs use many programs."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fastformer.functional import choice
from tests.support.fused_op import DEVICE


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def use_one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs, so that each walks over many tiles."""
    norm = pytest.importorskip("fastformer_kernels.norms.layer_norm")
    device_of = norm.device_of
    monkeypatch.setattr(norm, "device_of", lambda x: device_of(x)._replace(multiprocessors=1))


def record_partials(monkeypatch: pytest.MonkeyPatch, module: str) -> list[tuple[torch.dtype | None, ...]]:
    """Return a list that gets, at each backward, the dtypes for which it allocates partial sums."""
    kernels = pytest.importorskip(f"fastformer_kernels.norms.{module}")
    asked, new_partials = [], kernels.new_partials

    def record(x, programs, *dtypes):
        asked.append(dtypes)
        return new_partials(x, programs, *dtypes)

    monkeypatch.setattr(kernels, "new_partials", record)
    return asked


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Autocast for a GPU, also where there is none; one is then assumed that has kernels."""
    torch.set_autocast_enabled("cuda", True)
    target = choice._target
    choice._target = lambda device: "sm_90"
    try:
        yield
    finally:
        choice._target = target
        torch.set_autocast_enabled("cuda", False)
