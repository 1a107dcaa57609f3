"""Help that a narrow terminal shows whole, in order of use, and suggestions for mistyped options."""

import re
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

import typer

from fastformer.apps.cli import main  # noqa: F401 (registers the commands)
from fastformer.apps.cli.console import app
from fastformer.apps.cli.options import walk
from tests.support.command_line import fastformer
from tests.support.python import python

COMMANDS = dict(walk(typer.main.get_command(app), "fastformer"))


@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_80_columns_and_cuts_no_name(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = fastformer(*path.split()[1:], "--help", cwd=tmp_path).stdout
    assert max(map(len, text.splitlines())) <= 80
    first_words = {word for line in text.splitlines() for word in re.findall(r"^ +(--\S+)(?: / (--\S+))?", line)[:1]}
    shown = {name for names in first_words for name in names}
    for each in COMMANDS[path].params:
        names = {name for name in (*each.opts, *each.secondary_opts) if name[:2] == "--"}
        assert not names & shown if getattr(each, "hidden", False) else names <= shown


@pytest.mark.slow
def test_commands_stand_in_order_of_use() -> None:
    text = python("-m", "fastformer", "--help").stdout  # here, tests may have imported commands in another order
    names = [
        *("demo", "data", "train", "train lm", "train classify", "translate", "score", "generate", "classify", "serve"),
        *("evaluate", "compare", "plot attention", "plot positions", "plot history", "export", "info"),
    ]
    assert re.findall(r"^  ([a-z]+(?: [a-z]+)?)  ", text, re.M) == names


@pytest.mark.parametrize(
    ("command", "typed", "suggested"),
    [
        ("train", "--learning-rate", "--lr or --min-lr"),
        ("train", "--vocab-size", "--vocabulary"),
        ("train", "--gradient-accumulation-steps", "--accumulate"),
        ("train", "--max-grad-norm", "--clip-norm"),
        ("translate", "--beam-size", "--beam"),
        ("train", "--minuts", "--minutes"),
        ("train classify", "--batch-tokens", "--batch-sentences"),
        ("train lm", "--batch-sentences", "--batch-tokens"),
        ("evaluate", "--batchsize", None),
    ],
)
def test_a_mistyped_option_gets_the_right_one(command: str, typed: str, suggested: str | None, tmp_path: Path) -> None:
    done = fastformer(*command.split(), typed, "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", done.stderr).split())
    assert f"No such option: {typed}" in said
    if suggested is None:
        assert "did you mean" not in said
    else:
        assert f"did you mean {suggested}" in said
