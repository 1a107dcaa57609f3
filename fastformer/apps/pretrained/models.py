"""Convert models of transformers, objects or folders, to models of fastformer and back.

Folders may be untrusted. transformers itself follows an index out of the folder, loads an adapter beside the model, and
fetches kernels that a configuration names. It also casts weights of any kind, and builds any size. So it is passed
settings and tensors, and opens no file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.apps.models.sizes import MOST_LAYERS
from fastformer.apps.pretrained.architecture import Architecture
from fastformer.apps.runs.kinds import applications
from fastformer.apps.text.files import read_json
from fastformer.apps.train.checkpoint import check_finite, check_size, read_weights, same_kind, stored_shapes

_WEIGHTS, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
# Settings that transformers would act on before it builds a model: other weights, and layers with other settings.
_REFUSED = ("fusion_config", "per_layer_config", "transformers_weights")


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
        source = _load_folder(Path(source), _transformers())
    module, name = type(source).__module__, type(source).__name__
    known = architectures()
    if not module.startswith("transformers.") or name not in known:  # a subclass may differ
        raise ValueError(f"model must be one of transformers' {', '.join(known)}, not {module}.{name}")
    architecture, hf_weights = known[name], source.state_dict()
    with _refusals(name):  # attributes of a configuration may have been set to anything
        config = architecture.read(source.config, hf_weights)
    _check_numbers(hf_weights, source.dtype)
    with torch.device("meta"):
        model = architecture.network(config)
    model = model.to(source.dtype)
    model.load_state_dict(architecture.convert(model, hf_weights), assign=True)
    architecture.check_implied(model, hf_weights)
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
    convertible = {each.network: (name, each) for name, each in architectures().items() if each.configuration}
    if type(model) not in convertible:
        names = ", ".join(each.__name__ for each in convertible)
        raise ValueError(f"model must be one of {names}, not a {type(model).__name__}")
    name, architecture = convertible[type(model)]
    assert architecture.configuration is not None
    model_class = getattr(transformers, name)
    try:
        config = model_class.config_class(**architecture.configuration(model.config))
        back = architecture.read(config, ())
    except ValueError as error:
        raise ValueError(f"{name} cannot represent this model: {error}") from None
    settings, converted = _resolved(model.config), _resolved(back)
    other = [k for k in settings if settings[k] != converted[k] and not (_of_training(k) or k in architecture.unlike)]
    if other:
        differences = ", ".join(f"{k}={settings[k]!r} must be {converted[k]!r}" for k in other)
        raise ValueError(f"{name} cannot represent this model: {differences}")
    dtype = next(model.parameters()).dtype
    _check_numbers(model.state_dict(), dtype)
    hf_model = model_class(config).to(dtype)
    hf_model.load_state_dict(architecture.convert_back(model, hf_model.state_dict()))
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


def _of_training(name: str) -> bool:
    """Return whether a setting only affects training: a conversion to transformers may lose it."""
    return name.endswith("dropout") or "initialisation" in name or name == "embedding_range"


def _resolved(config: Any) -> dict[str, Any]:
    """Return settings with unset ones resolved, and without settings that have no effect."""
    settings = dict(vars(config))
    settings |= {"head_size": config.head_width, "kv_heads": config.kv_heads or config.heads}
    settings["qkv_bias"] = config.bias if config.qkv_bias is None else config.qkv_bias
    if config.longest is None:
        del settings["max_positions"]
    return settings


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("models of transformers need it: pip install 'fastformer[transformers]'") from error
    return transformers


def _load_folder(folder: Path, transformers: Any) -> Any:
    """Load a model of transformers after comparing its settings with the sizes in its files.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no safetensors.
        ValueError: naming the file, setting or weight that is damaged, missing, unexpected or unknown.
    """
    name, content = _read_settings(folder)
    model_class, files = getattr(transformers, name), _files(folder)
    shapes = {name: shape for path in files for name, shape in stored_shapes(path).items()}
    # transformers makes a name for each label before it builds a model.
    labels, most = content.get("num_labels"), max((*(max(shape, default=0) for shape in shapes.values()), MOST_LAYERS))
    if isinstance(labels, int) and labels > most:
        raise ValueError(f"{folder}: num_labels must be at most {most:,}, not {labels:,}")
    with _refusals(folder):
        config = model_class.config_class.from_dict(content)
        numbers = architectures()[name].read(config, shapes).matrix_numbers
    check_size(numbers, files, folder)
    weights = {name: x for path in files for name, x in read_weights(path).items()}
    # Whole numbers in old files are masks and positions, which nothing reads.
    floating = {name: x for name, x in weights.items() if same_kind(x.dtype, torch.float32)}
    with _refusals(folder):
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=floating,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # the report lists mismatches
            output_loading_info=True,
        )
    other = "".join(f"; {name} is of {x.dtype}" for name, x in list(weights.items()) if name not in floating)[:200]
    for kind, error in (
        ("missing_keys", f"not among the floating point weights{other}"),
        ("unexpected_keys", f"weights that {name} does not have"),
        ("mismatched_keys", "weights of another shape than the configuration says"),
    ):
        if keys := report.get(kind):
            raise ValueError(f"{folder}: {', '.join(sorted(map(str, keys)))}: {error}")
    if not model.dtype.is_floating_point:
        raise ValueError(f"{folder}: dtype must be of floating point numbers, not {model.dtype}")
    check_finite(model, folder)
    return model


def _read_settings(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of the model's class in transformers and its settings."""
    path = folder / "config.json"
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: no model of transformers, there is no config.json") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not the configuration of a model, but of type {type(content).__name__}")
    if (folder / _ADAPTER).is_file():
        raise ValueError(f"{folder}: an adapter lies beside the model ({_ADAPTER}); merge it first")
    names, known = content.get("architectures"), architectures()
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in known):
        raise ValueError(f"{folder}: architectures must be one of {', '.join(known)}, not {str(names)[:200]}")
    for name in _REFUSED:
        if content.get(name) is not None:
            raise ValueError(f"{folder}: {name} must be None, not {str(content[name])[:200]}")
    return names[0], content


def _files(folder: Path) -> list[Path]:
    """Return the files of weights; raise ValueError if an index names a file outside the folder."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / _INDEX
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: there is no {_WEIGHTS}")
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name != ".." for name in names):
        raise ValueError(f"{index}: damaged: weight_map must name files in this folder")
    for path in (paths := [folder / name for name in sorted(set(names))]):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
    return paths


@contextmanager
def _refusals(source: Path | str) -> Iterator[None]:
    """Turn any error that transformers raises for unusual settings into a ValueError."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{source}: transformers cannot build this model ({message})") from None
