"""Runs that begin with another run or go on: what they take over, what may change, and what is refused."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.apps.export import export_safetensors
from fastformer.apps.runs.application import application_of
from fastformer.apps.runs.folder import RunConfig, read_run_section, save_toml
from fastformer.apps.train import CheckpointFolder
from tests.apps.cli.test_cli import TRAIN as TRAIN_TRANSLATION
from tests.apps.conftest import LINES
from tests.support.command_line import Done, fastformer, succeed


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a translation run of 4 steps."""
    folder = tmp_path_factory.mktemp("resumed")
    succeed(*TRAIN_TRANSLATION.split(), "--run", "run", cwd=folder)
    return folder


def resume(short_run: Path, options: str = "") -> Done:
    return fastformer(*f"train --run run --resume --device cpu {options}".split(), cwd=short_run)


def saved(short_run: Path) -> dict[str, Any]:
    return tomllib.loads((short_run / "run" / "config.toml").read_text())["train"]


def test_a_resumed_run_saves_the_settings_that_it_has_now(short_run: Path) -> None:
    before = saved(short_run)
    done = resume(short_run, "--steps 6 --lr 0.002 --keep 2 --precision bf16 --no-tensorboard")
    assert done.returncode == 0, done.stderr
    assert saved(short_run) == {**before, "steps": 6, "lr": 0.002, "keep": 2, "precision": "bf16"}
    assert "training ends at step 6: all steps are made" in done.stderr
    nothing = resume(short_run, "--lr 0.1").stderr
    assert nothing == "nothing to train: 6 steps were made before; all steps are made\n"
    assert saved(short_run)["lr"] == 0.002


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("--schedule cosine", "schedule cannot change when a run goes on: it is 'linear', not 'cosine'"),
        ("--batch-sentences 4", "batch_sentences cannot change when a run goes on: it is None, not 4"),
        ("--momentum 0.5", "momentum has an effect only with optimizer=sgd, not with optimizer=adamw"),
        ("--steps 0", "steps must be at least 1, not 0"),
    ],
)
def test_what_a_run_keeps_is_refused_by_name_and_nothing_is_written(
    short_run: Path, changes: str, message: str
) -> None:
    files = [path for path in (short_run / "run").rglob("*") if path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in files}
    done = resume(short_run, f"--minutes 9 {changes}")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.parametrize(
    ("names", "kept"), [("checkpoints/*/model.safetensors", slice(-3)), ("metrics.jsonl", slice(3, None))]
)
def test_a_resumed_run_with_a_damaged_file_keeps_its_settings(short_run: Path, names: str, kept: slice) -> None:
    before = (short_run / "run" / "config.toml").read_bytes()
    contents = {path: path.read_bytes() for path in (short_run / "run").glob(names)}
    try:
        for path, content in contents.items():
            path.write_bytes(content[kept])
        done = resume(short_run, "--steps 70")
    finally:
        for path, content in contents.items():
            path.write_bytes(content)
    assert done.returncode == 2
    assert contents
    assert (short_run / "run" / "config.toml").read_bytes() == before


LABELLED = [
    f"{label}\tthe {word} is {verb}" for label, word in (("a", "cat"), ("b", "oak")) for verb in ("old", "here")
]
SMALL_SIZES = "--d-model 8 --heads 2 --feed-forward 8 --tokenizer words --warmup-steps 1 --validate-every 1"
PAIRS = " ".join(f"--{part}-{side} {part}" for part in ("train", "valid", "test") for side in ("source", "target"))
TEXTS = "--train-text train --valid-text valid --test-text test --layers 1"
RESUMED_COMMANDS = {
    "train": f"{PAIRS} --bleu-sentences 0 --encoder-layers 1 --decoder-layers 1",
    "train lm": f"{TEXTS} --context 8",
    "train classify": TEXTS,
}


@pytest.mark.parametrize("command", RESUMED_COMMANDS)
def test_the_best_so_far_is_of_the_same_validation_text(command: str, tmp_path: Path) -> None:
    def train(options: str) -> Done:
        return fastformer(*f"{command} --run run --device cpu {options}".split(), cwd=tmp_path)

    for name in ("train", "valid", "test"):
        (tmp_path / name).write_text("\n".join(LABELLED) + "\n")
    assert train(f"{RESUMED_COMMANDS[command]} {SMALL_SIZES} --steps 1").returncode == 0
    assert train("--resume --steps 2").returncode == 0
    for old, new in (("cat", "dog"), ("a\t", "b\t")):  # another text, and another label
        (tmp_path / "valid").write_text("\n".join([LABELLED[0].replace(old, new), *LABELLED[1:]]) + "\n")
        done = train("--resume --steps 3")
        assert done.stderr == "error: run: the validation data differs from what this run was started with\n"


# `--from` a run or an exported model, and `--checkpoint a,b`


SMALL = "--steps 1 --warmup-steps 0 --lr 1e-30 --device cpu --threads 1"  # the weights_of stay
COMMANDS = {
    "translation": "train --train-source lines --train-target lines --valid-size 4 --test-size 4 --bleu-sentences 0",
    "language": "train lm --train-text lines --held-out 0.2",
    "classification": "train classify --train-text labelled --held-out 0.2",
}


@pytest.fixture
def folder(runs, tmp_path):
    (tmp_path / "lines").write_text("".join(f"{line} w{i}\n" for i, line in enumerate(LINES)))
    (tmp_path / "labelled").write_text("".join(f"{'zxy'[i % 3]}\t{line} w{i}\n" for i, line in enumerate(LINES)))
    return tmp_path


def weights_of(application, folder, checkpoint="last"):
    return application.load_weights(folder, checkpoint).state_dict()


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_run_begins_with_the_weights_tokenizers_and_lengths_of_another(runs, folder, kind, exported):
    application, origin = application_of(kind), runs / kind
    if exported:
        model, tokenizers, data = application.load(origin)
        origin = folder / "exported"
        export_safetensors(origin, model, tokenizers, application.settings_of_text(data))
    succeed(*COMMANDS[kind].split(), *SMALL.split(), "--from", str(origin), "--run", "new", cwd=folder)
    before = weights_of(application, runs / kind)
    for name, after in weights_of(application, folder / "new").items():
        torch.testing.assert_close(after, before[name], rtol=0, atol=1e-20)
    assert read_run_section(folder / "new" / "config.toml").origin == str(origin)
    data = application.read_config(folder / "new")["data"]
    assert (data["tokenizer"], data[application.length]) == ("pretrained", 9)
    if kind == "classification":
        assert tuple(data["labels"]) == ("x", "y", "z")


@pytest.mark.parametrize(
    ("command", "origin", "message"),
    [
        (COMMANDS["translation"], "language", "is a language-model run"),
        (f"{COMMANDS['translation']} --d-model 16", "translation", "d_model: set by the model of"),
        (f"{COMMANDS['translation']} --vocabulary 50", "translation", "vocabulary has an effect only"),
        (
            f"{COMMANDS['translation']} --tokenizer bpe",
            "translation",
            "tokenizer must be pretrained with a model to begin",
        ),
        ("train", "translation", "--from needs text to train on: give dataset or train_source"),
        (COMMANDS["translation"], "empty", "no model of transformers, there is no config.json"),
        (
            COMMANDS["language"],
            "empty",
            "holds no run and no exported model, with which a language-model run can begin",
        ),
    ],
)
def test_what_a_run_cannot_begin_with_is_one_line(runs, folder, command, origin, message):
    (folder / "empty").mkdir()
    origin = folder / "empty" if origin == "empty" else runs / origin
    done = fastformer(*command.split(), *SMALL.split(), "--from", str(origin), "--run", "new", cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert not (folder / "new").exists()


def test_the_mean_of_chosen_checkpoints(runs, folder):
    application, run = application_of("language"), shutil.copytree(runs / "language", folder / "language")
    first = weights_of(application, run)
    config = application.load_weights(run, "last").config
    checkpoints = CheckpointFolder(run / "checkpoints")
    checkpoints.save(2, {name: 3 * x for name, x in first.items()}, {}, config)
    mean = weights_of(application, run, "step-1,step-2")
    for name, x in first.items():
        torch.testing.assert_close(mean[name], 2 * x)
    done = fastformer("generate", "--run", str(run), "--checkpoint", "step-1,step-9", "w1", cwd=folder)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {run}: holds no step-9 checkpoint; it has step-1, step-2\n",
    )


@pytest.mark.parametrize("kind", COMMANDS)
def test_settings_of_training_that_are_left_out_are_chosen(runs, folder, kind):
    application = application_of(kind)
    command = f"{COMMANDS[kind]} --steps 20 --validate-every 20 --device cpu --threads 1 --from {runs / kind} --run new"
    out = succeed(*command.split(), cwd=folder)
    assert "warmup_steps 2" in out
    sections = application.read_config(folder / "new")
    assert (sections["train"]["warmup_steps"], sections["train"]["lr"]) == (2, application.train.lr)
    assert sections["model"] == application.read_config(runs / kind)["model"]
    if kind == "translation":
        assert sections["train"]["schedule"] == "linear"


SETTINGS = {
    "translation": {"bleu_tokenizer": "char", "too_long": "truncate", "vocabulary": 50, "lowercase": True},
    "language": {"document": "line", "held_out": 0.3, "stream": "columns", "columns": 3},
    "classification": {"held_out": 0.3, "lowercase": True},
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_settings_of_the_text_stay_and_the_configuration_repeats_the_run(runs, folder, kind):
    application, first = application_of(kind), shutil.copytree(runs / kind, folder / "first")
    sections = {name: dict(values) for name, values in application.read_config(first).items()}
    sections["data"] |= SETTINGS[kind]
    save_toml(first / "config.toml", {"run": RunConfig(kind), **sections})
    again = " ".join(COMMANDS[kind].split()[: 1 + (kind != "translation")])
    for command in (
        f"{COMMANDS[kind].replace('--held-out 0.2', '')} --from first --run second",
        f"{again} --config second/config.toml --run third",
        f"{again} --config second/config.toml --from first --run fourth",
    ):
        succeed(*command.split(), *SMALL.split(), cwd=folder)
    second, *others = (application.read_config(folder / name) for name in ("second", "third", "fourth"))
    assert {name: second["data"][name] for name in SETTINGS[kind]} == SETTINGS[kind]
    assert second["data"]["tokenizer"] == "pretrained"
    assert others == [second] * 2
    assert read_run_section(folder / "third" / "config.toml").origin == str(first)
