"""Load a model that `fastformer export --format safetensors` wrote."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from fastformer.apps.models.sizes import check_memory
from fastformer.apps.runs.kinds import application_of
from fastformer.apps.settings import befores
from fastformer.apps.train.weights import CheckpointError, check_size, load_weights
from fastformer.settings import check_value


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
        check_value("dtype", content["dtype"], str, choices=("float64", "float32", "float16", "bfloat16"))
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


def read_export(folder: Path | str) -> dict[str, Any] | None:
    """Return the config.json of an exported model, with its kind and settings of data; None for other folders."""
    try:
        content = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and "kind" in content else None
