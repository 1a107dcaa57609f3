"""Weights as safetensors files, loaded by name and shape with one-line errors, and averaged.

Parameters that share memory (tied embeddings) are written once; the file's header names the copies, in the form that
`safetensors.torch.load_model` reads too. No pickle is involved: a weights file of a stranger can be opened safely.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.train.distributed import part_of


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model; the message is one line for the user."""


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors; tensors that are the same memory are stored once. Raises OSError on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    copies: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in weights.items():
        tensor = tensor.detach()
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if place in seen and tensor.numel():
            copies[name] = seen[place]
            continue
        seen[place] = name
        # safetensors refuses tensors that overlap without being equal, so those become tensors of their own.
        storage = tensor.untyped_storage().data_ptr()
        own = tensor.is_contiguous() and storage not in storages
        storages.add(storage)
        kept[name] = tensor if own else tensor.clone(memory_format=torch.contiguous_format)
    try:
        save_file(kept, path, metadata={"format": "pt", **copies})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU, tied ones under each of their names."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such weights file")
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    return weights | {name: weights[kept] for name, kept in metadata.items() if kept in weights}


def put_weights(model: nn.Module, weights: Mapping[str, Tensor], origin: Path | str) -> None:
    """Copy weights into a model, in place and strictly; raises CheckpointError naming the first tensor that differs."""
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name not in weights:
            raise CheckpointError(f"{origin}: does not hold {name}, which this model has")
        if weights[name].shape != tensor.shape:
            theirs, ours = list(weights[name].shape), list(tensor.shape)
            raise CheckpointError(f"{origin}: holds {name} of shape {theirs}, but this model's is {ours}")
    extra = next((name for name in weights if name not in expected), None)
    if extra is not None:
        raise CheckpointError(f"{origin}: holds {extra}, which this model does not have")
    model.load_state_dict({name: part_of(weights[name], tensor) for name, tensor in expected.items()})


def check_architecture(saved: Mapping[str, Any], expected: Mapping[str, Any], origin: Path | str) -> None:
    """Raise CheckpointError naming the first setting in which a checkpoint's architecture is not the expected one."""
    absent = object()
    for name in [*expected, *(name for name in saved if name not in expected)]:
        theirs, ours = saved.get(name, absent), expected.get(name, absent)
        if theirs != ours:
            theirs, ours = ("nothing" if value is absent else repr(value) for value in (theirs, ours))
            raise CheckpointError(f"{origin}: is of another architecture: it has {name}={theirs}, this model {ours}")


def average_weights(files: Iterable[Path]) -> dict[str, Tensor]:
    """The mean of the tensors of several weights files, summed in fp64; integers are taken from the last file."""
    paths = list(files)
    if not paths:
        raise ValueError("paths is empty; averaging needs at least one checkpoint")
    last = read_weights(paths[-1])
    mean = {name: tensor.double() for name, tensor in last.items() if tensor.is_floating_point()}
    for path in paths[:-1]:
        weights = read_weights(path)
        check_architecture(_shapes(weights), _shapes(last), path)
        for name, tensor in mean.items():
            tensor += weights[name]
    return {name: (mean[name] / len(paths)).to(last[name].dtype) if name in mean else last[name] for name in last}


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in weights.items()}
