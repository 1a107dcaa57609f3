"""What a run that goes on keeps, what it changes, and that it writes down what it has now."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fastformer.apps.classification import ClassificationDataConfig, ClassificationRun, ClassificationTrainConfig
from fastformer.apps.language.run import LanguageDataConfig, LanguageRun
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.apps.cli.test_cli import TRAIN as TRAIN_TRANSLATION
from tests.support.command_line import fastformer

pytest.importorskip("typer", reason="the command line needs the extra `apps`")


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


SIZES: dict[str, Any] = {"d_model": 8, "heads": 2, "feed_forward": 8}
TRAIN: dict[str, Any] = {"steps": 1, "warmup_steps": 1, "validate_every": 1}
LINES = [f"{label}\tthe {word} is {verb}" for label, word in (("a", "cat"), ("b", "oak")) for verb in ("old", "here")]


def begin(kind: str, folder: Path) -> tuple[type[Any], Path]:
    """A run of one step, in `folder/run`, and the file that it validates on."""
    files = [folder / name for name in ("train", "valid", "test")]
    for path in files:
        path.write_text("\n".join(LINES) + "\n")
    train, valid, test = files
    run: Any
    if kind == "translation":
        sides: Any = {
            f"{name}_{side}": folder / name for name in ("train", "valid", "test") for side in ("source", "target")
        }
        data: Any = DataConfig(**sides, tokenizer="words", bleu_sentences=0)
        run = TranslationRun.create(
            folder / "run", data, {**SIZES, "encoder_layers": 1, "decoder_layers": 1}, TrainConfig(**TRAIN)
        )
    elif kind == "language":
        data = LanguageDataConfig(train_text=train, valid_text=valid, test_text=test, tokenizer="words", context=8)
        run = LanguageRun.create(folder / "run", data, {**SIZES, "layers": 1}, TrainConfig(**TRAIN))
    else:
        data = ClassificationDataConfig(train_text=train, valid_text=valid, test_text=test, tokenizer="words")
        run = ClassificationRun.create(folder / "run", data, {**SIZES, "layers": 1}, ClassificationTrainConfig(**TRAIN))
    run.fit(show=False)
    return type(run), valid


@pytest.mark.parametrize("kind", ["translation", "language", "classification"])
def test_the_best_so_far_is_of_the_same_validation_text(kind: str, tmp_path: Path) -> None:
    run, valid = begin(kind, tmp_path)
    run.open(tmp_path / "run", {"steps": 2}).fit(resume=True, show=False)
    valid.write_text("\n".join([LINES[0].replace("cat", "dog"), *LINES[1:]]) + "\n")
    for changed in ("the same number of lines", "other labels"):
        with pytest.raises(ValueError, match=r"run: the validation data differs from what this run was started with"):
            run.open(tmp_path / "run", {"steps": 3})
        if changed == "the same number of lines":
            valid.write_text("\n".join([LINES[0].replace("a\t", "b\t"), *LINES[1:]]) + "\n")
