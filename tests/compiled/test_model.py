"""A model with all its kernels compiled: a training step in fp32 and under autocast to bf16, and a translation."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.apps.translation.model import TranslationModel, translation_loss
from fastformer.apps.translation.search import SearchOptions, greedy_search
from fastformer.backend import Backend
from tests.compiled.ptx.driver import session
from tests.support.fused_op import compare, needs_compiled
from tests.support.noise import noise
from tests.support.translation_task import random_batch, random_model, reverse_batch, reversing_model

pytestmark = needs_compiled
RATE = 0.5


def training_step(model: TranslationModel, backend: Backend, precision: torch.dtype | None = None) -> list[Tensor]:
    """The loss of a step, the gradients, and what the parameters are after it."""
    batch = random_batch([(5, 3), (1, 4), (7, 6)])
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with fastformer.backend(backend):
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = translation_loss(model, batch, label_smoothing=0.1) / batch.tokens
        loss.backward()
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert len(gradients) == len(parameters)
    optimizer.step()
    return [loss.detach(), *gradients, *(p.detach() for p in parameters)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_training_step(precision):
    model = random_model(d_model=32, heads=2, feed_forward=48, encoder_layers=1, decoder_layers=1)
    if precision is not None:  # what autocast rounds is exact, as the inputs of the ops' tests are
        model = model.to(precision).float()
    wide = copy.deepcopy(model).double()

    def exactly() -> list[Tensor]:
        return training_step(wide, "reference")

    exact = exactly()
    plain = training_step(model, "reference", precision)
    session.launches.clear()
    ours = training_step(model, "triton", precision)
    launched = {name.strip("_").split("_")[0] for name in session.launches}
    assert launched >= {"attention", "activate", "cross", "embedding", "norm"}, launched
    compare(ours, plain, exact, noise(exactly, exact, precision or torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_translation(dtype):
    """By a model that has learned its task, so that no two tokens are nearly as likely."""
    model = copy.deepcopy(reversing_model()).to(dtype)
    wide, given = copy.deepcopy(model).double(), reverse_batch(99, 3)
    options = SearchOptions(beam=1, max_length=5)

    def translate(model: TranslationModel, backend: Backend = "reference") -> tuple[list[Any], list[Tensor]]:
        with fastformer.backend(backend), torch.no_grad():
            actual = greedy_search(model.eval(), given.source, given.source_lengths, options)
        return [h.ids for h in actual], [torch.tensor([h.score for h in actual], dtype=torch.float64)]

    ids, exact = translate(wide)
    _, plain = translate(model)
    session.launches.clear()
    actual, ours = translate(model, "triton")
    assert session.launches
    assert actual == ids
    assert all(ids)
    compare(ours, plain, exact, noise(lambda: translate(wide)[1], exact, dtype))
