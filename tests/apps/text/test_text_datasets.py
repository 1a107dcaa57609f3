"""Datasets by name: recognised, counted, written once and whole, opened again; the tests' own corpora are small."""

import gzip
import json
from pathlib import Path

import pytest

from fastformer.apps.text import TextError, datasets, open_dataset, prepare, write_lines

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the corpora are not there")


def small_multi30k(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    counts = {"train": 30, "valid": 4, "test": 3}
    monkeypatch.setattr(datasets, "_MULTI30K_LINES", counts)
    folder.mkdir()
    for name, split in (("train", "train"), ("val", "valid"), ("test_2016_flickr", "test")):
        for language in ("en", "de"):
            lines = "".join(f"{split} {language} {i} \r\n" for i in range(counts[split]))
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def small_europarl(folder: Path, lines: int = 60) -> Path:
    folder.mkdir()
    for language in ("fr", "en"):
        write_lines(folder / f"europarl-v7.fr-en.{language}", [f"{language} {i}" for i in range(lines)])
    return folder


def test_multi30k_is_prepared_and_opened(tmp_path, monkeypatch):
    report = prepare("multi30k", small_multi30k(tmp_path / "from", monkeypatch), tmp_path / "to")
    assert report.lines == {f"{s}.{x}": n for s, n in (("train", 30), ("valid", 4), ("test", 3)) for x in ("de", "en")}
    assert "non-commercial" in str(report)
    assert "Elliott" in str(report)
    assert "train.de: 30 lines" in str(report)
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == sorted([*report.lines, "dataset.json"])
    train, valid, test = open_dataset(tmp_path / "to", "en", "de")
    assert [len(corpus) for corpus in (train, valid, test)] == [30, 4, 3]
    assert (train.name, valid.name, test.name) == ("train", "valid", "test")
    assert (test.source[2], test.target[2]) == ("test en 2", "test de 2")
    assert open_dataset(tmp_path / "to", "de", "en")[2].source == test.target


def test_europarl_is_split_without_overlap(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(datasets, "_EUROPARL_HELD_OUT", 5)
    report = prepare("europarl", small_europarl(tmp_path / "from"), tmp_path / "to")
    assert "60 lines, where the published corpus has 2,007,723" in report.warnings[0]
    train, valid, test = open_dataset(tmp_path / "to", "en", "fr")
    assert [len(corpus) for corpus in (train, valid, test)] == [50, 5, 5]
    assert len({*train.source, *valid.source, *test.source}) == 60
    assert all(e.split()[1] == f.split()[1] for e, f in zip(train.source, train.target, strict=True))
    first = (tmp_path / "to" / "test.en").read_bytes()
    prepare("europarl", tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to" / "test.en").read_bytes() == first
    assert capfd.readouterr() == ("", "")


@needs_data
def test_the_real_multi30k(tmp_path):
    report = prepare("multi30k", DATA / "multi30k", tmp_path)
    assert report.languages == ["de", "en", "fr"]
    assert report.warnings == []
    for corpus, count in zip(open_dataset(tmp_path, "en", "fr"), (29_000, 1_014, 1_000), strict=True):
        assert len(corpus) == count
        assert corpus.dropped_empty == 0


def test_wrong_counts_are_errors_and_nothing_looks_prepared(tmp_path, monkeypatch):
    folder = small_multi30k(tmp_path / "from", monkeypatch)
    (folder / "val.de.gz").write_bytes(gzip.compress(b"one\n"))
    with pytest.raises(TextError, match=r"val\.de\.gz: 1 lines, but Multi30k has 4 there"):
        prepare("multi30k", folder, tmp_path / "to")
    assert not (tmp_path / "to").exists()
    for name in ("train", "valid", "test"):
        write_lines(folder / f"{name}.txt", ["a b c"])
    with pytest.raises(TextError, match=r"train\.txt: 4 tokens with one <eos> a line, but WikiText-2 has 2,088,628"):
        prepare("wikitext2", folder, tmp_path / "to")


def test_missing_files_and_folders(tmp_path, monkeypatch):
    folder = small_multi30k(tmp_path / "from", monkeypatch)
    with pytest.raises(ValueError, match="unknown dataset 'wmt14'; known are multi30k, europarl, wikitext2"):
        prepare("wmt14", folder, tmp_path / "to")
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder; it must hold the files of multi30k"):
        prepare("multi30k", tmp_path / "nowhere", tmp_path / "to")
    with pytest.raises(ValueError, match="is not empty, and no prepared dataset"):
        prepare("multi30k", folder, folder)
    with pytest.raises(
        FileNotFoundError, match=r"none of train\.txt, wiki\.train\.tokens is there, plain or compressed"
    ):
        prepare("wikitext2", folder, tmp_path / "to")
    with pytest.raises(FileNotFoundError, match=r"europarl-v7\.XX-en\.XX .* are needed, found \[\]"):
        prepare("europarl", folder, tmp_path / "to")
    (folder / "test_2016_flickr.de.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"none of test_2016_flickr\.de, test2016\.de is there"):
        prepare("multi30k", folder, tmp_path / "to")
    (folder / "train.de.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"at least two languages is needed, found \['en'\]"):
        prepare("multi30k", folder, tmp_path / "to")
    small_europarl(tmp_path / "europarl")
    (tmp_path / "europarl" / "europarl-v7.fr-en.en").unlink()
    with pytest.raises(FileNotFoundError, match=r"none of europarl-v7\.fr-en\.en is there"):
        prepare("europarl", tmp_path / "europarl", tmp_path / "to")


@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
def test_an_interrupted_preparation_is_not_opened_and_may_be_repeated(tmp_path, monkeypatch, before):
    folder = small_multi30k(tmp_path / "from", monkeypatch)
    if before:
        prepare("multi30k", folder, tmp_path / "to")

    def full_disk(path, *rest):
        if path.name == "valid.en":
            raise OSError(28, "No space left on device")
        write_lines(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "write_lines", full_disk)
        with pytest.raises(OSError, match="No space left"):
            prepare("multi30k", folder, tmp_path / "to")
    with pytest.raises(
        TextError, match=r"dataset\.json: damaged, or its preparation did not end; prepare the dataset again"
    ):
        open_dataset(tmp_path / "to", "en", "de")
    prepare("multi30k", folder, tmp_path / "to")
    assert len(open_dataset(tmp_path / "to", "en", "de")[0]) == 30


def test_damaged_folders(tmp_path, monkeypatch):
    prepare("multi30k", small_multi30k(tmp_path / "from", monkeypatch), tmp_path / "to")
    for languages in (("en", "en"), ("en", "fr")):
        with pytest.raises(ValueError, match="must be two different ones of"):
            open_dataset(tmp_path / "to", *languages)
    for content in ("{", "[]", json.dumps({"languages": 5, "lines": {}})):
        (tmp_path / "to" / "dataset.json").write_text(content)
        with pytest.raises(TextError, match=r"dataset\.json: damaged"):
            open_dataset(tmp_path / "to", "en", "de")
