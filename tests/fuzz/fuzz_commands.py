"""Commands for the tests of bad input: runs of tiny models, a command in this process, and what it may leave behind.

Whatever comes in, a command ends with exit code 0, or with 2 and one line of error (a usage message where no such
option or value exists), in the time and the memory that it is given.
"""

import os
import resource
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import fuzz
from tests.support.command_line import Done, fastformer

TINY = " --max-length 4 --beam 2 --device cpu"
PNG = b"\x89PNG\r\n\x1a\n"  # how such a file begins
MEMORY = 1 << 30  # for one input, of addresses; the largest takes below 200 MiB
SECONDS = 60
TEXT = "".join(f"the {x} sees {y} {z}\n" for x in ("cat", "dog", "hen") for y in ("a", "no") for z in ("fox", "cow"))
_SIZES = " --d-model 8 --heads 2 --feed-forward 8 --tokenizer words --threads 1 --batch-tokens 64 --warmup-steps 2"
_TRAIN = f"{_SIZES} --steps 2 --validate-every 1 --label-smoothing 0 --device cpu"
# In a folder with text.txt; these runs have two checkpoints of 20 KB each.
TRAIN = {
    "lm": "train lm --train-text text.txt --held-out 0.2 --layers 1 --context 8" + _TRAIN,
    "tr": "train --bleu-sentences 0 --encoder-layers 1 --decoder-layers 1 "
    + " ".join(f"--{part}-{side} text.txt" for part in ("train", "valid", "test") for side in ("source", "target"))
    + _TRAIN,
}
RESUME = {
    kind: f"{' '.join(line.split()[: 2 if kind == 'lm' else 1])} --resume --device cpu" for kind, line in TRAIN.items()
}


def train_tiny(folder: Path) -> None:
    """Put text.txt and a run of each kind, lm and tr, into a folder."""
    (folder / "text.txt").write_text(TEXT)
    for kind, line in TRAIN.items():
        done = fastformer(*line.split(), "--run", kind, cwd=folder)
        assert done.returncode == 0, done.stderr


def run(arguments: list[str], home: Path, number: int, stdin: bytes = b"", figures: bool | None = None) -> Done:
    """Run a command, and check how it ends.

    One in eight draws its figures (or `figures`): that takes 0.5 s each, ten times what all else takes.
    """
    about = f"input {number}: {arguments}"[:600]
    try:
        with fuzz.time_limit(SECONDS), memory_limit(), pytest.MonkeyPatch.context() as patch:
            cheapen(patch, figures=number % 8 == 0 if figures is None else figures)
            done = fastformer(*arguments, cwd=home, stdin=stdin)
    except (Exception, fuzz.Hang) as error:
        raise AssertionError(f"{about}: {type(error).__name__}: {str(error)[:300]}") from error
    check_ending(done, about)
    return done


def cheapen(patch: pytest.MonkeyPatch, figures: bool = False) -> None:
    """Leave out what takes most of the time and is not what is asked: waiting for the disk, and drawing."""
    patch.setattr("os.fsync", lambda descriptor: None)
    if not figures:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **how: file.write(PNG))
        patch.setattr("fastformer.apps.plots.figure.figure_format", lambda path: "png")  # outputs have any name here
        patch.setattr("fastformer.apps.cli.inspection.figure_format", lambda path: "png")


def check_ending(done: Done, about: str) -> None:
    """A command ends well, or with one line that says why not."""
    assert done.returncode in (0, 2), f"{about}: {done}"
    if done.returncode == 2 and "Usage: " not in done.stderr:
        *before, last = done.stderr.removesuffix("\n").split("\n")
        assert last.startswith("error: "), f"{about}: {done.stderr[-500:]}"
        assert len(last) > len("error: "), about
        assert not any(line.startswith("error: ") for line in before), about
        assert "codec can't encode" not in last, f"{about}: {last}"
        assert "out of memory" not in last, f"{about}: {last}"  # sizes are bounded before they are built
        assert last.isprintable(), f"{about}: {last!r}"


@contextmanager
def memory_limit(more: int = MEMORY) -> Iterator[None]:
    """So many more bytes of addresses than this process has now; on Linux, which keeps to it."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def tree(folder: Path, *without: str) -> dict[str, Any]:
    """What is in a folder, names in `without` at its top apart: of each name its kind, time, mode and content."""
    found: dict[str, Any] = {}
    for entry in os.scandir(folder):
        if entry.name not in without:
            _walk(entry.path, entry.name, found)
    return found


def contents(folder: Path) -> dict[str, Any]:
    """As `tree`, without times and modes."""
    return {name: value[2:] for name, value in tree(folder).items()}


def _walk(path: str, name: str, found: dict[str, Any]) -> None:
    status = os.lstat(path)
    content: Any = None
    if stat.S_ISREG(status.st_mode):
        # Sparse files are the only large ones.
        content = Path(path).read_bytes() if status.st_size < 1 << 24 else status.st_size
    elif stat.S_ISLNK(status.st_mode):
        content = os.readlink(path)
    found[name] = (status.st_mtime_ns, stat.S_IMODE(status.st_mode), stat.S_IFMT(status.st_mode), content)
    if stat.S_ISDIR(status.st_mode):
        for entry in os.scandir(path):
            _walk(entry.path, f"{name}/{entry.name}", found)
