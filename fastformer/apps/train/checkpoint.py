"""Write and read one checkpoint: a folder of safetensors and JSON files. Nothing is unpickled.

    model.safetensors      weights: all that inference needs
    optimizer.safetensors  the optimizer's tensors, such as "3.exp_avg" of parameter 3
    state.json             schedule, random generators, position in the data: see `trainer.py`
    meta.json              step, architecture, metrics

An average of checkpoints has neither optimizer nor state. Names, shapes and dtypes are compared with the model before
a tensor is copied, because torch would cast any dtype to any other. `checkpoint_folder.py` decides which checkpoints a
run keeps.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.settings import to_plain
from fastformer.apps.train.parallel import local_shard

WEIGHTS, OPTIMIZER, STATE, META = "model.safetensors", "optimizer.safetensors", "state.json", "meta.json"

# The tensors in an optimizer's state for one parameter.
_ADAM_TENSORS = ("step", "exp_avg", "exp_avg_sq")
OPTIMIZER_TENSORS = {"adamw": _ADAM_TENSORS, "adam": _ADAM_TENSORS, "sgd": ("momentum_buffer",)}

# Each may be loaded into each other: a model is exported, and trained, in other precisions than it was saved in.
_FLOATING = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_DAMAGE = ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError  # of untrusted JSON


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model; the message is one line for the user."""


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors; tied ones, in the same memory, once. Raises OSError on a full disk."""
    from safetensors.torch import save

    first_names: dict[tuple[Any, ...], str] = {}
    stored: dict[str, Tensor] = {}
    copies: dict[str, str] = {}
    for name, tensor in weights.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        first = first_names.setdefault(memory, name) if tensor.numel() else name
        if first == name:
            stored[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        else:
            copies[name] = first
    content = save(stored, metadata={"format": "pt", **copies})
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # `save` writes it in a random order
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    with path.open("wb") as file:
        for part in (content[:8], text, memoryview(content)[8 + size :]):
            file.write(part)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU, tied ones under each of their names."""
    with _opened(path) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        metadata = file.metadata() or {}
    return {name: weights[first] for name, first in metadata.items() if first in weights} | weights


def stored_shapes(path: Path) -> dict[str, torch.Size]:
    """Return the shapes in the header of a safetensors file, tied tensors once; raises CheckpointError."""
    with _opened(path) as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file for the block; raise a CheckpointError of one line for every error in it."""
    from safetensors import safe_open

    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such weights file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # also a MemoryError, of a sparse file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: not a readable safetensors file ({reason})") from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the weights of a safetensors file into a model; raises CheckpointError as `put_weights`, and for NaN."""
    put_weights(model, read_weights(path), path)
    check_finite(model, path)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor], origin: Path | str) -> None:
    """Copy weights into a model, in place and strictly; raises CheckpointError naming the first tensor that differs.

    A parameter with two names in the model must have equal values under both, or one of them would be lost.
    """
    expected = model.state_dict()
    check_tensors_fit(weights, expected, origin)
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(parameter, name)
        if weights[name] is not weights[first] and not torch.equal(weights[name], weights[first]):
            raise CheckpointError(f"{origin}: holds different numbers as {first} and {name}, which this model ties")
    model.load_state_dict({name: local_shard(weights[name], tensor) for name, tensor in expected.items()})


def check_tensors_fit(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor], origin: Path | str) -> None:
    """Raise CheckpointError naming the first tensor that is missing, unknown, or of another shape or kind of dtype."""
    for name, tensor in expected.items():
        if name not in saved:
            raise CheckpointError(f"{origin}: does not hold {name}, which this model has")
        shape, dtype = list(saved[name].shape), saved[name].dtype
        if shape != list(tensor.shape):
            raise CheckpointError(f"{origin}: holds {name} of shape {shape}, but this model's is {list(tensor.shape)}")
        if not same_kind(dtype, tensor.dtype):
            raise CheckpointError(f"{origin}: holds {name} of {dtype}, but this model's is {tensor.dtype}")
    if extra := next((name for name in saved if name not in expected), None):
        raise CheckpointError(f"{origin}: holds {extra}, which this model does not have")


def same_kind(saved: torch.dtype, expected: torch.dtype) -> bool:
    """Return whether a dtype may be loaded into another: equal ones, and floating ones of any usual width."""
    return saved == expected or {saved, expected} <= _FLOATING


def check_size(numbers: int, files: Sequence[Path], origin: Path | str) -> None:
    """Raise CheckpointError for a model larger than its weights' files, because untrusted settings may name any size.

    numbers: elements that the model has at least; one takes two bytes or more.
    """
    stored = sum(path.stat().st_size for path in files if path.is_file())
    if 2 * numbers > stored:
        raise CheckpointError(
            f"{origin}: the settings are of a model with {numbers:,} parameters or more, but {stored:,} bytes of "
            "weights are there: it is damaged, or of another model"
        )


def check_finite(model: nn.Module, origin: Path | str) -> None:
    """Raise CheckpointError naming the first parameter that holds a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise CheckpointError(f"{origin}: {name} holds NaN or infinity; it is damaged, or its training diverged")


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: `path` its folder, `config` the architecture's settings, `metrics` of its validation."""

    path: Path
    step: int
    config: dict[str, Any]
    metrics: dict[str, float]

    @classmethod
    def open(cls, path: Path | str) -> "Checkpoint":
        """Read meta.json; raises CheckpointError if it is missing or damaged."""
        path = Path(path)
        meta = _read_json(path / META)
        try:
            return cls(path, int(meta["step"]), dict(meta["config"]), dict(meta["metrics"]))
        except _DAMAGE as error:
            raise CheckpointError(f"{path / META}: is damaged ({type(error).__name__}: {error})") from None

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors, on the CPU."""
        return read_weights(self.path / WEIGHTS)

    def state(self) -> dict[str, Any]:
        """Return the plain values that resuming needs; raises CheckpointError if there are none, as in an average."""
        if not (self.path / STATE).is_file():
            raise CheckpointError(f"{self.path}: holds weights only, training cannot continue from it")
        return _read_json(self.path / STATE)

    def optimizer_state(self, parameters: Sequence[Tensor], optimizer: str) -> dict[int, dict[str, Tensor]]:
        """Return {parameter: {name: tensor}}, as `torch.optim.Optimizer.state_dict` has it under "state".

        parameters: the optimizer's, in its order. optimizer: a key of `OPTIMIZER_TENSORS`. Raises CheckpointError
        naming the first tensor that the optimizer does not have, or has in another shape.
        """
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
        """Copy the weights into a model; raises the errors of `check_architecture` and `load_weights`."""
        self.check_architecture(config)
        load_weights(model, self.path / WEIGHTS)

    def check_architecture(self, config: Any, numbers: int = 0) -> None:
        """Raise CheckpointError naming the first setting that differs between a model and the checkpoint.

        config: the model's, a dataclass or mapping; None: nothing is compared. A setting that the checkpoint lacks has
        its default there. A checkpoint without settings fits every model.
        numbers: see `check_size`.
        """
        if config is not None and self.config:
            expected, saved = to_plain(config), {**_defaults(config), **self.config}
            for name in {**expected, **saved}:
                stored, needed = (repr(each[name]) if name in each else "nothing" for each in (saved, expected))
                if stored != needed:
                    raise CheckpointError(
                        f"{self.path}: is of another architecture: it has {name}={stored}, this model {needed}"
                    )
        if numbers:
            check_size(numbers, [self.path / WEIGHTS], self.path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); not a checkpoint") from None
    except _DAMAGE as error:
        raise CheckpointError(f"{path}: is damaged ({type(error).__name__}: {error})") from None


def _defaults(config: Any) -> dict[str, Any]:
    """Return the plain defaults of a dataclass's fields; {} for a mapping."""
    items = () if isinstance(config, Mapping) else dataclasses.fields(config)
    return to_plain({each.name: each.default for each in items if each.default is not dataclasses.MISSING})


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
