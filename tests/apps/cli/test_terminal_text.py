"""What reaches a terminal, and what the command line says of closed streams and strays in a run folder."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.support.command_line import fastformer
from tests.support.run_folders import save_run

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A run that writes one word of a stranger's, whatever it reads."""
    tokenizer = WordTokenizer.from_lines([EVIL], splitting="whitespace")
    settings = TranslationConfig(tokenizer.size, tokenizer.size, d_model=8, heads=2, feed_forward=8, output_bias=True,
                                 encoder_layers=1, decoder_layers=1)  # fmt: skip
    model = TranslationModel(settings)
    with torch.no_grad():
        model.output.bias[tokenizer.encode(EVIL)[0]] = 50.0
    save_run(tmp_path / "run", model, tokenizer, tokenizer, max_length=9)
    return tmp_path


def test_a_closed_standard_input_is_named(evil: Path) -> None:
    command = f"{sys.executable} -m fastformer translate --run {evil / 'run'} --device cpu <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (2, "error: standard input is closed: give sentences, or --input\n")


@pytest.mark.parametrize(
    "words", ["translate --run {run} a", "translate --run {run} --input {run}/config.toml", "generate --run {run} a"]
)
def test_a_closed_standard_output_is_named(evil: Path, words: str) -> None:
    """What was asked for would go nowhere, with exit code 0."""
    command = f"{sys.executable} -m fastformer {words.format(run=evil / 'run')} --device cpu >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (2, "error: standard output is closed: give --output\n")


@pytest.mark.parametrize("device", ["meta", "mps", "xla", "vulkan", "privateuseone", "nonsense"])
@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has it")
def test_devices_that_cannot_train_are_named(evil: Path, device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used"):
        TranslationRun.check(DataConfig(), {"d_model": 8, "heads": 2}, TrainConfig(steps=1), device)
    done = fastformer("translate", "--run", "run", "--device", device, "a", cwd=evil)
    said = f"device must be auto, cpu, cuda, cuda:N, mps or xpu, not {device!r}"
    if device == "mps":
        said = "device 'mps' was asked for, but torch sees no MPS devices"
    assert (done.returncode, done.stderr) == (2, f"error: {said}\n")
