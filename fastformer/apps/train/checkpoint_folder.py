"""Keep a run's last `keep` checkpoints, the best one, an average and an interim one; write each atomically.

    checkpoints/index.json    {"last": "step-200", "best": {"name": "step-100", "value": 2.1}, "kept": [...], ...}
    checkpoints/step-200/     one checkpoint: see `checkpoint.py`
    checkpoints/interim/      the same, written between validations; the next checkpoint replaces it
    checkpoints/average/      the mean of the weights of the last ones

A folder is written under a hidden name, flushed to the disk and renamed, so a folder named step-N is complete; then the
index is replaced, and checkpoints that are no longer kept are removed. A folder that a crash left out of the index is
found by its name. The next save cleans up after an interrupted one: .new-NAME was being written and .old-NAME removed,
so both are deleted; .swap-NAME was being replaced, and is renamed back if NAME is missing. Only one process writes.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from fastformer.apps.system.files import synchronise, write_file
from fastformer.apps.train.checkpoint import META, Checkpoint, write_checkpoint
from fastformer.apps.train.weights import CheckpointError
from fastformer.settings import check_value

INDEX, AVERAGE, INTERIM = "index.json", "average", "interim"
_NAME = rf"(?:step-\d+|{AVERAGE}|{INTERIM})"


class CheckpointFolder:
    """The checkpoints of one run: the last `keep` and the best are kept, older ones are removed."""

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep

    def paths(self) -> list[Path]:
        """Return the complete checkpoints with a training state, in the order of writing."""
        complete = {name for name in self._names(_NAME) if name != AVERAGE}
        index = self._index()
        listed = [name for name in index["kept"] if name in complete]
        unlisted = complete.difference(listed, index["removed"])
        unlisted_in_order = sorted(unlisted, key=lambda name: math.inf if name == INTERIM else int(name[5:]))
        return [self.folder / name for name in [*listed, *unlisted_in_order]]

    def last(self) -> Path | None:
        """Return the checkpoint that was written last; None if there is none."""
        return next(reversed(self.paths()), None)

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric, which may be the average; None before the first validation."""
        best = self._index()["best"]
        return self.folder / best["name"] if best and best["name"] in self._names(_NAME) else None

    def best_or_last(self) -> Path | None:
        """Return the best checkpoint, or the last one before the first validation.

        Raises CheckpointError if the best checkpoint is gone, because the last one holds another model.
        """
        named, best, last = self._index()["best"], self.best(), self.last()
        if named and best is None and last is not None:
            raise CheckpointError(
                f"{self.folder}: the best checkpoint, {named['name']}, is gone; the last one is {last.name}"
            )
        return best or last

    def best_value(self) -> float | None:
        """Return the metric of `best()`; None without a best checkpoint."""
        return float(self._index()["best"]["value"]) if self.best() else None

    def average(self) -> Path | None:
        """Return the average of the last checkpoints; None if there is none."""
        return self.folder / AVERAGE if AVERAGE in self._names(_NAME) else None

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any] | None,
        config: Any = None,
        metrics: Mapping[str, float] | None = None,
        best: float | None = None,
        name: str | None = None,
    ) -> Path:
        """Write a checkpoint and update the index.

        Args:
            step: number of optimizer steps so far.
            weights: state dict of the model.
            state: plain values that resuming needs, and under "optimizer" {parameter: {name: tensor}}. None: the
                checkpoint is an average.
            config: the architecture, a dataclass or mapping.
            metrics: values of the validation.
            best: value of the metric, which marks the checkpoint as the best; None: it is not.
            name: of the folder; None: "average" without a state, else "step-N".

        Raises:
            OSError: the disk is full or cannot be written; names the cause and the last good checkpoint. Earlier
                checkpoints stay loadable.
        """
        name = name or (AVERAGE if state is None else f"step-{step}")
        new, target = self.folder / f".new-{name}", self.folder / name
        try:
            self.recover()
            if name in self._index()["removed"]:  # else the new checkpoint would be removed, too
                self._update_index()
            new.mkdir()
            write_checkpoint(new, step, weights, state, config, metrics)
            if target.exists():
                target.rename(self.folder / f".swap-{name}")
            new.rename(target)
            synchronise(self.folder)
            marked = None if best is None else {"name": name, "value": best}
            self._update_index(name if name != AVERAGE else None, marked)
            self.recover()
        except OSError as error:
            with suppress(OSError):
                self.recover()
            last = self.last()
            last_good = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
            raise OSError(f"checkpoint {name} could not be written to {self.folder}: {error}; {last_good}") from error
        return target

    def mark_best(self, path: Path, value: float) -> None:
        """Record a checkpoint as the best; `value` is its metric."""
        self._update_index(best={"name": path.name, "value": value})

    def open(self, path: Path | str | None = None) -> Checkpoint:
        """Open the checkpoint at `path`, or the last one, after checking all its files.

        A damaged checkpoint raises CheckpointError naming the file and the previous good checkpoint.
        """
        candidates = self.paths()
        if path is None and not candidates:
            raise CheckpointError(f"{self.folder}: holds no checkpoint")
        try:
            return Checkpoint.open(candidates[-1] if path is None else path).check()
        except CheckpointError as error:
            previous = next(filter(_is_good, reversed(candidates)), None)
            way_out = f"to go on from the previous good checkpoint, {previous}, remove those after it"
            raise CheckpointError(
                f"{error}; {way_out if previous else 'there is no earlier good checkpoint'}"
            ) from None

    def recover(self) -> None:
        """Remove what an interrupted save left, and restore the name of a checkpoint that was being replaced.

        Only the writing process may call it: another process would remove a folder that is being written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for hidden in sorted(self._names(rf"\.(?:new|swap|old)-{_NAME}")):
            original = self.folder / hidden.split("-", 1)[1]
            if hidden.startswith(".swap-") and not original.exists():
                (self.folder / hidden).rename(original)
            else:
                shutil.rmtree(self.folder / hidden)
        self._remove(self._index()["removed"])

    def _names(self, pattern: str) -> set[str]:
        """Return the names of folders that match a pattern."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return {path.name for path in entries if re.fullmatch(pattern, path.name) and path.is_dir()}

    def _index(self) -> dict[str, Any]:
        """Return the index; an empty one if it is missing, damaged, or names a checkpoint as kept and as removed."""
        empty: dict[str, Any] = {"last": None, "best": None, "kept": [], "removed": []}
        try:
            index = {**empty, **json.loads((self.folder / INDEX).read_bytes())}
            kept = {*index["kept"], *([index["best"]["name"]] if index["best"] else [])}
            if index["best"]:
                float(index["best"]["value"])
            valid = all(re.fullmatch(_NAME, name) for name in (*kept, *index["removed"]))
            return index if valid and kept.isdisjoint(index["removed"]) else empty
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return empty

    def _update_index(self, last: str | None = None, best: dict[str, Any] | None = None) -> None:
        index = self._index()
        names = [path.name for path in self.paths()]
        if last is not None:
            names = [*(name for name in names if name != last), last]
        index["best"] = best or index["best"]
        numbered = [name for name in names if name != INTERIM]
        kept = {*numbered[-self.keep :], *([index["best"]["name"]] if index["best"] else []), *names[-1:]}
        kept_names, removed_names = [n for n in names if n in kept], [n for n in names if n not in kept]
        index.update(last=kept_names[-1] if kept_names else None, kept=kept_names, removed=removed_names)
        write_file(self.folder / INDEX, (json.dumps(index, indent=1) + "\n").encode("utf-8"))
        synchronise(self.folder)
        self._remove(removed_names)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            if (self.folder / name).is_dir():
                hidden = (self.folder / name).rename(self.folder / f".old-{name}")  # else a crash leaves half of it
                shutil.rmtree(hidden)


def _is_good(path: Path) -> bool:
    """Return whether all files of a checkpoint are intact."""
    with suppress(CheckpointError):
        Checkpoint.open(path).check()
        return True
    return False


def find_checkpoint(path: Path | str, which: str = "best") -> Path:
    """Return the checkpoint in `path`, which is a run folder, its checkpoints folder, or a checkpoint itself.

    which: "best" (the last one before the first validation), "last", "average", or a name such as "step-200". Raises
    CheckpointError.
    """
    path = Path(path)
    if not (isinstance(which, str) and re.fullmatch(r"step-\d+", which)):
        check_value("checkpoint", which, str, choices=("best", "last", "average", "step-N"))
    if (path / META).is_file():
        return path
    folder = CheckpointFolder(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    named = {"best": folder.best_or_last, "last": folder.last, "average": folder.average}
    checkpoint = named[which]() if which in named else next((p for p in folder.paths() if p.name == which), None)
    if checkpoint is None:
        names = ", ".join(p.name for p in folder.paths())
        raise CheckpointError(f"{path}: holds no {which} checkpoint{names and f'; it has {names}'}")
    return checkpoint
