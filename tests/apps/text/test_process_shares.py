"""The shares of a batch: together they are the batch, each is one that was made alone, and they are about equal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastformer.apps.language.model import language_model_loss
from fastformer.apps.text import Batch, LabelledBatch, LanguageBatch
from fastformer.apps.text.batch import share_of
from fastformer.apps.translation.model import translation_loss
from tests.support.language_task import random_batch as language_batch
from tests.support.language_task import random_model as language_model
from tests.support.translation_task import random_batch, random_model


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 9))
def test_every_sequence_has_one_process_and_shares_are_about_equal(lengths, world):
    rows = [share_of(torch.tensor(lengths, dtype=torch.int64), rank, world) for rank in range(world)]
    assert [i for each in rows for i in range(len(lengths))[each]] == list(range(len(lengths)))
    for each in rows:
        assert sum(lengths[each]) <= sum(lengths) / world + max(lengths, default=0)


@pytest.mark.parametrize("packed", [True, False])
def test_the_losses_of_the_shares_of_pairs_add_up(packed):
    batch = random_batch([(3, 5), (1, 0), (0, 2), (7, 1), (2, 2)], packed=packed)
    model = random_model().double()
    shares = [batch.share(rank, 3) for rank in range(3)]
    assert all(isinstance(share, Batch) for share in shares)
    assert sum(share.tokens for share in shares) == batch.tokens
    total = sum(translation_loss(model, share) for share in shares)
    torch.testing.assert_close(total, translation_loss(model, batch), rtol=1e-6, atol=0)
    if packed:
        for name in ("source", "target_in", "target_out", "source_lengths", "target_lengths"):
            assert torch.equal(torch.cat([getattr(share, name) for share in shares]), getattr(batch, name))


def test_the_losses_of_the_shares_of_documents_add_up():
    batch = language_batch([4, 1, 6, 2, 2])
    model = language_model().double()
    shares = [batch.share(rank, 2) for rank in range(2)]
    assert all(isinstance(share, LanguageBatch) for share in shares)
    total = sum(language_model_loss(model, share) for share in shares)
    torch.testing.assert_close(total, language_model_loss(model, batch), rtol=1e-6, atol=0)


def labels_of(form: str) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([2, 3, 1])
    ids = torch.arange(6) if form.startswith("packed") else torch.arange(9).view(3, 3)
    labels = torch.tensor([7, 8, 9]) if form.endswith("sequences") else ids + 10
    return ids, labels, lengths


@pytest.mark.parametrize("form", ["packed tokens", "packed sequences", "padded tokens", "padded sequences"])
def test_labels_stay_with_their_sequences(form):
    batch = LabelledBatch(*labels_of(form))
    shares = [batch.share(rank, 2) for rank in range(2)]
    for name in ("ids", "labels", "lengths"):
        assert torch.equal(torch.cat([getattr(share, name) for share in shares]), getattr(batch, name))
    assert [len(share) for share in shares] == [1, 2]
    assert shares[0].labels.tolist()[0] == batch.labels.tolist()[0]


def test_labels_that_may_be_of_tokens_or_of_sequences_are_not_parted():
    batch = LabelledBatch(torch.arange(3), torch.arange(3), torch.tensor([2, 0, 1]))
    first, second = (batch.share(rank, 2) for rank in range(2))
    assert torch.equal(first.labels, batch.labels)
    assert second is None


def test_a_process_may_get_nothing():
    batches = random_batch([(2, 3)]), language_batch([4]), LabelledBatch(*(torch.ones(n).long() for n in (2, 2, 1)))
    for batch in batches:
        shares = [batch.share(rank, 3) for rank in range(3)]
        assert [share is None for share in shares] == [True, False, True]
