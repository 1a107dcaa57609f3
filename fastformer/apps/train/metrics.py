"""One stream of records, written as JSON lines, as CSV and, if `tensorboard` is set, as TensorBoard events.

A record is flat: {"kind": "train", "step": 400, "epoch": 1, "seconds": 12.5, "loss": 3.1}. Its kind is "train", of the
steps since the record before, "epoch", the mean over all tokens of an epoch, or "validation" or "average".
metrics.jsonl is authoritative and appended line by line; metrics.csv, for spreadsheets, is rewritten with each record
that is not of kind "train", and at the end. A resumed run cuts both at its checkpoint, so no step appears twice.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.apps.system.files import append_file, write_file
from fastformer.host.devices import widest_dtype

# Validation values of which lower is better; of all others, such as BLEU, higher.
LOWER_IS_BETTER = ("loss", "perplexity", "word_perplexity")
JSONL, CSV = "metrics.jsonl", "metrics.csv"


class MetricsLog:
    """The metrics of one run folder. `count` is the number of records so far; a checkpoint stores it."""

    def __init__(self, folder: Path | str, count: int = 0, tensorboard: bool = False) -> None:
        """Keep the first `count` existing records (0: start anew) and append to them."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._records = read_metrics(self.folder)[:count] if (self.folder / JSONL).is_file() else []
        self.count = len(self._records)
        write_file(self.folder / JSONL, _jsonl(self._records))
        self._write_csv()
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            step = self._records[-1]["step"] + 1 if self._records else 0
            self._events = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step)

    def write(self, kind: str, step: int, /, **values: Any) -> dict[str, Any]:
        """Append a record and return it."""
        record = {"kind": kind, "step": step, **values}
        self._records.append(record)
        self.count += 1
        append_file(self.folder / JSONL, _jsonl([record]))
        if kind != "train":
            self._write_csv()
        for name, value in values.items() if self._events is not None else ():
            if isinstance(value, int | float):
                self._events.add_scalar(f"{kind}/{name}", value, step)
        return record

    def close(self) -> None:
        """Complete metrics.csv and TensorBoard's events; a full disk is no error, since metrics.jsonl is complete."""
        with suppress(OSError):
            self._write_csv()
        if self._events is not None:
            self._events.close()

    def _write_csv(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, dict.fromkeys(name for record in self._records for name in record))
        if self._records:
            writer.writeheader()
        writer.writerows(self._records)
        write_file(self.folder / CSV, text.getvalue().encode("utf-8"))


class RunningSums:
    """Loss, gradient norm and tokens since the last training record, summed on the device without waiting for it.

    Also loss and tokens of the epoch, in fp64 where the device has it, which is exact enough for a large epoch.

    skips: whether steps are skipped if their gradient is not finite, as in fp16; such steps are counted.
    """

    def __init__(self, device: torch.device, skips: bool = False) -> None:
        self.rate = 0.0
        names = ("loss", "norm", "skips") if skips else ("loss", "norm")
        self._totals = {name: torch.zeros((), device=device) for name in names}  # of a record
        self._epoch_loss = torch.zeros((), dtype=widest_dtype(device), device=device)
        self._counts = {"epoch_tokens": 0, "tokens": 0, "steps": 0}
        self._seconds, self._since = 0.0, 0.0

    def start(self, now: float) -> None:
        """Begin to measure time, at the start of a run or of a resumed one."""
        self._since = now - self._seconds

    def pause(self, seconds: float) -> None:
        """Exclude a span, such as a validation, from the speed."""
        self._since += seconds

    def add(self, loss: Tensor, norm: Tensor, tokens: int, rate: float) -> None:
        """Add a step: its summed loss, gradient norm before clipping, tokens and learning rate."""
        if "skips" in self._totals:
            self._totals["skips"] += ~norm.isfinite()
            norm = torch.where(norm.isfinite(), norm, 0.0)
        self._totals["loss"] += loss
        self._totals["norm"] += norm
        self._epoch_loss += loss
        for name, count in (("epoch_tokens", tokens), ("tokens", tokens), ("steps", 1)):
            self._counts[name] += count
        self.rate = rate

    def finite(self) -> bool:
        """Return whether every loss, and every norm of a step not skipped, is finite so far; waits for the device."""
        return bool(torch.isfinite(self._totals["loss"] + self._totals["norm"]))

    def values(self, now: float) -> dict[str, float]:
        """Return mean loss per token, mean norm, rate, tokens per second and skips; waits for the device."""
        totals = {name: total.item() for name, total in self._totals.items()}
        skips = {"skipped_steps": int(totals["skips"])} if "skips" in totals else {}
        return {
            "loss": totals["loss"] / max(self._counts["tokens"], 1),
            "gradient_norm": totals["norm"] / max(self._counts["steps"] - skips.get("skipped_steps", 0), 1),
            "lr": self.rate,
            "tokens_per_second": self._counts["tokens"] / max(now - self._since, 1e-9),
            **skips,
        }

    def take(self, now: float) -> dict[str, float]:
        """Return the values of a record, and begin a new one."""
        values = self.values(now)
        for total in self._totals.values():
            total.zero_()
        self._counts |= {"tokens": 0, "steps": 0}
        self._since = now
        return values

    def take_epoch(self) -> dict[str, float]:
        """Return the mean loss per token of an epoch, and begin the next one."""
        values = {"loss": self._epoch_loss.item() / max(self._counts["epoch_tokens"], 1)}
        self._epoch_loss.zero_()
        self._counts["epoch_tokens"] = 0
        return values

    def state_dict(self, now: float) -> dict[str, Any]:
        """Return what a resumed run needs to write the same next record."""
        totals = {name: total.item() for name, total in self._totals.items()}
        return {**totals, "epoch_loss": self._epoch_loss.item(), **self._counts, "seconds": now - self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for name, total in self._totals.items():
            total.fill_(state.get(name, 0) if name == "skips" else state[name])  # another precision may have no skips
        self._epoch_loss.fill_(state["epoch_loss"])
        self._counts = {name: state[name] for name in self._counts}
        self._seconds = state["seconds"]


def is_better(metric: str, value: float, best: float | None) -> bool:
    """Return whether a value of a metric is better than the best so far (None: there is none); NaN never is."""
    if math.isnan(value):
        return False
    return best is None or (value < best if metric in LOWER_IS_BETTER else value > best)


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the records of a run folder or a metrics.jsonl file; a last line that a crash cut off is left out."""
    path = Path(path)
    path = path / JSONL if path.is_dir() else path
    try:
        lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such metrics file") from None
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            known = isinstance(record["step"], int) and isinstance(record["kind"], str)
            if not known or not isinstance(record.get("seconds", 0), int | float):
                raise ValueError
            records.append(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if number < len(lines):
                raise ValueError(f"{path}:{number}: is not a JSON record with kind, step and seconds") from None
    return records


def _jsonl(records: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode("utf-8")
