"""Load folders that `save_pretrained` of transformers wrote, after comparing sizes in settings and files.

transformers itself follows an index out of the folder, loads an adapter beside the model, and fetches kernels that a
configuration names. It also casts weights of any kind, and builds any size. So it is passed settings and tensors, and
opens no file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.apps.models.sizes import MOST_LAYERS
from fastformer.apps.pretrained.architecture import Architecture
from fastformer.apps.text import read_json
from fastformer.apps.train.weights import check_finite, check_size, read_weights, same_kind, stored_shapes

_WEIGHTS, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
# Settings that transformers would act on before it builds a model: other weights, and layers with other settings.
_REFUSED = ("fusion_config", "per_layer_config", "transformers_weights")


def load_folder(folder: Path, transformers: Any, architectures: Mapping[str, Architecture]) -> Any:
    """Load a model of transformers from a folder, if its class is one of `architectures`.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no safetensors.
        ValueError: naming the file, setting or weight that is damaged, missing, unexpected or unknown.
    """
    content = _settings(folder)
    if (folder / _ADAPTER).is_file():
        raise ValueError(f"{folder}: an adapter lies beside the model ({_ADAPTER}); merge it first")
    name = _class_of(folder, content, architectures)
    model_class, files = getattr(transformers, name), _files(folder)
    shapes = {name: shape for path in files for name, shape in stored_shapes(path).items()}
    _check_settings(folder, content, max((size for shape in shapes.values() for size in shape), default=0))
    with refusals(folder):
        config = model_class.config_class.from_dict(content)
        numbers = architectures[name].read(config, shapes).matrix_numbers
    check_size(numbers, sum(path.stat().st_size for path in files), folder)
    weights = {name: x for path in files for name, x in read_weights(path).items()}
    # Whole numbers in old files are masks and positions, which nothing reads.
    floating = {name: x for name, x in weights.items() if same_kind(x.dtype, torch.float32)}
    with refusals(folder), _no_progress(transformers.utils.logging):
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=floating,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # the report lists mismatches
            output_loading_info=True,
        )
    _check_report(folder, name, report, {name: x for name, x in weights.items() if name not in floating})
    if not model.dtype.is_floating_point:
        raise ValueError(f"{folder}: dtype must be of floating point numbers, not {model.dtype}")
    check_finite(model, folder)
    return model


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: no model of transformers, there is no config.json") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not the configuration of a model, but of type {type(content).__name__}")
    return content


def _class_of(folder: Path, content: Mapping[str, Any], architectures: Mapping[str, Architecture]) -> str:
    names = content.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in architectures:
        return names[0]
    raise ValueError(f"{folder}: architectures must be one of {', '.join(architectures)}, not {str(names)[:200]}")


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


def _check_settings(folder: Path, content: Mapping[str, Any], largest: int) -> None:
    """Raise ValueError for settings that transformers acts on; `largest` is the largest dimension of any weight."""
    for name in _REFUSED:
        if content.get(name) is not None:
            raise ValueError(f"{folder}: {name} must be None, not {str(content[name])[:200]}")
    labels = content.get("num_labels")  # transformers makes a name for each
    if isinstance(labels, int) and labels > max(largest, MOST_LAYERS):
        raise ValueError(f"{folder}: num_labels must be at most {max(largest, MOST_LAYERS):,}, not {labels:,}")


def _check_report(folder: Path, name: str, report: Mapping[str, Any], integers: Mapping[str, Tensor]) -> None:
    """Raise ValueError for missing, unexpected or mismatched weights; `integers` are weights that were not loaded."""
    first = sorted(integers.items())[:1]
    other = "".join(f"; {key} is of {x.dtype}, not of floating point numbers" for key, x in first)
    for kind, error in (
        ("missing_keys", f"not among the weights{other}"),
        ("unexpected_keys", f"weights that {name} does not have"),
        ("mismatched_keys", "weights of another shape than the configuration says"),
    ):
        if keys := report.get(kind):
            raise ValueError(f"{folder}: {', '.join(sorted(map(str, keys)))}: {error}")


@contextmanager
def _no_progress(logging: Any) -> Iterator[None]:
    """Disable transformers' progress bar, whose writes to a broken terminal raise."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextmanager
def refusals(source: Path | str) -> Iterator[None]:
    """Turn any error that transformers raises for unusual settings into a ValueError."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{source}: transformers cannot build this model ({message})") from None
