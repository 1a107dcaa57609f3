"""`fastformer generate` as a person uses it: batched, from files, with right and wrong input."""

from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.language.text_generator import TextGenerator
from fastformer.apps.text import WordTokenizer
from tests.support.command_line import Done, fastformer
from tests.support.language_task import random_model

WORDS = ["the", "cat", "sat", "on", "a", "mat", ",", "and", "then", "slept", "."]
SETTINGS = ["--run", "run", "--device", "cpu", "--seed", "3", "--max-new-tokens", "12", "--min-new-tokens", "12"]


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    tokenizer = WordTokenizer.from_lines([" ".join(WORDS)])
    return TextGenerator(random_model(1, vocabulary=tokenizer.size), tokenizer, context=8)


@pytest.fixture
def loaded(generator: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Runs are this generator; the list tells which were asked for."""
    asked = []

    def load_generator(folder: Path, checkpoint: str, device: str) -> TextGenerator:
        asked.append((str(folder), checkpoint, device))
        return generator

    monkeypatch.setattr("fastformer.apps.language.commands.load_generator", load_generator)
    return asked


def generate(*arguments: str, cwd: Path) -> Done:
    return fastformer("generate", *SETTINGS, *arguments, cwd=cwd)


def test_options_decide_the_text(loaded, tmp_path):
    done = generate("the cat ", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("the cat ")
    assert loaded == [("run", "best", "cpu")]
    assert generate("the cat", "--checkpoint", "last", cwd=tmp_path).stdout == done.stdout
    assert loaded[1] == ("run", "last", "cpu")
    assert generate("the cat", "--seed", "4", cwd=tmp_path).stdout != done.stdout
    assert generate("the cat", "--temperature", "0", "--top-k", "3", cwd=tmp_path).stdout != done.stdout


def test_texts_of_several_lines(loaded, tmp_path):
    """An empty line ends each; nothing is lost on the way to a file."""
    arguments = ("the", "a", "--no-stop-at-eos", "--min-new-tokens", "0", "--max-new-tokens", "60")
    done = generate(*arguments, "--temperature", "4", cwd=tmp_path)
    single = generate("the", *arguments[2:], "--temperature", "4", cwd=tmp_path)
    assert single.stdout.count("\n") > 1
    assert done.stdout.startswith(single.stdout + "a")
    assert done.stdout.endswith("\n\n")
    assert generate(*arguments, "--temperature", "4", "--output", "out.txt", cwd=tmp_path).returncode == 0
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == done.stdout


WRONG = [
    (["the", "--temperature", "-1"], "temperature must be at least 0, not -1.0"),
    (["the", "--top-p", "0"], "top_p must be above 0 and at most 1, not 0.0"),
    (["the", "--top-p", "1.5"], "top_p must be above 0 and at most 1, not 1.5"),
    (["the", "--top-k", "-2"], "top_k must be at least 0, not -2"),
    (["the", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, not 0"),
    (["the", "a", "--batch-size", "0"], "batch_size must be at least 1, not 0"),
    (["the", "--seed", "-1"], "seed must be at least 0, not -1"),
    (["the", "--device", "tpu"], "device must be auto, cpu, cuda, cuda:N, mps or xpu, not 'tpu'"),
    (["the", "--prompt-file", "prompts.txt"], "give prompts or --prompt-file, not both"),
    (["--prompt-file", "no.txt"], "no.txt"),
    (["--prompt-file", "empty.txt"], "empty.txt"),
    (["the", "--output", "nowhere/out.txt"], "nowhere"),
    (["the", "--output", "."], "is a folder"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_a_mistake_gets_one_line(loaded, generator, tmp_path, monkeypatch, arguments, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "prompts.txt").write_text("the\n")
    if "--output" in arguments:  # found before anything is written, or the texts would be lost
        monkeypatch.setattr(generator, "generate_each", None)
    done = generate(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().split("\n")) == 1
    assert done.stdout == ""
