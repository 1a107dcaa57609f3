"""Commands write only into a new or empty folder, or a run; names read from a folder resolve inside it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastformer.apps.language.run import LanguageDataConfig, LanguageRun
from fastformer.apps.system.files import append_file, write_file
from fastformer.apps.system.run_lock import LOCK, RunLockedError, locked
from fastformer.apps.text import prepare
from fastformer.apps.train import CheckpointFolder, Result, TrainConfig
from tests.support.command_line import Done, fastformer
from tests.support.python import variables
from tests.support.train_task import config, trainer

SIZES = "--layers 1 --d-model 8 --heads 1 --feed-forward 8 --tokenizer words --device cpu"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} the quick brown fox {i * 7 % 11} jumps over {i * 3 % 5}\n" for i in range(300)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train(run: Path, text: Path, options: str) -> Done:
    new = "" if "--resume" in options else f"--train-text {text} --valid-text {text} {SIZES}"
    return fastformer(*f"train lm --run {run} {new} {options}".split(), cwd=text.parent)


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "mine"},
        {"config.toml": "[model]\nd_model = 8\n", "data.json": "{}"},
        {"config.toml": "[run]\nkind = 'language'\n"},
        {"config.toml": "[run]\nkind = 'translation'\n", "data.json": "{}"},
        {"metrics.csv": "a,b", ".lock": ""},
    ],
    ids=str,
)
def test_a_new_run_takes_no_folder_that_holds_something_else(tmp_path: Path, text: Path, files: dict[str, str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    before = contents(folder)
    done = train(folder, text, "--steps 1")
    assert done.returncode == 2
    assert "is no run folder, and holds" in done.stderr or "holds a translation run" in done.stderr
    assert contents(folder) == before


def test_a_run_with_checkpoints_is_not_replaced_and_one_without_is(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    assert train(run, text, "--steps 1").returncode == 0
    refused = train(run, text, "--steps 1")
    assert (refused.returncode, "holds a run already; resume it" in refused.stderr) == (2, True)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / ".new-step-1").mkdir(parents=True)
    assert train(run, text, "--steps 1").returncode == 0


def test_a_run_that_was_killed_before_its_settings_were_written_begins_again(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in (LOCK, "data.json", ".config.toml.tmp"):
        (run / name).write_text("{")
    assert train(run, text, "--steps 1").stderr.count("error") == 0
    assert not (run / ".config.toml.tmp").exists()


def test_a_run_that_could_not_be_made_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    assert train(tmp_path / "deep" / "run", tmp_path / "text", "--steps 1").returncode == 2
    assert not (tmp_path / "deep").exists()


def test_the_configuration_that_is_read_is_not_rewritten(tmp_path: Path, text: Path) -> None:
    content = "# mine\n[run]\nkind = 'language'\n[train]\nsteps = 2\n"
    (tmp_path / "config.toml").write_text(content)
    done = train(tmp_path, text, f"--config {tmp_path / 'config.toml'}")
    assert (done.returncode, "would be replaced" in done.stderr) == (2, True)
    assert (tmp_path / "config.toml").read_text() == content


def test_of_two_commands_on_a_new_folder_one_trains(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second command finds a new folder, and a run in it after it has read its data."""
    check, trained = LanguageRun.check, list[Result]()
    data = LanguageDataConfig(train_text=text, valid_text=text, tokenizer="words")

    def create() -> LanguageRun:
        model = {"d_model": 8, "heads": 1, "layers": 1, "feed_forward": 8}
        return LanguageRun.create(tmp_path / "run", data, model, TrainConfig(steps=1))

    def train_meanwhile(*arguments: Any) -> None:
        check(*arguments)
        monkeypatch.setattr(LanguageRun, "check", check)
        trained.append(create().fit(show=False))

    monkeypatch.setattr(LanguageRun, "check", train_meanwhile)
    with pytest.raises(FileExistsError, match="holds a run already"):
        create()
    assert trained[0].step == 1


def test_a_dataset_takes_only_a_new_or_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for language in ("fr", "en"):
        (tmp_path / f"europarl-v7.fr-en.{language}").write_text("".join(f"a sentence {i}\n" for i in range(6100)))
    prepare("europarl", tmp_path, tmp_path / "prepared")
    for target in (tmp_path, tmp_path / "prepared"):
        before = contents(target)
        with pytest.raises(ValueError, match="is not empty; choose an empty folder or a new one"):
            prepare("europarl", tmp_path, target)
        assert contents(target) == before
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    with pytest.raises(FileExistsError, match="is the folder that you are in, and would be replaced"):
        prepare("europarl", tmp_path, ".")


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


HOLDER = """
import sys, time
from pathlib import Path
from fastformer.apps.system.run_lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(1000)
"""


def test_a_second_writer_is_refused_by_name_and_a_killed_one_is_followed(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    assert train(run, text, "--steps 2").returncode == 0
    before = {name: content for name, content in contents(run).items() if name != LOCK}
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables(OMP_NUM_THREADS="1")) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"locked\n"
            for write in (trainer(run, config()).fit, trainer(run, config()).resume) * 2:  # the name stays
                with pytest.raises(RunLockedError, match=rf"is being written by process {process.pid} on \S+ since 20"):
                    write()
            refused = train(run, text, "--resume --steps 4")
            assert (refused.returncode, f"process {process.pid} on" in refused.stderr) == (2, True)
            assert {name: content for name, content in contents(run).items() if name != LOCK} == before
        finally:
            process.kill()
    assert train(run, text, "--resume --steps 4").returncode == 0


def lock(path: Path) -> None:
    with locked(path.parent):
        pass


WRITES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda path: write_file(path, b"x" * 99),
    "appended": lambda path: append_file(path, b"x" * 99),
    LOCK: lock,
}


@pytest.mark.parametrize("name", WRITES)
def test_the_error_names_the_file_whose_content_stays(name: str, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs a limit of a file's size")
    before, limits = b"old" * (name == "replaced"), resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / name).write_bytes(before)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            WRITES[name](tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == os.fspath(tmp_path / name)
    assert contents(tmp_path) == {name: before}
    WRITES[name](tmp_path / name)
