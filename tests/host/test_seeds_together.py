"""Seeds of dropout that are drawn together: each its own, the same again where torch draws again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer import functional
from fastformer.apps.train import Processes, TrainConfig
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import translation_loss
from fastformer.host import autograd_function
from fastformer.host.autograd_function import dropout_seed, seeds_together
from tests.support.fused_op import DEVICE, needs_kernels
from tests.support.translation_task import random_batch, random_model

X = torch.zeros(1, device=DEVICE)


def draw(count):
    return [int(dropout_seed(X)) for _ in range(count)]


def draws(monkeypatch):
    """Collect how many numbers each call to the generator asks for."""
    seen = []
    original = autograd_function._draw
    monkeypatch.setattr(autograd_function, "_draw", lambda x, count: seen.append(count) or original(x, count))
    return seen


def test_seeds_are_distinct_drawn_at_once_and_follow_manual_seed(monkeypatch):
    seen = draws(monkeypatch)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with seeds_together():
            runs.append(draw(100))
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])
    assert len(set(runs[0])) == 100
    assert len(seen) == 3 * 2  # 64 at a time
    with seeds_together():
        found = [dropout_seed(X) for _ in range(3)]
    assert all(x.shape == (1,) and x.dtype == torch.int64 and x.data_ptr() % 16 == 0 for x in found)


@needs_kernels
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_drops_the_same_elements(reentrant):
    """The gradient of dropout(x) is 0 where dropout made 0: of another mask it would not be."""
    ones = torch.ones(8, 32, device=DEVICE)

    def dropped(x):
        with fastformer.backend("triton"):
            return functional.dropout_add_layer_norm(x, torch.zeros_like(x), 32, dropout_p=0.5)[1] ** 2

    x = ones.clone().requires_grad_()
    with seeds_together():
        draw(1)
        y = checkpoint(dropped, x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)
    assert 0 < int((y == 0).sum()) < y.numel()


@needs_kernels
@pytest.mark.parametrize("together", [False, True])
def test_a_loss_that_seeds_twice_draws_the_same_dropout_twice(together):
    differences = []

    def loss(model, batch):
        found = []
        for _ in range(2):
            torch.manual_seed(7)
            found.append(translation_loss(model, batch))
        differences.append((found[0] - found[1]).item())
        return sum(found)

    model = random_model(dropout=0.5).train().to(DEVICE)
    update = Update(model, loss, TrainConfig(steps=1), Processes())
    if together:  # what ours are spared: the test can tell
        update._runs_known_code = True
    with fastformer.backend("triton"):
        update.gradients([random_batch([(3, 2), (1, 4)])])
    assert (differences != [0.0]) == together
