"""Write and read one checkpoint: a folder of safetensors and JSON files. Nothing is unpickled.

    model.safetensors      weights: all that inference needs
    optimizer.safetensors  the optimizer's tensors, such as "3.exp_avg" of parameter 3
    state.json             schedule, random generators, position in the data: see `run_state.py`
    meta.json              step, architecture, metrics, and size and SHA-256 of the other files; written last

An average of checkpoints has neither optimizer nor state. Names, shapes, dtypes and sizes are compared with the model
before a tensor is copied. `checkpoint_folder.py` decides which checkpoints a run keeps.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.settings import befores, to_plain
from fastformer.apps.system.files import inside, synchronise, write_file
from fastformer.apps.train.weights import (
    CheckpointError,
    check_size,
    check_tensors_fit,
    load_weights,
    read_weights,
    stored_shapes,
    write_weights,
)

WEIGHTS, OPTIMIZER, STATE, META = "model.safetensors", "optimizer.safetensors", "state.json", "meta.json"

# The tensors in an optimizer's state for one parameter.
_ADAM_TENSORS = ("step", "exp_avg", "exp_avg_sq")
OPTIMIZER_TENSORS = {"adamw": _ADAM_TENSORS, "adam": _ADAM_TENSORS, "sgd": ("momentum_buffer",)}


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
            checkpoint = cls(path, int(meta["step"]), dict(meta["config"]), dict(meta["metrics"]), files)
        except OSError as error:
            raise CheckpointError(f"{path / META}: cannot be read ({error.strerror}); not a checkpoint") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path / META}: is damaged ({type(error).__name__}: {error})") from None
        if (path / "shards").is_dir():
            raise CheckpointError(
                f"{path}: was written in shards, which this version does not read; with the version that wrote it, "
                "resume the run with --no-sharded-checkpoints, which saves a whole checkpoint"
            )
        return checkpoint

    def check(self, *names: str) -> "Checkpoint":
        """Compare files (all by default) with their saved size and SHA-256; raises CheckpointError naming the first."""
        for name in names or self.files:
            path, saved = self.path / name, self.files.get(name)
            if saved is None or not path.is_file():
                raise CheckpointError(f"{path}: is missing")
            if (size := path.stat().st_size) != saved["bytes"]:
                raise CheckpointError(f"{path}: is damaged: it has {size:,} bytes instead of {saved['bytes']:,}")
            if file_facts(path) != saved:
                raise CheckpointError(f"{path}: is damaged: its content is not what was saved (SHA-256 differs)")
        return self

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors, on the CPU, after size and SHA-256 of their file were checked."""
        self.check(WEIGHTS)
        return read_weights(self.path / WEIGHTS)

    def state(self) -> dict[str, Any]:
        """Return the plain values that resuming needs; raises CheckpointError if there are none, as in an average."""
        if STATE not in self.files:
            raise CheckpointError(f"{self.path}: holds weights only, training cannot continue from it")
        self.check(STATE)
        try:
            return dict(json.loads((self.path / STATE).read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.path / STATE}: is damaged ({type(error).__name__}: {error})") from None

    def optimizer_state(self, parameters: Sequence[Tensor], optimizer: str) -> dict[int, dict[str, Tensor]]:
        """Return {parameter: {name: tensor}}, as `torch.optim.Optimizer.state_dict` has it under "state".

        Args:
            parameters: the optimizer's parameters, in its order.
            optimizer: a key of `OPTIMIZER_TENSORS`.

        Raises:
            CheckpointError: naming the first tensor that the optimizer does not have, or has in another shape.
        """
        self.check(OPTIMIZER)
        tensors = read_weights(self.path / OPTIMIZER)
        expected: dict[str, Tensor] = {}
        for index in {name.partition(".")[0] for name in tensors} & set(map(str, range(len(parameters)))):
            for key in OPTIMIZER_TENSORS[optimizer]:
                expected[f"{index}.{key}"] = torch.empty(()) if key == "step" else parameters[int(index)]
        check_tensors_fit(tensors, expected, self.path)
        nested: dict[int, dict[str, Tensor]] = {}
        for name, x in tensors.items():
            index, _, key = name.partition(".")
            nested.setdefault(int(index), {})[key] = x
        return nested

    def load_into(self, model: nn.Module, config: Any = None) -> None:
        """Copy the weights into `model`, which must have tensors of the saved names and shapes.

        config: the model's configuration, a dataclass or mapping, which is compared first; None: no comparison. Raises
        CheckpointError naming what differs, is missing, is damaged or is not finite.
        """
        self.check_architecture(config)
        self.check(WEIGHTS)
        load_weights(model, self.path / WEIGHTS)

    def check_architecture(self, config: Any) -> None:
        """Raise CheckpointError naming the first setting that differs between a model and the checkpoint.

        config: the model's, a dataclass or mapping; None: nothing is compared. A setting that the checkpoint lacks is
        newer than the checkpoint, and compared by its earlier value. A checkpoint without settings fits every model.
        """
        if config is None or not self.config:
            return
        expected, saved = to_plain(config), {**_earlier_values(config), **self.config}
        for name in {**expected, **saved}:
            if name not in saved or name not in expected or saved[name] != expected[name]:
                stored, needed = (repr(each[name]) if name in each else "nothing" for each in (saved, expected))
                raise CheckpointError(
                    f"{self.path}: is of another architecture: it has {name}={stored}, this model {needed}"
                )

    def parameters(self) -> int:
        """Return the number of elements of all weights, tied ones counted once; only the file's header is read."""
        return sum(shape.numel() for shape in stored_shapes(self.path / WEIGHTS).values())

    def check_size(self, numbers: int) -> None:
        """Raise CheckpointError if the weights file is too small for a model of `numbers` elements or more."""
        if not (self.path / WEIGHTS).is_file():
            raise CheckpointError(f"{self.path / WEIGHTS}: is missing")
        check_size(numbers, (self.path / WEIGHTS).stat().st_size, self.path)


def write_checkpoint(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any] | None,
    config: Any,
    metrics: Mapping[str, float] | None,
) -> None:
    """Write the files of a checkpoint into an empty folder, meta.json last, and flush them to the disk."""
    write_weights(folder / WEIGHTS, weights)
    if state is not None:
        optimizer = state.get("optimizer", {}).items()
        tensors = {f"{i}.{key}": x for i, entries in optimizer for key, x in entries.items() if isinstance(x, Tensor)}
        write_weights(folder / OPTIMIZER, tensors)
        plain = {name: value for name, value in state.items() if name != "optimizer"}
        (folder / STATE).write_text(json.dumps(plain), "utf-8")
    files = sorted(folder.iterdir())
    meta = {
        "step": step,
        "config": to_plain(config or {}),
        "metrics": dict(metrics or {}),
        "files": {path.name: file_facts(path) for path in files},
    }
    for path in files:
        synchronise(path)
    write_file(folder / META, (json.dumps(meta, indent=1) + "\n").encode("utf-8"))
    synchronise(folder)


def average_checkpoints(paths: Sequence[Path | str]) -> dict[str, Tensor]:
    """Return the mean of the weights of several checkpoint folders, summed in fp64; integers are those of the last.

    Raises CheckpointError for weights that are damaged or of different models.
    """
    if not paths:
        raise ValueError("paths is empty; averaging needs at least one checkpoint")
    first, total = Checkpoint.open(paths[0]).weights(), dict[str, Tensor]()
    for path in paths:
        last = Checkpoint.open(path).weights()
        check_tensors_fit(last, first, path)
        for name, x in last.items():
            if x.is_floating_point() or x.is_complex():
                total[name] = total.get(name, 0) + x.to(torch.promote_types(x.dtype, torch.float64))
    return {name: (total[name] / len(paths)).to(x.dtype) if name in total else x for name, x in last.items()}


def file_facts(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _earlier_values(config: Any) -> dict[str, Any]:
    """Return the plain values that a dataclass's fields have in files that leave them out; {} for a mapping."""
    if isinstance(config, Mapping):
        return {}
    values = {each.name: each.default for each in dataclasses.fields(config)}
    values = {name: default for name, default in values.items() if default is not dataclasses.MISSING}
    return to_plain(values | befores(type(config)))
