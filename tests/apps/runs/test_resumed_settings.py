"""What a run that goes on keeps, what it changes, and that it writes down what it has now."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from tests.apps.cli.test_cli import TRAIN as TRAIN_TRANSLATION
from tests.support.command_line import fastformer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a translation run of 4 steps."""
    folder = tmp_path_factory.mktemp("resumed")
    done = fastformer(*TRAIN_TRANSLATION.split(), "--run", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def saved(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "run" / "config.toml").read_text())["train"]


def test_a_resumed_run_saves_the_settings_that_it_has_now(run: Path) -> None:
    before = saved(run)
    changes = ["--steps", "6", "--lr", "0.002", "--keep", "2", "--precision", "bf16", "--no-tensorboard"]
    done = fastformer("train", "--run", "run", "--resume", "--device", "cpu", *changes, cwd=run)
    assert done.returncode == 0, done.stderr
    assert saved(run) == {**before, "steps": 6, "lr": 0.002, "keep": 2, "precision": "bf16"}
    done = fastformer("train", "--run", "run", "--resume", "--device", "cpu", cwd=run)
    assert "ended after 6 steps" in done.stdout
    assert not list((run / "run").glob("*.tmp"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("--optimizer sgd", "optimizer cannot change when a run goes on: it is 'adamw', not 'sgd'"),
        ("--schedule cosine", "schedule cannot change when a run goes on: it is 'linear', not 'cosine'"),
        ("--seed 2", "seed cannot change when a run goes on: it is 1, not 2"),
        ("--batch-tokens 400", "batch_tokens cannot change when a run goes on: it is 300, not 400"),
        ("--batch-sentences 4", "batch_sentences cannot change when a run goes on: it is None, not 4"),
        ("--metric bleu", "metric cannot change when a run goes on: it is 'loss', not 'bleu'"),
        ("--clock cpu", "clock cannot change when a run goes on: it is 'wall', not 'cpu'"),
        ("--momentum 0.5", "momentum has an effect only with optimizer=sgd, not with optimizer=adamw"),
        ("--steps 0", "steps must be at least 1, not 0"),
    ],
)
def test_what_a_run_keeps_is_refused_by_name_and_nothing_is_written(run: Path, changes: str, message: str) -> None:
    files = [path for path in (run / "run").rglob("*") if path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in files}
    done = fastformer(
        "train", "--run", "run", "--resume", "--device", "cpu", "--minutes", "9", *changes.split(), cwd=run
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert {path: path.stat().st_mtime_ns for path in (run / "run").rglob("*") if path.name != ".lock"} == before


def test_a_resumed_run_whose_checkpoint_is_damaged_keeps_its_settings(run: Path) -> None:
    before = (run / "run" / "config.toml").read_bytes()
    weights = {path: path.read_bytes() for path in (run / "run" / "checkpoints").rglob("model.safetensors")}
    try:
        for path in weights:
            path.write_bytes(weights[path][:-3])
        done = fastformer("train", "--run", "run", "--resume", "--steps", "70", "--device", "cpu", cwd=run)
    finally:
        for path, content in weights.items():
            path.write_bytes(content)
    assert done.returncode == 2
    assert (run / "run" / "config.toml").read_bytes() == before
