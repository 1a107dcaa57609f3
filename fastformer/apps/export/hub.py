"""Models of the applications with `save_pretrained`, `from_pretrained` and `push_to_hub`, by huggingface_hub's mixin.

    TranslationModel = on_hub(fastformer.apps.translation.TranslationModel)
    model = TranslationModel(config)  # a TranslationModel in all else: train it, search with it
    model.save_pretrained(folder)     # config.json, model.safetensors, README.md
    model = TranslationModel.from_pretrained(folder)  # or the name of a repository

It is the model alone; `export_safetensors` writes the tokenizers beside it. Weights are safetensors only: nothing is
unpickled. Settings and weights may be a stranger's, so both are compared before a model is built, as `load_safetensors`
does; of a folder, regular files alone are read, and no link is followed.
"""

from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from fastformer.apps.models.sizes import check_memory
from fastformer.apps.runs.kinds import applications
from fastformer.apps.settings import befores
from fastformer.apps.text import read_json
from fastformer.apps.train.weights import CheckpointError, check_size, load_weights, write_weights

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


@cache
def on_hub(network: Any) -> Any:
    """Return a model's class with the mixin of huggingface_hub, which the extra `hub` installs.

    Args:
        network: TranslationModel, LanguageModel, or another class of the applications' models.

    Raises:
        TypeError: it is none of these.
        ImportError: huggingface_hub is not installed.
    """
    names = {each.network.__name__: each for each in applications()}
    found = [each for each in names.values() if isinstance(network, type) and issubclass(network, each.network)]
    if not found:
        raise TypeError(f"network must be a class of {', '.join(names)}, not {network!r}")
    settings = found[0].model
    try:
        from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
    except ImportError as error:
        raise ImportError("on_hub needs huggingface_hub: pip install 'fastformer[hub]'") from error

    class OnHub(network, PyTorchModelHubMixin, library_name="fastformer", tags=["transformer"]):  # type: ignore[misc]
        def _save_pretrained(self, save_directory: Path) -> None:
            write_weights(save_directory / _WEIGHTS, self.state_dict())

        @classmethod
        def from_pretrained(  # type: ignore[override]
            cls,
            pretrained_model_name_or_path: str | Path,
            *,
            map_location: str = "cpu",
            strict: bool = True,
            config: Any = None,
            **hub: Any,
        ) -> nn.Module:
            """Load a model, in evaluation mode.

            Args:
                pretrained_model_name_or_path: a folder, or the name of a repository.
                map_location: the device.
                strict: True.
                config: in place of that in config.json.
                hub: of huggingface_hub's `hf_hub_download`: revision, token, cache_dir and the like.

            Raises:
                ValueError: strict is False, or config.json is none (fastformer.apps.text.TextError).
                fastformer.apps.train.CheckpointError: it is of no such model, or the weights are none of it.
            """
            if not strict:
                raise ValueError("strict must be True: weights that do not fit are of another model")
            folder = Path(pretrained_model_name_or_path)

            def file(name: str) -> Path:
                if not folder.is_dir():
                    return Path(hf_hub_download(str(pretrained_model_name_or_path), name, **hub))
                if not (folder / name).is_file():
                    raise CheckpointError(f"{folder / name}: no such file")
                return folder / name

            if config is None:
                config = _read_config(file(_CONFIG), settings)
            path = file(_WEIGHTS)
            check_size(config.matrix_numbers, path.stat().st_size, path)
            check_memory(config)
            model: nn.Module = cls(config)
            load_weights(model, path)
            return model.to(map_location).eval()

    OnHub.__name__ = OnHub.__qualname__ = network.__name__
    return OnHub


def _read_config(path: Path, settings: type) -> Any:
    """Read the settings of a model; those that are newer than the file are what they were before."""
    content = read_json(path)
    try:
        return settings(**{**befores(settings), **content})
    except (ValueError, TypeError) as error:
        said = " ".join(str(error).splitlines())
        raise CheckpointError(f"{path}: not the settings of such a model: {said}") from None
