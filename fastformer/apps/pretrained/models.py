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

from fastformer.apps.models.embeddings import Embedding
from fastformer.apps.models.sizes import MOST_LAYERS
from fastformer.apps.pretrained.tables import ARCHITECTURES
from fastformer.apps.text.files import read_json
from fastformer.apps.train.checkpoint import check_finite, check_size, read_weights, same_kind, stored_shapes

# Settings that transformers would act on before it builds a model: other weights, and layers with other settings.
_REFUSED = ("fusion_config", "per_layer_config", "transformers_weights")


def from_transformers(source: Any) -> Any:
    """Convert a model of transformers to a model of fastformer with the same outputs; weights are copied.

    Args:
        source: a model, of one of the classes of `docs/pretrained.md`; or a folder that `save_pretrained` wrote.

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
    if not module.startswith("transformers.") or name not in ARCHITECTURES:  # a subclass may differ
        raise ValueError(f"model must be one of transformers' {', '.join(ARCHITECTURES)}, not {module}.{name}")
    architecture, hf_weights = ARCHITECTURES[name], source.state_dict()
    with _transformers_errors(name):  # attributes of a configuration may have been set to anything
        config = architecture.read(source.config, hf_weights)
    _check_dtypes(hf_weights, source.dtype)
    with torch.device("meta"):
        model = architecture.network(config)
    model = model.to(source.dtype)
    architecture.load(model, hf_weights)
    for part in model.modules():
        if isinstance(part, Embedding):  # tables on meta would make `model.to` raise; an empty one grows when read
            part.table = part.table.new_empty(0, part.width, device=source.device)
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
    convertible = {each.network: (name, each) for name, each in ARCHITECTURES.items() if each.configuration}
    if type(model) not in convertible:
        names = ", ".join(each.__name__ for each in convertible)
        raise ValueError(f"model must be one of {names}, not a {type(model).__name__}")
    name, architecture = convertible[type(model)]
    assert architecture.configuration is not None
    model_class = getattr(transformers, name)
    try:
        config = model_class.config_class(**architecture.configuration(model.config))
        converted = _resolved(architecture.read(config, ()))
    except ValueError as error:
        raise ValueError(f"{name} cannot represent this model: {error}") from None
    settings = _resolved(model.config)
    if converted["output_bias"]:  # zeros do for a model without it
        settings["output_bias"] = True
    if other := [key for key, value in settings.items() if value != converted.get(key)]:
        differences = ", ".join(f"{key}={settings[key]!r} must be {converted.get(key)!r}" for key in other)
        raise ValueError(f"{name} cannot represent this model: {differences}")
    dtype = next(model.parameters()).dtype
    _check_dtypes(model.state_dict(), dtype)
    hf_model = model_class(config).to(dtype)
    hf_model.load_state_dict(architecture.convert_back(model, hf_model.state_dict()))
    return hf_model.to(next(model.parameters()).device).train(model.training)


def _check_dtypes(weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise ValueError for weights on meta, of fewer than 16 bits, or of several dtypes."""
    for name, x in weights.items():
        if x.is_meta:
            raise ValueError(f"{name} is on meta, and has no numbers: load the weights before")
        if not same_kind(x.dtype, torch.float32):
            raise ValueError(f"{name} must be of floating point numbers of 16 bits or more, not {x.dtype}")
        if x.dtype != dtype:
            raise ValueError(f"{name} must be of {dtype}, as the model is, not {x.dtype}")


def _resolved(config: Any) -> dict[str, Any]:
    """Return the settings that change an output, with unset ones resolved; dropout and initial values may be lost."""
    settings = {name: value for name, value in vars(config).items() if not name.endswith("dropout")}
    for name in ("initialisation", "initialisation_range", "embedding_initialisation", "embedding_range"):
        del settings[name]
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
    model_class, files = getattr(transformers, name), _weight_files(folder)
    shapes = {name: shape for path in files for name, shape in stored_shapes(path).items()}
    # transformers makes a name for each label before it builds a model.
    labels, most = content.get("num_labels"), max(MOST_LAYERS, *(max(shape, default=0) for shape in shapes.values()))
    if isinstance(labels, int) and labels > most:
        raise ValueError(f"{folder}: num_labels must be at most {most:,}, not {labels:,}")
    with _transformers_errors(folder):
        config = model_class.config_class.from_dict(content)
        numbers = ARCHITECTURES[name].read(config, shapes).matrix_numbers
    check_size(numbers, files, folder)
    weights = {name: x for path in files for name, x in read_weights(path).items()}
    # Whole numbers in old files are masks and positions, which nothing reads.
    floating = {name: x for name, x in weights.items() if same_kind(x.dtype, torch.float32)}
    with _transformers_errors(folder):
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=floating,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # the report lists mismatches
            output_loading_info=True,
        )
    other = "".join(f"; {name} is of {x.dtype}" for name, x in weights.items() if name not in floating)[:200]
    for kind, error in (
        ("missing_keys", f"not among the floating point weights{other}"),
        ("unexpected_keys", f"weights that {name} does not have"),
        ("mismatched_keys", "weights of another shape than the configuration says"),
    ):
        if keys := report.get(kind):
            raise ValueError(f"{folder}: {', '.join(sorted(map(str, keys)))}: {error}")
    check_finite(model, folder)
    return model


def _read_settings(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of the model's class in transformers and its settings."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no model of transformers, there is no config.json")
    content = read_json(path)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder}: an adapter lies beside the model (adapter_config.json); merge it first")
    if (names := content.get("architectures")) is None:
        raise ValueError(f"{folder}: no model of transformers, its config.json names no architectures")
    if not isinstance(names, list) or names not in [[name] for name in ARCHITECTURES]:
        raise ValueError(f"{folder}: architectures must be one of {', '.join(ARCHITECTURES)}, not {str(names)[:200]}")
    for name in _REFUSED:
        if content.get(name) is not None:
            raise ValueError(f"{folder}: {name} must be None, not {str(content[name])[:200]}")
    return names[0], content


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights; raise ValueError if an index names a file outside the folder."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: there is no {whole.name}")
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name != ".." for name in names):
        raise ValueError(f"{index}: damaged: weight_map must name files in this folder")
    return [folder / name for name in sorted(set(names))]


@contextmanager
def _transformers_errors(source: Path | str) -> Iterator[None]:
    """Turn any error that transformers raises for unusual settings into a ValueError."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{source}: transformers cannot build this model ({message})") from None
