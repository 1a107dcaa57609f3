r"""Read and write lines of text.

A line ends at ``\n`` or ``\r\n`` and nowhere else. ``str.splitlines`` would also split at U+0085, U+2028 and a form
feed, which occur inside sentences, so that two aligned files would differ in their number of lines. A ``\r`` alone
occurs there, too; a file in which it is the only line end is an error, because it would be one line. A file is decoded
strictly: one wrong byte is an error that names its line, because a replaced character would enter the vocabulary.
"""

import bz2
import collections
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fastformer.apps.system.files import add_path_to_errors, replacing

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How compressed files are opened, by their first bytes, with which no text begins.
_OPENERS: dict[bytes, tuple[str, Callable[..., Any]]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"\xfd7zXZ\0": ("xz", lzma.open),
    **{b"BZh%d1AY&SY" % level: ("bzip2", bz2.open) for level in range(1, 10)},
}
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
COMPRESSED = (".gz", ".bz2", ".xz")


class TextError(ValueError):
    """A text file, a corpus or a tokenizer is unusable; the message is one line and names the file and line."""


def iterate_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of `read_lines` one by one, from a pipe too; raises the same errors, once it reaches the line."""
    path = Path(path)
    format, line = "", None
    try:
        with path.open("rb") as file:
            start = file.peek(10)
            if start.startswith(_ZSTANDARD):
                raise TextError(f"{path}: Zstandard is not read; unpack the file: zstd -d {path.name}")
            format, opener = next((o for magic, o in _OPENERS.items() if start.startswith(magic)), ("", iter))
            for line in lines_of(opener(file), str(path)):
                yield line
    except FileNotFoundError:
        raise missing_file(path) from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if format and getattr(error, "errno", None) is None:
            raise TextError(f"{path}: not a complete {format} file ({error})") from error
        raise TextError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error
    if line is None:
        raise TextError(f"{path}: the file is empty")


def missing_file(path: Path) -> FileNotFoundError:
    """Return the error for a file that does not exist; it names the current folder if the path is relative."""
    folder = "" if path.is_absolute() else f" in the current folder, {Path.cwd()}"
    return FileNotFoundError(f"{path}: no such file{folder}")


def lines_of(source: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a binary file, or of another iterable of lines, as text without line ends.

    Raises ``TextError``, which begins with `name`, for a line that is not UTF-8 or holds a NUL, and if all lines end
    with CR alone.
    """
    for number, data in enumerate(source, start=1):
        if number == 1:
            data = data.removeprefix(_BYTE_ORDER_MARK)
            if not data:  # the file holds only the mark
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
    """Return the lines of a file after reading it once, so that errors are raised first; a pipe is not checked."""
    if not path.is_fifo():
        collections.deque(iterate_lines(path), maxlen=0)
    return iterate_lines(path)


def read_lines(path: str | Path) -> list[str]:
    r"""Return the lines of a UTF-8 file without line ends; a byte order mark is dropped.

    The file may be compressed by gzip, bzip2 or xz. Raises ``FileNotFoundError`` if there is no such file, and
    ``TextError`` for a folder, an empty file, a broken archive, and the errors of `lines_of`.
    """
    return list(iterate_lines(path))


def check_texts(name: str, texts: object) -> None:
    """Raise TypeError for one string in place of a list, because each character would count as a text."""
    if isinstance(texts, str):
        raise TypeError(f"{name} must be a list of {name}, not one string")


def encode_text(text: str, name: str) -> bytes:
    """Return a text as UTF-8; raises ``TextError``, which begins with `name`, for half of a surrogate pair.

    Such halves come from JSON files, and from bytes on the command line that are not UTF-8.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode("ascii")
        raise TextError(
            f"{name}: {half} at character {error.start + 1} is not text, and UTF-8 cannot hold it"
        ) from None


def read_file(path: Path) -> bytes:
    """Return the content of a file; raises ``FileNotFoundError`` if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises ``TextError`` if it has none, or is nested deeper than Python reads."""
    try:
        content = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(content, dict):
        raise TextError(f"{path}: damaged; it must hold a JSON object, not {type(content).__name__}")
    return content


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write lines, or texts of several lines, as UTF-8, each with a final newline as soon as it is available.

    They are written to NAME.partial, which is renamed to `path` at the end and stays, with a warning, if an error or an
    interrupt ends the lines. Open files, devices and pipes are written to directly.
    """
    path = Path(path)
    with replacing(path, partial=True) as file:
        for number, line in enumerate(lines, start=1):
            data = memoryview(encode_text(line, f"{path}:{number}") + b"\n")
            with add_path_to_errors(path):
                while data:
                    data = data[file.write(data) :]
