"""Load folders of transformers, as `save_pretrained` writes them, after their sizes are compared with the files.

transformers by itself follows an index out of the folder, loads an adapter beside the model, fetches kernels that a
configuration names, casts weights of any kind, and builds any size. So it gets settings and tensors, and opens no file.
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
# What transformers would act on before it builds: other weights, and layers that differ from one another.
_REFUSED = ("fusion_config", "per_layer_config", "transformers_weights")


def load_folder(folder: Path, transformers: Any, kinds: Mapping[str, Architecture]) -> Any:
    """Load a model of transformers from a folder, if its class is known here.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no safetensors.
        ValueError: naming the file, the setting or the weight that is damaged, missing, left over or not known here.
    """
    content = _settings(folder)
    if (folder / _ADAPTER).is_file():
        raise ValueError(f"{folder}: an adapter lies beside the model ({_ADAPTER}); merge it first")
    name = _class_of(folder, content, kinds)
    kind, files = getattr(transformers, name), _files(folder)
    shapes = {name: shape for path in files for name, shape in stored_shapes(path).items()}
    _check_settings(folder, content, max((size for shape in shapes.values() for size in shape), default=0))
    with refusals(folder):
        config = kind.config_class.from_dict(content)
        numbers = kinds[name].read(config, shapes).matrix_numbers
    check_size(numbers, sum(path.stat().st_size for path in files), folder)
    weights = {name: x for path in files for name, x in read_weights(path).items()}
    # Whole numbers in old files are masks and positions, which nothing reads.
    floating = {name: x for name, x in weights.items() if same_kind(x.dtype, torch.float32)}
    with refusals(folder), _no_progress(transformers.utils.logging):
        theirs, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=floating,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # they are in the report
            output_loading_info=True,
        )
    _check_report(folder, name, report, {name: x for name, x in weights.items() if name not in floating})
    if not theirs.dtype.is_floating_point:
        raise ValueError(f"{folder}: dtype must be of floating point numbers, not {theirs.dtype}")
    check_finite(theirs, folder)
    return theirs


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder}: no model of transformers, there is no config.json") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not the configuration of a model, but of type {type(content).__name__}")
    return content


def _class_of(folder: Path, content: Mapping[str, Any], kinds: Mapping[str, Architecture]) -> str:
    names = content.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in kinds:
        return names[0]
    raise ValueError(f"{folder}: architectures must be one of {', '.join(kinds)}, not {str(names)[:200]}")


def _files(folder: Path) -> list[Path]:
    """Return the files of weights; those that an index names must lie in the folder."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / _INDEX
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: there is no {_WEIGHTS}")
    content = read_json(index)
    placed = content.get("weight_map") if isinstance(content, dict) else None
    names = list(placed.values()) if isinstance(placed, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name != ".." for name in names):
        raise ValueError(f"{index}: damaged: weight_map must name files in this folder")
    for path in (paths := [folder / name for name in sorted(set(names))]):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
    return paths


def _check_settings(folder: Path, content: Mapping[str, Any], largest: int) -> None:
    """Raise ValueError for settings that transformers acts on; `largest`: of the sizes of all weights."""
    for name in _REFUSED:
        if content.get(name) is not None:
            raise ValueError(f"{folder}: {name} must be None, not {str(content[name])[:200]}")
    labels = content.get("num_labels")  # it makes a name for each
    if isinstance(labels, int) and labels > max(largest, MOST_LAYERS):
        raise ValueError(f"{folder}: num_labels must be at most {max(largest, MOST_LAYERS):,}, not {labels:,}")


def _check_report(folder: Path, kind: str, report: Mapping[str, Any], left: Mapping[str, Tensor]) -> None:
    other = "".join(f"; {name} is of {x.dtype}, not of floating point numbers" for name, x in sorted(left.items())[:1])
    for name, what in (
        ("missing_keys", f"not among the weights{other}"),
        ("unexpected_keys", f"weights that {kind} has no place for"),
        ("mismatched_keys", "weights of another shape than the configuration says"),
    ):
        if found := report.get(name):
            raise ValueError(f"{folder}: {', '.join(sorted(map(str, found)))}: {what}")


@contextmanager
def _no_progress(logging: Any) -> Iterator[None]:
    """Disable transformers' progress bar, whose writes to a broken terminal raise."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def refusals(of: Path | str) -> Iterator[None]:
    """Turn any error that transformers raises for unusual settings into a ValueError."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"{of}: no model that transformers can make ({type(error).__name__}: {said})") from None
