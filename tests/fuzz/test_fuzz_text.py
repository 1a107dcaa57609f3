"""Generated bad input for the readers, tokenizers and settings: a documented error of one line, or a sound result.

`pytest tests/fuzz/test_fuzz_text.py --fuzz 10000` makes 10,000 inputs a test; see `fuzz`. What once failed stays below,
as a case by itself.
"""

import gzip
import hashlib
import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fastformer.apps.language.run import APPLICATION as LANGUAGE
from fastformer.apps.runs.application import Application
from fastformer.apps.text import (
    DOCUMENT_KINDS,
    TextError,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    open_dataset,
    open_text_dataset,
    read_lines,
    read_parallel,
    read_text,
    train_sentencepiece,
    write_lines,
    write_texts,
)
from fastformer.apps.text.datasets import SPLITS
from fastformer.apps.train import read_metrics
from fastformer.apps.translation.run import APPLICATION as TRANSLATION
from tests.fuzz import fuzz

LINES = [
    f"{word} {other} runs, doesn't it?" for word in ("the cat", "a dog", "grün") for other in ("42", "and", "«so»")
]
READING = (TextError, FileNotFoundError)


def file_bytes(random: Random) -> bytes:
    """A text file, whole or damaged, in any encoding, packed or not, whatever its name says."""
    data = fuzz.encoded(random, fuzz.text(random))
    if random.random() < 0.2:
        data = fuzz.damaged(random, data)
    drawn = random.random()
    if drawn < 0.4:
        data = gzip.compress(data, compresslevel=1, mtime=0)
        if drawn < 0.1:
            data += gzip.compress(fuzz.text(random).encode("utf-8", "replace"), compresslevel=1, mtime=0)
        if drawn < 0.3:
            data = fuzz.damaged(random, data)
    return data


def test_files(tmp_path: Path, numbers: range) -> None:
    """Lines, text and pairs: what is read has no line end and no NUL, and is what the bytes say."""
    read = 0
    for number in numbers:
        random = Random(number)
        path, other = tmp_path / random.choice(("plain", "packed.gz")), tmp_path / "other"
        data = file_bytes(random)
        path.write_bytes(data)
        other.write_bytes(file_bytes(random) if random.random() < 0.7 else data)
        lines = fuzz.attempt(lambda path=path: read_lines(path), READING, number)
        if lines is not None:
            read += 1
            whole = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
            assert len(lines) == whole.removesuffix(b"\n").count(b"\n") + 1
            assert not any("\n" in line or "\0" in line for line in lines)
            assert all(line.encode("utf-8") in whole for line in lines)
        pairs = fuzz.attempt(lambda path=path, other=other: read_parallel(path, other), READING, number)
        assert pairs is None or (all(pairs.source) and all(pairs.target) and len(pairs.source) == len(pairs.target))
        kind = random.choice(DOCUMENT_KINDS)
        found = fuzz.attempt(lambda path=path, kind=kind: read_text(path, kind), (*READING, ValueError), number)
        assert found is None or (lines is not None and len(found.lines) == len(lines))
    assert read > len(numbers) / 10  # the inputs are not all nonsense


def test_written_files_are_whole_or_the_earlier_ones(tmp_path: Path, numbers: range) -> None:
    """Lines and texts that cannot be written leave the earlier file; texts before the error are in a partial file."""
    path = tmp_path / "out"
    for number in numbers:
        random = Random(number)
        lines = [fuzz.text(random, 5, odd=0.15) for _ in range(random.randint(0, 4))]
        path.write_bytes(b"earlier\n")

        def write(lines: list[str] = lines) -> bool:
            write_lines(path, lines)
            return True

        if fuzz.attempt(write, (TextError,), number):
            assert path.read_bytes() == "".join(f"{line}\n" for line in lines).encode()
        else:
            assert path.read_bytes() == b"earlier\n"

        def texts(lines: list[str] = lines) -> bool:
            write_texts(path, lines)
            return True

        good = next((i for i, line in enumerate(lines) if "\ud800" in line or "\udcff" in line), len(lines))
        path.write_bytes(b"earlier\n")
        assert (fuzz.attempt(texts, (TextError,), number) is True) == (good == len(lines))
        whole = "".join(f"{line}\n" for line in lines[:good]).encode()
        assert path.read_bytes() == (whole if good == len(lines) else b"earlier\n"), f"input {number}"
        partial = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file != path}
        assert partial == ({"out.partial": whole} if 0 < good < len(lines) else {}), f"input {number}"
        for name in partial:
            (tmp_path / name).unlink()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of a saved tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("saved")
    made: dict[str, Tokenizer] = {
        "word": WordTokenizer.from_lines(LINES),
        "whitespace": WordTokenizer.from_lines(LINES, splitting="whitespace", lowercase=True),
        "bpe": train_sentencepiece(LINES, 50, model_type="bpe"),
        "unigram": train_sentencepiece(LINES, 50, lowercase=True),
    }
    for name, tokenizer in made.items():
        tokenizer.save(folder / name)
    return {name: {file.name: file.read_bytes() for file in (folder / name).iterdir()} for name in made}


def use(tokenizer: Tokenizer, random: Random) -> None:
    """Whatever was loaded works: ids within the vocabulary, text of them, and a name for each."""
    lines = [fuzz.text(random, 6).encode("utf-8", "replace").decode() for _ in range(3)]
    ids = tokenizer.encode_batch(lines)
    assert ids == [tokenizer.encode(line) for line in lines]
    assert all(0 <= i < tokenizer.size for each in ids for i in each)
    everything = range(tokenizer.size)
    assert isinstance(tokenizer.decode(everything), str)
    tokenizer.decode(everything).encode("utf-8")
    assert all(isinstance(piece, str) for piece in tokenizer.pieces(everything))
    assert {tokenizer.unk_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} <= set(everything)


def test_saved_tokenizers(tmp_path: Path, saved: dict[str, dict[str, bytes]], numbers: range) -> None:
    """A folder with a changed or damaged file, or without one."""
    loaded = 0
    for number in numbers:
        random = Random(number)
        files = dict(saved[random.choice(list(saved))])
        if random.random() < 0.75:
            files["tokenizer.json"] = fuzz.changed_json(random, json.loads(files["tokenizer.json"]))
        elif random.random() < 0.9:
            name = random.choice(list(files))
            files[name] = fuzz.damaged(random, files[name])
            if name == "sentencepiece.model" and random.random() < 0.7:  # damaged before its checksum was taken
                content = json.loads(files["tokenizer.json"]) | {"sha256": hashlib.sha256(files[name]).hexdigest()}
                files["tokenizer.json"] = json.dumps(content).encode()
        else:
            del files[random.choice(list(files))]
        for name in ("tokenizer.json", "sentencepiece.model"):
            (tmp_path / name).unlink(missing_ok=True)
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)

        def load(random: Random = random) -> bool:
            use(load_tokenizer(tmp_path), random)
            return True

        loaded += fuzz.attempt(load, READING, number) is True
    assert loaded > len(numbers) / 50


def test_vocabularies_from_bad_lines(numbers: range) -> None:
    """Control characters, separators, gigantic words, special symbols: a tokenizer that works, or why there is none."""
    logging.getLogger("fastformer").setLevel(logging.ERROR)
    for number in numbers[:: max(1, len(numbers) // 2000)]:
        random = Random(number)
        lines = [fuzz.text(random, 8) for _ in range(random.randint(0, 6))]
        if random.random() < 0.5:
            lines = [line.encode("utf-8", "replace").decode() for line in lines]
        lowercase = random.random() < 0.3

        def words(lines: list[str] = lines, lowercase: bool = lowercase, random: Random = random) -> None:
            splitting: Any = random.choice(("punctuation", "whitespace"))
            use(WordTokenizer.from_lines(lines, lowercase=lowercase, splitting=splitting), random)

        def pieces(lines: list[str] = lines, lowercase: bool = lowercase, random: Random = random) -> None:
            kind: Any = random.choice(("bpe", "unigram", "char", "word"))
            size = random.choice((5, 30, 200))
            use(train_sentencepiece(lines, size, model_type=kind, lowercase=lowercase, threads=1), random)

        fuzz.attempt(words, (TextError,), number)
        if number % 5 == 0:
            fuzz.attempt(pieces, (TextError,), number)
    logging.getLogger("fastformer").setLevel(logging.NOTSET)


def fields(application: Application) -> dict[str, list[str]]:
    kinds = {"data": application.data, "model": application.model, "train": application.train}
    return {"run": ["kind"], **{name: list(kind.__dataclass_fields__) for name, kind in kinds.items()}}


def test_settings(tmp_path: Path, numbers: range) -> None:
    """A settings file: its values fit the fields that they are for, and make settings, or are refused."""
    path = tmp_path / "settings.toml"
    made = 0
    for number in numbers:
        random = Random(number)
        application = random.choice((TRANSLATION, LANGUAGE))
        path.write_bytes(fuzz.toml(random, fields(application)))

        def read(application: Application = application) -> bool:
            found = application.read_settings(path)
            application.data(**found["data"])
            application.train(**{"steps": 1, **found["train"]})
            derived = dict.fromkeys(application.vocabularies, 60) | {"pad_id": 1, "bos_id": 2, "eos_id": 3}
            application.model(**found["model"], **derived)
            return True

        made += fuzz.attempt(read, (ValueError,), number) is True
    assert made > len(numbers) / 20


def test_prepared_folders_and_metrics(tmp_path: Path, numbers: range) -> None:
    """dataset.json and metrics.jsonl, changed or damaged."""
    pairs, text = tmp_path / "pairs", tmp_path / "text"
    for folder, suffixes in ((pairs, ("en", "fr")), (text, ("txt",))):
        folder.mkdir()
        for name in SPLITS:
            for suffix in suffixes:
                write_lines(folder / f"{name}.{suffix}", ["", "= a title =", "", "some words"])
    report: dict[str, Any] = {"name": "x", "notice": "n", "warnings": [], "languages": [], "tokens": {}}
    counts = {n: dict.fromkeys((f"{name}.txt" for name in SPLITS), n) for n in (4, 9)}  # lines; words, eos counted
    reports = {
        pairs: {**report, "languages": ["en", "fr"], "lines": dict.fromkeys((f"{name}.en" for name in SPLITS), 4)},
        text: {**report, "lines": counts[4], "tokens": counts[9]},
    }
    records = [{"kind": "train", "step": i, "loss": 1.5} for i in range(3)]
    opened = 0
    for number in numbers:
        random = Random(number)
        folder = random.choice((pairs, text))
        (folder / "dataset.json").write_bytes(fuzz.changed_json(random, reports[folder]))

        def open_(folder: Path = folder) -> bool:
            parts: Any = open_dataset(folder, "en", "fr") if folder == pairs else open_text_dataset(folder)
            return all(len(part) for part in parts)

        opened += fuzz.attempt(open_, (ValueError,), number) is True
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        data = fuzz.damaged(random, lines) if random.random() < 0.5 else lines + fuzz.changed_json(random, records[0])
        (tmp_path / "metrics.jsonl").write_bytes(data)
        fuzz.attempt(lambda: read_metrics(tmp_path / "metrics.jsonl"), (ValueError,), number)
    assert opened > len(numbers) / 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": ["<unk>", "<pad>", "<bos>", "<eos>", 5]}, "damaged"),
        ({"words": ["<unk>", "<pad>", "<bos>", "<eos>", "\ud800"]}, "is not text"),
        ({"lowercase": "false"}, "lowercase must be true or false"),
    ],
)
def test_a_table_of_words_that_are_none(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    WordTokenizer.from_lines(LINES).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(TextError, match=message):
        load_tokenizer(tmp_path)


def test_deep_nesting_is_no_stack_overflow(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(TextError, match="not a JSON file"):
        load_tokenizer(tmp_path)
    (tmp_path / "c.toml").write_text("[model]\nd_model = " + "[" * 5000 + "\n")
    with pytest.raises(ValueError, match=r"c\.toml: not a TOML file"):
        TRANSLATION.read_settings(tmp_path / "c.toml")


def test_half_a_surrogate_pair_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"earlier\n")
    for write in (write_lines, write_texts):
        with pytest.raises(TextError, match=r"\\udcff at character 2 is not text"):
            write(path, ["a\udcff"])
        assert path.read_bytes() == b"earlier\n"
