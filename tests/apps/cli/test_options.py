"""Every option of `fastformer train` that applies is read and saved; one that does not apply is refused by name.

What applies is derived from the settings' declarations (`only=`), and compared with what the code does: an option that
applies must be read by something else than the checks.
"""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.language.run import LanguageRun
from fastformer.apps.runs.run import Run
from fastformer.apps.settings import derived, unmet_conditions
from fastformer.apps.text import number_corpus, write_lines
from fastformer.apps.translation.run import TranslationRun

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
