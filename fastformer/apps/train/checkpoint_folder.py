"""Keep a run's last `keep` checkpoints, the best one, an average and an interim one.

    checkpoints/index.json    {"kept": ["step-100", "step-200"], "best": {"name": "step-100", "value": 2.1}, ...}
    checkpoints/step-200/     one checkpoint: see `checkpoint.py`
    checkpoints/interim-150/  the same, written between validations; the next checkpoint replaces it
    checkpoints/average/      the mean of the weights of the last ones

A checkpoint is written to a hidden folder, flushed to the disk and renamed; then the index is replaced. A checkpoint
that the index does not name is incomplete or no longer kept: it is ignored, and removed by the next save. So a save
that is killed or meets a full disk at any point leaves the checkpoints before it. If the index is lost, every folder
with a meta.json counts. Only one process writes.
"""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import Tensor

from fastformer.apps.settings import to_plain
from fastformer.apps.system.files import new_folder, synchronise, write_file
from fastformer.apps.train.checkpoint import META, OPTIMIZER, STATE, WEIGHTS, Checkpoint, CheckpointError, write_weights
from fastformer.settings import check_value

INDEX, AVERAGE, INTERIM = "index.json", "average", "interim"
_NAME = re.compile(rf"(step-\d+|{AVERAGE}|{INTERIM}-\d+)(-\d+)?")


class CheckpointFolder:
    """The checkpoints of one run: the last `keep` and the best are kept, older ones are removed."""

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep

    def paths(self) -> list[Path]:
        """Return the complete checkpoints with a training state, in the order of writing."""
        return [self.folder / name for name in self.index()["kept"] if (self.folder / name).is_dir()]

    def last(self) -> Path | None:
        """Return the checkpoint that was written last; None if there is none."""
        return next(reversed(self.paths()), None)

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric, which may be the average; None before the first validation."""
        best = self.index()["best"]
        return self.folder / best["name"] if best and (self.folder / best["name"]).is_dir() else None

    def best_value(self) -> float | None:
        """Return the metric of `best()`; None without a best checkpoint."""
        return float(self.index()["best"]["value"]) if self.best() else None

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any] | None,
        config: Any = None,
        metrics: Mapping[str, float] | None = None,
        best: float | None = None,
        interim: bool = False,
    ) -> Path:
        """Write a checkpoint, then the index, and remove checkpoints that are no longer kept.

        state: plain values that resuming needs, and under "optimizer" {parameter: {name: tensor}}; None: the checkpoint
        is an average. config: the architecture, a dataclass or mapping. metrics: of the validation. best: value of the
        metric if the checkpoint is the best. interim: whether the next checkpoint replaces this one. Raises OSError,
        which names the last good checkpoint, if the disk is full or cannot be written; earlier checkpoints stay.
        """
        name = AVERAGE if state is None else f"{INTERIM if interim else 'step'}-{step}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            index = self._remove_unnamed()
            free = (self.folder / each for each in chain([name], (f"{name}-{i}" for i in count(2))))
            target = next(path for path in free if not path.exists())
            with new_folder(target) as folder:
                write_weights(folder / WEIGHTS, weights)
                if state is not None:
                    moments = {i: entries.items() for i, entries in state.get("optimizer", {}).items()}
                    tensors = {f"{i}.{key}": x for i in moments for key, x in moments[i] if isinstance(x, Tensor)}
                    write_weights(folder / OPTIMIZER, tensors)
                    plain = {name: value for name, value in state.items() if name != "optimizer"}
                    (folder / STATE).write_text(json.dumps(plain), "utf-8")
                meta = {"step": step, "config": to_plain(config or {}), "metrics": dict(metrics or {})}
                (folder / META).write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
            self._write_index(
                kept=index["kept"] if state is None else [*index["kept"], target.name],
                best=index["best"] if best is None else {"name": target.name, "value": best},
                average=target.name if state is None else index["average"],
            )
        except OSError as error:
            with suppress(OSError):
                self._remove_unnamed()
            last = self.last()
            last_good = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
            raise OSError(f"checkpoint {name} could not be written to {self.folder}: {error}; {last_good}") from error
        return target

    def mark_best(self, path: Path, value: float) -> None:
        """Record a checkpoint as the best; `value` is its metric."""
        self._write_index(**{**self.index(), "best": {"name": path.name, "value": value}})

    def open(self) -> Checkpoint:
        """Open the last checkpoint; raises CheckpointError if there is none, or its meta.json is damaged."""
        if (last := self.last()) is None:
            raise CheckpointError(f"{self.folder}: holds no checkpoint; begin the run again, without --resume")
        return Checkpoint.open(last)

    def index(self) -> dict[str, Any]:
        """Return names: `kept` in the order of writing, `best` with its value or None, `average` if it exists."""
        try:
            index = json.loads((self.folder / INDEX).read_bytes())
            best = index["best"] and {"name": index["best"]["name"], "value": float(index["best"]["value"])}
            index = {"kept": list(index["kept"]), "best": best, "average": index.get("average", AVERAGE)}
            if all(map(_NAME.fullmatch, _named(index))):
                return index
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        complete = [path.parent.name for path in self.folder.glob(f"*/{META}")]
        numbered = [name for name in complete if _NAME.fullmatch(name) and AVERAGE not in name]
        return {"kept": sorted(numbered, key=lambda name: int(name.split("-")[1])), "best": None, "average": AVERAGE}

    def _write_index(self, kept: list[str], best: dict[str, Any] | None, average: str) -> None:
        """Replace the index, without checkpoints that are no longer kept, and remove those."""
        numbered = [name for name in kept if not name.startswith(INTERIM)]
        named = {*numbered[-self.keep :], *kept[-1:], *([best["name"]] if best else [])}
        index = {"kept": [name for name in kept if name in named], "best": best, "average": average}
        write_file(self.folder / INDEX, (json.dumps(index, indent=1) + "\n").encode("utf-8"))
        synchronise(self.folder)
        self._remove_unnamed()

    def _remove_unnamed(self) -> dict[str, Any]:
        """Remove checkpoints that the index does not name, complete or not, and return the index."""
        index = self.index()
        for path in self.folder.iterdir():
            name = path.name.removeprefix(".").removesuffix(".tmp")
            if _NAME.fullmatch(name) and path.name not in _named(index) and path.is_dir():
                shutil.rmtree(path)
        return index


def _named(index: Mapping[str, Any]) -> list[str]:
    return [*index["kept"], index["average"], *([index["best"]["name"]] if index["best"] else [])]


def find_checkpoint(run: Path | str, which: str = "best") -> Path:
    """Return a checkpoint of a run folder.

    which: "best" (the last one before the first validation), "last", "average", or a name such as "step-200". Raises
    CheckpointError.
    """
    if not (isinstance(which, str) and re.fullmatch(r"step-\d+", which)):
        check_value("checkpoint", which, str, choices=("best", "last", "average", "step-N"))
    folder = CheckpointFolder(Path(run) / "checkpoints")
    index, names = folder.index(), [each.name for each in folder.paths()]
    last = names[-1] if names else ""
    best = index["best"]["name"] if index["best"] else last
    named: dict[str, str] = {"best": best, "last": last, "average": index["average"]}
    name = named.get(which, which if which in names else "")
    if not name or not (folder.folder / name).is_dir():
        listed = f"; it has {', '.join(names)}" if names else ""
        raise CheckpointError(f"{run}: holds no {which} checkpoint{listed}")
    return folder.folder / name
