"""Runs side by side, as plain data: sizes, budgets, best validation values, and the settings that differ.

A run is any folder with a config.toml, whatever it trains: its settings are read as they stand, its metrics from
metrics.jsonl, its size from its checkpoint's header. Nothing is loaded into a model.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastformer.apps.runs.folder import BY_HAND, DATA, config_of
from fastformer.apps.runs.toml import read_toml
from fastformer.apps.text import read_json
from fastformer.apps.train import Checkpoint, CheckpointFolder, read_metrics
from fastformer.apps.train.metrics import JSONL, LOWER_IS_BETTER

__all__ = ["Comparison", "RunSummary", "compare_runs", "summarise"]

VALUES = ("loss", "perplexity", "bleu", "chrf")  # of a validation, in this order; others follow
_COUNTS = ("kind", "step", "epoch", "seconds")
_CHECKSUMS = ("fingerprint", "validation")  # in data.json
# Settings of data that change no token.
_SAME_TEXT = ("run.version", "data.bleu_sentences", "data.bleu_tokenizer", "data.bucket", "data.target_language")


@dataclass(frozen=True)
class RunSummary:
    """What a run folder says of itself; None where it says nothing yet.

    Attributes:
        name: short, and another for each of the runs that are compared.
        settings: everything of config.toml, as "section.key".
        records: of metrics.jsonl.
        parameters: of the model, tied ones counted once.
        steps: of training so far.
        seconds: of training so far, validations included.
        clock: what counts the seconds: "wall", or "cpu", the processor's time of all threads.
        best_step: where validation was best by the run's own metric.
        best: all values of that validation.
        bleu_signature: of the BLEU in that validation, as sacrebleu states it.
        text: checksums of the encoded training text and of the validation text, as far as the folder says.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    records: list[dict[str, Any]] = field(repr=False)
    parameters: int | None
    steps: int | None
    seconds: float | None
    clock: str
    best_step: int | None
    best: dict[str, float]
    bleu_signature: str | None = None
    text: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Comparison:
    """Several runs, and the settings in which they differ: {"section.key": one value a run, None where it has none}."""

    runs: list[RunSummary]
    differing: dict[str, list[Any]]

    @property
    def values(self) -> list[str]:
        """The names of the validation values that any of the runs has."""
        found = {name for run in self.runs for name in run.best}
        return [*(name for name in VALUES if name in found), *sorted(found.difference(VALUES))]

    @property
    def same_bleu(self) -> bool:
        """Whether no two runs state different signatures of BLEU, so that their BLEU can be compared."""
        return len({run.bleu_signature for run in self.runs} - {None}) <= 1

    @property
    def same_tokens(self) -> bool:
        """Whether losses and perplexities per token can be compared: no text and no setting of it or of words differs.

        Settings name files, which may have changed between two runs, and be others in another folder.
        """
        if any(len({run.text[name] for run in self.runs if name in run.text}) > 1 for name in _CHECKSUMS):
            return False
        if any(run.settings.get("data.dataset") == BY_HAND for run in self.runs):
            return False  # nobody knows
        telling = [key for key in self.differing if key.startswith(("run.", "data.")) or "vocabulary" in key]
        return not set(telling).difference(_SAME_TEXT)


def compare_runs(folders: Sequence[Path | str]) -> Comparison:
    """Read run folders and compare them.

    Raises:
        FileNotFoundError: a folder is no run.
        ValueError: there is no folder, one is given twice, or a file in one is damaged. A last line of metrics.jsonl
            that a crash cut off is left out.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("runs must name at least one run folder")
    real = [os.path.realpath(path) for path in paths]
    for i, path in enumerate(paths):
        if real[i] in real[:i]:
            raise ValueError(f"runs names {path} twice")
    runs = [summarise(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    columns = {key: [run.settings.get(key) for run in runs] for key in keys}
    return Comparison(runs, {key: found for key, found in columns.items() if any(x != found[0] for x in found)})


def summarise(folder: Path, name: str | None = None) -> RunSummary:
    """Read one run folder; see `compare_runs` for what it raises."""
    settings = _read_settings(folder)
    records = read_metrics(folder) if (folder / JSONL).is_file() else []
    metric = str(settings.get("train.metric", "loss"))
    best, checkpoint = _best(records, metric), CheckpointFolder(folder / "checkpoints").last()
    last: Mapping[str, Any] = records[-1] if records else {}
    return RunSummary(
        name=name or folder.name,
        folder=folder,
        settings=settings,
        records=records,
        parameters=None if checkpoint is None else Checkpoint.open(checkpoint).parameters(),
        steps=last.get("step"),
        seconds=last.get("seconds"),
        clock=str(settings.get("train.clock", "wall")),
        best_step=best.get("step"),
        best={k: v for k, v in best.items() if k not in _COUNTS and _is_number(v)},
        bleu_signature=str(best["bleu_signature"]) if "bleu_signature" in best else None,
        text=_read_checksums(folder),
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart."""
    parts = [Path(os.path.realpath(path)).parts for path in paths]
    for size in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-size:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _read_settings(folder: Path) -> dict[str, Any]:
    settings = {}
    for section, values in read_toml(config_of(folder)).items():
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            settings[f"{section}.{key}" if key else section] = value
    return settings


def _read_checksums(folder: Path) -> dict[str, str]:
    path = folder / DATA
    report = read_json(path) if path.is_file() else {}
    if not isinstance(report, dict) or not all(isinstance(report.get(name, ""), str) for name in _CHECKSUMS):
        raise ValueError(f"{path}: damaged; it is no report of a run's data")
    return {name: report[name] for name in _CHECKSUMS if name in report}


def _best(records: Sequence[Mapping[str, Any]], metric: str) -> Mapping[str, Any]:
    """Return the first of the best validations; the last one where none has the metric; {} where there is none."""
    found = [record for record in records if record["kind"] in ("validation", "average")]
    rated = [record for record in found if _is_number(record.get(metric)) and record[metric] == record[metric]]
    if not rated:
        return found[-1] if found else {}
    sign = 1 if metric in LOWER_IS_BETTER else -1
    return min(rated, key=lambda record: sign * record[metric])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
