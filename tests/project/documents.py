"""README and the pages of the site: their blocks of code, their headings and their links."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.python import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^(?P<fence>```+|:::+)(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=fence)$", re.M | re.S)
PROGRAMS = ("fastformer", "make", "pip", "pre-commit", "pytest", "python", "python3", "torchrun")
_STUB = """#!/bin/sh
test "$1" = -c && exec "$PYTHON" "$@"
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\n\\0'; } >> "$CALLED"
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document: its language, its text, and the line on which its text begins, from 1."""

    language: str
    text: str
    line: int


def blocks(markdown: str) -> list[Block]:
    """All fenced blocks, in order."""
    return [
        Block(actual["language"], actual["text"], markdown.count("\n", 0, actual.start("text")) + 1)
        for actual in _FENCE.finditer(markdown)
    ]


def commands(script: str, folder: Path) -> list[list[str]]:
    """What a shell block calls, as bash reads it in `folder`: the words of each command, in order.

    `python -c` is run; of everything else only the words are kept. An unknown program, or a block that fails, raises.
    """
    stubs, record = folder / ".venv" / "bin", folder / ".called"
    stubs.mkdir(parents=True, exist_ok=True)
    record.write_bytes(b"")
    (stubs / "activate").touch()  # PATH has the stubs already
    for name in PROGRAMS:
        (stubs / name).write_text(_STUB, encoding="utf-8")
        (stubs / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{stubs}:/usr/bin:/bin", "CALLED": str(record), "PYTHON": sys.executable}
    done = subprocess.run(["bash", "-euc", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [call.split("\0")[:-1] for call in record.read_text(encoding="utf-8").split("\n\0")[:-1]]


def sentences(markdown: str) -> Iterator[str]:
    """The sentences of paragraphs and lists, without headings, tables and blocks; code is X."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("", markdown), flags=re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if not paragraph.lstrip().startswith(("|", "#", "%", "![")):
            words = re.sub(r"\[([^]]*)\]\([^)]*\)", lambda link: link[1] or "X", re.sub(r"`[^`]*`", "X", paragraph))
            yield from filter(None, re.split(r"(?<=[.!?:;])\s+", " ".join(words.split())))


def prose(markdown: str) -> str:
    """The document without its blocks and without code between backticks."""
    return re.sub(r"`[^`\n]+`", "", _FENCE.sub("", markdown))


def anchors(markdown: str) -> set[str]:
    """What a link may name behind `#`: headings as GitHub and MyST spell them, and targets `(name)=`."""
    text = _FENCE.sub("", markdown)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    spelt = {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}
    return spelt | set(re.findall(r"^\((.+)\)=$", text, re.M))


def links(markdown: str) -> list[str]:
    """The targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(markdown))
