"""Collect the docstrings of the installed Python and torch: English prose on every machine, without network.

Files are parsed with `ast` and never imported. Each docstring becomes one line, one document, and counts once if files
share it. A file belongs to training, validation or test by a hash of its path, so that the corpora share no file and do
not change when other files come or go.
"""

import ast
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from .corpora import TextCorpus
from .files import TextError

_HELD_OUT = 5  # percent of the files for validation, and as many for test
_SHORTEST = 8  # words; shorter docstrings are mostly "Return self." and the like
_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def docstring_corpora(size: int = 2_000_000, roots: dict[str, Path] | None = None) -> tuple[TextCorpus, ...]:
    """Return training, validation and test docstrings.

    Args:
        size: characters to collect for all three corpora together; files are read until there are so many.
        roots: name -> folder of Python files; by default the standard library and torch.

    Raises ``TextError`` if no docstring was found for one of the corpora.
    """
    if roots is None:
        roots = {"python": Path(sysconfig.get_paths()["stdlib"]), "torch": Path(torch.__file__).parent}
    train, valid, test = corpora = tuple(TextCorpus([], name) for name in ("train", "valid", "test"))
    seen: set[str] = set()
    remaining = size  # characters
    # In the order of their hashes, the first files are a sample of all of them.
    for digest, path in sorted(_files(roots)):
        # The end of the hash, because files are sorted by its beginning.
        bucket = int(digest[-8:], 16) % 100
        corpus = valid if bucket < _HELD_OUT else test if bucket < 2 * _HELD_OUT else train
        for text in _docstrings(path):
            if text not in seen and remaining > 0:
                seen.add(text)
                corpus.documents.append([text])
                remaining -= len(text)
        if remaining <= 0:
            break
    for corpus in corpora:
        if not corpus.documents:
            folders = ", ".join(map(str, roots.values())) or "no folder"
            raise TextError(f"no docstring for {corpus.name} within {size:,} characters of {folders}; raise the size")
    return corpora


def _files(roots: dict[str, Path]) -> Iterator[tuple[str, Path]]:
    """Yield a hash of the name, and the path, of every Python file outside of skipped folders."""
    for name, root in roots.items():
        for folder, folders, files in os.walk(root):
            folders[:] = [each for each in folders if each not in _SKIPPED_FOLDERS]
            for path in (Path(folder, file) for file in files if file.endswith(".py")):
                inside = path.relative_to(root).as_posix()
                yield hashlib.sha256(f"{name}/{inside}".encode()).hexdigest(), path


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file in order, each as one line; none if the file cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node, clean=False) or "").encode("utf-8", "ignore").decode()  # no surrogates
            words = text.replace("\0", " ").split()
            if len(words) >= _SHORTEST:
                yield " ".join(words)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements in it; expressions are most of a tree and contain no docstrings."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _statements(child)
