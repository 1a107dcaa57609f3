"""Models of the applications with `save_pretrained`, `from_pretrained` and `push_to_hub`, by huggingface_hub's mixin.

    TranslationModel = on_hub(fastformer.apps.translation.TranslationModel)
    model = TranslationModel(config)  # a TranslationModel in all else: train it, search with it
    model.save_pretrained(folder)     # config.json, model.safetensors, README.md
    model = TranslationModel.from_pretrained(folder)  # or the name of a repository

It is the model alone; `export_safetensors` writes the tokenizers beside it. Weights are safetensors only: nothing is
unpickled. Settings and weights may be a stranger's, so both are compared before a model is built, as `load_safetensors`
does.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from fastformer.apps.runs.kinds import applications
from fastformer.apps.train.weights import check_finite, check_size, put_weights, read_weights, write_weights

_WEIGHTS = "model.safetensors"


@cache
def on_hub(network: Any) -> Any:
    """Return a model's class with the mixin of huggingface_hub, which the extra `hub` installs.

    Args:
        network: TranslationModel, LanguageModel, or another class of the applications' models.

    Raises:
        TypeError: it is none of these.
        ImportError: huggingface_hub is not installed.
    """
    names = {each.network.__name__: each.network for each in applications()}
    if not (isinstance(network, type) and issubclass(network, tuple(names.values()))):
        raise TypeError(f"network must be a class of {', '.join(names)}, not {network!r}")
    try:
        from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
    except ImportError as error:
        raise ImportError("on_hub needs huggingface_hub: pip install 'fastformer[hub]'") from error

    class OnHub(network, PyTorchModelHubMixin, library_name="fastformer", tags=["transformer"]):  # type: ignore[misc]
        def _save_pretrained(self, save_directory: Path) -> None:
            write_weights(save_directory / _WEIGHTS, self.state_dict())

        @classmethod
        def _from_pretrained(  # type: ignore[override]
            cls, *, model_id: str, map_location: str = "cpu", strict: bool = True, config: Any, **hub: Any
        ) -> nn.Module:
            if not strict:
                raise ValueError("strict must be True: weights that do not fit are of another model")
            path = Path(model_id) / _WEIGHTS
            if not os.path.isdir(model_id):
                path = Path(hf_hub_download(model_id, _WEIGHTS, **hub))
            check_size(config.matrix_numbers, path.stat().st_size if path.is_file() else 0, path)
            model: nn.Module = cls(config)
            put_weights(model, read_weights(path), path)
            check_finite(model, path)
            return model.to(map_location).eval()

    OnHub.__name__ = OnHub.__qualname__ = network.__name__
    return OnHub
