"""Text as documents of lines, and as a stream in columns: every token where the tutorial's arithmetic puts it."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from fastformer.apps.text import (
    ColumnBatches,
    EncodedDocuments,
    Sequences,
    SpecialIds,
    TextCorpus,
    TextError,
    WordTokenizer,
    encode_lines,
    open_text_dataset,
    prepare,
    read_text,
    split_text,
)
from fastformer.apps.text.corpora import cut_lines
from fastformer.apps.text.language_batches import cut_stream, token_stream

IDS = SpecialIds()


def stream_of(count: int) -> EncodedDocuments:
    """A stream of `count` tokens in all, each different: 10, 11, … and eos at the end."""
    return EncodedDocuments(Sequences.from_lists([list(range(10, 9 + count))]), IDS)


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
    documents = stream_of(count)
    ours = ColumnBatches(documents, columns=columns, context=bptt)
    expected = tutorial_batches(torch.from_numpy(token_stream(documents).astype(np.int64)), columns, bptt)
    found = list(ours.epoch(0))
    assert len(found) == len(expected) == ours.batches_in(0)
    for batch, (data, target) in zip(found, expected, strict=True):
        assert batch.lengths.tolist() == [len(data)] * columns
        assert torch.equal(batch.ids_in, data.t().flatten())
        assert torch.equal(batch.ids_out, target.t().flatten())
    assert sum(batch.tokens for batch in found) == columns * (count // columns - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": 0, "context": 5}, "columns must be at least 1, not 0"),
        ({"columns": 2, "context": 0}, "context must be at least 1, not 0"),
        ({"columns": 6, "context": 5}, "columns=6 is too many for 11 tokens"),
    ],
)
def test_columns_that_cannot_be(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ColumnBatches(stream_of(11), **arguments)
    with pytest.raises(ValueError, match="context must be at least 1"):
        cut_stream(stream_of(11), 0)


ARTICLES = [
    "",
    "= Cats =",
    "",
    "cats sleep",
    "",
    "= = Food = =",
    "",
    "= not a title =",
    "mice",
    "",
    "= Dogs =",
    "",
    "bark",
]


def test_what_a_document_is(tmp_path: Path) -> None:
    assert cut_lines(ARTICLES, "line") == [[line] for line in ARTICLES]
    assert cut_lines(ARTICLES, "file") == [ARTICLES]
    assert cut_lines(ARTICLES, "article") == [ARTICLES[:10], ARTICLES[10:]]
    with pytest.raises(ValueError, match="needs titles"):
        cut_lines(["a", "b"], "article")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"  one two \n\nthree\n"))
    assert read_text(tmp_path / "a.gz").documents == [["one two"], [""], ["three"]]
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(TextError, match=r"blank\.txt: holds no word"):
        read_text(tmp_path / "blank.txt")
    with pytest.raises(ValueError, match="document must be one of"):
        cut_lines(["a"], "page")  # type: ignore[arg-type]


def test_every_line_ends_with_eos_and_is_counted() -> None:
    tokenizer = WordTokenizer.from_lines(["a b c"], splitting="whitespace")
    a, b, c = tokenizer.encode("a b c")
    eos = tokenizer.eos_id
    documents = encode_lines([["a b", "", "c"], [""], ["c"]], tokenizer)
    assert [documents.documents[i] for i in range(len(documents))] == [[a, b, eos, eos, c], [c]]
    assert documents.dropped == 1
    assert token_stream(documents).tolist() == [a, b, eos, eos, c, eos, c, eos]
    assert TextCorpus([["a b", "", "c"], [""], ["c"]]).words == 9
    with pytest.raises(ValueError, match="none of the 2 documents"):
        encode_lines([[""], [""]], tokenizer)


def test_split_keeps_equal_documents_together() -> None:
    corpus = TextCorpus([[f"line {i % 50}"] for i in range(100)])
    parts = split_text(corpus, 0.1, seed=1)
    assert [len(part) for part in parts] == [80, 10, 10]
    lines = [set(part.lines) for part in parts]
    assert len(set.union(*lines)) == sum(map(len, lines)) == 50
    assert parts == split_text(corpus, 0.1, seed=1)
    with pytest.raises(ValueError, match="2 different documents are too few"):
        split_text(TextCorpus([["a"], ["b"], ["a"]]), 0.1, seed=1)


@pytest.mark.slow
def test_wikitext2_has_its_counts_and_articles(tmp_path: Path) -> None:
    wikitext2 = Path(__file__).resolve().parents[4] / "shared" / "data" / "wikitext-2"
    if not wikitext2.is_dir():
        pytest.skip(f"needs the WikiText-2 files in {wikitext2}")
    prepare("wikitext2", wikitext2, tmp_path / "w")
    parts = open_text_dataset(tmp_path / "w")
    assert [part.words for part in parts] == [2_088_628, 217_646, 245_569]
    assert [len(part) for part in parts] == [600, 60, 60]
    # The published 33,278 hold <unk> and <eos>; <pad> and <bos> are ours.
    assert WordTokenizer.from_lines(parts[0].lines, splitting="whitespace").size == 33_278 + 2


def test_a_folder_of_sentence_pairs_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(
        '{"name": "multi30k", "languages": ["de", "en"], "lines": {}, "tokens": {}, "warnings": [], "notice": ""}'
    )
    with pytest.raises(ValueError, match="holds multi30k, sentence pairs"):
        open_text_dataset(tmp_path)
    with pytest.raises(FileNotFoundError, match="fastformer data NAME"):
        open_text_dataset(tmp_path / "nothing")
