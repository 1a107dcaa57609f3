"""Documents to batches: every token predicted exactly once from its own past, nothing padded, resumable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.apps.text import (
    EncodedDocuments,
    LanguageBatch,
    LanguageBatches,
    Sequences,
    SpecialIds,
    WordTokenizer,
    encode_documents,
)
from fastformer.apps.text.language_batches import (
    cut_documents,
)

IDS = SpecialIds(unk_id=3, pad_id=0, bos_id=1, eos_id=2)
VOCABULARY = 100


def make_documents(documents: list[list[int]]) -> EncodedDocuments:
    return EncodedDocuments(Sequences.from_lists(documents), IDS)


def random_documents(count: int, longest: int, seed: int = 0) -> EncodedDocuments:
    random = np.random.default_rng(seed)
    return make_documents([random.integers(4, VOCABULARY, n).tolist() for n in random.integers(1, longest + 1, count)])


def pieces_of(batch: LanguageBatch) -> list[tuple[list[int], list[int]]]:
    """(ids in, ids out) of each piece."""
    lengths = batch.lengths.tolist()
    return [
        (read.tolist(), predicted.tolist())
        for read, predicted in zip(batch.ids_in.split(lengths), batch.ids_out.split(lengths), strict=True)
    ]


def expected_pieces(documents: list[list[int]], context: int) -> list[tuple[list[int], list[int]]]:
    """Cut documents one by one: what the arrays must come to."""
    found = []
    for tokens in documents:
        read, predicted = [IDS.bos_id, *tokens], [*tokens, IDS.eos_id]
        for start in range(0, len(read), context):
            found.append((read[start : start + context], predicted[start : start + context]))
    return found


some_documents = st.lists(st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=9), min_size=1, max_size=9)


@settings(deadline=None)
@given(some_documents, st.integers(1, 12), st.integers(0, 20), st.booleans(), st.integers(0, 3), st.integers(0, 4))
def test_every_token_is_predicted_exactly_once_within_the_budget(documents, context, more, shuffle, seed, epoch):
    """Each epoch holds each piece once, whole, whatever the order; so each token but bos is predicted once."""
    budget = context + more
    batches = LanguageBatches(make_documents(documents), context=context, tokens=budget, seed=seed, shuffle=shuffle)
    seen = list(batches.epoch(epoch))
    assert len(seen) == batches.batches_in(epoch)
    found = [piece for batch in seen for piece in pieces_of(batch)]
    assert sorted(found) == sorted(expected_pieces(documents, context))
    assert sum(batch.tokens for batch in seen) == sum(len(tokens) + 1 for tokens in documents)
    assert all(0 < batch.tokens <= budget for batch in seen)
    assert all(batch.tokens == batch.ids_in.numel() == batch.ids_out.numel() for batch in seen)
    # A batch ends where the next piece does not fit, and not before.
    firsts = [int(batch.lengths[0]) for batch in seen[1:]]
    assert all(batch.tokens + first > budget for batch, first in zip(seen, firsts, strict=False))
    assert shuffle or found == expected_pieces(documents, context)
    other = [batch.ids_in.tolist() for batch in batches.epoch(epoch + 1)]
    assert [batch.ids_in.tolist() for batch in batches.epoch(epoch)] == [batch.ids_in.tolist() for batch in seen]
    assert shuffle or other == [batch.ids_in.tolist() for batch in seen]


def test_encoding_drops_and_counts_empty_documents():
    tokenizer = WordTokenizer.from_lines(["a b c"])
    documents = encode_documents(["a b", "", "c a b", "  \n"], tokenizer)
    assert [tokenizer.decode(documents.documents[i]) for i in range(len(documents))] == ["a b", "c a b"]
    assert documents.special_ids == tokenizer.special_ids
    assert str(documents) == "2 documents, 5 tokens, 2 empty documents dropped"
    assert str(encode_documents(["a"], tokenizer)) == "1 documents, 1 tokens"
    for texts, count in (([], 0), (["", " "], 2)):
        with pytest.raises(ValueError, match=f"^none of the {count} documents has a token$"):
            encode_documents(texts, tokenizer)


def test_bad_arguments():
    documents = make_documents([[9] * 5, [9]])
    for context in (0, -3):
        for call in (
            lambda c: LanguageBatches(documents, context=c, tokens=9),
            lambda c: cut_documents(documents, c),
        ):
            with pytest.raises(ValueError, match=f"^context must be at least 1, not {context}$"):
                call(context)
    with pytest.raises(ValueError, match=r"^tokens=7 is less than context=8: a batch must hold at least one piece$"):
        LanguageBatches(documents, context=8, tokens=7)
    assert LanguageBatches(documents, context=8, tokens=8).batches_in(0) == 1
    with pytest.raises(ValueError, match=r"^there are no documents to make batches of$"):
        LanguageBatches(make_documents([]), context=8, tokens=8)
