"""Language models on the command line: train, evaluate, generate, info."""

import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from tests.support.command_line import fastformer

TRAIN_LM = (
    "train lm --train-text text.txt --held-out 0.1 --tokenizer words --d-model 16 --heads 2 --layers 1 "
    "--feed-forward 32 --context 8 --batch-tokens 64 --steps 4 --warmup-steps 2 --validate-every 2 --threads 1 "
    "--label-smoothing 0 --device cpu"
)
TEXT = [
    f"the {animal} sees the {other}" for animal in ("cat", "dog", "cow", "hen") for other in ("mouse", "bird", "fox")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny trained language model in `lm/`."""
    folder = tmp_path_factory.mktemp("cli_language")
    (folder / "text.txt").write_text("\n".join(TEXT) + "\n")
    done = fastformer(*TRAIN_LM.split(), "--run", "lm", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "ended after 4 steps" in done.stdout
    assert "vocabulary 13" in done.stdout
    return folder


def test_evaluate_prints_perplexity_with_the_counts(folder: Path) -> None:
    done = fastformer("evaluate", "--run", "lm", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"perplexity \d+\.\d\d per token \(6 predicted, <eos> counted\)", done.stdout)
    (folder / "other.txt").write_text("the unicorn sees\nthe cat\n")
    done = fastformer("evaluate", "--run", "lm", "--source", "other.txt", "--checkpoint", "last", cwd=folder)
    assert "(7 predicted, <eos> counted, 1 of them <unk>)" in done.stdout


def test_files_and_flags_fill_in_the_defaults_of_language_models(folder: Path) -> None:
    (folder / "own.toml").write_text("[train]\nlr = 0.01\nwarmup_steps = 3\n")
    command = TRAIN_LM.replace("--warmup-steps 2", "--config own.toml").replace("--label-smoothing 0", "").split()
    done = fastformer(*command, "--clip-norm", "0.5", "--run", "own", cwd=folder)
    assert done.returncode == 0, done.stderr
    train = tomllib.loads((folder / "own" / "config.toml").read_text())["train"]
    names = ("schedule", "label_smoothing", "warmup_steps", "lr", "clip_norm", "batch_tokens")
    assert [train[name] for name in names] == ["cosine", 0.0, 3, 0.01, 0.5, 64]
    for command, shown in (("train lm", "cosine"), ("train", "chosen for corpus and budget")):
        text = " ".join(fastformer(*command.split(), "--help", cwd=folder).stdout.split())
        assert f"[default: {shown}]" in text
