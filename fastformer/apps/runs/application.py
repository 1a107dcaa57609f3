"""`Application`: describe one kind of run; read, write and check the run folders and exported models of that kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastformer.apps.models.settings import fitting_shape
from fastformer.apps.models.sizes import check_memory
from fastformer.apps.runs.folder import (
    CONFIG,
    KINDS,
    RunConfig,
    is_config_of_run,
    load_toml,
    read_export,
    read_kind,
    read_run_section,
    save_toml,
)
from fastformer.apps.settings import Given, derived, reject_unused_options
from fastformer.apps.text import SpecialIds, Tokenizer, load_tokenizer
from fastformer.apps.train import (
    Checkpoint,
    CheckpointError,
    Processes,
    TrainConfig,
    average_checkpoints,
    find_checkpoint,
)
from fastformer.apps.train.checkpoint import check_size, load_weights
from fastformer.settings import check_value

PRETRAINED = "pretrained"  # value of `tokenizer` for runs that began with another model
RATES = ("dropout", "attention_dropout", "activation_dropout")  # settings of such a model that fine-tuning may change
_IDS = ("pad_id", "bos_id", "eos_id")


@dataclass(frozen=True)
class Application:
    """One kind of run. A setting whose default is None must keep that default: config.toml leaves unset values out."""

    kind: str  # in config.toml
    title: str  # in messages
    use: str  # the command that uses such a run
    command: str  # the command that trains such a run
    data: type  # classes of settings
    model: type
    network: type[nn.Module]  # constructed from `model`
    train: type[TrainConfig]  # or a subclass with other defaults
    length: str  # setting of `data` that limits the length of sequences
    tokenizers: Mapping[str, str]  # setting of `model` that is the size -> folder within the run folder
    corpus: tuple[str, ...]  # settings of `data` that name the text, either of the first two, and its size
    automatic: tuple[str, ...] = ()  # settings that the command chooses if they are not given
    pretrained: Callable[[Path], tuple[Tokenizer, ...]] | None = None  # reads the tokenizers of a model of transformers

    def settings_of_text(self, data: Any) -> dict[str, Any]:
        """Return the settings of `data` that hold for other text too, of a run that begins with this run's model."""
        return {name: value for name, value in vars(data).items() if name not in (*self.corpus, "tokenizer")}

    def model_config(self, model: Mapping[str, Any], tokenizers: Sequence[Any], data: Any) -> Any:
        """Return the configuration of a model from its settings, the tokenizers and the data.

        Raises ValueError if a setting is out of range, or sequences are longer than learned positions hold.
        """
        sizes = {name: each.size for name, each in zip(self.tokenizers, tokenizers, strict=True)}
        ids = {name: getattr(tokenizers[-1], name) for name in _IDS if name in derived(self.model)}
        classes = {"classes": len(data.labels or ("", ""))} if hasattr(data, "labels") else {}  # 2 until they are known
        config = self.model(**{**model, **sizes, **ids, **classes})
        length = getattr(data, self.length)
        if config.longest is not None and length > config.longest:
            raise ValueError(
                f"{self.length} ({length}) is beyond max_positions ({config.longest}) of the learned positions; lower "
                "it, or raise max_positions"
            )
        return config

    def expected_config(self, model: Mapping[str, Any], data: Any) -> Any:
        """Return the expected configuration of a model before its tokenizers exist; see `model_config`.

        Heads or a width that were not given fit the other, as they are chosen later.
        """
        if model.keys() & {"d_model", "heads", "kv_heads"}:
            model = {**fitting_shape(model, self.model.d_model), **model}  # type: ignore[attr-defined]
        ids = data.special_ids if hasattr(data, "special_ids") else SpecialIds()
        tokenizer = SimpleNamespace(size=data.vocabulary or max(ids.names()) + 1, **vars(ids))
        return self.model_config(model, [tokenizer] * len(self.tokenizers), data)

    def reject_unused_options(
        self, given: Given, data: Any, model: Mapping[str, Any], train: TrainConfig, device: torch.device | str
    ) -> None:
        """Raise ValueError naming the given settings that have no effect with the other settings."""
        machine = SimpleNamespace(
            hardware="a CUDA device" if str(device).startswith("cuda") else "a CPU",
            processes="one process" if Processes.current().world == 1 else "several processes",
        )
        reject_unused_options(
            given, {"data": data, "model": self.expected_config(model, data), "train": train}, machine
        )

    def load_initial_model(
        self, folder: Path, model: Mapping[str, Any], data: Any, given: Given | None
    ) -> tuple[nn.Module, tuple[Tokenizer, ...], dict[str, Any], Any]:
        """Return the model that a run begins with, its tokenizers, and the settings of the run's model and data.

        folder: a run (its best weights), an exported model, or a model of transformers. model: may change dropout rates
        only. Of `data`, the folder's settings replace those that were not given (None: all were given). Raises
        ValueError if runs of this kind cannot begin with it, or no text is given; also the errors of `load` and
        `pretrained`.
        """
        if given is not None and not {*self.corpus[:2]} & {*given["data"]}:
            raise ValueError(f"--from needs text to train on: give {' or '.join(self.corpus[:2])}")
        before: dict[str, Any] = {}
        if (folder / CONFIG).is_file():
            initial, tokenizers, read = self.load(folder)
            before = self.settings_of_text(read)
        elif (export := read_export(folder)) is not None:
            if (kind := export["kind"]) != self.kind:
                raise ValueError(f"{folder} holds a {application_of(kind).title} model")
            initial, before = load_safetensors(folder).float(), export.get("data", {})
            tokenizers = self.load_tokenizers(folder, initial.config)
        elif self.pretrained is not None:
            initial = import_module("fastformer.apps.pretrained").from_transformers(folder).float()
            if not isinstance(initial, self.network):
                raise ValueError(f"{folder} holds a {type(initial).__name__}, with which no {self.title} run can begin")
            tokenizers = self.pretrained(folder)
            self._check_tokenizers(tokenizers, initial.config, [folder] * len(tokenizers))
        else:
            raise ValueError(f"{folder} holds no run and no exported model, with which a {self.title} run can begin")
        user_data = before if given is None else given["data"]
        changes = {name: x for name, x in before.items() if name in derived(self.data) or name not in user_data}
        settings = {name: value for name, value in vars(initial.config).items() if name not in derived(self.model)}
        if fixed := [name for name, value in model.items() if name not in RATES and value != settings.get(name)]:
            raise ValueError(f"{', '.join(fixed)}: set by the model of {folder}; only {', '.join(RATES)} may be given")
        return initial, tokenizers, {**settings, **model}, replace(data, **changes)

    def save_settings(self, folder: Path, data: Any, model: Any, train: TrainConfig, origin: str | None = None) -> None:
        """Write config.toml, which marks a run folder; origin: see `RunConfig`."""
        run = RunConfig(self.kind, origin)
        save_toml(folder / CONFIG, {"run": run, "data": data, "model": model, "train": train})

    def save_tokenizers(self, folder: Path, tokenizers: Sequence[Tokenizer]) -> None:
        """Write the tokenizers of a run folder."""
        for name, tokenizer in zip(self.tokenizers.values(), tokenizers, strict=True):
            tokenizer.save(folder / name)

    def read_config(self, folder: Path | str) -> dict[str, dict[str, Any]]:
        """Return the settings of a run folder, by section: data, model, train.

        Raises FileNotFoundError without a run, ValueError for a run of another kind or an unknown setting.
        """
        path = Path(folder) / CONFIG
        if (kind := read_kind(folder)) != self.kind:
            other = application_of(kind)
            raise ValueError(
                f"{folder} is a {other.title} run, not a {self.title} run: `{other.use}` and `{other.command}` take it"
            )
        sections = self._load(path)
        needed = {each.name for each in fields(self.model) if each.default is MISSING}
        if missing := sorted(needed.difference(sections["model"])):
            raise ValueError(f"{path}: [model] has no {', '.join(missing)}: it is damaged")
        return sections

    def read_settings(self, path: Path) -> dict[str, dict[str, Any]]:
        """Return the settings in a user's file, by section.

        Raises FileNotFoundError without the file, ValueError for a file of another kind or a setting that is unknown or
        cannot be given.
        """
        if (kind := read_run_section(path, self.kind).kind) != self.kind:
            other = application_of(kind)
            raise ValueError(f"{path} is for a {other.title} run; use `{other.command}`")
        sections = self._load(path)
        for section, settings in (("data", self.data), ("model", self.model)):
            for name, source in derived(settings).items():
                if is_config_of_run(path):
                    sections[section].pop(name, None)
                elif name in sections[section]:
                    raise ValueError(f"{path}: [{section}] {name} is set from {source}; leave it out")
        return sections

    def _load(self, path: Path) -> dict[str, dict[str, Any]]:
        settings = {"run": RunConfig, "data": self.data, "model": self.model, "train": self.train}
        sections = load_toml(path, settings)
        sections.pop("run")
        return sections

    def load_tokenizers(self, folder: Path | str, config: Any = None) -> tuple[Tokenizer, ...]:
        """Return the tokenizers of a run folder, or those of a model with the given configuration.

        Raises FileNotFoundError without a run or a file, ValueError for a file that is damaged or of another run.
        """
        config = config or self.model(**self.read_config(folder)["model"])
        paths = [Path(folder) / name for name in self.tokenizers.values()]
        tokenizers = tuple(load_tokenizer(path) for path in paths)
        self._check_tokenizers(tokenizers, config, paths)
        return tokenizers

    def _check_tokenizers(self, tokenizers: Sequence[Tokenizer], config: Any, paths: Sequence[Path]) -> None:
        sizes = zip(self.tokenizers, tokenizers, paths, strict=True)
        values = [(name, tokenizer.size, path) for name, tokenizer, path in sizes]
        values += [(name, getattr(tokenizers[-1], name), paths[-1]) for name in _IDS if name in derived(self.model)]
        for name, value, path in values:
            if getattr(config, name) != value:
                raise ValueError(f"{path}: it is of another model: its {name} is {value}, not {getattr(config, name)}")

    def load_weights(self, folder: Path | str, checkpoint: str) -> Any:
        """Return the model of a run with its weights, on the CPU.

        checkpoint: "best" (by validation), "last", "average", or a name such as "step-200"; of several names, separated
        by commas, the mean of their weights.

        Raises FileNotFoundError without a run, ValueError for a run of another kind or a model beyond this machine's
        memory, CheckpointError for a checkpoint that is missing, damaged or of another architecture.
        """
        config = self.model(**self.read_config(folder)["model"])
        paths = [find_checkpoint(folder, name.strip()) for name in checkpoint.split(",")]
        for path in paths:
            saved = Checkpoint.open(path)
            saved.check_architecture(config, config.matrix_numbers)
        check_memory(config)
        network = self.network(config)
        saved.load_into(network, config)
        if len(paths) > 1:
            network.load_state_dict(average_checkpoints(paths))
        return network

    def load(
        self, folder: Path | str, checkpoint: str = "best", device: torch.device | str = "cpu"
    ) -> tuple[Any, tuple[Tokenizer, ...], Any]:
        """Return a run's model in evaluation mode on a device, its tokenizers, and the settings of its data.

        Arguments and errors as in `load_weights` and `load_tokenizers`.
        """
        model = self.load_weights(folder, checkpoint).to(device).eval()
        return model, self.load_tokenizers(folder), self.data(**self.read_config(folder)["data"])


def application_of(kind: str) -> Application:
    """Import and return the `Application` whose runs are of a kind; raises ValueError if there is none."""
    check_value("kind", kind, str, choices=KINDS)
    application: Application = import_module(f"fastformer.apps.{kind}.run").APPLICATION
    return application


def application_for(model: Any, tokenizers: Sequence[Any]) -> Application:
    """Return the application of a model; raise TypeError, or ValueError for another number of tokenizers."""
    applications = tuple(map(application_of, KINDS))
    application = next((each for each in applications if isinstance(model, each.network)), None)
    if application is None:
        names = ", ".join(each.network.__name__ for each in applications)
        raise TypeError(f"model must be one of {names}, not a {type(model).__name__}")
    if len(tokenizers) != (count := len(application.tokenizers)):
        raise ValueError(f"tokenizers must be {count} for a {type(model).__name__}, not {len(tokenizers)}")
    return application


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
        config = application.model(**content["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: config.json is not that of an exported model: {error}") from None
    check_size(config.matrix_numbers, [path], path)
    check_memory(config)
    model = application.network(config).to(getattr(torch, content["dtype"]))
    load_weights(model, path)
    return model.eval()
