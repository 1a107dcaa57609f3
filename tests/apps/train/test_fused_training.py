"""Training with the kernels: the losses of the reference, step by step, and its translations after that."""

from typing import Any

import pytest
import torch

import fastformer
from fastformer.apps.translation.model import TranslationModel, translation_loss
from fastformer.apps.translation.search import SearchOptions, greedy_search
from fastformer.backend import Backend
from tests.support.fused_op import DEVICE, compare, needs_kernels
from tests.support.noise import noise
from tests.support.translation_task import config, reverse_batch

pytestmark = needs_kernels

STEPS, SENTENCES, VOCABULARY = 5, 2, 12


def tiny_model(dtype: torch.dtype = torch.float32, **changes: Any) -> TranslationModel:
    torch.manual_seed(0)
    sizes = {"source_vocabulary": VOCABULARY, "target_vocabulary": VOCABULARY, "d_model": 16, "heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "feed_forward": 24}
    return TranslationModel(config(**{**sizes, **layers, **changes})).to(DEVICE, dtype)


def loss_curve(model: TranslationModel, backend: Backend, batches: list[int]) -> list[float]:
    """Train on batches of these seeds; the loss of each, before its step."""
    optimizer = torch.optim.Adam(model.train().parameters(), 0.02)
    losses = []
    with fastformer.backend(backend):
        for seed in batches:
            batch = reverse_batch(seed, SENTENCES, longest=5).to(torch.device(DEVICE))
            optimizer.zero_grad()
            loss = translation_loss(model, batch, label_smoothing=0.1) / batch.tokens
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"norm_first": False, "activation": "gelu", "embeddings": "shared"}], ids=str)
def test_the_loss_curve_is_that_of_the_reference(changes):
    """By the rule of fused_op.py for the whole curve: an error of one step is in the parameters of all that follow."""
    seeds = list(range(STEPS))

    def curve(model: TranslationModel, backend: Backend = "reference") -> list[torch.Tensor]:
        return [torch.tensor(loss_curve(model, backend, seeds), dtype=torch.float64)]

    def wide() -> list[torch.Tensor]:
        return curve(tiny_model(torch.float64, **changes))

    exact, plain = wide(), curve(reference := tiny_model(**changes))
    assert len(exact[0].unique()) == STEPS
    compare(curve(ours := tiny_model(**changes), "triton"), plain, exact, noise(wide, exact, torch.float32))

    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name

    given = reverse_batch(99, 3)
    options = SearchOptions(beam=1, min_length=4, max_length=6)
    with fastformer.backend("triton"):
        searched = greedy_search(ours.eval(), given.source.to(DEVICE), given.source_lengths, options)
    expected = greedy_search(reference.eval(), given.source.to(DEVICE), given.source_lengths, options)
    assert [h.ids for h in searched] == [h.ids for h in expected]
    assert all(h.ids for h in searched)
