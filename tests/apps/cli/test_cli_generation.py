"""`fastformer generate` as a person uses it: batched, from files."""

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
