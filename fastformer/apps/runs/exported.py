"""Load a model that `fastformer export --format safetensors` wrote."""

import json
from pathlib import Path
from typing import Any

import torch

from fastformer.apps.models.sizes import check_memory
from fastformer.apps.runs.kinds import application_of
from fastformer.apps.settings import befores
from fastformer.apps.train.checkpoint import CheckpointError, check_size, load_weights
from fastformer.settings import check_value


def load_safetensors(folder: Path | str) -> Any:
    """Load the model of a folder that `export_safetensors` wrote, in its dtype, in evaluation mode.

    Raises:
        fastformer.apps.train.CheckpointError: the folder holds no exported model, or a damaged one.
    """
    path, content = Path(folder) / "model.safetensors", read_export(folder)
    if content is None:
        raise CheckpointError(f"{folder}: holds no exported model, or its config.json is damaged")
    try:
        application = application_of(content["kind"])
        check_value("dtype", content["dtype"], str, choices=("float64", "float32", "float16", "bfloat16"))
        config = application.model(**{**befores(application.model), **content["model"]})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: config.json is not that of an exported model: {error}") from None
    check_size(config.matrix_numbers, [path], path)
    check_memory(config)
    built = application.network(config).to(getattr(torch, content["dtype"]))
    load_weights(built, path)
    return built.eval()


def read_export(folder: Path | str) -> dict[str, Any] | None:
    """Return the config.json of an exported model, with its kind and settings of data; None for other folders."""
    try:
        content = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and "kind" in content else None
