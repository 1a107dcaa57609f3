"""Generated bad input for readers, tokenizers and settings: a documented error of one line, or a sound result."""

import gzip
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fastformer.apps.classification.run import APPLICATION as CLASSIFICATION
from fastformer.apps.language.run import APPLICATION as LANGUAGE
from fastformer.apps.text import (
    DOCUMENT_KINDS,
    TextError,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    read_lines,
    read_parallel,
    read_text,
    train_sentencepiece,
    write_lines,
)
from fastformer.apps.translation.run import APPLICATION as TRANSLATION
from tests.fuzz.conftest import Explore, attempt, chance, changed_json, damaged, encoded, text, toml

LINES = [f"{x} {y} runs, doesn't it?" for x in ("the cat", "a dog", "grün") for y in ("42", "and", "«so»")]
READING = (TextError, FileNotFoundError)


def file_bytes(random: Random) -> bytes:
    """A text file, whole or damaged, in any encoding, packed or not, whatever its name says."""
    data = encoded(random, text(random))
    if chance(random, 20):
        data = damaged(random, data)
    if chance(random, 40):
        data = gzip.compress(data, compresslevel=1, mtime=0)
        data = damaged(random, data) if chance(random, 50) else data
    return data


def test_files_are_read_as_their_bytes_say_or_refused(tmp_path: Path, explore: Explore) -> None:
    """Lines, text and pairs: what is read has no line end and no NUL, and is what the bytes say."""

    def check(random: Random) -> str:
        path, other = tmp_path / random.choice(("plain", "packed.gz")), tmp_path / "other"
        data = file_bytes(random)
        path.write_bytes(data)
        other.write_bytes(file_bytes(random) if chance(random, 70) else data)
        lines = attempt(lambda: read_lines(path), *READING)
        if lines is not None:
            whole = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
            assert len(lines) == whole.removesuffix(b"\n").count(b"\n") + 1
            assert not any("\n" in line or "\0" in line for line in lines)
            assert all(line.encode("utf-8") in whole for line in lines)
        pairs = attempt(lambda: read_parallel(path, other), *READING)
        assert pairs is None or (all(pairs.source) and all(pairs.target) and len(pairs.source) == len(pairs.target))
        kind = random.choice(DOCUMENT_KINDS)
        document = attempt(lambda: read_text(path, kind), *READING, ValueError)
        assert document is None or (lines is not None and len(document.lines) == len(lines))
        return "refused" if lines is None else "read"

    explore(check, {"read": 0.1, "refused": 0.1})


def test_written_files_are_whole_or_the_earlier_ones(
    tmp_path: Path, explore: Explore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that cannot be written leave the earlier file; lines before the error are in a partial file."""
    path, partial = tmp_path / "out", tmp_path / "out.partial"
    monkeypatch.setattr("os.fsync", lambda descriptor: None)

    def check(random: Random) -> str:
        lines = [text(random, 6, odd=50) for _ in range(random.randrange(5))]
        content = [f"{line}\n".encode("utf-8", "surrogatepass") for line in lines]
        good = [not any("\ud800" <= character <= "\udfff" for character in line) for line in lines]
        path.write_bytes(b"earlier\n")
        write: Callable[[], Any] = lambda: write_lines(path, lines) or "written"  # noqa: E731
        assert (attempt(write, TextError) == "written") == all(good)
        assert path.read_bytes() == (b"".join(content) if all(good) else b"earlier\n")
        first = b"".join(x for x, _ in itertools.takewhile(lambda pair: pair[1], zip(content, good, strict=True)))
        expected = {} if all(good) or not first else {partial.name: first}
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file != path} == expected
        partial.unlink(missing_ok=True)
        return "written" if all(good) else "refused"

    explore(check, {"written": 0.1, "refused": 0.05})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The files of saved tokenizers."""
    folder = tmp_path_factory.mktemp("saved")
    WordTokenizer.from_lines(LINES).save(folder / "word")
    train_sentencepiece(LINES, 50, lowercase=True).save(folder / "unigram")
    return [{file.name: file.read_bytes() for file in kind.iterdir()} for kind in sorted(folder.iterdir())]


def use(tokenizer: Tokenizer, random: Random) -> None:
    """Whatever was loaded works: ids within the vocabulary, text of them, and a name for each."""
    lines = [text(random, 6).encode("utf-8", "replace").decode() for _ in range(2)]
    ids = tokenizer.encode_batch(lines)
    assert ids == [tokenizer.encode(line) for line in lines]
    assert all(0 <= i < tokenizer.size for each in ids for i in each)
    everything = range(tokenizer.size)
    tokenizer.decode(everything).encode("utf-8")
    assert all(isinstance(piece, str) for piece in tokenizer.pieces(everything))
    assert {tokenizer.unk_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} <= set(everything)


def test_damaged_tokenizers_load_and_work_or_are_refused(
    tmp_path: Path, saved: list[dict[str, bytes]], explore: Explore
) -> None:
    """A folder with a changed or damaged file, or without one."""

    def check(random: Random) -> str:
        files = dict(random.choice(saved))
        name = random.choice(list(files))
        if chance(random, 75):
            files["tokenizer.json"] = changed_json(random, json.loads(files["tokenizer.json"]))
        elif chance(random, 90):
            files[name] = damaged(random, files[name])
        else:
            del files[name]
        for file in tmp_path.iterdir():
            file.unlink()
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        tokenizer = attempt(lambda: load_tokenizer(tmp_path), *READING)
        if tokenizer is not None:
            use(tokenizer, random)
        return "refused" if tokenizer is None else "loaded"

    explore(check, {"loaded": 0.02, "refused": 0.1})


def test_vocabularies_of_any_lines_work_or_are_refused(explore: Explore, caplog: pytest.LogCaptureFixture) -> None:
    """Control characters, separators, gigantic words, special symbols: a tokenizer that works, or why there is none."""
    caplog.set_level(logging.ERROR, "fastformer")

    def check(random: Random) -> str:
        lines = [text(random, 8) for _ in range(random.randrange(7))]
        if chance(random, 70):
            lines = [line.encode("utf-8", "replace").decode() for line in lines]
        lowercase, kind = chance(random, 30), random.choice(("punctuation", "whitespace", "bpe", "unigram", "char"))
        make: Any = lambda: WordTokenizer.from_lines(lines, lowercase=lowercase, splitting=kind)  # noqa: E731
        if kind not in ("punctuation", "whitespace"):
            size = random.choice((5, 30, 200))
            make = lambda: train_sentencepiece(lines, size, model_type=kind, lowercase=lowercase)  # noqa: E731
        tokenizer = attempt(make, TextError)
        if tokenizer is not None:
            use(tokenizer, random)
        return "refused" if tokenizer is None else "learned"

    explore(check, {"learned": 0.1, "refused": 0.1}, share=0.5)


def test_settings_files_are_read_or_refused(tmp_path: Path, explore: Explore) -> None:
    """A settings file: its values fit the fields that they are for, and make settings, or are refused."""
    path = tmp_path / "settings.toml"

    def check(random: Random) -> str:
        application = random.choice((TRANSLATION, LANGUAGE, CLASSIFICATION))
        kinds = {"data": application.data, "model": application.model, "train": application.train}
        sections = {name: list(kind.__dataclass_fields__) for name, kind in kinds.items()}
        path.write_bytes(toml(random, {"run": ["kind"], **sections}))

        def read() -> bool:
            settings = application.read_settings(path)
            application.data(**settings["data"])
            application.train(**{"steps": 1, **settings["train"]})
            return True

        return "read" if attempt(read, ValueError) else "refused"

    explore(check, {"read": 0.05, "refused": 0.1})
