"""What a resumed run keeps, what it changes, and which settings it saves."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from tests.apps.cli.test_cli import TRAIN as TRAIN_TRANSLATION
from tests.support.command_line import Done, fastformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a translation run of 4 steps."""
    folder = tmp_path_factory.mktemp("resumed")
    done = fastformer(*TRAIN_TRANSLATION.split(), "--run", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def resume(folder: Path, options: str = "") -> Done:
    return fastformer(*f"train --run run --resume --device cpu {options}".split(), cwd=folder)


def saved(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "run" / "config.toml").read_text())["train"]


def test_a_resumed_run_saves_the_settings_that_it_has_now(folder: Path) -> None:
    before = saved(folder)
    done = resume(folder, "--steps 6 --lr 0.002 --keep 2 --precision bf16 --no-tensorboard")
    assert done.returncode == 0, done.stderr
    assert saved(folder) == {**before, "steps": 6, "lr": 0.002, "keep": 2, "precision": "bf16"}
    assert "ended after 6 steps" in resume(folder).stdout
    resume(folder, "--lr 0.1")  # trains nothing
    assert saved(folder)["lr"] == 0.002


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("--schedule cosine", "schedule cannot change when a run goes on: it is 'linear', not 'cosine'"),
        ("--batch-sentences 4", "batch_sentences cannot change when a run goes on: it is None, not 4"),
        ("--momentum 0.5", "momentum has an effect only with optimizer=sgd, not with optimizer=adamw"),
        ("--steps 0", "steps must be at least 1, not 0"),
    ],
)
def test_what_a_run_keeps_is_refused_by_name_and_nothing_is_written(folder: Path, changes: str, message: str) -> None:
    files = [path for path in (folder / "run").rglob("*") if path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in files}
    done = resume(folder, f"--minutes 9 {changes}")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.parametrize(
    ("names", "kept"), [("checkpoints/*/model.safetensors", slice(-3)), ("metrics.jsonl", slice(3, None))]
)
def test_a_resumed_run_with_a_damaged_file_keeps_its_settings(folder: Path, names: str, kept: slice) -> None:
    before = (folder / "run" / "config.toml").read_bytes()
    contents = {path: path.read_bytes() for path in (folder / "run").glob(names)}
    try:
        for path, content in contents.items():
            path.write_bytes(content[kept])
        done = resume(folder, "--steps 70")
    finally:
        for path, content in contents.items():
            path.write_bytes(content)
    assert done.returncode == 2
    assert contents
    assert (folder / "run" / "config.toml").read_bytes() == before


LINES = [f"{label}\tthe {word} is {verb}" for label, word in (("a", "cat"), ("b", "oak")) for verb in ("old", "here")]
SIZES = "--d-model 8 --heads 2 --feed-forward 8 --tokenizer words --warmup-steps 1 --validate-every 1"
PAIRS = " ".join(f"--{part}-{side} {part}" for part in ("train", "valid", "test") for side in ("source", "target"))
TEXTS = "--train-text train --valid-text valid --test-text test --layers 1"
COMMANDS = {
    "train": f"{PAIRS} --bleu-sentences 0 --encoder-layers 1 --decoder-layers 1",
    "train lm": f"{TEXTS} --context 8",
    "train classify": TEXTS,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_best_so_far_is_of_the_same_validation_text(command: str, tmp_path: Path) -> None:
    def train(options: str) -> Done:
        return fastformer(*f"{command} --run run --device cpu {options}".split(), cwd=tmp_path)

    for name in ("train", "valid", "test"):
        (tmp_path / name).write_text("\n".join(LINES) + "\n")
    assert train(f"{COMMANDS[command]} {SIZES} --steps 1").returncode == 0
    assert train("--resume --steps 2").returncode == 0
    for old, new in (("cat", "dog"), ("a\t", "b\t")):  # another text, and another label
        (tmp_path / "valid").write_text("\n".join([LINES[0].replace(old, new), *LINES[1:]]) + "\n")
        done = train("--resume --steps 3")
        assert done.stderr == "error: run: the validation data differs from what this run was started with\n"
