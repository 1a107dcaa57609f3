"""Write and load weights as safetensors files; compare them with a model by name, shape and dtype.

All tensors are compared before one is copied, because torch would cast any dtype to any other. Parameters that share
memory (tied embeddings) are written once; the file's header names their other names. Nothing is unpickled.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.train.parallel import part_of

# Each may be loaded into each other: a model is exported, and trained, in other precisions than it was saved in.
_FLOATING = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model; the message is one line for the user."""


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors; tensors in the same memory are stored once. Raises OSError on a full disk."""
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
    path.write_bytes(save(stored, metadata={"format": "pt", **copies}))


def check_storable(state: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first value of a model's state dict that is not a dense tensor."""
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ValueError(
                f"model: its state holds {name} of type {type(value).__name__}, but checkpoints hold dense tensors only"
            )


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
    model.load_state_dict({name: part_of(weights[name], tensor) for name, tensor in expected.items()})


def check_tensors_fit(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor], origin: Path | str) -> None:
    """Raise CheckpointError naming the first tensor that is missing, unknown, or of another shape or kind of dtype."""
    for name, tensor in expected.items():
        if name not in saved:
            raise CheckpointError(f"{origin}: does not hold {name}, which this model has")
        shape, dtype = saved[name].shape, saved[name].dtype
        if shape != tensor.shape:
            raise CheckpointError(
                f"{origin}: holds {name} of shape {list(shape)}, but this model's is {list(tensor.shape)}"
            )
        if not same_kind(dtype, tensor.dtype):
            raise CheckpointError(f"{origin}: holds {name} of {dtype}, but this model's is {tensor.dtype}")
    if extra := next((name for name in saved if name not in expected), None):
        raise CheckpointError(f"{origin}: holds {extra}, which this model does not have")


def same_kind(saved: torch.dtype, expected: torch.dtype) -> bool:
    """Return whether a dtype may be loaded into another: equal ones, and floating ones of any usual width."""
    return saved == expected or {saved, expected} <= _FLOATING


def check_size(numbers: int, stored: int, origin: Path | str) -> None:
    """Raise CheckpointError for a model larger than its stored weights, because untrusted settings may name any size.

    numbers: elements that the model has at least. stored: bytes of the weights' files; an element takes two or more.
    """
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
