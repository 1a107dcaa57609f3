"""Options of the commands: help shows them whole, mistyped ones get suggestions, and each that applies is read.

What applies to `fastformer train` is derived from the settings' declarations (`only=`), and compared with what the code
does: an option that applies must be read by something else than the checks; another one is refused by name.
"""

import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from fastformer.apps.cli import main  # noqa: F401 (registers the commands)
from fastformer.apps.cli.console import app
from fastformer.apps.cli.options import walk
from fastformer.apps.language.run import LanguageRun
from fastformer.apps.runs.run import Run
from fastformer.apps.settings import derived, unmet_conditions
from fastformer.apps.text import number_corpus, write_lines
from fastformer.apps.translation.run import TranslationRun
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
    suggestion = f"; did you mean {suggested}?" if suggested else ""
    assert done.stderr == f"error: No such option: {typed}{suggestion}\n"


CPU = SimpleNamespace(hardware="a CPU", processes="one process")
PACKAGE = Path(sys.modules["fastformer"].__file__ or "").parent
MODEL = {"d_model": 16, "heads": 2, "feed_forward": 16}
TRAIN = {"steps": 2, "validate_every": 1, "log_every": 1, "warmup_steps": 1, "threads": 1}
PAIRS, TEXT = {"vocabulary": 70, "bleu_sentences": 2}, {"vocabulary": 200, "context": 16}
HELD_OUT, FILES = {"valid_size": 10, "test_size": 10}, {"train_source": "train.en", "train_target": "train.fr"}
# Kinds of data, each with a kind of batches: settings of the data, settings of training.
CASES: dict[str, tuple[type[Run], dict[str, Any], dict[str, Any]]] = {
    "numbers": (TranslationRun, {**PAIRS, **HELD_OUT, "train_size": 80}, {"batch_tokens": 200}),
    "files": (TranslationRun, {**PAIRS, **HELD_OUT, **FILES}, {"batch_sentences": 8}),
    "docstrings": (LanguageRun, {**TEXT, "size": 60_000}, {"batch_tokens": 64}),
    "text": (LanguageRun, {**TEXT, "train_text": "train.en", "stream": "columns", "columns": 3}, {}),
}
CHECKS = {
    "__post_init__", "check", "corpus", "expected_config", "metric_names", "model_config", "numbers_in_layers", "parts",
}  # fmt: skip


@pytest.fixture
def read_settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The settings that are read, by section, while runs are created and trained, by other code than the checks."""
    actual: dict[str, set[str]] = {"data": set(), "model": set(), "train": set()}

    def watch(section: str, settings: type) -> type:
        names = {item.name for item in dataclasses.fields(settings)}

        def read(self: Any, name: str) -> Any:
            if name in names:
                code = sys._getframe(1).f_code
                file = Path(code.co_filename)
                declaring = file == PACKAGE / "apps" / "settings.py" or file.name == "config.py"
                if PACKAGE in file.parents and not declaring and code.co_name not in CHECKS:
                    actual[section].add(name)
            return object.__getattribute__(self, name)

        return type(settings.__name__, (settings,), {"__getattribute__": read, "__module__": settings.__module__})

    for kind in (TranslationRun, LanguageRun):
        parts = {name: watch(name, getattr(kind.application, name)) for name in actual}
        monkeypatch.setattr(kind, "application", dataclasses.replace(kind.application, **parts))
    return actual


@pytest.mark.parametrize("case", CASES)
def test_what_applies_is_read_and_saved_and_other_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_settings: dict[str, set[str]], case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = number_corpus("fr", 80, 12, 12)[0]
    write_lines("train.en", corpus.source)
    write_lines("train.fr", corpus.target)
    kind, stated, batches = CASES[case]
    layers = ("encoder_layers", "decoder_layers") if kind is TranslationRun else ("layers",)
    application, model = kind.application, {**MODEL, **dict.fromkeys(layers, 1)}
    data, train = application.data(**stated), application.train(**TRAIN, **batches)
    run = kind.create(tmp_path / "run", data, model, train)
    run.fit(show=False)
    saved, refused = application.read_config(tmp_path / "run"), set()
    sections = {"data": data, "model": run.model_config, "train": train}
    for section, settings in sections.items():
        for item in dataclasses.fields(settings):
            name, value = item.name, getattr(settings, item.name)
            assert saved[section].get(name) == (str(value) if isinstance(value, Path) else value), name
            if section == "model" and name in derived(application.model):
                continue
            if not list(unmet_conditions(item, (*sections.values(), CPU))):
                assert name in read_settings[section], f"{name} applies, and nothing reads it"
            elif value is not False:
                refused.add(name)
                with pytest.raises(ValueError, match=f"^{name} has an effect only "):
                    application.reject_unused_options({section: {name}}, data, model, train, "cpu")
    assert {"momentum", "plateau_factor", "max_positions", "parallel"} <= refused
    assert ("batch_tokens" in refused) == (case in ("files", "text"))
