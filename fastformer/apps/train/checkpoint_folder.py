"""Which checkpoints a run keeps: the last `keep`, the best, an average and an interim one; how each becomes complete.

    checkpoints/index.json    {"last": "step-200", "best": {"name": "step-100", "value": 2.1}, "kept": [...], ...}
    checkpoints/step-200/     one checkpoint: see `checkpoint.py`
    checkpoints/interim/      the same, written because time has passed; the next checkpoint replaces it
    checkpoints/average/      the mean of the weights of the last ones

A folder is written under a hidden name, flushed to the disk and renamed, so a folder named step-N is complete; then the
index is replaced, and checkpoints that are no longer kept are removed. The index says which is best and the order of
writing; a folder that a crash left out of it is found by its name. The next save repairs what an interrupted one left:
.new-NAME was being written, .old-NAME removed, .swap-NAME replaced; the last gets its name back if NAME is missing. One
process writes.
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

INDEX = "index.json"
AVERAGE, INTERIM = "average", "interim"
_NAME = rf"(?:step-\d+|{AVERAGE}|{INTERIM})"


class CheckpointFolder:
    """The checkpoints of one run: the last `keep` and the best are kept, older ones are removed."""

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep

    def paths(self) -> list[Path]:
        """Return the complete checkpoints with a training state, in the order of writing."""
        found = {name for name in self._names(_NAME) if name != AVERAGE}
        index = self._index()
        listed = [name for name in index["kept"] if name in found]
        unlisted = sorted(found.difference(listed, index["removed"]), key=_step_of)
        return [self.folder / name for name in [*listed, *unlisted]]

    def last(self) -> Path | None:
        """Return the checkpoint that was written last."""
        return next(reversed(self.paths()), None)

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric, which may be the average; None before the first validation."""
        best = self._index()["best"]
        return self.folder / best["name"] if best and best["name"] in self._names(_NAME) else None

    def best_or_last(self) -> Path | None:
        """Return the best checkpoint, or the last one before the first validation.

        Raises CheckpointError if the best is gone, because the last is another model.
        """
        named, best, last = self._index()["best"], self.best(), self.last()
        if named and best is None and last is not None:
            raise CheckpointError(
                f"{self.folder}: the best checkpoint, {named['name']}, is gone; the last one is {last.name}"
            )
        return best or last

    def best_value(self) -> float | None:
        """Return the metric of `best()`."""
        best = self._index()["best"]
        return float(best["value"]) if best and self.best() else None

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
        """Write a checkpoint, and mark it as the best with the metric value `best`.

        Args:
            step, weights, state, config, metrics: see `write_checkpoint`.
            best: see above.
            name: of its folder; None: "average" or that of its step.

        Raises:
            OSError: the disk is full or cannot be written; names the cause and the last good checkpoint. The earlier
                ones stay loadable.
        """
        name = name or (AVERAGE if state is None else f"step-{step}")
        new, target = self.folder / f".new-{name}", self.folder / name
        try:
            self.recover()
            if name in self._index()["removed"]:  # else the new one would be removed, too
                self._update_index()
            new.mkdir()
            write_checkpoint(new, step, weights, state, config, metrics)
            if target.exists():
                target.rename(self.folder / f".swap-{name}")
            new.rename(target)
            synchronise(self.folder)
            self._update_index(
                last=name if name != AVERAGE else None, best=None if best is None else {"name": name, "value": best}
            )
            self.recover()
        except OSError as error:
            with suppress(OSError):
                self.recover()
            last = self.last()
            rest = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
            raise OSError(f"checkpoint {name} could not be written to {self.folder}: {error}; {rest}") from error
        return target

    def mark_best(self, path: Path, value: float) -> None:
        """Record a checkpoint as the best; `value` is its metric."""
        self._update_index(best={"name": path.name, "value": value})

    def open(self, path: Path | str | None = None) -> Checkpoint:
        """Open the checkpoint at `path`, or the last one, after all its files were checked.

        A damaged one raises CheckpointError naming the file and the previous good checkpoint.
        """
        candidates = self.paths()
        if path is None and not candidates:
            raise CheckpointError(f"{self.folder}: holds no checkpoint")
        try:
            return Checkpoint.open(candidates[-1] if path is None else path).check()
        except CheckpointError as error:
            previous = next(filter(_is_good, reversed(candidates)), None)
            if previous is None:
                raise CheckpointError(f"{error}; there is no earlier good checkpoint") from None
            raise CheckpointError(
                f"{error}; to go on from the previous good checkpoint, {previous}, remove those after it"
            ) from None

    def _names(self, pattern: str) -> set[str]:
        """Return the names of folders that match a pattern."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return {path.name for path in found if re.fullmatch(pattern, path.name) and path.is_dir()}

    def _index(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"last": None, "best": None, "kept": [], "removed": []}
        try:
            index = {**empty, **json.loads((self.folder / INDEX).read_bytes())}
            return index if _is_index(index) else empty
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return empty

    def _update_index(self, last: str | None = None, best: dict[str, Any] | None = None) -> None:
        index = self._index()
        names = [path.name for path in self.paths()]
        if last is not None:
            names = [*(name for name in names if name != last), last]
        index["best"] = best or index["best"]
        spared = index["best"]["name"] if index["best"] else None
        lasting = [name for name in names if name != INTERIM]
        kept = [name for name in lasting if name in lasting[-self.keep :] or name == spared]
        kept += [INTERIM] if names[-1:] == [INTERIM] else []
        removed = [name for name in names if name not in kept]
        index.update(last=kept[-1] if kept else None, kept=kept, removed=removed)
        write_file(self.folder / INDEX, (json.dumps(index, indent=1) + "\n").encode("utf-8"))
        synchronise(self.folder)
        self._remove(removed)

    def recover(self) -> None:
        """Remove what an interrupted save left, and give a checkpoint that was being replaced its name back.

        Only for the process that writes: another one would remove what is being written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for hidden in sorted(self._names(rf"\.(?:new|swap|old)-{_NAME}")):
            original = self.folder / hidden.split("-", 1)[1]
            if hidden.startswith(".swap-") and not original.exists():
                (self.folder / hidden).rename(original)
            else:
                shutil.rmtree(self.folder / hidden)
        self._remove(self._index()["removed"])

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            if (self.folder / name).is_dir():
                hidden = (self.folder / name).rename(self.folder / f".old-{name}")  # a half removed one is not complete
                shutil.rmtree(hidden)


def _is_good(path: Path) -> bool:
    """Return whether the files of a checkpoint are what was saved."""
    try:
        Checkpoint.open(path).check()
    except CheckpointError:
        return False
    return True


def _is_index(index: Mapping[str, Any]) -> bool:
    """Return whether an index names only checkpoints, none both as kept and as removed; removed ones are deleted."""
    best = index["best"]
    kept = [*index["kept"], *([] if best is None else [best["name"]])]
    checkpoints = all(re.fullmatch(_NAME, name) for name in (*kept, *index["removed"]))
    number = best is None or isinstance(best["value"], int | float)
    return checkpoints and number and not set(index["removed"]).intersection(kept)


def find_checkpoint(path: Path | str, which: str = "best") -> Path:
    """Return the checkpoint in `path`, which is a run folder, its checkpoints folder, or a checkpoint itself.

    which: "best" (the last one before the first validation), "last" or "average". Raises CheckpointError.
    """
    path = Path(path)
    check_value("which", which, str, choices=("best", "last", "average"))
    if (path / META).is_file():
        return path
    folder = CheckpointFolder(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    found = {"best": folder.best_or_last, "last": folder.last, "average": folder.average}[which]()
    if found is None:
        raise CheckpointError(f"{path}: holds no {which} checkpoint")
    return found


def _step_of(name: str) -> float:
    return math.inf if name == INTERIM else int(name.removeprefix("step-"))
