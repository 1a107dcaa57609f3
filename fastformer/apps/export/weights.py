"""Export and load a model as safetensors, with its settings as JSON and its tokenizers."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fastformer.apps.models.sizes import check_memory
from fastformer.apps.runs.kinds import application_for, application_of
from fastformer.apps.settings import befores, to_plain
from fastformer.apps.system.files import new_folder
from fastformer.apps.text import Tokenizer
from fastformer.apps.train.weights import CheckpointError, check_size, load_weights, write_weights
from fastformer.settings import check_value

Dtype = Literal["float32", "float16", "bfloat16"]


def export_safetensors(
    folder: Path | str,
    model: Any,
    tokenizers: Sequence[Tokenizer],
    dtype: Dtype = "float32",
    data: Mapping[str, Any] | None = None,
) -> None:
    """Write `model.safetensors`, `config.json` and the tokenizers into a new folder.

    Args:
        folder: the folder to create.
        model: a model of one of the applications.
        tokenizers: source and target of a translation model, or the one of another model.
        dtype: the dtype of the stored weights.
        data: settings for reading text, such as the longest length; written unchanged.

    Raises:
        FileExistsError: the folder exists and is not empty.
        TypeError: the model belongs to no application.
        ValueError: dtype is unknown, or the number of tokenizers is wrong.
    """
    _check_dtype(dtype)
    application = application_for(model, tokenizers)
    converted: dict[int, Tensor] = {}  # tied weights stay one tensor

    def convert(x: Tensor) -> Tensor:
        return converted.setdefault(x.data_ptr(), x.to(getattr(torch, dtype)))

    with export_folder(folder) as new:
        write_weights(new / "model.safetensors", {name: convert(x) for name, x in model.state_dict().items()})
        content = {"kind": application.kind, "dtype": dtype, "model": model.config, "data": data or {}}
        (new / "config.json").write_text(json.dumps(content, indent=1, default=to_plain) + "\n", encoding="utf-8")
        application.save_tokenizers(new, tokenizers)


def load_safetensors(folder: Path | str) -> Any:
    """Load the model of a folder that `export_safetensors` wrote, in its dtype, in evaluation mode.

    Raises:
        fastformer.apps.train.CheckpointError: the folder holds no exported model, or a damaged one.
    """
    folder = Path(folder)
    path = folder / "model.safetensors"
    try:
        content = json.loads((folder / "config.json").read_bytes())
        application = application_of(content["kind"])
        _check_dtype(content["dtype"])
        config = application.model(**{**befores(application.model), **content["model"]})
        check_size(config.matrix_numbers, path.stat().st_size if path.is_file() else sys.maxsize, path)
        check_memory(config)
        built = application.network(config).to(getattr(torch, content["dtype"]))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no exported model, there is no config.json") from None
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'}: not the configuration of an exported model: {error}"
        ) from None
    load_weights(built, path)
    return built.eval()


def _check_dtype(dtype: object) -> None:
    check_value("dtype", dtype, str, choices=get_args(Dtype))


@contextmanager
def export_folder(folder: Path | str) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` when the block ends.

    Raises FileExistsError if the folder is not empty, or is the current one.
    """
    folder = Path(os.path.realpath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; choose another folder")
    if folder == Path.cwd():
        raise FileExistsError(f"{folder} is the folder that you are in, and would be replaced; choose another")
    with new_folder(folder) as temporary:
        yield temporary
