"""Compare runs as plain data: steps, time, the best validation, and the settings that differ.

A run is any folder with a config.toml, of any kind. Of the folder, only config.toml, data.json and metrics.jsonl are
read; no model is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastformer.apps.runs.folder import DATA, config_of
from fastformer.apps.runs.toml import read_toml
from fastformer.apps.text.files import read_json
from fastformer.apps.train import read_metrics
from fastformer.apps.train.metrics import JSONL, LOWER_IS_BETTER

__all__ = ["RunSummary", "differing_settings", "summarise"]

_CHECKSUMS = ("fingerprint", "validation")  # in data.json: of the encoded training text, of the validation text


@dataclass(frozen=True)
class RunSummary:
    """A run folder: `settings` has all of config.toml as "section.key", and checksums of the text as "text.key"."""

    name: str
    settings: dict[str, Any]
    records: list[dict[str, Any]] = field(repr=False)

    @property
    def last(self) -> dict[str, Any]:
        """The last record of metrics.jsonl; {} if there is none."""
        return self.records[-1] if self.records else {}

    @property
    def best(self) -> dict[str, Any]:
        """The first of the best validations by the run's metric; the last one if none has it; {} without any."""
        metric = str(self.settings.get("train.metric", "loss"))
        validations = [record for record in self.records if record["kind"] in ("validation", "average")]
        rated = [record for record in validations if record.get(metric) == record.get(metric, float("nan"))]  # no NaN
        if not rated:
            return validations[-1] if validations else {}
        return (min if metric in LOWER_IS_BETTER else max)(rated, key=lambda record: record[metric])


def summarise(folder: Path) -> RunSummary:
    """Read a run folder; raises FileNotFoundError if it holds no run, ValueError for a damaged file in it."""
    sections = {name: values for name, values in read_toml(config_of(folder)).items() if isinstance(values, dict)}
    report = read_json(folder / DATA) if (folder / DATA).is_file() else {}
    if not isinstance(report, dict):
        raise ValueError(f"{folder / DATA}: damaged; it is no report of a run's data")
    sections["text"] = {name: str(report[name])[:8] for name in _CHECKSUMS if name in report}
    settings = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    return RunSummary(str(folder), settings, read_metrics(folder) if (folder / JSONL).is_file() else [])


def differing_settings(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ: {"section.key": one value per run, None if missing}."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    columns = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: values for name, values in columns.items() if any(value != values[0] for value in values)}
