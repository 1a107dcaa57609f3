"""Compare runs as plain data: sizes, budgets, best validation values, and the settings that differ.

A run is any folder with a config.toml, of any kind: settings are read from that file, metrics from metrics.jsonl, and
the model's size from the header of a checkpoint. No model is loaded.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastformer.apps.runs.folder import BY_HAND, DATA, config_of
from fastformer.apps.runs.toml import read_toml
from fastformer.apps.text.files import read_json
from fastformer.apps.train import Checkpoint, CheckpointFolder, read_metrics
from fastformer.apps.train.metrics import JSONL, LOWER_IS_BETTER

__all__ = ["Comparison", "RunSummary", "compare_runs", "summarise"]

VALUES = ("loss", "perplexity", "bleu", "chrf")  # of a validation, in this order; further values follow
_COUNTS = ("kind", "step", "epoch", "seconds")
_CHECKSUMS = ("fingerprint", "validation")  # in data.json
# Settings of data that change no token.
_SAME_TEXT = ("run.version", "data.bleu_sentences", "data.bleu_tokenizer", "data.bucket", "data.target_language")


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run folder; None for values that the folder does not hold yet.

    Attributes:
        name: short name, different for each compared run.
        settings: all of config.toml, as "section.key".
        records: records of metrics.jsonl.
        parameters: number of the model's parameters, tied ones counted once.
        steps: number of steps so far.
        seconds: of training so far, validations included.
        clock: the clock of the seconds: "wall", or "cpu", the processor's time of all threads.
        best_step: step of the best validation by the run's own metric.
        best: all values of that validation.
        bleu_signature: sacrebleu's signature of the BLEU in that validation.
        text: checksums of the encoded training text and of the validation text, if the folder holds them.
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
    """Several runs, and the settings in which they differ: {"section.key": one value per run, None if missing}."""

    runs: list[RunSummary]
    differing: dict[str, list[Any]]

    @property
    def values(self) -> list[str]:
        """The names of the validation values that any of the runs has."""
        names = {name for run in self.runs for name in run.best}
        return [*(name for name in VALUES if name in names), *sorted(names.difference(VALUES))]

    @property
    def same_bleu(self) -> bool:
        """Whether BLEU can be compared: no two runs have different signatures of BLEU."""
        return len({run.bleu_signature for run in self.runs} - {None}) <= 1

    @property
    def same_tokens(self) -> bool:
        """Whether losses and perplexities per token can be compared: no text and no setting of text or words differs.

        Checksums are compared, too, because the files that settings name may change between two runs.
        """
        if any(len({run.text[name] for run in self.runs if name in run.text}) > 1 for name in _CHECKSUMS):
            return False
        if any(run.settings.get("data.dataset") == BY_HAND for run in self.runs):
            return False  # these folders do not know their text
        of_text = {key for key in self.differing if key.startswith(("run.", "data.")) or "vocabulary" in key}
        return not of_text.difference(_SAME_TEXT)


def compare_runs(folders: Sequence[Path | str]) -> Comparison:
    """Read run folders and compare them.

    Raises:
        FileNotFoundError: a folder is no run.
        ValueError: no folder is given, one is given twice, or a file in a folder is damaged. A last line of
            metrics.jsonl that a crash cut off is ignored.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("runs must name at least one run folder")
    real = [os.path.realpath(path) for path in paths]
    if twice := next((path for i, path in enumerate(paths) if real[i] in real[:i]), None):
        raise ValueError(f"runs names {twice} twice")
    sizes = range(1, 1 + max(len(Path(path).parts) for path in real))
    ends = (["/".join(Path(path).parts[-size:]) for path in real] for size in sizes)
    names = next(each for each in ends if len(set(each)) == len(each))  # the shortest ends that are all different
    runs = [summarise(path, name) for path, name in zip(paths, names, strict=True)]
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    columns = {key: [run.settings.get(key) for run in runs] for key in keys}
    return Comparison(runs, {key: values for key, values in columns.items() if any(x != values[0] for x in values)})


def summarise(folder: Path, name: str | None = None) -> RunSummary:
    """Read one run folder; raises the errors of `compare_runs`."""
    settings: dict[str, Any] = {}
    for section, values in read_toml(config_of(folder)).items():
        settings |= {f"{section}.{key}": x for key, x in values.items()} if isinstance(values, dict) else {}
    records = read_metrics(folder) if (folder / JSONL).is_file() else []
    best = _best(records, str(settings.get("train.metric", "loss")))
    checkpoint = CheckpointFolder(folder / "checkpoints").last()
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


def _read_checksums(folder: Path) -> dict[str, str]:
    path = folder / DATA
    report = read_json(path) if path.is_file() else {}
    if not isinstance(report, dict) or not all(isinstance(report.get(name, ""), str) for name in _CHECKSUMS):
        raise ValueError(f"{path}: damaged; it is no report of a run's data")
    return {name: report[name] for name in _CHECKSUMS if name in report}


def _best(records: Sequence[Mapping[str, Any]], metric: str) -> Mapping[str, Any]:
    """Return the first of the best validations; the last one if none has the metric; {} without a validation."""
    validations = [record for record in records if record["kind"] in ("validation", "average")]
    rated = [record for record in validations if _is_number(record.get(metric)) and record[metric] == record[metric]]
    if not rated:
        return validations[-1] if validations else {}
    return (min if metric in LOWER_IS_BETTER else max)(rated, key=lambda record: record[metric])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
