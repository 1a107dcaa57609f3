"""Checkpoints that survive kill -9 and a full disk: one folder a step, written aside and renamed when complete.

    checkpoints/index.json            {"last": "step-200", "best": {"name": "step-100", "value": 2.1}, "kept": […], …}
    checkpoints/step-200/model.safetensors   weights: all that inference needs, no pickle
                         state.pt            optimiser, schedule, generators, data position (torch.load, weights_only)
                         meta.json           step, architecture, metrics, and size and SHA-256 of the other files

A folder named step-N is complete because only a rename gives it that name, after its files and it are synchronised to
the disk. The index adds what the names do not tell (which is best, the order of writing); a folder that a crash left
out of it is found by its name. The price is one extra copy of the model on the disk while saving. Hidden folders
(.new-, .old-, .swap-) are leftovers of an interrupted save; the next save removes them. One process writes.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.train.weights import (
    CheckpointError,
    average_weights,
    check_architecture,
    put_weights,
    read_weights,
    write_weights,
)

WEIGHTS, STATE, META, INDEX = "model.safetensors", "state.pt", "meta.json", "index.json"
AVERAGE = "average"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: `path` its folder, `config` the architecture's settings, `metrics` of its validation."""

    path: Path
    step: int
    config: dict[str, Any]
    metrics: dict[str, float]
    files: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, path: Path | str) -> "Checkpoint":
        """Read meta.json; raises CheckpointError when it is missing or damaged."""
        path = Path(path)
        try:
            meta = json.loads((path / META).read_text(encoding="utf-8"))
            files = {
                name: {"bytes": int(file["bytes"]), "sha256": str(file["sha256"])}
                for name, file in dict(meta["files"]).items()
            }
            return cls(path, int(meta["step"]), dict(meta["config"]), dict(meta["metrics"]), files)
        except OSError as error:
            raise CheckpointError(f"{path / META}: cannot be read ({error.strerror}); not a checkpoint") from None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path / META}: is damaged ({type(error).__name__}: {error})") from None

    def weights(self) -> dict[str, Tensor]:
        """The tensors, on the CPU, after the file's size and SHA-256 were checked."""
        self._check(WEIGHTS)
        return read_weights(self.path / WEIGHTS)

    def state(self) -> dict[str, Any]:
        """What resuming needs, loaded without running any code from the file; an average has none."""
        if STATE not in self.files:
            raise CheckpointError(f"{self.path}: holds weights only, training cannot continue from it")
        self._check(STATE)
        state: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        return state

    def load_into(self, model: nn.Module, config: Any = None) -> None:
        """Copy the weights into `model`. `config` (dataclass or mapping) is compared with the checkpoint's first."""
        if config is not None:
            check_architecture(self.config, settings(config), self.path)
        put_weights(model, self.weights(), self.path)

    def _check(self, name: str) -> None:
        path, recorded = self.path / name, self.files.get(name)
        if recorded is None or not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        size = path.stat().st_size
        if size != recorded["bytes"]:
            raise CheckpointError(f"{path}: is damaged: it has {size:,} bytes instead of {recorded['bytes']:,}")
        if _sha256(path) != recorded["sha256"]:
            raise CheckpointError(f"{path}: is damaged: its content is not what was saved (SHA-256 differs)")


class CheckpointFolder:
    """The checkpoints of one run: the last `keep` and the best are kept, older ones are removed."""

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep

    def paths(self) -> list[Path]:
        """Complete checkpoints with a training state, in the order of writing."""
        found = {path.name for path in self.folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()}
        index = self._index()
        listed = [name for name in index["kept"] if name in found]
        unlisted = sorted(found.difference(listed, index["removed"]), key=_step_of)
        return [self.folder / name for name in [*listed, *unlisted]]

    def last(self) -> Path | None:
        """The checkpoint written last."""
        return next(reversed(self.paths()), None)

    def best(self) -> Path | None:
        """The checkpoint with the best validation metric, possibly the average; None before the first validation."""
        best = self._index()["best"]
        return self.folder / best["name"] if best and (self.folder / best["name"]).is_dir() else None

    def best_value(self) -> float | None:
        """The metric of `best()`."""
        best = self._index()["best"]
        return float(best["value"]) if best and self.best() else None

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any] | None,
        config: Any = None,
        metrics: Mapping[str, float] | None = None,
        best: float | None = None,
    ) -> Path:
        """Write a checkpoint (without `state`: the average), and mark it as the best with the metric value `best`.

        Whatever goes wrong, the earlier ones stay loadable.

        Raises OSError naming the cause and the last good checkpoint when the disk is full or cannot be written.
        """
        name = AVERAGE if state is None else f"step-{step}"
        try:
            self.recover()
            new = self._write(name, step, weights, state, config, metrics or {})
            target = self.folder / name
            if target.exists():
                os.replace(target, self.folder / f".swap-{name}")
            os.replace(new, target)
            _sync(self.folder)
            self._update_index(
                last=name if state is not None else None,
                best=None if best is None else {"name": name, "value": best},
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

    def open(self, path: Path | str | None = None, fallback: bool = False) -> Checkpoint:
        """The checkpoint at `path`, or the last one, with all its files checked.

        A damaged one raises CheckpointError naming the file and the previous good checkpoint; with `fallback` that
        one is opened instead.
        """
        candidates = self.paths() if path is None else [Path(path)]
        if not candidates:
            raise CheckpointError(f"{self.folder}: holds no checkpoint")
        try:
            return _checked(candidates[-1])
        except CheckpointError as error:
            previous = self._previous_good(candidates[-1])
            if previous is None:
                raise CheckpointError(f"{error}; there is no earlier good checkpoint") from None
            if fallback:
                return previous
            raise CheckpointError(f"{error}; the previous good checkpoint is {previous.path}") from None

    def _previous_good(self, damaged: Path) -> Checkpoint | None:
        for path in reversed([path for path in self.paths() if path.name != damaged.name]):
            try:
                return _checked(path)
            except CheckpointError:
                continue
        return None

    def _write(self, name: str, step: int, weights: Any, state: Any, config: Any, metrics: Mapping[str, float]) -> Path:
        new = self.folder / f".new-{name}"
        new.mkdir(parents=True)
        write_weights(new / WEIGHTS, weights)
        if state is not None:
            _write_state(new / STATE, state)
        files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(new.iterdir())}
        meta = {"step": step, "config": settings(config), "metrics": dict(metrics), "files": files}
        (new / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        for path in [*new.iterdir(), new]:
            _sync(path)
        return new

    def _index(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"last": None, "best": None, "kept": [], "removed": []}
        try:
            index = {**empty, **json.loads((self.folder / INDEX).read_text(encoding="utf-8"))}
            return index if _is_index(index) else empty
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return empty

    def _update_index(self, last: str | None = None, best: dict[str, Any] | None = None) -> None:
        index = self._index()
        names = [path.name for path in self.paths()]
        if last is not None:
            names = [*(name for name in names if name != last), last]
        index["best"] = best or index["best"]
        spared = index["best"]["name"] if index["best"] else None
        kept = [name for name in names if name in names[-self.keep :] or name == spared]
        removed = [name for name in names if name not in kept]
        index.update(last=kept[-1] if kept else None, kept=kept, removed=removed)
        temporary = self.folder / f".{INDEX}"
        temporary.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        _sync(temporary)
        os.replace(temporary, self.folder / INDEX)
        _sync(self.folder)
        self._remove(removed)

    def recover(self) -> None:
        """Remove what an interrupted save left; a checkpoint that was about to be replaced gets its name back.

        Only for the process that writes: a reader would remove what is being written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(".swap-*"):
            original = self.folder / path.name.removeprefix(".swap-")
            if not original.exists():
                os.replace(path, original)
        for pattern in (".swap-*", ".new-*", ".old-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path)
        self._remove(self._index()["removed"])

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            if (self.folder / name).exists():  # out of the way first: a half removed folder must not look complete
                os.replace(self.folder / name, self.folder / f".old-{name}")
                shutil.rmtree(self.folder / f".old-{name}")


def _is_index(index: Mapping[str, Any]) -> bool:
    """Whether it names checkpoints and nothing else; what it lists as removed is deleted."""
    best = index["best"]
    names = [*index["kept"], *index["removed"], *([] if best is None else [best["name"]])]
    return all(name == AVERAGE or _STEP.fullmatch(name) for name in names) and (
        best is None or isinstance(best["value"], int | float)
    )


def find_checkpoint(path: Path | str, which: str = "best") -> Path:
    """The checkpoint folder meant by `path`: a run folder, its checkpoints folder, or a checkpoint itself.

    which: "best" (the last one while none was validated), "last" or "average". Raises CheckpointError.
    """
    path = Path(path)
    if which not in ("best", "last", "average"):
        raise ValueError(f"which={which!r} is not allowed; choose best, last, average")
    if (path / META).is_file():
        return path
    folder = CheckpointFolder(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    average = folder.folder / AVERAGE
    found = {"last": folder.last(), "average": average if average.is_dir() else None}.get(which)
    found = (folder.best() or folder.last()) if which == "best" else found
    if found is None:
        raise CheckpointError(f"{path}: holds no {which} checkpoint")
    return found


def average_checkpoints(paths: Sequence[Path | str]) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoint folders of one architecture, each checked before."""
    for path in paths:
        Checkpoint.open(path)._check(WEIGHTS)
    return average_weights(Path(path) / WEIGHTS for path in paths)


def settings(config: Any) -> dict[str, Any]:
    """A dataclass or mapping as the plain values that JSON gives back (tuples become lists)."""
    values = {} if config is None else dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config)
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _checked(path: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.files:
        checkpoint._check(name)
    return checkpoint


def _write_state(path: Path, state: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # the archive writer's own complaint hides the write that failed before it
            raise OSError(f"{path.name}: {error.__context__ or error}") from None


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have the system write a file or a folder's names to the disk; Windows cannot open folders for that."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
