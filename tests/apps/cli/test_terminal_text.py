"""What reaches a terminal, and what the command line says of closed streams and strays in a run folder."""

import ast
import io
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.cli.console import console
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.language.run import APPLICATION as LANGUAGE
from fastformer.apps.system.terminal import Terminal as OurTerminal
from fastformer.apps.system.terminal import escaped, shown
from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import CheckpointFolder, TrainConfig, write_weights
from fastformer.apps.train.progress import Progress
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.run import APPLICATION as TRANSLATION
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.support.command_line import fastformer
from tests.support.train_task import config, trainer

PACKAGE = Path(__file__).resolve().parents[3] / "fastformer"
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_escaped_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"a {EVIL}\tb\nc é"
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert shown(text) == "a \\x1b]0;owned\\x07\\x1b[2J\\x9b31m\tb\nc é"
    assert shown("run \u202etxt.exe\u2069 \u200fא") == "run \\u202etxt.exe\\u2069 \u200fא"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert shown(text) == text
    assert escaped("\r\x7f\x00") == "\\x0d\\x7f\\x00"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A run that writes one word of a stranger's, whatever it reads."""
    tokenizer = WordTokenizer.from_lines([EVIL], splitting="whitespace")
    settings = TranslationConfig(tokenizer.size, tokenizer.size, d_model=8, heads=2, feed_forward=8, output_bias=True,
                                 encoder_layers=1, decoder_layers=1)  # fmt: skip
    model = TranslationModel(settings)
    with torch.no_grad():
        model.output.bias[tokenizer.encode(EVIL)[0]] = 50.0
    CheckpointFolder(tmp_path / "run" / "checkpoints").save(1, model.state_dict(), {}, settings)
    TRANSLATION.complete(tmp_path / "run", settings, (tokenizer, tokenizer), {"max_length": 9}, TrainConfig(steps=1))
    return tmp_path


@pytest.fixture
def strangers(evil: Path) -> Path:
    """The same, a language model's beside it, and a copy of the first whose folder's name is an attack, too."""
    tokenizer = WordTokenizer.from_lines([EVIL], splitting="whitespace")
    settings = LanguageConfig(tokenizer.size, d_model=8, heads=2, feed_forward=8, layers=1, output_bias=True)
    model = LanguageModel(settings)
    with torch.no_grad():
        model.output.bias[tokenizer.encode(EVIL)[0]] = 50.0
    folder = evil / "language"
    CheckpointFolder(folder / "checkpoints").save(1, model.state_dict(), {}, settings)
    LANGUAGE.complete(folder, settings, (tokenizer,), {"context": 9}, TrainConfig(steps=1))
    shutil.copytree(evil / "run", evil / f"named {EVIL}")
    record = {"kind": "validation", "step": 1, "epoch": 1, "seconds": 1.0, "tokens": 9, f"loss {EVIL}": 1.0}
    (evil / "run" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    for name in ("source", "target"):
        (evil / name).write_text("a b\n")
    return evil


READING = {
    "translate": ["translate", "--max-length", "3", "a"],
    "generate one": ["generate", "--run", "language", "--max-new-tokens", "3", "a"],
    "generate two": ["generate", "--run", "language", "--max-new-tokens", "3", "a", "b"],
    "plot attention": ["plot", "attention", "--source", "a", "--output", "a.png"],
    "plot attention of text": ["plot", "attention", "--run", f"named {EVIL}", "--source", "a", "--output", "a.png"],
    "compare": ["compare", "run", f"named {EVIL}"],
    "info": ["info", "--run", f"named {EVIL}"],
    "evaluate": ["evaluate", "--source", f"source {EVIL}", "--target", "target"],
    "export": ["export", "--format", "safetensors", "--to", f"to {EVIL}"],
}


@pytest.mark.parametrize("command", READING)
def test_a_strangers_names_do_not_reach_the_terminal(
    strangers: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastformer.apps.cli import main

    arguments = READING[command]
    arguments += [] if "--run" in arguments or command == "compare" else ["--run", "run"]
    (strangers / "source").rename(strangers / f"source {EVIL}")
    monkeypatch.chdir(strangers)
    for stream, wanted in ((Terminal(), "\\x1b]0;owned\\x07"), (io.StringIO(), "\x1b")):
        monkeypatch.setattr(sys, "argv", ["fastformer", *arguments])
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit, match=r"^0$"):
            main()
        assert wanted in stream.getvalue()
        assert ("\x1b" in stream.getvalue()) == (wanted == "\x1b")
        shutil.rmtree(strangers / f"to {EVIL}", ignore_errors=True)


def test_what_is_printed_is_escaped_in_one_place() -> None:
    """Every `print` is of `shown`, every console is the command line's, and no other stream is written to."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called, given = ast.unparse(node.func), [ast.unparse(each) for each in node.args]
            plain = called == "print" and not all(each.startswith("shown(") for each in given)
            if plain or called in ("Console", "sys.stdout.write", "sys.stderr.write", "typer.echo", "typer.secho"):
                found.append((path.relative_to(PACKAGE).as_posix(), f"{called}({', '.join(given)})"))
    # rich's own, for its bar and for warnings: what they show is escaped where it is made.
    assert found == [("apps/cli/__init__.py", "Console()"), ("apps/train/progress.py", "Console()")]


def test_lines_and_tables_are_escaped_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table

    table = Table(EVIL)
    table.add_row(EVIL)
    for stream, wanted in ((Terminal(), 4), (io.StringIO(), 0)):
        monkeypatch.setattr(sys, "stdout", stream)
        console.print(table)
        console.print(f"{EVIL} [b] :smile:")
        OurTerminal(stream).line(EVIL)
        assert stream.getvalue().count("\\x1b]0;owned") == wanted
        assert ("\x1b" in stream.getvalue()) == (not wanted)
        assert "[b] :smile:" in stream.getvalue()


def test_the_lines_of_a_bar_are_escaped() -> None:
    stream = Terminal()
    with Progress(stream=stream) as progress:
        progress.line(EVIL)
    assert "\\x1b]0;owned\\x07" in stream.getvalue()
    assert "\x1b]0" not in stream.getvalue()


def test_warnings_escape_what_they_quote(strangers: Path) -> None:
    (strangers / "prompts").write_text("who\x1b[2J\n")
    command = [sys.executable, "-m", "fastformer", "generate", "--run", "language", "--prompt-file", "prompts"]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, timeout=600, cwd=strangers)
    assert done.returncode == 0
    assert "does not know these words" in done.stderr
    assert "who\\x1b[2J" in done.stderr.replace("\n", "")
    assert "\x1b" not in done.stderr


def test_a_warning_of_an_endless_word_is_shown_at_once(strangers: Path) -> None:
    """rich would take a minute to break it into lines."""
    (strangers / "prompts").write_text("x" * 100_000)
    command = [sys.executable, "-m", "fastformer", "generate", "--run", "language", "--prompt-file", "prompts"]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, timeout=600, cwd=strangers)
    assert done.returncode == 0
    assert "does not know these words: xxx" in " ".join(done.stderr.split())
    assert 1900 < done.stderr.count("x") < 2100
    assert "…" in done.stderr


@pytest.mark.parametrize(("encoding", "text"), [("ascii", "\xfc"), ("iso8859-1", "\u65e5"), ("cp1254", "\u65e5")])
def test_a_standard_output_that_cannot_hold_a_text_is_named(strangers: Path, encoding: str, text: str) -> None:
    done = fastformer("generate", "--run", "language", "--device", "cpu", text, cwd=strangers, encoding=encoding)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: standard output is in {encoding}, which has no {text!a}: set PYTHONIOENCODING=utf-8, or give --output"
    )


def test_errors_escape_what_they_quote(tmp_path: Path) -> None:
    done = fastformer("info", "--run", "no\x1b[2J", cwd=tmp_path)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "no\\x1b[2J" in done.stderr


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
def test_devices_that_cannot_train_are_named(evil: Path, device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used"):
        TranslationRun.check(DataConfig(), {"d_model": 8, "heads": 2}, TrainConfig(steps=1), device)
    done = fastformer("translate", "--run", "run", "--device", device, "a", cwd=evil)
    assert (done.returncode, done.stderr) == (2, f"error: device must be auto, cpu, cuda or cuda:N, not {device!r}\n")


@pytest.mark.parametrize("name", [".new-x", ".old-x", ".swap-x", ".new-step-9", ".old-step-9", ".swap-step-9"])
def test_a_stray_file_does_not_block_a_run(tmp_path: Path, name: str) -> None:
    trainer(tmp_path, config(steps=2)).fit()
    (tmp_path / "checkpoints" / name).write_text("somebody's")
    again = trainer(tmp_path, config(steps=4))
    again.resume()
    again.fit()
    assert (tmp_path / "checkpoints" / name).read_text() == "somebody's"


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_weights_have_the_permissions_of_other_files(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_weights(tmp_path / "w.safetensors", {"w": torch.ones(2)})
        (tmp_path / "other").write_text("")
    finally:
        assert os.umask(before) == mask
    found = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("w.safetensors", "other")]
    assert found[0] == found[1]
