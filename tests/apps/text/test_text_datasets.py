"""Datasets by name: recognised, counted, written whole, opened again."""

import gzip
from pathlib import Path

import pytest

from fastformer.apps.text import (
    TextError,
    WordTokenizer,
    datasets,
    open_dataset,
    open_text_dataset,
    prepare,
    write_lines,
)

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the corpora are not there")


@pytest.fixture
def multi30k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a small Multi30k."""
    counts = {"train": 30, "valid": 4, "test": 3}
    monkeypatch.setattr(datasets, "_MULTI30K_LINES", counts)
    folder = tmp_path / "from"
    folder.mkdir()
    for name, split in (("train", "train"), ("val", "valid"), ("test_2016_flickr", "test")):
        for language in ("en", "de"):
            lines = "".join(f"{split} {language} {i} \r\n" for i in range(counts[split]))
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def test_multi30k_is_prepared_and_opened(multi30k, tmp_path):
    report = prepare("multi30k", multi30k, tmp_path / "to")
    assert "train.de: 30 lines\n" in report
    assert "non-commercial" in report
    names = sorted(f"{split}.{language}" for split in ("train", "valid", "test") for language in ("de", "en"))
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == names
    train, valid, test = open_dataset(tmp_path / "to", "en", "de", limit=20)
    assert [(corpus.name, len(corpus)) for corpus in (train, valid, test)] == [("train", 20), ("valid", 4), ("test", 3)]
    assert (test.source[2], test.target[2]) == ("test en 2", "test de 2")
    assert open_dataset(tmp_path / "to", "de", "en")[2].source == test.target
    with pytest.raises(ValueError, match="must be two different ones"):
        open_dataset(tmp_path / "to", "en", "en")
    for open_it in (lambda: open_dataset(tmp_path / "to", "en", "fr"), lambda: open_text_dataset(tmp_path / "to")):
        with pytest.raises(FileNotFoundError, match=r"train\.(fr|txt): no such file; make the folder with: fastformer"):
            open_it()


def test_europarl_is_split_without_overlap(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(datasets, "_EUROPARL_HELD_OUT", 5)
    (tmp_path / "from").mkdir()
    for language in ("fr", "en"):
        write_lines(tmp_path / "from" / f"europarl-v7.fr-en.{language}", [f"{language} {i}" for i in range(60)])
    report = prepare("europarl", tmp_path / "from", tmp_path / "to")
    assert "note: 60 lines, where the published corpus has 2,007,723" in report
    train, valid, test = open_dataset(tmp_path / "to", "en", "fr")
    assert [len(corpus) for corpus in (train, valid, test)] == [50, 5, 5]
    assert len({*train.source, *valid.source, *test.source}) == 60
    assert all(e.split()[1] == f.split()[1] for e, f in zip(train.source, train.target, strict=True))
    prepare("europarl", tmp_path / "from", tmp_path / "again")
    assert (tmp_path / "to" / "test.en").read_bytes() == (tmp_path / "again" / "test.en").read_bytes()
    assert capfd.readouterr() == ("", "")


@needs_data
def test_the_real_multi30k(tmp_path):
    assert "note:" not in prepare("multi30k", DATA / "multi30k", tmp_path)
    corpora = open_dataset(tmp_path, "en", "fr")
    assert [str(corpus) for corpus in corpora] == ["train: 29,000 pairs", "valid: 1,014 pairs", "test: 1,000 pairs"]


@pytest.mark.slow
@needs_data
def test_wikitext2_has_its_counts_and_articles(tmp_path):
    prepare("wikitext2", DATA / "wikitext-2", tmp_path / "w")
    parts = open_text_dataset(tmp_path / "w")
    assert [part.words for part in parts] == [2_088_628, 217_646, 245_569]
    assert [len(part) for part in parts] == [600, 60, 60]
    # The published 33,278 hold <unk> and <eos>; <pad> and <bos> are ours.
    assert WordTokenizer.from_lines(parts[0].lines, splitting="whitespace").size == 33_278 + 2


def test_wrong_counts_and_missing_files_are_named_and_nothing_looks_prepared(multi30k, tmp_path):
    def refused(name, message, kind=FileNotFoundError, folder=multi30k):
        with pytest.raises(kind, match=message):
            prepare(name, folder, tmp_path / "to")

    refused("wmt14", "dataset must be one of multi30k, europarl, wikitext2, not 'wmt14'", ValueError)
    refused("multi30k", "nowhere: no such folder; it must hold the files of multi30k", folder=tmp_path / "nowhere")
    refused("wikitext2", r"none of train\.txt, wiki\.train\.tokens is there, plain or compressed")
    refused("europarl", r"europarl-v7\.XX-en\.XX .* are needed, found \[\]")
    write_lines(multi30k / "train.txt", ["a b c"])
    refused("wikitext2", r"train\.txt: 4 tokens with one <eos> a line, but WikiText-2 has 2,088,628", TextError)
    (multi30k / "val.de.gz").write_bytes(gzip.compress(b"one\n"))
    refused("multi30k", r"val\.de\.gz: 1 lines, but Multi30k has 4 there", TextError)
    (multi30k / "val.de.gz").unlink()
    refused("multi30k", r"none of val\.de, valid\.de is there")
    (multi30k / "train.de.gz").unlink()
    refused("multi30k", r"at least two languages is needed, found \['en'\]")
    assert not (tmp_path / "to").exists()


def test_an_interrupted_preparation_leaves_no_folder_and_may_be_repeated(multi30k, tmp_path, monkeypatch):
    def full_disk(path, *rest):
        if path.name == "valid.en":
            raise OSError(28, "No space left on device")
        write_lines(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "write_lines", full_disk)
        with pytest.raises(OSError, match="No space left"):
            prepare("multi30k", multi30k, tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from"]
    prepare("multi30k", multi30k, tmp_path / "to")
    assert len(open_dataset(tmp_path / "to", "en", "de")[0]) == 30
