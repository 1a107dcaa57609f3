"""How one checkpoint is written and read: a folder of safetensors and JSON files, which a rename makes complete.

    model.safetensors      weights: all that inference needs
    optimizer.safetensors  the optimizer's tensors, such as "3.exp_avg" of parameter 3
    state.json             schedule, random generators, position in the data: see `saving.py`
    meta.json              step, architecture, metrics, and size and SHA-256 of the other files; written last
    shards/                in a sharded checkpoint, in place of the first two: the tensors as each process held them

An average of checkpoints has neither optimizer nor state. Nothing is unpickled. Names, shapes, dtypes and sizes are
compared with the model before a tensor is copied. `checkpoint_folder.py` says which checkpoints a run keeps.

Earlier versions wrote `state.pt` in place of optimizer.safetensors and state.json. It is read by torch's loader of
tensors and plain values (weights_only), which runs no code of the file.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.settings import befores, to_plain
from fastformer.apps.system.files import inside, synchronise, write_file
from fastformer.apps.train.parallel import empty_part
from fastformer.apps.train.shards import SUFFIX, Shards
from fastformer.apps.train.weights import (
    CheckpointError,
    average_weights,
    check_architecture,
    check_finite,
    check_size,
    check_tensors_fit,
    check_ties,
    facts_of,
    put_weights,
    read_weights,
    stored_shapes,
    tied_names,
    write_weights,
)

WEIGHTS, OPTIMIZER, STATE, META = "model.safetensors", "optimizer.safetensors", "state.json", "meta.json"
OLD_STATE, SHARDS = "state.pt", "shards"
# The beginnings of names in shards: "model.0.weight" and "optimizer.3.exp_avg".
IN_MODEL, IN_OPTIMIZER = "model.", "optimizer."

# The tensors that an optimizer keeps for a parameter.
OPTIMIZER_TENSORS = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "adam": ("step", "exp_avg", "exp_avg_sq"),
                     "sgd": ("momentum_buffer",)}  # fmt: skip


def write_checkpoint(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor] | None,
    state: Mapping[str, Any] | None,
    config: Any = None,
    metrics: Mapping[str, float] | None = None,
    shards: Mapping[str, Mapping[str, Any]] | None = None,
    copies: Mapping[str, str] | None = None,
) -> None:
    """Write the files of a checkpoint into a hidden folder, meta.json last, and flush them to the disk.

    Args:
        folder: is there, and gets its name after this.
        step: of the run.
        weights: of the model; None: they are in shards.
        state: what resuming needs: plain values, and under "optimizer" {parameter: {name: tensor}}, which are left out
            where they are in shards. None: the checkpoint is an average.
        config: the architecture, a dataclass or mapping.
        metrics: of the validation.
        shards: {name: facts} of files below `folder` that are on the disk already.
        copies: see `Checkpoint`.
    """
    if weights is not None:
        write_weights(folder / WEIGHTS, weights)
    if state is not None:
        if weights is not None:
            write_weights(folder / OPTIMIZER, flat_state(state.get("optimizer", {})))
        plain = {name: value for name, value in state.items() if name != "optimizer"}
        (folder / STATE).write_text(json.dumps(plain), "utf-8")
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    facts = {path.name: file_facts(path) for path in files}
    meta = {
        "step": step,
        "config": to_plain(config or {}),
        "metrics": dict(metrics or {}),
        "files": {**facts, **(shards or {})},
        **({"copies": dict(copies)} if copies else {}),
    }
    for path in files:
        synchronise(path)
    write_file(folder / META, (json.dumps(meta, indent=1) + "\n").encode("utf-8"))
    for path in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        synchronise(path)


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
        """Read meta.json; raises CheckpointError if it is missing or damaged, or names a file outside the folder."""
        path = Path(path)
        try:
            meta = json.loads((path / META).read_bytes())
            files = {
                str(name): {"bytes": int(file["bytes"]), "sha256": str(file["sha256"])}
                for name, file in dict(meta["files"]).items()
            }
            for name in files:
                inside(path, name)
            copies = {str(name): str(kept) for name, kept in dict(meta.get("copies", {})).items()}
            return cls(path, int(meta["step"]), dict(meta["config"]), dict(meta["metrics"]), files, copies)
        except OSError as error:
            raise CheckpointError(f"{path / META}: cannot be read ({error.strerror}); not a checkpoint") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path / META}: is damaged ({type(error).__name__}: {error})") from None

    @property
    def is_sharded(self) -> bool:
        """Whether each process wrote its own part."""
        return any(name.startswith(f"{SHARDS}/") for name in self.files)

    def check(self) -> "Checkpoint":
        """Read all files and compare them with what was saved; raises CheckpointError naming the first that differs."""
        for name in self.files:
            self._check(name)
        return self

    def weights(self) -> dict[str, Tensor]:
        """Return the whole tensors, on the CPU, after size and SHA-256 of their files were checked."""
        if not self.is_sharded:
            self._check(WEIGHTS)
            return read_weights(self.path / WEIGHTS)
        shards = self._shards()
        names = self._names_of_weights(shards)
        stored = shards.read({IN_MODEL + kept for kept in names.values()})
        return {name: stored[IN_MODEL + kept] for name, kept in names.items()}

    def state(self) -> dict[str, Any]:
        """Return the plain values that resuming needs; raises CheckpointError if there are none, as in an average."""
        if OLD_STATE in self.files:
            self._check(OLD_STATE)
            return _read_old_state(self.path / OLD_STATE)[0]
        if STATE not in self.files:
            raise CheckpointError(f"{self.path}: holds weights only, training cannot continue from it")
        self._check(STATE)
        try:
            return dict(json.loads((self.path / STATE).read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.path / STATE}: is damaged ({type(error).__name__}: {error})") from None

    def optimizer_state(
        self, parameters: Sequence[Tensor], optimizer: str, checked: bool = False
    ) -> dict[int, dict[str, Tensor]]:
        """Return {parameter: {name: tensor}}, as `torch.optim.Optimizer.state_dict` has it under "state".

        Args:
            parameters: of the optimizer, in its order. Of shards, the parts that belong to them are read.
            optimizer: a key of `OPTIMIZER_TENSORS`.
            checked: another process has checked the shards.

        Raises:
            CheckpointError: naming the first tensor that such an optimizer lacks or has in another shape.
        """
        tensors: dict[str, Tensor] = {}
        if OLD_STATE in self.files:
            self._check(OLD_STATE)
            tensors = _read_old_state(self.path / OLD_STATE)[1]
        elif not self.is_sharded:
            self._check(OPTIMIZER)
            tensors = read_weights(self.path / OPTIMIZER)
        facts, shards = facts_of(tensors), self._shards(checked) if self.is_sharded else None
        for name, fact in shards.tensors.items() if shards else ():
            if name.startswith(IN_OPTIMIZER):
                facts[name.removeprefix(IN_OPTIMIZER)] = fact
        check_tensors_fit(facts, _expected(facts, parameters, optimizer), self.path)
        if shards is not None:
            in_shards = {name: fact for name, fact in facts.items() if name not in tensors}
            for name, (shape, dtype) in in_shards.items():
                parameter = parameters[int(name.partition(".")[0])]
                tensors[name] = empty_part(shape, dtype, parameter) if shape else torch.empty(shape, dtype=dtype)
            shards.read_into({IN_OPTIMIZER + name: tensors[name] for name in in_shards})
        nested: dict[int, dict[str, Tensor]] = {}
        for name, x in tensors.items():
            index, _, key = name.partition(".")
            nested.setdefault(int(index), {})[key] = x
        return nested

    def load_into(self, model: nn.Module, config: Any = None, checked: bool = False) -> None:
        """Copy the weights into `model`. Of sharded parameters in a sharded checkpoint, only their parts are read.

        Args:
            model: whose tensors are to have the names and shapes of those saved.
            config: dataclass or mapping; it is compared with the checkpoint's first.
            checked: another process has checked the shards.

        Raises:
            CheckpointError: naming what differs, is missing, is damaged or is not finite.
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
        check_tensors_fit({name: shards.tensors[IN_MODEL + kept] for name, kept in names.items()}, targets, self.path)
        ties = [[name for name in each if name not in self.copies] for each in tied_names(model)]
        ties = [each for each in ties if len(each) > 1]  # parameters that the run tied are stored once
        stored = shards.read([IN_MODEL + name for each in ties for name in each])
        check_ties([[IN_MODEL + name for name in each] for each in ties], stored, self.path)
        shards.read_into({IN_MODEL + name: targets[name] for name in names if name not in self.copies})
        for name, kept in self.copies.items():  # a model may have untied what was tied
            if targets[name] is not targets[kept]:
                shards.read_into({IN_MODEL + kept: targets[name]})

    def check_architecture(self, config: Any) -> None:
        """Raise CheckpointError naming the first setting that differs in a model (dataclass or mapping; None: any).

        A setting that the checkpoint does not state is newer than it, and what it was before. One that states none at
        all was written without a configuration.
        """
        if config is not None and self.config:
            check_architecture({**defaults(config), **self.config}, to_plain(config or {}), self.path)

    def parameters(self) -> int:
        """Return how many numbers the weights have, tied ones once; only the files' headers are read."""
        if self.is_sharded:
            stored = self._shards(checked=True).tensors
            return sum(shape.numel() for name, (shape, _) in stored.items() if name.startswith(IN_MODEL))
        return sum(shape.numel() for shape in stored_shapes(self.path / WEIGHTS).values())

    def check_size(self, numbers: int) -> None:
        """Raise CheckpointError if a model of so many numbers, or more, cannot be what this checkpoint holds."""
        names = [name for name in self.files if name.startswith(f"{SHARDS}/")] if self.is_sharded else [WEIGHTS]
        for name in names:
            if not (self.path / name).is_file():
                raise CheckpointError(f"{self.path / name}: is missing")
        check_size(numbers, sum((self.path / name).stat().st_size for name in names), self.path)

    def _names_of_weights(self, shards: Shards) -> dict[str, str]:
        """Return {name in the state dict: name in the shards, without its beginning}."""
        stored = {name.removeprefix(IN_MODEL) for name in shards.tensors if name.startswith(IN_MODEL)}
        missing = set(self.copies.values()) - stored
        if missing:
            raise CheckpointError(f"{self.path / META}: is damaged: copies names {min(missing)}, which is not stored")
        return {name: name for name in stored} | self.copies

    def _shards(self, checked: bool = False) -> Shards:
        recorded = {name for name in self.files if name.startswith(f"{SHARDS}/")}
        for name in () if checked else recorded:
            self._check(name)
        for path in sorted((self.path / SHARDS).glob(f"*{SUFFIX}")):
            if f"{SHARDS}/{path.name}" not in recorded:
                raise CheckpointError(f"{path}: does not belong to this checkpoint")
        return Shards(self.path / SHARDS)

    def _check(self, name: str) -> None:
        path, recorded = self.path / name, self.files.get(name)
        if recorded is None or not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        size = path.stat().st_size
        if size != recorded["bytes"]:
            raise CheckpointError(f"{path}: is damaged: it has {size:,} bytes instead of {recorded['bytes']:,}")
        if file_facts(path) != recorded:
            raise CheckpointError(f"{path}: is damaged: its content is not what was saved (SHA-256 differs)")


def average_checkpoints(paths: Sequence[Path | str]) -> dict[str, Tensor]:
    """Return the mean of the weights of several checkpoint folders of one architecture, each checked before."""
    if not paths:
        raise ValueError("paths is empty; averaging needs at least one checkpoint")
    return average_weights((path, Checkpoint.open(path).weights()) for path in paths)


def flat_state(optimizer: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return an optimizer's tensors by name: {3: {"exp_avg": x}} becomes {"3.exp_avg": x}."""
    return {f"{i}.{key}": x for i, entries in optimizer.items() for key, x in entries.items() if isinstance(x, Tensor)}


def file_facts(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def defaults(config: Any) -> dict[str, Any]:
    """Return the values of a dataclass's fields that a file does not state, as `to_plain` gives them."""
    if config is None or isinstance(config, Mapping):
        return {}
    found = {each.name: each.default for each in dataclasses.fields(config)}
    found = {name: default for name, default in found.items() if default is not dataclasses.MISSING}
    return to_plain(found | befores(type(config)))


def _expected(names: Mapping[str, Any], parameters: Sequence[Tensor], optimizer: str) -> dict[str, Tensor]:
    """Return, on "meta", the tensors that an optimizer has for each parameter of which `names` holds any."""
    stepped = {name.partition(".")[0] for name in names}
    expected = {}
    for index, parameter in enumerate(parameters):
        for key in OPTIMIZER_TENSORS[optimizer] if str(index) in stepped else ():
            shape, dtype = ((), torch.float32) if key == "step" else (parameter.shape, parameter.dtype)
            expected[f"{index}.{key}"] = torch.empty(shape, dtype=dtype, device="meta")
    return expected


def _read_old_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the plain values, and the optimizer's tensors by name, of a state.pt of an earlier version."""
    try:
        state = dict(torch.load(path, map_location="cpu", weights_only=True))
        optimizer = flat_state(state.pop("optimizer")["state"])
        state["sums"] = {name: float(x) if isinstance(x, Tensor) else x for name, x in state["sums"].items()}
        return state, optimizer
    except Exception as error:  # torch.load may raise anything for a damaged archive
        text = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{path}: not a training state ({type(error).__name__}: {text})") from None
