"""Loops of decoding replay CUDA graphs where the device has them, the cache is small enough, and no hook is lost."""

import weakref

import pytest
import torch

from fastformer.apps.language.sampling import LanguageState, SamplingOptions, sample
from fastformer.apps.models import decoding
from fastformer.apps.models.decoding import recorder_of
from fastformer.apps.models.sampling import RandomStreams
from fastformer.apps.translation.search import SearchOptions, greedy_search
from fastformer.host.cuda_graphs import Recorded, ReplayedStep
from tests.support import language_task, translation_task
from tests.support.uncached_search import RAGGED, cached_decoder, sources

LENGTH = 9


def language(tape):
    model = language_task.random_model(3).double()
    return model, model.config.layers, LanguageState(model, [[2, 5], [2]], LENGTH, tape).cache, 2


def translation(tape):
    model = translation_task.random_model(6).double()
    cache, _ = cached_decoder(model, *sources(RAGGED), 4, LENGTH)
    return model, model.config.decoder_layers, cache, 4 * len(RAGGED)


@pytest.mark.parametrize("make", [language, translation])
@torch.inference_mode()
def test_by_default_where_they_apply(make, tape, monkeypatch):
    """If the cache takes at most a tenth of the device's memory, and without hooks."""
    model, layers, cache, rows = make(tape)
    memory = 10 * sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    for size, cuda_graphs, applies in (
        (memory, None, True),
        (memory, False, False),
        (memory - 1, None, False),
        (memory - 1, True, True),
        (0, None, False),  # a device without graphs
    ):
        monkeypatch.setattr(decoding, "memory_for_graphs", lambda device, size=size: size)
        assert (recorder_of(model, layers, rows * LENGTH, cuda_graphs) is tape) == applies
    monkeypatch.setattr(decoding, "memory_for_graphs", lambda device: memory)
    with model.output.register_forward_hook(lambda *_: None):
        assert recorder_of(model, layers, rows * LENGTH, None) is None


def test_an_error_without_a_gpu():
    for run in (
        lambda: greedy_search(translation_task.random_model(3), *sources([3]), SearchOptions(cuda_graphs=True)),
        lambda: list(
            sample(language_task.random_model(3), [[2]], SamplingOptions(cuda_graphs=True), 6, RandomStreams(0))
        ),
    ):
        with pytest.raises(ValueError, match="cuda_graphs has an effect only with a CUDA device, not with a cpu"):
            run()


def test_a_graph_keeps_the_buffers_that_it_reads(tape, monkeypatch):
    """A table of positions that grows is replaced; a graph would read the memory of the table before."""
    monkeypatch.setattr(tape, "capture", lambda step: Recorded(step, None))  # the tape itself keeps what it reads
    model = torch.nn.Module()
    model.register_buffer("table", torch.zeros(3))
    step = ReplayedStep(tape, model, lambda: None, "decoding")
    step()
    step()
    table = weakref.ref(model.table)
    model.table = torch.zeros(6)
    assert table() is not None
    step.reset()
    assert table() is None
