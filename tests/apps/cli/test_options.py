"""Every option of `fastformer train` that applies, in all kinds of data and batches, is read and saved.

What applies where is derived from the settings' declarations (`only=`), and compared with what the code does: an option
that applies must be read by something else than the checks, and saved. One that does not is refused.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.language import run as language_run
from fastformer.apps.language.run import LanguageRun
from fastformer.apps.runs.application import Application
from fastformer.apps.runs.run import Run
from fastformer.apps.settings import unmet
from fastformer.apps.text import docstring_corpora, number_corpus, write_lines
from fastformer.apps.translation.run import TranslationRun

CPU = SimpleNamespace(hardware="a CPU", processes="one process")


RUNS: dict[str, type[Run]] = {"translation": TranslationRun, "language": LanguageRun}
PACKAGE = Path(sys.modules["fastformer"].__file__ or "").parent
Settings = dict[str, dict[str, Any]]
TRAIN = {"steps": 2, "validate_every": 1, "log_every": 1, "warmup_steps": 1, "threads": 1}
MODEL = {"d_model": 16, "heads": 2, "feed_forward": 16}
SMALL = {
    "translation": {
        "data": {"vocabulary": 70, "bleu_sentences": 2, "max_length": 64},
        "model": {**MODEL, "encoder_layers": 1, "decoder_layers": 1},
        "train": TRAIN,
    },
    "language": {"data": {"vocabulary": 200, "context": 16}, "model": {**MODEL, "layers": 1}, "train": TRAIN},
}
# What each kind of data, and of batches, is made by; %s is the folder of the files.
FILES = {"train_source": "%s/train.en", "train_target": "%s/train.fr"}
ENDS = {"source": "en", "target": "fr"}
HELD = {f"{part}_{side}": f"%s/{part}.{end}" for part in ("valid", "test") for side, end in ENDS.items()}
NEAR = {"valid_size": 10, "test_size": 10}
DATA = {
    "translation": {
        "numbers": {**NEAR, "train_size": 80},
        "files to split": {**FILES, **NEAR},
        "files": {**FILES, **HELD},
        "folder": {"dataset": "%s/pairs"},
    },
    "language": {
        "docstrings": {"size": 60_000},
        "a file to split": {"train_text": "%s/train.en"},
        "files": {f"{part}_text": f"%s/{part}.en" for part in ("train", "valid", "test")},
        "folder": {"dataset": "%s/text"},
    },
}
BATCHES: dict[str, dict[str, Settings]] = {
    "translation": {"tokens": {"train": {"batch_tokens": 200}}, "sentences": {"train": {"batch_sentences": 8}}},
    "language": {
        "documents": {"train": {"batch_tokens": 64}},
        "columns": {"data": {"stream": "columns", "columns": 3}},
    },
}
# Each kind of data with one kind of batches, in turn.
COMBINATIONS = [(app, data, batch) for app in RUNS for data, batch in zip(DATA[app], 2 * [*BATCHES[app]], strict=True)]


@pytest.fixture(scope="module", autouse=True)
def _docstrings_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_run, "docstring_corpora", functools.cache(docstring_corpora))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of sentences, and prepared folders of pairs and of text."""
    folder = tmp_path_factory.mktemp("options")
    corpora = number_corpus("fr", 80, 12, 12)
    pairs = {f"{c.name}.{end}": lines for c in corpora for end, lines in (("en", c.source), ("fr", c.target))}
    text = {f"{c.name}.txt": c.source for c in corpora}
    for to, contents in (folder / "pairs", pairs), (folder / "text", {k: ["= A =", "", *v] for k, v in text.items()}):
        to.mkdir()
        for name, lines in contents.items():
            write_lines(to / name, lines)
    for name, lines in pairs.items():
        write_lines(folder / name, lines)
    return folder


def settings(app: str, data: str, batch: str, files: Path, *changes: Mapping[str, Mapping[str, Any]]) -> Settings:
    """What a user states for a small run of this kind."""
    own = {"data": {k: v % files if isinstance(v, str) else v for k, v in DATA[app][data].items()}}
    layers = (SMALL[app], own, BATCHES[app][batch], *changes)
    return {name: {k: v for each in layers for k, v in each.get(name, {}).items()} for name in SMALL[app]}


def made(application: Application, stated: Settings) -> tuple[Any, Any, Any]:
    """The settings with their defaults: data, model, train."""
    data, train = application.data(**stated["data"]), application.train(**stated["train"])
    return data, application.planned(stated["model"], data), train


def options(application: Application, stated: Settings) -> Iterator[tuple[str, "dataclasses.Field[Any]", bool]]:
    """Section, option, and whether it applies to such a run on one CPU; all that a user can state."""
    parts = dict(zip(("data", "model", "train"), made(application, stated), strict=True))
    for section, each in parts.items():
        for item in dataclasses.fields(each):
            if item.name not in application.derived or section != "model":
                yield section, item, not list(unmet(item, (each, *parts.values(), CPU)))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The settings that are read, by section, while runs are made and trained, by other code than the checks."""
    seen: dict[str, set[str]] = {"data": set(), "model": set(), "train": set()}
    checks = {"__post_init__", "check", "computed", "corpus", "parts", "planned", "model_config", "numbers_in_layers"}

    def watch(section: str, settings: type) -> type:
        names = {item.name for item in dataclasses.fields(settings)}

        def read(self: Any, name: str) -> Any:
            if name in names:
                code = sys._getframe(1).f_code
                file = Path(code.co_filename)
                inside = (
                    PACKAGE in file.parents and file != PACKAGE / "apps" / "settings.py" and file.name != "config.py"
                )
                if inside and code.co_name not in checks:
                    seen[section].add(name)
            return object.__getattribute__(self, name)

        return type(settings.__name__, (settings,), {"__getattribute__": read, "__module__": settings.__module__})

    for kind in RUNS.values():
        app = kind.application
        parts = {name: watch(name, getattr(app, name)) for name in seen}
        monkeypatch.setattr(kind, "application", dataclasses.replace(app, **parts))
    return seen


@pytest.mark.parametrize(("app", "data", "batch"), COMBINATIONS, ids=lambda x: x.replace(" ", "_"))
def test_what_applies_is_read_and_saved(
    tmp_path: Path, files: Path, watched: dict[str, set[str]], app: str, data: str, batch: str
) -> None:
    stated = settings(app, data, batch, files)
    kind = RUNS[app]
    text, _, train = made(kind.application, stated)
    run = kind.create(tmp_path / "run", text, stated["model"], train)
    run.fit(show=False)
    saved = kind.application.read_config(tmp_path / "run")
    for section, item, applies in options(kind.application, stated):
        assert not applies or item.name in watched[section], f"{item.name} applies, and nothing reads it"
        value = getattr({"data": text, "model": run.model_config, "train": train}[section], item.name)
        assert saved[section].get(item.name) == (str(value) if isinstance(value, Path) else value), item.name


@pytest.mark.parametrize(("app", "data", "batch"), COMBINATIONS, ids=lambda x: x.replace(" ", "_"))
def test_what_does_not_apply_is_refused_by_name(files: Path, app: str, data: str, batch: str) -> None:
    stated = settings(app, data, batch, files)
    application = RUNS[app].application
    text, _, train = made(application, stated)
    refused = set()
    for section, item, applies in options(application, stated):
        given: Settings = {name: {item.name: "given"} if name == section else {} for name in stated}
        if not applies:
            refused.add(item.name)
            with pytest.raises(ValueError, match=f"^{item.name} has an effect only "):
                application.refuse_idle(given, text, stated["model"], train, "cpu")
    assert {"momentum", "plateau_factor", "max_positions", "parallel"} <= refused
    assert ("batch_tokens" in refused) == (batch in ("sentences", "columns"))
