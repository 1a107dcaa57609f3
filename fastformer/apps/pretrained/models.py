"""Convert models of transformers, objects or folders, to models of fastformer and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.apps.pretrained.architecture import TRAINING, Architecture
from fastformer.apps.pretrained.folders import load_folder, refusals
from fastformer.apps.pretrained.weights import check_implied, check_ties, read, write
from fastformer.apps.runs.kinds import applications
from fastformer.apps.train.weights import same_kind

_HOME = "transformers."


def architectures() -> dict[str, Architecture]:
    """Return the architectures of all applications, by the name of their class in transformers."""
    return {name: found for each in applications() for name, found in each.architectures.items()}


def from_transformers(source: Any) -> Any:
    """Make a model of fastformer that computes what a model of transformers does, with copies of its weights.

    Args:
        source: a model, of one of the classes of `docs/hugging-face.md`; or a folder that `save_pretrained` wrote.

    Returns:
        The model, in the dtype, on the device and in the mode of theirs.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: there is no such folder, or it holds no safetensors.
        ValueError: naming what has no counterpart here: the class, a setting and its value, or a weight.
    """
    theirs = load_folder(Path(source), _transformers(), architectures()) if isinstance(source, str | Path) else source
    kind = type(theirs)
    architecture = _architecture_of(kind)
    weights = theirs.state_dict()
    with refusals(kind.__name__):  # settings of an object may have come to be anything
        config = architecture.read(theirs.config, weights)
    _check_numbers(weights, theirs.dtype)
    with torch.device("meta"):
        ours = architecture.network(config)
    ours = ours.to(theirs.dtype)
    found = read(ours, weights, architecture)
    check_ties(ours, found)
    ours.load_state_dict(found, assign=True)
    check_implied(ours, weights, architecture)
    return ours.train(theirs.training)


def to_transformers(model: Any) -> Any:
    """Make a model of transformers that computes what a model of fastformer does.

    Args:
        model: whose settings an architecture of transformers has: GPT-2's of `LanguageModel`, Marian's of
            `TranslationModel`.

    Returns:
        A model of theirs, with copies of the weights, for `save_pretrained`.

    Raises:
        ImportError: transformers is not installed.
        ValueError: naming the settings that no such architecture has.
    """
    transformers = _transformers()
    kinds = {name: each for name, each in architectures().items() if each.configuration is not None}
    found = next((item for item in kinds.items() if item[1].network is type(model)), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} becomes no model of transformers")
    name, architecture = found
    assert architecture.configuration is not None
    kind = getattr(transformers, name)
    try:
        config = kind.config_class(**architecture.configuration(model.config))
        back = architecture.read(config, ())
    except ValueError as error:
        raise ValueError(f"{name} cannot be this model: {error}") from None
    ours, same = _resolved(model.config), _resolved(back)
    other = [k for k in ours if ours[k] != same[k] and k not in TRAINING | architecture.unlike]
    if other:
        said = ", ".join(f"{k}={ours[k]!r} (there it is {same[k]!r})" for k in other)
        raise ValueError(f"{name} cannot be this model: {said}")
    dtype = next(model.parameters()).dtype
    _check_numbers(model.state_dict(), dtype)
    theirs = kind(config).to(dtype)
    theirs.load_state_dict(write(model, theirs.state_dict(), architecture))
    return theirs.to(next(model.parameters()).device).train(model.training)


def _check_numbers(weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise ValueError for weights on meta, of fewer than 16 bits, or of several dtypes."""
    for name, x in weights.items():
        if x.is_meta:
            raise ValueError(f"{name} is on meta, and has no numbers: load the weights before")
        if not same_kind(x.dtype, torch.float32):
            raise ValueError(f"{name} must be of floating point numbers of 16 bits or more, not {x.dtype}")
        if x.dtype != dtype:
            raise ValueError(f"{name} must be of {dtype}, as the model is, not {x.dtype}")


def _resolved(config: Any) -> dict[str, Any]:
    """Return settings with the values that unset ones stand for, and without those that have no effect."""
    found = dict(vars(config))
    found |= {"head_size": config.head_width, "kv_heads": config.kv_heads or config.heads}
    found["qkv_bias"] = config.bias if config.qkv_bias is None else config.qkv_bias
    idle = {"learned": (), "rotary": ("max_positions",)}.get(config.positions, ("max_positions",))
    return {name: value for name, value in found.items() if name not in idle}


def _architecture_of(kind: type) -> Architecture:
    """Return the architecture of a class; raise ValueError for others, because a subclass may compute anything."""
    known = architectures()
    if not kind.__module__.startswith(_HOME) or kind.__name__ not in known:
        raise ValueError(
            f"model must be one of transformers' {', '.join(known)}, not {kind.__module__}.{kind.__name__}"
        )
    return known[kind.__name__]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("models of transformers need it: pip install 'fastformer[transformers]'") from error
    return transformers
