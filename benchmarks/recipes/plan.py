"""What `benchmarks.recipes` has to do: settings of each run, the dataset's folder, and the processes in their order."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import Command
from benchmarks.recipes.seed import Training, kind_of
from benchmarks.recipes.table import DONE, GOALS, RECORD, heading, key_of, read_rows
from fastformer.apps.runs.toml import save_toml
from fastformer.apps.text import prepare

_MARGIN = 25.0  # seconds of a seed beside its budget: start of the process, data, evaluation
_WARM_UP_STEPS = 30
_WARM_UP_SENTENCES = 64
_BUILT_IN = ("numbers", "docstrings")  # datasets without files
_DRY_SENTENCES = 8
_TINY: Mapping[str, Mapping[str, Any]] = {
    "model": {"d_model": 16, "heads": 2, "feed_forward": 32},
    "translation": {"encoder_layers": 1, "decoder_layers": 1},
    "language": {"layers": 1},
    "train": {"steps": 4, "validate_every": 4, "warmup_steps": 2, "threads": 1, "average": 1, "log_every": 2},
}

Changes = Mapping[str, Mapping[str, Any]]  # by section; None: as if the recipe did not say it
Sections = dict[str, dict[str, Any]]


def with_changes(recipe: Path, changes: Iterable[Changes], to: Path) -> Sections:
    """Write a recipe with other settings, check that training would take it, and give back what it states.

    Raises:
        FileNotFoundError, ValueError: as `fastformer train --config` does.
    """
    application = kind_of(recipe).application
    found: Sections = {"run": {"kind": application.kind}, **application.read_settings(recipe)}
    for each in changes:
        for section, values in each.items():
            merged = {**found[section], **values}
            found[section] = {name: value for name, value in merged.items() if value is not None}
    save_toml(to, found)
    stated = application.read_settings(to)
    application.data(**stated["data"])
    application.train(**stated["train"])
    return found


def tiny(kind: str) -> Sections:
    """The changes that make a dry run of a recipe of a kind."""
    data: dict[str, Any] = {"vocabulary": 600}
    data |= {"bleu_sentences": 4} if kind == "translation" else {"context": 64}
    train = {**_TINY["train"], "batch_tokens": 1024, "minutes": None, "epochs": None}
    return {"data": data, "model": {**_TINY["model"], **_TINY[kind]}, "train": train}


def prepared(dataset: str, files: Path | None, runs: Path) -> str:
    """The folder of a dataset, made of its published files by the product; what is built in stays a name.

    Raises:
        ValueError: files are needed and not given.
        FileNotFoundError, ValueError: as `fastformer data` does.
    """
    name = Path(dataset).name
    if dataset in _BUILT_IN:
        return dataset
    if files is None:
        raise ValueError(f"--data: the dataset {name} of the recipe needs the folder of its published files")
    to = runs / "data" / name
    if not (to / "dataset.json").is_file():
        folders = [path for path in sorted(files.glob("*/")) if path.name.replace("-", "") == name]
        prepare(name, folders[0] if folders else files, to)
    return str(to)


def steps_of(options: argparse.Namespace, out: Path, runs: Path) -> list[Command]:
    """What there is left to do, in order, compilations first; the files of each are written.

    Raises:
        FileNotFoundError, ValueError: a recipe, a change or a dataset that cannot be.
    """
    done = {key_of(row) for row in read_rows(out / RECORD) if row["status"] == DONE}
    steps = [step for recipe in options.recipe for step in _of_recipe(recipe, options, out, runs, done)]
    return sorted(steps, key=lambda step: not step.alone)


def _of_recipe(
    recipe: Path, options: argparse.Namespace, out: Path, runs: Path, done: set[tuple[str, str, int]]
) -> Iterator[Command]:
    changes: list[Changes] = [options.change]
    stated = with_changes(recipe, changes, _new(runs, recipe.stem, ".toml"))
    kind, data = stated["run"]["kind"], stated["data"]
    if options.dry_run:
        changes.append(tiny(kind))
    if data.keys().isdisjoint(("train_source", "train_text")):
        default = "numbers" if kind == "translation" else "docstrings"
        changes.append({"data": {"dataset": prepared(data.get("dataset", default), options.data, runs)}})
    variant = _variant(options.change, options.dry_run)
    for number, seed in enumerate(seed for seed in options.seeds if (recipe.stem, variant, seed) not in done):
        config = _new(runs, f"{recipe.stem}-seed{seed}", ".toml")
        settings = with_changes(recipe, [*changes, {"train": {"seed": seed}}], config)
        facts = {"recipe": recipe.stem, "variant": variant, "seed": seed, "at_once": options.at_once}
        training = Training(
            str(config),
            str(config.with_name(f"{config.name}-run")),
            options.device,
            str(out / RECORD),
            {**facts, "settings": settings},
            () if options.dry_run else GOALS.get(recipe.stem, ()),
            options.beam,
            _DRY_SENTENCES if options.dry_run else None,
        )
        if number == 0 and options.device == "cuda" and options.warm_up:
            yield _warm_up(recipe, changes, training)
        minutes = settings["train"].get("minutes")
        yield _step(f"{heading(facts)}, seed {seed}", training, 0.0 if minutes is None else 60 * minutes + _MARGIN)


def _variant(change: Changes, dry_run: bool) -> str:
    said = [f"{place}.{name}={json.dumps(value)}" for place, values in change.items() for name, value in values.items()]
    return ", ".join([*sorted(said), *["dry run"] * dry_run])


def _warm_up(recipe: Path, changes: Iterable[Changes], training: Training) -> Command:
    """A few steps, a validation and a search, of which no figure counts."""
    few = {"steps": _WARM_UP_STEPS, "validate_every": _WARM_UP_STEPS, "average": 1}
    config = Path(f"{training.folder}-warm-up.toml")
    with_changes(recipe, [*changes, {"train": few}], config)
    folder = f"{config}-run"
    short = replace(training, config=str(config), folder=folder, record=None, goals=(), test=_WARM_UP_SENTENCES)
    return _step(f"{recipe.stem}, compilation", short, 0.0, alone=True)


def _step(name: str, training: Training, seconds: float, alone: bool = False) -> Command:
    path = Path(f"{training.config}.json")
    training.save(path)
    return Command(name, (sys.executable, "-m", "benchmarks.recipes.seed", str(path)), seconds, alone)


def _new(folder: Path, name: str, suffix: str) -> Path:
    """A path in a folder that nothing uses yet: what an earlier command left there stays."""
    number = 1
    while (folder / f"{name}-{number}{suffix}").exists():
        number += 1
    return folder / f"{name}-{number}{suffix}"
