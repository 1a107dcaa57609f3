"""Two processes whose layers are sharded one by one train what one process trains, and gather while they compute."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from tests.apps.train.sharded_task import FAMILIES, work
from tests.apps.train.test_train_distributed import spawn
from tests.support.noise import DEVIATIONS, noise

pytestmark = pytest.mark.slow  # importing DTensor alone takes seconds


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What needs no whole run, started once."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, spawn(folder, "precise", "caches", task=work)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_in_bf16_are_as_exact_as_bf16(steps, name):
    """Within the noise of a formula all of whose numbers are rounded to bf16."""
    folder, _ = steps
    make, loss, batch = FAMILIES[name]
    batches = [batch(0), batch(1)]
    tokens = sum(each.tokens for each in batches)

    def wide() -> list[torch.Tensor]:
        model = make().double()
        total = sum(loss(model, each) for each in batches)
        return [total.detach().double(), *torch.autograd.grad(total / tokens, list(model.parameters()))]

    exact = wide()
    found = torch.load(folder / f"{name}.pt")
    assert found["dtypes"] == {"torch.float32"}
    names = ["loss", *found["grads"]]
    allowed = dict(zip(names, noise(wide, exact, torch.bfloat16), strict=True))
    ours = dict(zip(names, [found["loss"], *found["grads"].values()], strict=True))
    for key, wanted in zip(names, exact, strict=True):
        error = float((ours[key].double() - wanted).abs().max())
        assert error <= DEVIATIONS * allowed[key], f"{key}: {error:.3g}, allowed {DEVIATIONS * allowed[key]:.3g}"
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in found["grads"].values()))
    assert float(found["norm"]) == pytest.approx(norm, rel=1e-5)


def test_gathered_layers_decode_with_a_cache_and_others_say_why_not(steps):
    _, seen = steps
    for each in seen:
        caches = each["caches"]
        assert caches["found"] == caches["plain"] > 1
        assert caches["said"] == (
            "layers.0 is sharded, and decoding with a cache does not gather parameters: call unshard() on it"
        )
