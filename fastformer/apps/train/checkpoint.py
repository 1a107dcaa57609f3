"""One checkpoint: the files of a folder that a rename has made complete.

model.safetensors   weights: all that inference needs, no pickle
state.pt            optimiser, schedule, generators, data position: see `states.py`
meta.json           step, architecture, metrics, and size and SHA-256 of the other files
shards/             in a sharded checkpoint, weights and the optimiser's tensors, as each process held them
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.settings import befores, to_plain
from fastformer.apps.system.files import inside, write_file
from fastformer.apps.train.parallel import empty_part
from fastformer.apps.train.shards import SUFFIX, Shards
from fastformer.apps.train.states import check_numbers, check_state, read_state
from fastformer.apps.train.weights import (
    CheckpointError,
    average_weights,
    check_architecture,
    check_finite,
    check_size,
    check_tensors_fit,
    check_ties,
    put_weights,
    read_weights,
    stored_shapes,
    tied_names,
)

WEIGHTS, STATE, META, SHARDS = "model.safetensors", "state.pt", "meta.json", "shards"
# What the names of tensors in shards begin with: weights, and the optimiser's ("optimizer.3.exp_avg": parameter 3).
MODEL, OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: `path` its folder, `config` the architecture's settings, `metrics` of its validation.

    `copies` names, in a sharded checkpoint, the tied parameters that are stored under another name.
    """

    path: Path
    step: int
    config: dict[str, Any]
    metrics: dict[str, float]
    files: dict[str, dict[str, Any]]
    copies: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | str) -> "Checkpoint":
        """Read meta.json; raises CheckpointError when it is missing or damaged."""
        path = Path(path)
        try:
            meta = json.loads((path / META).read_bytes())
            for name in dict(meta["files"]):
                inside(path, name)
            files = {
                name: {"bytes": int(file["bytes"]), "sha256": str(file["sha256"])}
                for name, file in dict(meta["files"]).items()
            }
            copies = {str(name): str(kept) for name, kept in dict(meta.get("copies", {})).items()}
            return cls(path, int(meta["step"]), dict(meta["config"]), dict(meta["metrics"]), files, copies)
        except OSError as error:
            raise CheckpointError(f"{path / META}: cannot be read ({error.strerror}); not a checkpoint") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path / META}: is damaged ({type(error).__name__}: {error})") from None

    @property
    def is_sharded(self) -> bool:
        """Whether the processes that wrote it wrote a part each."""
        return any(name.startswith(f"{SHARDS}/") for name in self.files)

    def weights(self) -> dict[str, Tensor]:
        """The whole tensors, on the CPU, after size and SHA-256 of their files were checked."""
        if not self.is_sharded:
            self._check(WEIGHTS)
            return read_weights(self.path / WEIGHTS)
        shards = self._shards()
        names = self._names_of_weights(shards)
        stored = shards.read({MODEL + kept for kept in names.values()})
        return {name: stored[MODEL + kept] for name, kept in names.items()}

    def state(self, parameters: Sequence[Tensor] | None = None, checked: bool = False) -> dict[str, Any]:
        """What resuming needs, loaded without running any code from the file; an average has none.

        Args:
            parameters: the optimiser's, in its order: all that the state holds is compared with what a run of these
                writes, and of a sharded checkpoint, its tensors come as the parts that belong to them. None: whatever
                it holds, whole, on the CPU.
            checked: leave out the check of shards, which another process has done.

        Raises:
            CheckpointError: there is none, or it is not one of such a run.
        """
        if STATE not in self.files:
            raise CheckpointError(f"{self.path}: holds weights only, training cannot continue from it")
        self._check(STATE)
        path, shards = self.path / STATE, self._shards(checked) if self.is_sharded else None
        if parameters is not None:
            outline = read_state(path, "meta")
            _put_targets(
                outline, shards, lambda index, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), path
            )
            check_state(outline, parameters, path)
        state = read_state(path, "cpu")

        def target(index: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            return empty_part(shape, dtype, torch.empty(0) if parameters is None else parameters[index])

        targets = _put_targets(state, shards, target, path)
        if shards is not None:
            shards.read_into(targets)
        if parameters is not None:
            check_numbers(state, path)
        return state

    def load_into(self, model: nn.Module, config: Any = None, checked: bool = False) -> None:
        """Copy the weights into `model`; of sharded parameters in a sharded checkpoint, their parts alone are read.

        Args:
            model: whose tensors are to have the names and shapes of those saved.
            config: dataclass or mapping; it is compared with the checkpoint's first.
            checked: leave out the check of shards, which another process has done.

        Raises:
            CheckpointError: naming what differs, is missing, is damaged or is no number.
        """
        self.check_architecture(config)
        if self.is_sharded:
            self._read_shards_into(model, checked)
        else:
            put_weights(model, self.weights(), self.path)
        check_finite(model, self.path)

    def _read_shards_into(self, model: nn.Module, checked: bool) -> None:
        shards, targets = self._shards(checked), model.state_dict()
        names = self._names_of_weights(shards)
        check_tensors_fit({name: shards.tensors[MODEL + kept] for name, kept in names.items()}, targets, self.path)
        ties = [[name for name in each if name not in self.copies] for each in tied_names(model)]
        ties = [each for each in ties if len(each) > 1]  # ours are stored once
        stored = shards.read([MODEL + name for each in ties for name in each])
        check_ties([[MODEL + name for name in each] for each in ties], stored, self.path)
        shards.read_into({MODEL + name: targets[name] for name in names if name not in self.copies})
        for name, kept in self.copies.items():  # a model may have untied what was tied
            if targets[name] is not targets[kept]:
                shards.read_into({MODEL + kept: targets[name]})

    def check_architecture(self, config: Any) -> None:
        """Raise CheckpointError naming the first setting that differs in a model (dataclass or mapping; None: any).

        A setting that the checkpoint does not state is newer than it, and what it was before. One that states none at
        all was written without a configuration.
        """
        if config is not None and self.config:
            check_architecture({**defaults(config), **self.config}, to_plain(config or {}), self.path)

    def check(self) -> "Checkpoint":
        """Read all files and compare them with what was saved; raises CheckpointError naming the first that differs."""
        for name in self.files:
            self._check(name)
        return self

    def parameters(self) -> int:
        """How many numbers the weights have, tied ones once; read from the files' headers alone."""
        if self.is_sharded:
            stored = self._shards(checked=True).tensors
            return sum(shape.numel() for name, (shape, _) in stored.items() if name.startswith(MODEL))
        return sum(shape.numel() for shape in stored_shapes(self.path / WEIGHTS).values())

    def check_size(self, numbers: int) -> None:
        """Raise CheckpointError where a model of so many numbers, or more, cannot be what this one holds."""
        names = [name for name in self.files if name.startswith(f"{SHARDS}/")] if self.is_sharded else [WEIGHTS]
        for name in names:
            if not (self.path / name).is_file():
                raise CheckpointError(f"{self.path / name}: is missing")
        check_size(numbers, sum((self.path / name).stat().st_size for name in names), self.path)

    def _names_of_weights(self, shards: Shards) -> dict[str, str]:
        """{name in the state dict: name in the shards, without its beginning}."""
        stored = {name.removeprefix(MODEL) for name in shards.tensors if name.startswith(MODEL)}
        missing = set(self.copies.values()) - stored
        if missing:
            raise CheckpointError(f"{self.path / META}: is damaged: copies names {min(missing)}, which is not stored")
        return {name: name for name in stored} | self.copies

    def _shards(self, checked: bool = False) -> Shards:
        recorded = {name for name in self.files if name.startswith(f"{SHARDS}/")}
        for name in () if checked else recorded:
            self._check(name)
        folder = self.path / SHARDS
        for name in sorted(path.name for path in folder.glob(f"*{SUFFIX}")):
            if f"{SHARDS}/{name}" not in recorded:
                raise CheckpointError(f"{folder / name}: does not belong to this checkpoint")
        return Shards(folder)

    def _check(self, name: str) -> None:
        path, recorded = self.path / name, self.files.get(name)
        if recorded is None or not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        size = path.stat().st_size
        if size != recorded["bytes"]:
            raise CheckpointError(f"{path}: is damaged: it has {size:,} bytes instead of {recorded['bytes']:,}")
        if sha256(path) != recorded["sha256"]:
            raise CheckpointError(f"{path}: is damaged: its content is not what was saved (SHA-256 differs)")


def average_checkpoints(paths: Sequence[Path | str]) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoint folders of one architecture, each checked before."""
    if not paths:
        raise ValueError("paths is empty; averaging needs at least one checkpoint")
    return average_weights((path, Checkpoint.open(path).weights()) for path in paths)


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write what resuming needs; raises OSError on a full disk."""
    with path.open("xb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # the archive writer's own complaint hides the write that failed before it
            raise OSError(f"{path.name}: {error.__context__ or error}") from None


def write_meta(
    folder: Path,
    step: int,
    config: Any,
    metrics: Mapping[str, float],
    files: Mapping[str, Mapping[str, Any]],
    copies: Mapping[str, str],
) -> None:
    """Write the last file of a checkpoint, which says what the others are."""
    meta = {"step": step, "config": to_plain(config or {}), "metrics": dict(metrics), "files": dict(files)}
    if copies:
        meta["copies"] = dict(copies)
    write_file(folder / META, (json.dumps(meta, indent=1) + "\n").encode("utf-8"))


def file_facts(path: Path) -> dict[str, Any]:
    """What a checkpoint records of one of its files."""
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def defaults(config: Any) -> dict[str, Any]:
    """What a dataclass's fields were where nothing states them, as `to_plain` gives values; a mapping has none."""
    if config is None or isinstance(config, Mapping):
        return {}
    found = {each.name: each.default for each in dataclasses.fields(config)}
    found = {name: default for name, default in found.items() if default is not dataclasses.MISSING}
    return to_plain(found | befores(type(config)))


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put_targets(
    state: dict[str, Any], shards: Shards | None, target: Callable[[int, torch.Size, torch.dtype], Tensor], origin: Path
) -> dict[str, Tensor]:
    """Put a tensor for each of the optimiser's that shards hold into a state; returns them under their names there."""
    targets: dict[str, Tensor] = {}
    try:
        for name, (shape, dtype) in {} if shards is None else shards.tensors.items():
            if name.startswith(OPTIMIZER):
                index, _, key = name.removeprefix(OPTIMIZER).partition(".")  # "optimizer.3.exp_avg": parameter 3
                entries = state["optimizer"]["state"][int(index)]
                targets[name] = entries[key] = target(int(index), shape, dtype)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError):  # the last where it has too many numbers
        raise CheckpointError(
            f"{origin}: not a state of this run: it does not fit {SHARDS}/, which holds {name}"
        ) from None
    return targets
