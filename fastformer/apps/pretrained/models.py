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

_PACKAGE = "transformers."


def architectures() -> dict[str, Architecture]:
    """Return the architectures of all applications, by class name in transformers."""
    return {name: architecture for each in applications() for name, architecture in each.architectures.items()}


def from_transformers(source: Any) -> Any:
    """Convert a model of transformers to a model of fastformer with the same outputs; weights are copied.

    Args:
        source: a model, of one of the classes of `docs/hugging-face.md`; or a folder that `save_pretrained` wrote.

    Returns:
        The model, in the dtype, on the device and in the mode of the source.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: there is no such folder, or it holds no safetensors.
        ValueError: naming the class, the setting with its value, or the weight that fastformer does not have.
    """
    if isinstance(source, str | Path):
        source = load_folder(Path(source), _transformers(), architectures())
    architecture = _architecture_of(type(source))
    hf_weights = source.state_dict()
    with refusals(type(source).__name__):  # attributes of a configuration may have been set to anything
        config = architecture.read(source.config, hf_weights)
    _check_numbers(hf_weights, source.dtype)
    with torch.device("meta"):
        model = architecture.network(config)
    model = model.to(source.dtype)
    weights = read(model, hf_weights, architecture)
    check_ties(model, weights)
    model.load_state_dict(weights, assign=True)
    check_implied(model, hf_weights, architecture)
    return model.train(source.training)


def to_transformers(model: Any) -> Any:
    """Convert a model of fastformer to a model of transformers with the same outputs; weights are copied.

    Args:
        model: a `LanguageModel` with settings that GPT-2 has, or a `TranslationModel` with settings that Marian has.

    Returns:
        A model of transformers, for `save_pretrained`.

    Raises:
        ImportError: transformers is not installed.
        ValueError: naming the settings that the architecture does not have.
    """
    transformers = _transformers()
    convertible = {name: each for name, each in architectures().items() if each.configuration is not None}
    item = next((item for item in convertible.items() if item[1].network is type(model)), None)
    if item is None:
        names = ", ".join(each.network.__name__ for each in convertible.values())
        raise ValueError(f"model must be one of {names}, not a {type(model).__name__}")
    name, architecture = item
    assert architecture.configuration is not None
    model_class = getattr(transformers, name)
    try:
        config = model_class.config_class(**architecture.configuration(model.config))
        back = architecture.read(config, ())
    except ValueError as error:
        raise ValueError(f"{name} cannot represent this model: {error}") from None
    settings, converted = _resolved(model.config), _resolved(back)
    other = [k for k in settings if settings[k] != converted[k] and k not in TRAINING | architecture.unlike]
    if other:
        differences = ", ".join(f"{k}={settings[k]!r} must be {converted[k]!r}" for k in other)
        raise ValueError(f"{name} cannot represent this model: {differences}")
    dtype = next(model.parameters()).dtype
    _check_numbers(model.state_dict(), dtype)
    hf_model = model_class(config).to(dtype)
    hf_model.load_state_dict(write(model, hf_model.state_dict(), architecture))
    return hf_model.to(next(model.parameters()).device).train(model.training)


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
    """Return settings with unset ones resolved, and without settings that have no effect."""
    settings = dict(vars(config))
    settings |= {"head_size": config.head_width, "kv_heads": config.kv_heads or config.heads}
    settings["qkv_bias"] = config.bias if config.qkv_bias is None else config.qkv_bias
    idle = {"learned": (), "rotary": ("max_positions",)}.get(config.positions, ("max_positions",))
    return {name: value for name, value in settings.items() if name not in idle}


def _architecture_of(model_class: type) -> Architecture:
    """Return the architecture of a class; raise ValueError for other classes, also subclasses, which may differ."""
    known = architectures()
    module, name = model_class.__module__, model_class.__name__
    if not module.startswith(_PACKAGE) or name not in known:
        raise ValueError(f"model must be one of transformers' {', '.join(known)}, not {module}.{name}")
    return known[name]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("models of transformers need it: pip install 'fastformer[transformers]'") from error
    return transformers
