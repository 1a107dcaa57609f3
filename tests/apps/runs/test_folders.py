"""Commands write only into a new or empty folder, or a run; names read from a folder resolve inside it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fastformer.apps.language.run import LanguageDataConfig, LanguageRun
from fastformer.apps.system.files import append_file, write_file
from fastformer.apps.system.run_lock import LOCK, RunLockedError, lock_run
from fastformer.apps.text import prepare
from fastformer.apps.train import CheckpointFolder, Result, TrainConfig
from fastformer.apps.translation.demo import run_demo
from tests.support.command_line import fastformer
from tests.support.python import variables
from tests.support.train_task import config, trainer

MODEL = {"d_model": 8, "heads": 1, "layers": 1, "feed_forward": 8}
SETTINGS = "[model]\nd_model = 8\n[train]\nsteps = 3\n"


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def create(folder: Path, text: Path) -> LanguageRun:
    data = LanguageDataConfig(train_text=text, valid_text=text, tokenizer="words")
    return LanguageRun.create(folder, data, MODEL, TrainConfig(steps=1))


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "mine"},
        {"config.toml": SETTINGS, "data.json": "{}"},
        {"config.toml": "[run]\nkind = 'language'\n"},
        {"config.toml": "[run]\nkind = 'translation'\n", "data.json": "{}"},
        {"metrics.csv": "a,b", ".lock": ""},
    ],
    ids=str,
)
def test_a_new_run_takes_no_folder_that_holds_something_else(tmp_path: Path, text: Path, files: dict[str, str]) -> None:
    folder = write(tmp_path / "folder", files)
    before = contents(folder)
    ended = train(folder, text, "--steps", "1")
    assert ended.returncode == 2
    assert "is no run folder, and holds" in ended.stderr or "holds a translation run" in ended.stderr
    assert contents(folder) == before


def test_a_run_with_checkpoints_is_not_replaced_and_one_without_is(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    assert train(run, text, "--steps", "1").returncode == 0
    refused = train(run, text, "--steps", "1")
    assert (refused.returncode, "holds a run already; resume it" in refused.stderr) == (2, True)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / ".new-step-1").mkdir(parents=True)
    assert train(run, text, "--steps", "1").returncode == 0


def test_a_run_that_could_not_be_made_leaves_no_folder(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("")
    with pytest.raises(ValueError, match="text: "):
        create(tmp_path / "deep" / "run", text)
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("name", ["config.toml", "run/config.toml"])
def test_the_configuration_that_is_read_is_not_rewritten(tmp_path: Path, text: Path, name: str) -> None:
    content = "# mine\n[run]\nkind = 'language'\n[train]\nsteps = 2\n"
    path = write(tmp_path / "new", {name: content}) / name
    ended = fastformer(*words(str(path.parent), text, "--config", str(path)), cwd=tmp_path / "new")
    assert (ended.returncode, "would be replaced" in ended.stderr) == (2, True)
    assert contents(tmp_path / "new") == {name: content.encode()}


def test_of_two_commands_on_a_new_folder_one_trains(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second command finds a new folder, and a run in it after it has read its data."""
    check, trained = LanguageRun.check, list[Result]()

    def train_meanwhile(*arguments: Any) -> None:
        check(*arguments)
        monkeypatch.setattr(LanguageRun, "check", check)
        trained.append(create(tmp_path / "run", text).fit(show=False))

    monkeypatch.setattr(LanguageRun, "check", train_meanwhile)
    with pytest.raises(FileExistsError, match="holds a run already"):
        create(tmp_path / "run", text)
    assert trained[0].step == 1


def test_a_demo_replaces_no_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "demo", {"demo.txt": "my notes"})
    with pytest.raises(FileExistsError, match="choose an empty folder or a new one"):
        run_demo(folder, "fr", "cpu", Console(quiet=True))
    assert contents(folder) == {"demo.txt": b"my notes"}


def europarl(folder: Path) -> Path:
    lines = "".join(f"a sentence {i}\n" for i in range(6100))
    return write(folder, {f"europarl-v7.fr-en.{language}": lines for language in ("fr", "en")})


def test_a_dataset_takes_only_a_new_or_an_empty_folder(tmp_path: Path) -> None:
    origin, notes = europarl(tmp_path / "from"), write(tmp_path / "notes", {"notes": "mine"})
    prepare("europarl", origin, tmp_path / "prepared")
    for target in (notes, origin, tmp_path / "prepared"):
        before = contents(target)
        with pytest.raises(ValueError, match="is not empty; choose an empty folder or a new one"):
            prepare("europarl", origin, target)
        assert contents(target) == before


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "tensors/../../outside"])
def test_names_of_files_in_a_checkpoint_resolve_inside_it(tmp_path: Path, name: str) -> None:
    trainer(tmp_path / "run", config(steps=5)).fit()
    checkpoint = CheckpointFolder(tmp_path / "run" / "checkpoints").last()
    assert checkpoint is not None
    (checkpoint.parent / "outside").write_text("")
    index = json.loads((checkpoint.parent / "index.json").read_text())
    index |= {"last": name, "best": {"name": name, "value": 1.0}, "kept": [name], "removed": [name]}
    (checkpoint.parent / "index.json").write_text(json.dumps(index))
    folder = CheckpointFolder(checkpoint.parent)
    folder.mark_best(checkpoint, 1.0)
    assert [path.name for path in folder.paths()][-1] == checkpoint.name
    assert (checkpoint.parent / "outside").exists()


ENVIRONMENT = variables(OMP_NUM_THREADS="1")
SIZES = ["--d-model", "8", "--heads", "1", "--feed-forward", "8", "--device", "cpu"]

HOLDER = """
import sys, time
from pathlib import Path
from typing import Any
from fastformer.apps.system.run_lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(1000)
"""


def words(run, text, *more):
    given = ["--train-text", str(text), "--valid-text", str(text), "--tokenizer", "words", "--layers", "1", *SIZES]
    return ["train", "lm", "--run", str(run), *([] if "--resume" in more else given), *more]


def train(run, text, *more):
    return fastformer(*words(run, text, *more), cwd=text.parent)


@pytest.fixture
def holder(tmp_path):
    """Starts a process that writes to a folder."""
    started = []

    def start(folder):
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, env=ENVIRONMENT)
        started.append(process)
        assert process.stdout.readline() == b"locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_writer_is_refused_by_name_and_a_killed_one_is_followed(tmp_path, text, holder):
    run = tmp_path / "run"
    assert train(run, text, "--steps", "2").returncode == 0
    files = [path for path in run.rglob("*") if path.is_file() and path.name != LOCK]
    before = {path: path.read_bytes() for path in files}
    process = holder(run)
    name = rf"run is being written by process {process.pid} on \S+ since 20"
    for _ in range(2):  # the first refusal does not remove the name
        with pytest.raises(RunLockedError, match=name):
            trainer(run, config()).fit()
        with pytest.raises(RunLockedError, match=name):
            trainer(run, config()).resume()
    refused = train(run, text, "--resume", "--steps", "4")
    assert (refused.returncode, f"process {process.pid} on" in refused.stderr) == (2, True)
    assert before == {path: path.read_bytes() for path in before}
    process.kill()
    process.wait()
    assert train(run, text, "--resume", "--steps", "4").returncode == 0


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    resource = pytest.importorskip("resource", reason="needs a limit of a file's size")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda path: write_file(path, b"x" * 99),
    "appended": lambda path: append_file(path, b"x" * 99),
    LOCK: lambda path: lock_run(path.parent).release(),
}


@pytest.mark.parametrize("name", WRITES)
def test_the_error_names_the_file_whose_content_stays(name: str, tmp_path: Path) -> None:
    before = b"old" * (name == "replaced")
    (tmp_path / name).write_bytes(before)
    with largest_file(0), pytest.raises(OSError, match="File too large") as caught:
        WRITES[name](tmp_path / name)
    assert caught.value.filename == os.fspath(tmp_path / name)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, before)]
    WRITES[name](tmp_path / name)
