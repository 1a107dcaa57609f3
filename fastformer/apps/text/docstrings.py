"""The docstrings of the installed Python and torch: English prose that is on every machine, without network.

Files are parsed with `ast` and never imported. Each docstring of a module, class or function becomes one line, one
document; a docstring that several files share counts once. A file belongs to training, validation or test by a hash of
its path, so that the parts share no file and do not change when other files come or go. Which text is found depends on
the installed versions, nothing else.
"""

import ast
import hashlib
import importlib.util
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from fastformer.settings import check_value

from .corpora import TextCorpus
from .files import TextError

_HELD_OUT = 5  # percent of the files for validation, and as many for test
_SHORTEST = 8  # words; shorter docstrings are mostly "Return self." and the like
_CLAUSE = ast.excepthandler | ast.match_case
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def docstring_corpora(
    size: int = 2_000_000, roots: dict[str, Path] | None = None
) -> tuple[TextCorpus, TextCorpus, TextCorpus]:
    """Training, validation and test docstrings.

    Args:
        size: characters to collect, of all three parts together; files are read until there are so many.
        roots: name -> folder of Python files; by default the standard library and torch.

    Raises:
        ValueError: size is below 1.
        TextError: no docstring was found, or none for one of the parts.
    """
    check_value("size", size, int, at_least=1)
    roots = _installed() if roots is None else roots
    parts: dict[str, list[list[str]]] = {"train": [], "valid": [], "test": []}
    seen: set[str] = set()
    left = size
    # In the order of their hashes a part of the files is a sample of all of them.
    for digest, path in sorted(_files(roots)):
        for text in _docstrings(path):
            if text not in seen and left > 0:
                seen.add(text)
                parts[_part(digest)].append([text])
                left -= len(text)
        if left <= 0:
            break
    for name, documents in parts.items():
        if not documents:
            places = ", ".join(str(root) for root in roots.values()) or "no folder"
            raise TextError(f"no docstring for {name} within {size:,} characters of {places}; raise the size")
    train, valid, test = (TextCorpus(documents, name) for name, documents in parts.items())
    return train, valid, test


def _installed() -> dict[str, Path]:
    """The folders of the standard library and of torch, found without importing it."""
    roots = {"python": Path(sysconfig.get_paths()["stdlib"])}
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        roots["torch"] = Path(spec.origin).parent
    return roots


def _files(roots: dict[str, Path]) -> Iterator[tuple[str, Path]]:
    """A hash of the name, and the path, of every Python file that is worth reading."""
    for name, root in roots.items():
        for folder, folders, files in os.walk(root):
            folders[:] = [each for each in folders if each not in _LEFT_OUT]
            for path in (Path(folder, file) for file in files if file.endswith(".py")):
                inside = path.relative_to(root).as_posix()
                yield hashlib.sha256(f"{name}/{inside}".encode()).hexdigest(), path


def _part(digest: str) -> Literal["train", "valid", "test"]:
    # From the other end than the one that files are sorted by.
    bucket = int(digest[-8:], 16) % 100
    return "valid" if bucket < _HELD_OUT else "test" if bucket < 2 * _HELD_OUT else "train"


def _docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a file in the order of its text, each in one line; none where it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in other people's strings
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    found: list[tuple[int, str]] = []
    # Statements only: nothing that has a docstring stands within an expression, and those are most of the tree.
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node, clean=False) or "").encode("utf-8", "ignore").decode()  # no surrogates
            words = text.replace("\0", " ").split()
            if len(words) >= _SHORTEST:
                found.append((getattr(node, "lineno", 0), " ".join(words)))
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            waiting.extend(part for part in getattr(node, name, ()) if isinstance(part, ast.stmt | _CLAUSE))
    yield from (text for _, text in sorted(found))
