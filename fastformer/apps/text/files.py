r"""Lines of text from files, and line-aligned pairs of them.

A line ends at ``\n`` or ``\r\n`` and nowhere else. ``str.splitlines`` would also split at U+0085, U+2028 and a form
feed, which do occur inside sentences, and then two aligned files no longer have the same number of lines. A ``\r``
alone occurs there too; a file in which it is the only line end is refused, because it would be one line. A file is
decoded strictly, a part at a time: one wrong byte is an error that names its line, because a replaced character would
end up in the vocabulary. Pairs beyond a limit are read, too, and not kept: files that are not aligned show it.
"""

import bz2
import collections
import gzip
import importlib
import itertools
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from fastformer.apps.system.files import naming, replacing, write_file
from fastformer.settings import check_value

# How compressed files begin, which apart from bzip2's is never the start of text, and how they may be called.
_GZIP, _BZIP2, _XZ, _ZSTANDARD = "gzip", "bzip2", "xz", "Zstandard"
_MAGIC = {b"\x1f\x8b": _GZIP, b"BZh": _BZIP2, b"\xfd7zXZ\0": _XZ, b"\x28\xb5\x2f\xfd": _ZSTANDARD}
_BY_SUFFIX = {".gz": _GZIP, ".bz2": _BZIP2, ".xz": _XZ, ".zst": _ZSTANDARD}
COMPRESSED = tuple(_BY_SUFFIX)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TextError(ValueError):
    """A text file, a corpus or a tokenizer is unusable; the message is one line and names the file and line."""


def iterate_lines(path: str | Path) -> Iterator[str]:
    """The lines of `read_lines`, one after another; raises what that raises, where it comes to it.

    The file may be a pipe, such as a shell's process substitution.
    """
    path = Path(path)
    if "\0" in str(path):
        raise TextError(f"{str(path)!r}: a NUL character in the name of a file")
    empty, compression = True, None
    try:
        if path.is_dir():
            raise TextError(f"{path}: is a folder, not a text file")
        with path.open("rb") as file:
            compression = _compression(file.peek(10), path.suffix)
            source = _unpacked(file, compression, path)
            for line in lines_of(source, str(path)):
                empty = False
                yield line
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise TextError(f"{path}: not a complete {compression} file ({error})") from error
    except OSError as error:  # a name that is too long among them
        if error.errno is None and compression:  # what bz2 raises
            raise TextError(f"{path}: not a complete {compression} file ({error})") from error
        raise TextError(f"{path}: cannot be read ({error.strerror})") from error
    if empty:
        raise TextError(f"{path}: the file is empty")


def _compression(start: bytes, suffix: str) -> str | None:
    """The name of the compression of a file that begins so; None for plain text and an empty file."""
    found = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
    if found == _BZIP2 and start[4:10] not in (b"1AY&SY", b"\x17rE8P\x90"):  # of a block, of none
        found = None  # a text that begins with BZh
    return found or (_BY_SUFFIX.get(suffix) if start else None)


def _unpacked(file: BufferedReader, compression: str | None, path: Path) -> BufferedIOBase:
    if compression == _GZIP:
        return gzip.GzipFile(fileobj=file)
    if compression == _BZIP2:
        return bz2.BZ2File(file)
    if compression == _XZ:
        return lzma.LZMAFile(file)
    if compression == _ZSTANDARD:
        try:
            zstd = importlib.import_module("compression.zstd")
        except ImportError:
            raise TextError(f"{path}: Zstandard needs Python 3.14; unpack the file: zstd -d {path.name}") from None
        opened: BufferedIOBase = zstd.ZstdFile(file)
        return opened
    return file


def lines_of(source: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a stream of UTF-8 bytes without their ends.

    Args:
        source: a binary file, or lines that end with a newline.
        name: of the stream, for errors.

    Raises:
        TextError: a line is not UTF-8 or holds a NUL, or all lines end with CR alone.
    """
    for number, data in enumerate(source, start=1):
        if number == 1:
            data = data.removeprefix(_BYTE_ORDER_MARK)
            if not data:  # a file of the mark alone
                return
            if not data.endswith(b"\n") and b"\r" in data.rstrip(b"\r"):
                raise TextError(
                    f"{name}: its lines end with CR alone; convert it, for example with: tr '\\r' '\\n' <OLD >NEW"
                )
        try:
            line = data.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = data[error.start]
            raise TextError(f"{name}:{number}: not valid UTF-8 (byte 0x{byte:02x}); save the file as UTF-8") from None
        if "\0" in line:
            raise TextError(f"{name}:{number}: a NUL character, not text; if the file is UTF-16, save it as UTF-8")
        yield line.removesuffix("\n").removesuffix("\r")


def checked_lines(path: Path) -> Iterator[str]:
    """The lines of a file, all of which are read once before, so that an error in one comes first; of a pipe, no error.

    Raises what `read_lines` raises.
    """
    if not path.is_fifo():
        collections.deque(iterate_lines(path), maxlen=0)
    return iterate_lines(path)


def read_lines(path: str | Path) -> list[str]:
    r"""The lines of a UTF-8 file, plain or compressed, without their line ends; a byte order mark is dropped.

    It may be compressed by gzip, bzip2 or xz, and with Python 3.14 by Zstandard.

    Raises ``FileNotFoundError`` when there is no such file, and ``TextError`` for a folder, an empty file, a broken
    archive, and a line that is not UTF-8 or holds a NUL (the sign of UTF-16).
    """
    return list(iterate_lines(path))


def check_texts(name: str, texts: object) -> None:
    """Refuse one string where a list is wanted: each of its characters would count as a text."""
    if isinstance(texts, str):
        raise TypeError(f"{name} must be a list of {name}, not one string")


def encode_text(text: str, name: str) -> bytes:
    """UTF-8 of a text; raises ``TextError``, which begins with `name`, for half of a surrogate pair.

    Such halves come from JSON files and, as bytes that are no UTF-8, from the command line.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode("ascii")
        raise TextError(
            f"{name}: {half} at character {error.start + 1} is not text, and UTF-8 cannot hold it"
        ) from None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; raises ``TextError`` if it is not one, or nested deeper than Python reads."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path}: not a JSON file ({error})") from None


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write lines as UTF-8 with a final newline, atomically.

    Raises ``TextError`` for a line that holds a newline or half of a surrogate pair.
    """
    lines = list(lines)
    for number, line in enumerate(lines, start=1):
        if "\n" in line:
            raise TextError(f"{path}:{number}: a newline inside a line cannot be written")
    encoded = (encode_text(line, f"{path}:{number}") + b"\n" for number, line in enumerate(lines, start=1))
    write_file(path, b"".join(encoded))


def write_texts(path: str | Path, texts: Iterable[str]) -> None:
    """Write texts as UTF-8, each with a final newline as soon as it comes, and each whole or not at all.

    They grow in a file NAME.partial, which is renamed to `path` once all are there. It is kept, with a warning that
    names it, if the texts end in an error or are interrupted. What is open (/dev/stdout) and what is no file are
    written to; a pipe keeps what it got of a text. Raises ``TextError`` for half of a surrogate pair.
    """
    path = Path(path)
    with replacing(path, partial=True) as file:
        for number, text in enumerate(texts, start=1):
            data = memoryview(encode_text(text, f"{path}, text {number}") + b"\n")
            end = file.tell() if file.seekable() else None
            try:
                with naming(path):
                    while data:
                        data = data[file.write(data) :]
            except BaseException:  # a full disk, or Ctrl-C
                if end is not None:
                    file.truncate(end)
                raise


def sample_lines(lines: Sequence[str], count: int, seed: int) -> list[str]:
    """At most `count` of the lines, drawn without replacement and kept in order: a tokenizer needs no more."""
    if count >= len(lines):
        return list(lines)
    chosen = np.random.default_rng(seed).choice(len(lines), size=count, replace=False)
    return [lines[i] for i in sorted(chosen.tolist())]


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs: ``source[i]`` is translated by ``target[i]``.

    `dropped_*` count the pairs that are no use, `beyond` those that a limit left out.
    """

    source: list[str]
    target: list[str]
    name: str = "corpus"
    dropped_empty: int = 0
    dropped_copies: int = 0
    beyond: int = 0

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise TextError(f"{self.name}: {len(self.source):,} source lines but {len(self.target):,} target lines")

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: Sequence[int], name: str) -> "ParallelCorpus":
        """The pairs at `indices`, in that order, under a name of their own."""
        return ParallelCorpus([self.source[i] for i in indices], [self.target[i] for i in indices], name=name)

    def __str__(self) -> str:
        notes = [f"{self.name}: {len(self):,} pairs"]
        if self.dropped_empty:
            notes.append(f"{self.dropped_empty:,} with an empty side dropped")
        if self.dropped_copies:
            notes.append(f"{self.dropped_copies:,} copies of held-out pairs dropped")
        if self.beyond:
            notes.append(f"{self.beyond:,} more left out")
        return ", ".join(notes)


def read_parallel(
    source_path: str | Path, target_path: str | Path, name: str | None = None, limit: int | None = None
) -> ParallelCorpus:
    """Read two line-aligned files; pairs of which a side is blank are dropped and counted, spaces at the ends cut.

    limit: the most pairs to take, the first ones; None: all. The others are read, checked and counted, but not kept.

    Raises what `read_lines` raises, and ``TextError`` when the line counts differ or no pair is left.
    """
    source: list[str] = []
    target: list[str] = []
    lines, empty, beyond = [0, 0], 0, 0
    for left, right in itertools.zip_longest(iterate_lines(source_path), iterate_lines(target_path)):
        lines[0], lines[1] = lines[0] + (left is not None), lines[1] + (right is not None)
        left, right = (left or "").strip(), (right or "").strip()
        if limit is not None and len(source) >= limit:
            beyond += 1
        elif left and right:
            source.append(left)
            target.append(right)
        else:
            empty += 1
    if lines[0] != lines[1]:
        raise TextError(
            f"{source_path} has {lines[0]:,} lines but {target_path} has {lines[1]:,}: "
            "line i of one must translate line i of the other"
        )
    if not source:
        raise TextError(f"{source_path} and {target_path}: every pair of lines has an empty side")
    return ParallelCorpus(source, target, name or Path(source_path).name, dropped_empty=empty, beyond=beyond)


def split(
    corpus: ParallelCorpus, validation: int, test: int, seed: int
) -> tuple[ParallelCorpus, ParallelCorpus, ParallelCorpus]:
    """Shuffle a corpus and split it in training, validation and test pairs with no pair in common.

    Disjoint in content, not only in line number: the held-out pairs are distinct, and every further copy of one is
    dropped from training (Europarl repeats its formulas thousands of times). Raises ``ValueError`` for a negative
    count, and ``TextError`` when fewer than one distinct pair would be left for training.
    """
    for name, value in (("validation", validation), ("test", test)):
        check_value(name, value, int, at_least=0)
    order = np.random.default_rng(seed).permutation(len(corpus)).tolist()
    held: dict[tuple[str, str], int] = {}
    train, copies = [], 0
    for i in order:
        pair = (corpus.source[i], corpus.target[i])
        if pair in held:
            copies += 1
        elif len(held) < validation + test:
            held[pair] = i
        else:
            train.append(i)
    if not train:
        raise TextError(
            f"{corpus.name}: {len(corpus):,} pairs ({len(held):,} distinct) leave none for training "
            f"after {validation:,} for validation and {test:,} for test"
        )
    chosen = list(held.values())
    return (
        replace(
            corpus.take(train, "train"), dropped_empty=corpus.dropped_empty, dropped_copies=copies, beyond=corpus.beyond
        ),
        corpus.take(chosen[:validation], "valid"),
        corpus.take(chosen[validation:], "test"),
    )
