"""Export a model as safetensors, with its settings as JSON and its tokenizers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastformer.apps.runs.application import application_for
from fastformer.apps.settings import to_plain
from fastformer.apps.system.files import new_folder
from fastformer.apps.text import Tokenizer
from fastformer.apps.train.checkpoint import write_weights


def export_safetensors(
    folder: Path | str, model: Any, tokenizers: Sequence[Tokenizer], data: Mapping[str, Any] | None = None
) -> None:
    """Write `model.safetensors`, in the dtype of the model, `config.json` and the tokenizers into a new folder.

    Args:
        folder: the folder to create.
        model: a model of one of the applications.
        tokenizers: source and target of a translation model, or the one of another model.
        data: settings for reading text, such as the longest length; written unchanged.

    Raises:
        FileExistsError: the folder exists and is not empty.
        TypeError: the model belongs to no application.
        ValueError: the number of tokenizers is wrong.
    """
    application, dtype = application_for(model, tokenizers), str(next(model.parameters()).dtype).partition(".")[2]
    with new_folder(Path(folder).resolve()) as new:
        write_weights(new / "model.safetensors", model.state_dict())
        content = {"kind": application.kind, "dtype": dtype, "model": model.config, "data": data or {}}
        (new / "config.json").write_text(json.dumps(content, indent=1, default=to_plain) + "\n", encoding="utf-8")
        application.save_tokenizers(new, tokenizers)
