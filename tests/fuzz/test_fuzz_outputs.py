"""Broken outputs by the thousand: a run is saved and a file is whole or the earlier one, whatever stdout, stderr or
--output are, and nothing that is read is replaced.

Streams that are closed, full, or that nobody reads any more, in any encoding; outputs that are the input, a folder, a
pipe, a link, a device. What once failed stays below, as a case by itself.
"""

import io
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz import fuzz

pytest.importorskip("typer", reason="the command line needs the extra `apps`")
if not os.path.exists("/dev/full"):
    pytest.skip("needs /dev/full", allow_module_level=True)

from fastformer.apps.cli import main
from fastformer.apps.cli.console import console
from fastformer.apps.train import CheckpointFolder, read_metrics
from tests.apps.cli.test_broken_terminal import Broken
from tests.fuzz.fuzz_commands import (
    PNG,
    RESUME,
    SECONDS,
    TEXT,
    TINY,
    TRAIN,
    cheapen,
    check_ending,
    memory_limit,
    train_tiny,
    tree,
)
from tests.support.command_line import Done

# A glyph that a font lacks, a model that shrinks: to a user no error.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

EARLIER = b"earlier\n"
WRITERS = {
    "translate": "translate --run tr --input text.txt" + TINY,
    "score": "score --run tr --source text.txt --target text.txt --device cpu",
    "evaluate": "evaluate --run tr --source text.txt --target text.txt" + TINY,
    "generate": "generate --run lm --prompt-file text.txt --max-new-tokens 2 --temperature 0 --device cpu",
    "plot history": "plot history tr lm",
}
OTHERS = {
    "info": "info --run tr",
    "compare": "compare tr lm",
    "perplexity": "evaluate --run lm",
    "generate one": "generate --run lm --max-new-tokens 2 --device cpu the",
    "resume": RESUME["lm"] + " --run run --steps 3 --log-every 1",
    "resume tr": RESUME["tr"] + " --run run --steps 3 --log-every 1",
    "train": TRAIN["lm"] + " --run run --log-every 1",
}


@pytest.fixture(autouse=True)
def _console_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that breaks silences rich's console for good, and other tests share this process."""
    monkeypatch.setattr(console, "quiet", False)


ENCODINGS = ("ascii", "latin-1", "cp1252", "utf-16", "utf-8")


def stream(random: Random, kind: str) -> Any:
    """What stdout or stderr may be."""
    encoding = random.choice(ENCODINGS)
    if kind == "none":
        return None
    if kind == "breaks":
        error = random.choice((OSError(28, "full"), BrokenPipeError(32, "gone"), ValueError("closed")))
        return Broken(error, random.randrange(6), random.random() < 0.5)
    if kind == "full":
        return open("/dev/full", "w", encoding=encoding)
    if kind == "gone":
        theirs, ours = os.pipe()
        os.close(theirs)
        return open(ours, "w", encoding=encoding, buffering=random.choice((1, 100)))
    found = io.TextIOWrapper(io.BytesIO(), encoding, random.choice(("strict", "strict", "backslashreplace")))
    if kind == "closed":
        found.close()
    return found


STREAMS = ("fine", "fine", "none", "breaks", "full", "gone", "closed")


# Paths for --output, {} being the run; others are `out`, where `_place` has put something.
PATHS = {
    **{"input": "text.txt", "input by another name": "folder/../text.txt", "folder": "folder", "below": "text.txt/out"},
    **{"full": "/dev/full", "null": "/dev/null", "proc": "/proc/out", "nowhere": "no/such", "long": "x" * 3000},
    **{
        "settings": "{}/config.toml",
        "lock": "{}/.lock",
        "tokenizer": "{}/tokenizer/new",
        "checkpoints": "{}/checkpoints",
    },
}
LINKS = {"link": "text.txt", "link to run": "{}/data.json", "dangling": "target", "loop": "out"}
PLACES = (*PATHS, *LINKS, "new", "earlier", "hard link", "pipe")
OF_INPUT = ("input", "input by another name", "link", "hard link")


def place(home: Path, kind: str, run: str) -> tuple[str, Callable[[], bytes | None]]:
    """A path for --output, and what reads what came there; None: nothing may come."""
    out = home / "out"
    if kind in LINKS:
        out.symlink_to(LINKS[kind].format(run))
    elif kind == "earlier":
        out.write_bytes(EARLIER)
    elif kind == "hard link":
        os.link(home / "text.txt", out)
    elif kind == "pipe":
        os.mkfifo(out)
        reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)

        def drained() -> bytes:
            try:
                return os.read(reader, 1 << 20)
            finally:
                os.close(reader)

        return "out", drained
    path = PATHS.get(kind, "out").format(run)
    if kind in ("new", "earlier", "dangling", "loop", "nowhere"):
        return path, lambda: (home / path).read_bytes() if (home / path).is_file() else None
    return path, lambda: None


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz_outputs")
    train_tiny(folder)
    (folder / "folder").mkdir()
    return folder


def call(line: str, home: Path, out: Any, err: Any) -> int:
    """Run a command with these streams."""
    with fuzz.time_limit(SECONDS), memory_limit(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        cheapen(patch)
        patch.setattr(sys, "argv", ["fastformer", *line.split()])
        for name, value in (("stdout", out), ("stderr", err), ("stdin", io.StringIO(TEXT))):
            patch.setattr(sys, name, value)
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            for given, now in ((out, sys.stdout), (err, sys.stderr)):
                opened = now if given is None else given  # None: in its place, until the end of the process
                if isinstance(getattr(opened, "buffer", None), io.BufferedWriter):
                    with suppress(OSError):  # says once more what could not be written
                        opened.close()
    return 0


def written(found: Any) -> str | None:
    """What came into a stream of ours that works."""
    if not isinstance(found, io.TextIOWrapper) or found.closed or not isinstance(found.buffer, io.BytesIO):
        return None
    found.flush()
    return found.buffer.getvalue().decode(found.encoding)


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[str, bytes]:
    """What each command writes where nothing is broken."""
    for name, line in WRITERS.items():
        assert call(f"{line} --output {name.replace(' ', '')}", home, io.StringIO(), io.StringIO()) == 0
    found = {name: (home / name.replace(" ", "")) for name in WRITERS}
    content = {name: path.read_bytes() for name, path in found.items()}
    for path in found.values():
        path.unlink()
    return content


def test_broken_outputs(home: Path, whole: dict[str, bytes], numbers: range) -> None:
    before = tree(home)
    codes = [attempt(home, whole, before, number) for number in numbers]
    assert min(codes.count(0), codes.count(2)) > len(numbers) / 10


def attempt(home: Path, whole: dict[str, bytes], before: dict[str, Any], number: int) -> int:
    random = Random(number)
    kinds = random.choice(STREAMS), random.choice(STREAMS)
    out, err = (stream(random, kind) for kind in kinds)
    name = random.choice(list(WRITERS) if random.random() < 0.6 else list(OTHERS))
    line, kind, drained = {**OTHERS, **WRITERS}[name], "none", None
    if name in WRITERS and random.random() < 0.9:
        kind = random.choice(
            [x for x in PLACES if name != "plot history" or x not in OF_INPUT]
        )  # that it does not read
        path, drained = place(home, kind, "lm" if name == "generate" else "tr")
        line += f" --output {path}"
    about = f"input {number}: {kinds}: {kind}: {line}"
    if name.startswith("resume"):
        shutil.copytree(home / ("tr" if name.endswith("tr") else "lm"), home / "run")
    try:
        code = call(line, home, out, err)
    except (Exception, fuzz.Hang) as error:
        raise AssertionError(f"{about}: {type(error).__name__}: {str(error)[:300]}") from error
    said = written(err)
    about = f"{about}: {code}: {said}"
    if code == 1:  # as a reader that has gone ends every command of click
        assert kinds[0] in ("gone", "breaks"), about
    elif said is not None:
        check_ending(Done(code, "", said), about)
    assert code in (0, 1, 2), about
    came = drained() if drained else None
    if code == 0 and kind not in ("none", "null"):
        assert came == whole[name], about
    elif kind != "none":  # what is said after it was written may be what fails
        assert came in (None, b"", EARLIER, whole[name]), about
    if name in ("train", "resume", "resume tr"):
        assert code == 0, about
        step = 2 if name == "train" else 3
        assert CheckpointFolder(home / "run" / "checkpoints").open().step == step, about
        assert read_metrics(home / "run")[-1]["step"] == step, about
        assert (home / "run" / "history.png").read_bytes() == PNG, about
    clean(home)
    assert tree(home) == before, about
    return code


def clean(home: Path) -> None:
    """Remove what an input may make; a name that is left is one too many."""
    shutil.rmtree(home / "run", ignore_errors=True)
    shutil.rmtree(home / "no", ignore_errors=True)  # which a picture's folder may be
    for name in ("out", "target", "history.png"):
        (home / name).unlink(missing_ok=True)


@pytest.mark.parametrize("streams", [(None, None), (None, io.StringIO()), ("gone", None)])
def test_streams_that_were_closed_before_the_start(home: Path, streams: tuple[Any, Any]) -> None:
    out, err = streams
    out = stream(Random(0), "gone") if out == "gone" else out
    assert call(OTHERS["generate one"], home, out, err) == (0 if out is None else 1)
