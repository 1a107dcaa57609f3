"""Documents and streams to batches: every token predicted exactly once from its own past, nothing padded, resumable."""

import gzip
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.apps.text import (
    ColumnBatches,
    EncodedDocuments,
    LanguageBatch,
    LanguageBatches,
    Sequences,
    SpecialIds,
    TextCorpus,
    TextError,
    WordTokenizer,
    encode_documents,
    encode_lines,
    read_text,
    split_text,
    write_lines,
)
from fastformer.apps.text.batches import cut_documents

IDS = SpecialIds(unk_id=3, pad_id=0, bos_id=1, eos_id=2)
VOCABULARY = 100


def make_documents(documents: list[list[int]]) -> EncodedDocuments:
    return EncodedDocuments(Sequences.from_lists(documents), IDS)


def pieces_of(batch: LanguageBatch) -> list[tuple[list[int], list[int]]]:
    """(ids in, ids out) of each piece."""
    lengths = batch.lengths.tolist()
    return [
        (read.tolist(), predicted.tolist())
        for read, predicted in zip(batch.ids_in.split(lengths), batch.ids_out.split(lengths), strict=True)
    ]


def expected_pieces(documents: list[list[int]], context: int) -> list[tuple[list[int], list[int]]]:
    """Cut documents one by one: what the arrays must come to."""
    actual = []
    for tokens in documents:
        read, predicted = [IDS.bos_id, *tokens], [*tokens, IDS.eos_id]
        for start in range(0, len(read), context):
            actual.append((read[start : start + context], predicted[start : start + context]))
    return actual


some_documents = st.lists(st.lists(st.integers(2, VOCABULARY - 1), min_size=1, max_size=9), min_size=1, max_size=9)


@settings(deadline=None)
@given(some_documents, st.integers(1, 12), st.integers(0, 20), st.booleans(), st.integers(0, 3), st.integers(0, 4))
def test_every_token_is_predicted_exactly_once_within_the_budget(documents, context, more, shuffle, seed, epoch):
    """Each epoch holds each piece once, whole, whatever the order; so each token but bos is predicted once."""
    budget = context + more
    batches = LanguageBatches(make_documents(documents), context=context, tokens=budget, seed=seed, shuffle=shuffle)
    seen = list(batches.epoch(epoch))
    assert len(seen) == batches.batches_in(epoch)
    actual = [piece for batch in seen for piece in pieces_of(batch)]
    assert sorted(actual) == sorted(expected_pieces(documents, context))
    assert sum(batch.tokens for batch in seen) == sum(len(tokens) + 1 for tokens in documents)
    assert all(0 < batch.tokens <= budget for batch in seen)
    assert all(batch.tokens == batch.ids_in.numel() == batch.ids_out.numel() for batch in seen)
    # A batch ends where the next piece does not fit, and not before.
    firsts = [int(batch.lengths[0]) for batch in seen[1:]]
    assert all(batch.tokens + first > budget for batch, first in zip(seen, firsts, strict=False))
    assert shuffle or actual == expected_pieces(documents, context)
    other = [batch.ids_in.tolist() for batch in batches.epoch(epoch + 1)]
    assert [batch.ids_in.tolist() for batch in batches.epoch(epoch)] == [batch.ids_in.tolist() for batch in seen]
    assert shuffle or other == [batch.ids_in.tolist() for batch in seen]


def tutorial_batches(stream: torch.Tensor, columns: int, bptt: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """batchify and get_batch as the classical example describes them: time first, [bptt, columns]."""
    rows = stream.numel() // columns
    table = stream[: rows * columns].view(columns, -1).t().contiguous()  # [rows, columns]
    batches = []
    for i in range(0, rows - 1, bptt):
        length = min(bptt, rows - 1 - i)
        batches.append((table[i : i + length], table[i + 1 : i + 1 + length]))
    return batches


@pytest.mark.parametrize(("count", "columns", "bptt"), [(103, 4, 5), (103, 4, 35), (100, 20, 2), (9, 4, 1), (41, 1, 8)])
def test_columns_are_the_tutorials(count: int, columns: int, bptt: int) -> None:
    tokens = list(range(10, 9 + count))
    expected = tutorial_batches(torch.tensor([*tokens, IDS.eos_id]), columns, bptt)
    batches = ColumnBatches(make_documents([tokens]), columns=columns, context=bptt)
    actual = list(batches.epoch(0))
    assert len(actual) == len(expected) == batches.batches_in(0)
    for batch, (data, target) in zip(actual, expected, strict=True):
        assert batch.lengths.tolist() == [len(data)] * columns
        assert torch.equal(batch.ids_in, data.t().flatten())
        assert torch.equal(batch.ids_out, target.t().flatten())
    assert sum(batch.tokens for batch in actual) == columns * (count // columns - 1)


def test_wrong_arguments_of_batches_of_text() -> None:
    documents, none = make_documents([[9] * 5, [9] * 4]), make_documents([])
    for message, call in (
        ("context must be at least 1, not -3", lambda: cut_documents(documents, -3)),
        ("tokens=7 is less than context=8: a batch must", lambda: LanguageBatches(documents, context=8, tokens=7)),
        ("there are no sequences to make batches of", lambda: LanguageBatches(none, context=8, tokens=8)),
        ("columns=6 is too many for 11 tokens", lambda: ColumnBatches(documents, columns=6, context=5)),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
    assert LanguageBatches(documents, context=8, tokens=8).batches_in(0) == 2


ARTICLES = "\n= Cats =\n\ncats sleep\n\n= = Food = =\n\n= not a title =\nmice\n\n= Dogs =\n\nbark".splitlines()


def test_what_a_document_is(tmp_path: Path) -> None:
    write_lines(tmp_path / "articles", ARTICLES)
    for kind, documents in (
        ("line", [[line] for line in ARTICLES]),
        ("file", [ARTICLES]),
        ("article", [ARTICLES[:10], ARTICLES[10:]]),
    ):
        assert read_text(tmp_path / "articles", kind).documents == documents
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"  one two \n\nthree\n"))
    assert read_text(tmp_path / "a.gz").documents == [["one two"], [""], ["three"]]
    with pytest.raises(ValueError, match="needs titles"):
        read_text(tmp_path / "a.gz", "article")
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(TextError, match=r"blank\.txt: holds no word"):
        read_text(tmp_path / "blank.txt")
    with pytest.raises(ValueError, match="document must be one of"):
        read_text(tmp_path / "a.gz", "page")  # type: ignore[arg-type]


def test_every_line_ends_with_eos_and_empty_documents_are_dropped_and_counted() -> None:
    tokenizer = WordTokenizer.from_lines(["a b c"], splitting="whitespace")
    a, b, c = tokenizer.encode("a b c")
    eos = tokenizer.eos_id
    documents = encode_lines([["a b", "", "c"], [""], ["c"]], tokenizer)
    assert [documents.documents[i] for i in range(len(documents))] == [[a, b, eos, eos, c], [c]]
    assert documents.dropped == 1
    assert TextCorpus([["a b", "", "c"], [""], ["c"]]).words == 9
    documents = encode_documents(["a b", "", "c a b", "  \n"], tokenizer)
    assert [documents.documents[i] for i in range(len(documents))] == [[a, b], [c, a, b]]
    assert documents.special_ids == tokenizer.special_ids
    assert str(documents) == "2 documents, 5 tokens, 2 empty documents dropped"
    for texts, count in (([], 0), (["", " "], 2)):
        with pytest.raises(ValueError, match=f"^none of the {count} documents has a token$"):
            encode_documents(texts, tokenizer)


def test_split_keeps_equal_documents_together() -> None:
    corpus = TextCorpus([[f"line {i % 50}"] for i in range(100)])
    parts = split_text(corpus, 0.1, seed=1)
    assert [len(part) for part in parts] == [80, 10, 10]
    lines = [set(part.lines) for part in parts]
    assert len(set.union(*lines)) == sum(map(len, lines)) == 50
    assert parts == split_text(corpus, 0.1, seed=1)
    with pytest.raises(ValueError, match="2 different documents are too few"):
        split_text(TextCorpus([["a"], ["b"], ["a"]]), 0.1, seed=1)
