"""Weights as safetensors files, loaded by name, shape and dtype with one-line errors, and averaged.

What a file holds is compared with the model before a number of it is copied: torch would cast anything to anything.

Parameters that share memory (tied embeddings) are written once; the file's header names the copies, in the form that
`safetensors.torch.load_model` reads too. No pickle is involved: a weights file of a stranger can be opened safely.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.train.parallel import part_of

# Of these, any may be loaded into any: a model is exported, and trained, in other precisions than it was saved in.
_FLOATING = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

_FORMAT = "format"  # what safetensors' own header says, beside the copies, whatever a weight is called


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model; the message is one line for the user."""


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors; tensors that are the same memory are stored once. Raises OSError on a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    copies: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if place in seen and tensor.numel() and name != _FORMAT:
            copies[name] = seen[place]
            continue
        seen[place] = name
        kept[name] = tensor
    kept = apart(kept)
    try:
        path.touch()  # with the usual mode, which safetensors' own files lack
        mode = path.stat().st_mode
        save_file(kept, path, metadata={_FORMAT: "pt", **copies})
        _sort_metadata(path)
        path.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from None
    except KeyError as error:
        raise TypeError(f"{path.name}: safetensors holds no numbers of {error.args[0]}") from None


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file by key: safetensors writes them in another order each time."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        if len(encoded) <= size:
            file.seek(8)
            file.write(encoded.ljust(size))  # the format allows spaces at the end


def check_storable(tensors: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first of a model's tensors that no weights file holds; nothing is written."""
    from safetensors import SafetensorError
    from safetensors.torch import load, save

    for name, tensor in tensors.items():
        what = f"model: its state holds {name} of type {type(tensor).__name__}"
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{what}, but checkpoints hold tensors alone")
        if tensor.layout != torch.strided:
            raise ValueError(f"{what} and {tensor.layout}, but checkpoints hold dense ones alone")
        try:
            load(save({name: torch.empty(0, dtype=tensor.dtype)}))
        except KeyError:
            raise ValueError(f"{what}, but checkpoints hold no numbers of {tensor.dtype}") from None
        except (SafetensorError, UnicodeEncodeError):  # __metadata__
            raise ValueError(f"{what}, but checkpoints hold nothing of this name") from None


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, as safetensors demands; others are copied."""
    found: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        storage = tensor.untyped_storage().data_ptr()
        own = tensor.is_contiguous() and storage not in storages
        storages.add(storage)
        found[name] = tensor if own else tensor.clone(memory_format=torch.contiguous_format)
    return found


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU, tied ones under each of their names."""
    from safetensors import safe_open

    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such weights file")
    with _readable(path), safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        metadata = file.metadata() or {}
    copies = {name: kept for name, kept in metadata.items() if kept in weights and name != _FORMAT}
    return {name: weights[kept] for name, kept in copies.items()} | weights


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the weights of a safetensors file into a model; raises CheckpointError as `put_weights`, and for NaN."""
    put_weights(model, read_weights(path), path)
    check_finite(model, path)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor], origin: Path | str) -> None:
    """Copy weights into a model, in place and strictly; raises CheckpointError naming the first tensor that differs.

    A parameter that the model has under two names must be the same under both, or one of them would be lost.
    """
    expected = model.state_dict()
    check_tensors_fit(facts_of(weights), expected, origin)
    check_ties(tied_names(model), weights, origin)
    model.load_state_dict({name: part_of(weights[name], tensor) for name, tensor in expected.items()})


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that a model has under several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def check_ties(ties: Iterable[Sequence[str]], weights: Mapping[str, Tensor], origin: Path | str) -> None:
    """Raise CheckpointError if a parameter of several names (`tied_names`) is not stored the same under all of them."""
    for first, *others in ties:
        for name in others:
            if weights[name] is not weights[first] and not torch.equal(weights[name], weights[first]):
                raise CheckpointError(f"{origin}: holds different numbers as {first} and {name}, which this model ties")


def facts_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each tensor."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def check_tensors_fit(
    saved: Mapping[str, tuple[torch.Size, torch.dtype]], expected: Mapping[str, Tensor], origin: Path | str
) -> None:
    """Refuse tensors that a model lacks, or has in another shape or kind of number, before one of them is copied.

    Args:
        saved: shape and dtype by name.
        expected: the model's.
        origin: of the tensors, for messages.

    Raises:
        CheckpointError: naming the first that is missing, unknown, of another shape or of a dtype that cannot be cast.
    """
    for name, tensor in expected.items():
        if name not in saved:
            raise CheckpointError(f"{origin}: does not hold {name}, which this model has")
        shape, dtype = saved[name]
        if shape != tensor.shape:
            raise CheckpointError(
                f"{origin}: holds {name} of shape {list(shape)}, but this model's is {list(tensor.shape)}"
            )
        if not same_kind(dtype, tensor.dtype):
            raise CheckpointError(f"{origin}: holds {name} of {dtype}, but this model's is {tensor.dtype}")
    extra = next((name for name in saved if name not in expected), None)
    if extra is not None:
        raise CheckpointError(f"{origin}: holds {extra}, which this model does not have")


def same_kind(saved: torch.dtype, expected: torch.dtype) -> bool:
    """Return whether a dtype may be loaded into another: equal ones, and floating ones of any usual width."""
    return saved == expected or {saved, expected} <= _FLOATING


def check_size(numbers: int, stored: int, origin: Path | str) -> None:
    """Refuse to build a model that is larger than its stored weights, because untrusted settings may name any size.

    Args:
        numbers: that the model has at least.
        stored: bytes of the weights' files; a number takes two or more.
        origin: of the weights, for messages.

    Raises:
        CheckpointError: there are too few.
    """
    if 2 * numbers > stored:
        raise CheckpointError(
            f"{origin}: the settings are of a model with {numbers:,} parameters or more, but {stored:,} bytes of "
            "weights are there: it is damaged, or of another model"
        )


def check_finite(model: nn.Module, origin: Path | str) -> None:
    """Raise CheckpointError naming the first parameter with a NaN or an infinity, of which only garbage can come."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise CheckpointError(f"{origin}: {name} holds NaN or infinity; it is damaged, or its training diverged")


def check_architecture(saved: Mapping[str, Any], expected: Mapping[str, Any], origin: Path | str) -> None:
    """Raise CheckpointError naming the first setting in which a checkpoint's architecture is not the expected one."""
    absent = object()
    for name in [*expected, *(name for name in saved if name not in expected)]:
        theirs, ours = saved.get(name, absent), expected.get(name, absent)
        if theirs != ours:
            theirs, ours = ("nothing" if value is absent else repr(value) for value in (theirs, ours))
            raise CheckpointError(f"{origin}: is of another architecture: it has {name}={theirs}, this model {ours}")


def average_weights(sources: Iterable[tuple[Path | str, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the mean of several models' weights, summed in fp64; integers are those of the last.

    sources: (origin for messages, weights) each. Tied weights may be one tensor; no tensor is changed.
    """
    expected: dict[str, Tensor] = {}
    total: dict[str, Tensor] = {}
    last: Mapping[str, Tensor] = {}
    count = 0
    for origin, last in sources:
        count += 1
        numbers = {name: x for name, x in last.items() if x.is_floating_point() or x.is_complex()}
        if count == 1:
            expected = {name: torch.empty_like(tensor, device="meta") for name, tensor in last.items()}
            total = {name: x.to(torch.promote_types(x.dtype, torch.float64), copy=True) for name, x in numbers.items()}
            continue
        check_tensors_fit(facts_of(last), expected, origin)
        for name, tensor in numbers.items():
            total[name] += tensor
    return {name: (total[name] / count).to(x.dtype) if name in total else x for name, x in last.items()}


def stored_shapes(path: Path) -> dict[str, torch.Size]:
    """Return the shapes in the header of a safetensors file, tied tensors once; raises CheckpointError."""
    from safetensors import safe_open

    with _readable(path), safe_open(path, framework="pt") as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn every error of reading a safetensors file into a CheckpointError of one line."""
    try:
        yield
    except Exception as error:  # MemoryError of a hole on the disk
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: not a readable safetensors file ({said})") from None
