"""Lines, pairs and splits: what is read is what is in the file, bad input is one line, files are replaced at once."""

import bz2
import gzip
import io
import lzma
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.apps.cli.console import check_output
from fastformer.apps.system.files import write_file
from fastformer.apps.text import ParallelCorpus, TextError, files, read_lines, read_parallel, split, write_lines

# Everything that str.splitlines would split at, but a translator's file does not.
SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
COMPRESSIONS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\xef\xbb\xbfa\n", ["a"]),
        (b"\n", [""]),
        (b"a\n\n\n", ["a", "", ""]),
        (b"a\rb\n", ["a\rb"]),
        (b"a\r", ["a"]),
        (b"BZh1 may begin a text\n", ["BZh1 may begin a text"]),
        (f"a{SEPARATORS}b\nc\n".encode(), [f"a{SEPARATORS}b", "c"]),
    ],
)
def test_lines_end_at_newlines_only(tmp_path, data, lines):
    (tmp_path / "plain").write_bytes(data)
    assert read_lines(tmp_path / "plain") == lines
    for suffix, compress in COMPRESSIONS.items():
        (tmp_path / f"by_{suffix}").write_bytes(compress(data))
        assert read_lines(tmp_path / f"by_{suffix}") == lines


BAD_FILES = {
    "empty": (b"", "the file is empty"),
    "only_mark": (b"\xef\xbb\xbf", "the file is empty"),
    "latin1": (b"ok\ncaf\xe9\nok\n", r"latin1:2: not valid UTF-8 \(byte 0xe9\)"),
    "cut_character": (b"ok\nok\n\xc3", "cut_character:3: not valid UTF-8"),
    "utf16": ("ab\ncd".encode("utf-16-le"), "utf16:1: a NUL character"),
    "packed.zst": (bytes.fromhex("28b52ffd2003190000610a62"), r"packed\.zst: Zstandard is not read; unpack .* zstd -d"),
    "cr": (b"\xef\xbb\xbfa\rb\rc\r", r"cr: its lines end with CR alone; convert it"),
    "cut.bz2": (bz2.compress(b"a line\n" * 100)[:-9], "cut.bz2: not a complete bzip2 file"),
    "flipped.xz": (lzma.compress(b"a line\n" * 100)[:-8] + b"\0" * 8, "flipped.xz: not a complete xz file"),
    "cut.gz": (gzip.compress(b"a line\n" * 100)[:-9], "cut.gz: not a complete gzip file"),
    "garbage.gz": (gzip.compress(b"a line\n")[:10] + b"\xff" * 20, "garbage.gz: not a complete gzip file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_one_line_errors(tmp_path, name):
    data, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TextError, match=message) as caught:
        read_lines(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_streams_folders_and_missing_files_are_named(tmp_path):
    with pytest.raises(TextError, match="standard input: its lines end with CR alone"):
        list(files.lines_of(io.BytesIO(b"a line\r" * (1 << 18)), "standard input"))
    with pytest.raises(FileNotFoundError, match=r"absent\.en: no such file"):
        read_lines(tmp_path / "absent.en")
    with pytest.raises(TextError, match="Is a directory"):
        read_lines(tmp_path)


def test_pairs_are_aligned_and_empty_sides_are_counted(tmp_path):
    write_lines(tmp_path / "a.en", ["one", "", "three ", " \t", "\u3000", "six"])
    write_lines(tmp_path / "a.fr", ["un", "deux", " trois", "", "cinq", " "])
    corpus = read_parallel(tmp_path / "a.en", tmp_path / "a.fr")
    assert (corpus.source, corpus.target) == (["one", "three"], ["un", "trois"])
    assert str(corpus) == "a.en: 2 pairs, 4 with an empty side dropped"
    write_lines(tmp_path / "a.de", [""] * 6)
    with pytest.raises(TextError, match="every pair of lines has an empty side"):
        read_parallel(tmp_path / "a.en", tmp_path / "a.de")
    write_lines(tmp_path / "a.de", ["eins"])
    with pytest.raises(TextError, match=r"a\.en has 6 lines but .*a\.de has 1: "):
        read_parallel(tmp_path / "a.en", tmp_path / "a.de")
    with pytest.raises(TextError, match="2 source lines but 1 target lines"):
        ParallelCorpus(["a", "b"], ["a"])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xyz")), min_size=12, max_size=40),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_split_is_disjoint_in_content_and_loses_only_copies(pairs, validation, test, seed):
    corpus = ParallelCorpus([left for left, _ in pairs], [right for _, right in pairs])
    if len(set(pairs)) <= validation + test:
        with pytest.raises(TextError, match="leave none for training"):
            split(corpus, validation, test, seed)
        return
    parts = split(corpus, validation, test, seed)
    train, valid, held = (list(zip(part.source, part.target, strict=True)) for part in parts)
    assert (len(valid), len(held)) == (validation, test)
    assert len(set(valid + held)) == validation + test
    assert not set(train) & set(valid + held)
    assert sorted(train) == sorted(pair for pair in pairs if pair not in valid + held)
    assert len(train) + len(valid) + len(held) + parts[0].left_out["copies of held-out pairs dropped"] == len(pairs)
    assert split(corpus, validation, test, seed) == parts


def test_split_shuffles_by_seed():
    numbers = [str(i) for i in range(100)]
    trains = [split(ParallelCorpus(numbers, numbers), 10, 10, seed)[0].source for seed in (1, 2)]
    assert trains[0] != trains[1] != sorted(trains[1], key=int)


def test_texts_are_in_a_partial_file_as_soon_as_they_come(tmp_path):
    path, partial = tmp_path / "texts.txt", tmp_path / "texts.txt.partial"
    path.write_text("earlier\n")
    texts = ["eins", "zwei\nund drei ü", ""]

    def coming():
        for i, text in enumerate(texts):
            yield text
            assert partial.read_text(encoding="utf-8") == "".join(f"{one}\n" for one in texts[: i + 1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_lines(path, coming())
    assert path.read_text() == "earlier\n"
    assert partial.read_text(encoding="utf-8") == "eins\nzwei\nund drei ü\n\n"
    partial.unlink()
    write_lines(path, texts)
    assert path.read_text(encoding="utf-8") == "eins\nzwei\nund drei ü\n\n"
    write_lines(path, [])
    assert path.read_text() == ""


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError) as caught:
        write_file(tmp_path / "missing" / "file", b"new")
    assert caught.value.filename == str(tmp_path / "missing" / "file")  # not the temporary one
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "file")  # root may write everything
    for write in (lambda path: check_output(path, run=tmp_path / "run"), lambda path: write_file(path, b"new")):
        with pytest.raises(PermissionError, match="cannot be written"):
            write(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of open files")
def test_an_open_file_is_appended_to(tmp_path):
    """As with `--output /dev/stdout >> log`."""
    (tmp_path / "log").write_bytes(b"earlier\n")
    with (tmp_path / "log").open("ab") as file:
        for folder in ("/dev/fd", "/proc/self/fd"):
            write_lines(f"{folder}/{file.fileno()}", ["lines"])
        file.write(b"later\n")
    assert (tmp_path / "log").read_bytes() == b"earlier\n" + b"lines\n" * 2 + b"later\n"
