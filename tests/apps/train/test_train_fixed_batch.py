"""Batches of fixed shapes: the loss and the gradients of what they hold, in memory that stays where it is."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.apps.language.model import language_model_loss
from fastformer.apps.text import (
    Batches,
    ColumnBatches,
    EncodedDocuments,
    EncodedPairs,
    LabelledBatch,
    LanguageBatch,
    LanguageBatches,
    Sequences,
)
from fastformer.apps.train.fixed_batch import FixedBatch, shape_of
from fastformer.apps.translation.model import translation_loss
from tests.support import language_task
from tests.support.recorded_steps import read_nothing
from tests.support.translation_task import IDS, random_batch, random_model

CPU = torch.device("cpu")
PAIRS = {
    "targets longer": [(2, 30), (4, 8), (1, 1)],
    "sources longer": [(70, 2), (1, 3), (20, 1)],
    "exactly full": [(15, 31)],
    "many": [(k % 9 + 1, k % 7 + 1) for k in range(40)],
}


def fixed(batch, longest=None):
    memory = FixedBatch(batch, shape_of(batch, longest), CPU)
    memory.load(batch)
    return memory.batch()


def loss_and_gradients(loss, model, batch):
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())]


def assert_equal(loss, model, batch, other):
    expected = [x.clone() for x in loss_and_gradients(loss, model, batch)]
    for x, y in zip(loss_and_gradients(loss, model, other), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@dataclass(frozen=True)
class Weighted(LanguageBatch):
    """With a field that no side has, which a graph would take for that of the first batch."""

    weight: float


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    """The targets of padding are no classes, and nothing looks at values, as on a GPU."""
    read_nothing(monkeypatch)


def smoothed(model, batch):
    return translation_loss(model, batch, 0.1).double()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("lengths", PAIRS.values(), ids=PAIRS)
def test_loss_and_gradients_of_pairs(lengths, positions):
    batch = random_batch(lengths)
    longest = int(max(batch.source_lengths.max(), batch.target_lengths.max()))
    model = random_model(2, positions=positions, max_positions=longest, embeddings="separate").double()
    assert_equal(smoothed, model, batch, fixed(batch, longest))


@pytest.mark.parametrize("lengths", [[16], [0, 3, 0], [130, 2]], ids=str)
def test_loss_and_gradients_of_documents(lengths):
    batch = language_task.random_batch(lengths)
    assert_equal(language_model_loss, language_task.random_model().double(), batch, fixed(batch))


def test_another_batch_in_the_same_memory():
    first, second = language_task.random_batch([5, 9, 2]), language_task.random_batch([1, 1, 8], seed=1)
    shape = shape_of(first)
    assert shape_of(second) == shape
    memory = FixedBatch(first, shape, CPU)
    memory.load(first)
    before = memory.batch()
    memory.load(second)
    after = memory.batch()
    assert before.ids_in.data_ptr() == after.ids_in.data_ptr()
    assert before.lengths.offsets.data_ptr() == after.lengths.offsets.data_ptr()
    assert_equal(language_model_loss, language_task.random_model().double(), second, after)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=60),
    longest=st.sampled_from([0, 1]),
)
@settings(max_examples=200, deadline=None)
def test_shapes_hold_the_batch_and_little_more(lengths, longest):
    batch = random_batch(lengths)
    most = max(n + 1 for pair in lengths for n in pair) if longest else None
    shape = shape_of(batch, most)
    missing = 0
    for real, tokens, length in zip(
        (batch.source_lengths, batch.target_lengths), shape.tokens, shape.longest, strict=True
    ):
        total = int(real.sum())
        assert total <= tokens
        assert tokens - total < 16 or (tokens - total) * 16 < tokens
        assert int(real.max()) <= length
        assert most is None or length <= most
        missing = max(missing, -(-(tokens - total) // length))
    assert len(lengths) + missing <= shape.sequences < max(2 * (len(lengths) + missing), 2)


def test_sources_of_batches_know_their_longest_sequence():
    random = np.random.default_rng(0)
    lists = [random.integers(4, 17, n).tolist() for n in (3, 14, 1, 9)]
    source, target = Sequences.from_lists(lists), Sequences.from_lists(lists[::-1])
    documents = EncodedDocuments(source, IDS)
    sources = [
        Batches(EncodedPairs(source, target, IDS, IDS), sentences=2),
        LanguageBatches(documents, context=6, tokens=10),
        LanguageBatches(documents, context=40, tokens=40),
        ColumnBatches(documents, columns=2, context=7),
        ColumnBatches(documents, columns=2, context=40),
    ]
    for each in sources:
        found = [getattr(batch, side.lengths) for batch in each.epoch(0) for side in batch.SIDES]
        assert each.longest == max(int(x.max()) for x in found)


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (random_batch([(1, 2), (3, 1)], packed=False), "Batch with padded ids"),
        (LabelledBatch(*torch.ones(2, 3, dtype=torch.int64), torch.tensor([3])), "LabelledBatch"),
        (Weighted(*torch.ones(2, 3, dtype=torch.int64), torch.tensor([3]), 2.0), "Weighted"),
    ],
)
def test_batches_that_do_not_fit_are_named(batch, what):
    with pytest.raises(TypeError, match=f"cuda_graphs=True needs batches of packed ids .*; not {what}$"):
        shape_of(batch)
