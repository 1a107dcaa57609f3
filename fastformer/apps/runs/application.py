"""`Application`: all that the rest knows of one kind of run, and what follows from it for the folders of such runs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastformer.apps.models.sizes import check_memory
from fastformer.apps.runs.folder import BY_HAND, CONFIG, VERSION, RunConfig, read_kind, stated
from fastformer.apps.runs.kinds import application_of
from fastformer.apps.runs.toml import load_toml, save_toml
from fastformer.apps.settings import Given, Settings, befores, facts, refuse_idle
from fastformer.apps.system.run_lock import locked
from fastformer.apps.text import SpecialIds, Tokenizer, load_tokenizer
from fastformer.apps.train import Checkpoint, Processes, TrainConfig, find_checkpoint

PRETRAINED = "pretrained"  # the tokenizer of a run that began with a model from elsewhere
RATES = ("dropout", "attention_dropout", "activation_dropout")  # what fine-tuning may change of such a model
REMOVED = ("sharded_checkpoints",)  # settings that run folders of earlier versions hold
_IDS = ("pad_id", "bos_id", "eos_id")


@dataclass(frozen=True)
class Machine:
    """The device that a run uses, and the number of processes, in words, for the conditions of settings."""

    device: str
    world: int = 1

    @property
    def hardware(self) -> str:
        """The device, in words."""
        return "a CUDA device" if self.device.startswith("cuda") else "a CPU"

    @property
    def processes(self) -> str:
        """How many processes there are, in words."""
        return "one process" if self.world == 1 else "several processes"


@dataclass(frozen=True)
class Application:
    """One kind of run. A setting that is unset by default must stay so: config.toml leaves unset values out.

    Attributes:
        kind, title: what config.toml and messages call such a run.
        use, command: the commands that use and train one.
        data, model, train: the classes of its settings; `train` is `TrainConfig`, or a subclass with other defaults.
        network: the class of the model that is made from `model`.
        describe: says a model's shape in words.
        length: name of the setting of `data` that says how long sequences are.
        vocabularies: names of the settings of `model` that are the sizes of the tokenizers.
        tokenizers: their folders within that of the run.
        metrics: the values that validation may compute, and what each needs.
        reading: names of settings of `data` that a model cannot be used without.
        automatic: names of the settings that the command chooses if they are not given: see `automatic_settings`.
        architectures: the models of transformers that become such ones, by class: see `fastformer.apps.pretrained`.
        pretrained: reads a folder that a run may begin with: a model and its tokenizers.
        counted: the settings of `model` that follow from those of `data` otherwise.
    """

    kind: str
    title: str
    use: str
    command: str
    data: type
    model: type
    network: type[nn.Module]
    describe: Callable[[Any], str]
    train: type[TrainConfig]
    length: str
    vocabularies: tuple[str, ...]
    tokenizers: tuple[str, ...]
    metrics: Mapping[str, str]
    reading: tuple[str, ...]
    automatic: tuple[str, ...] = ()
    architectures: Mapping[str, Any] = field(default_factory=dict)
    pretrained: Callable[[Path], tuple[Any, tuple[Tokenizer, ...]]] | None = None
    counted: Mapping[str, Callable[[Any], int]] = field(default_factory=dict)

    @property
    def derived(self) -> dict[str, str]:
        """The settings of `model` that are never a user's, each with what it follows from."""
        return _derived(self.model)

    def model_config(self, model: Mapping[str, Any], tokenizers: Sequence[Any], data: Any) -> Any:
        """Return the configuration of a model: its settings, and what follows from the tokenizers and the data.

        Raises ValueError if a setting is out of range, or sequences are longer than learned positions hold.
        """
        sizes = {name: each.size for name, each in zip(self.vocabularies, tokenizers, strict=True)}
        ids = {name: getattr(tokenizers[-1], name) for name in _IDS if name in self.derived}
        counts = {name: count(data) for name, count in self.counted.items()}
        config = self.model(**{**model, **sizes, **ids, **counts})
        length = getattr(data, self.length)
        if config.longest is not None and length > config.longest:
            raise ValueError(
                f"{self.length} ({length}) is beyond max_positions ({config.longest}) of the learned positions; lower "
                "it, or raise max_positions"
            )
        return config

    def planned(self, model: Mapping[str, Any], data: Any) -> Any:
        """Return the configuration of a model as it may become, before there are tokenizers; see `model_config`."""
        ids = data.special_ids if hasattr(data, "special_ids") else SpecialIds()
        tokenizer = SimpleNamespace(size=data.vocabulary or max(ids.names()) + 1, **vars(ids))
        return self.model_config(model, [tokenizer] * len(self.vocabularies), data)

    def check_begins(self) -> None:
        """Raise ValueError if runs of this kind begin with no model from elsewhere."""
        if self.pretrained is None:
            raise ValueError(f"{self.title} runs begin with no model from elsewhere")

    def begin_with(
        self, folder: Path, given: Mapping[str, Any]
    ) -> tuple[nn.Module, tuple[Tokenizer, ...], dict[str, Any]]:
        """Return a model from elsewhere, its tokenizers, and its settings with those that were given.

        Raises:
            ValueError: there are no such models of this kind, or a given setting is the model's.
            FileNotFoundError, ImportError: see `pretrained`.
        """
        self.check_begins()
        assert self.pretrained is not None
        if own := [name for name in given if name not in RATES]:
            raise ValueError(f"{', '.join(own)}: that of {folder}; only {', '.join(RATES)} may be given with it")
        model, tokenizers = self.pretrained(folder)
        settings = {name: value for name, value in vars(model.config).items() if name not in self.derived}
        return model, tokenizers, {**settings, **given}

    def refuse_idle(
        self, given: Given, data: Any, model: Mapping[str, Any], train: TrainConfig, device: torch.device | str
    ) -> None:
        """Raise ValueError naming the settings in `given` that have no effect beside the others."""
        sections = {"data": data, "model": self.planned(model, data), "train": train}
        refuse_idle(given, sections, Machine(str(device), Processes.current().world))

    def save_settings(
        self, folder: Path, data: Any, model: Any, train: TrainConfig, chosen: tuple[str, ...] | None = None
    ) -> None:
        """Write config.toml, which makes a folder a run; `chosen` names the settings that no user gave."""
        kind = RunConfig(self.kind, VERSION, chosen)
        save_toml(folder / CONFIG, {"run": kind, "data": data, "model": model, "train": train})

    def save_tokenizers(self, folder: Path, tokenizers: Sequence[Tokenizer]) -> None:
        """Write the tokenizers of a run folder."""
        for name, tokenizer in zip(self.tokenizers, tokenizers, strict=True):
            tokenizer.save(folder / name)

    def complete(
        self, folder: Path, config: Any, tokenizers: Sequence[Tokenizer], data: Mapping[str, Any], train: TrainConfig
    ) -> None:
        """Make the folder of a `Trainer` a run folder; see `complete_run` of the applications.

        Raises:
            TypeError: the model's configuration is not the application's.
            ValueError: it does not fit the tokenizers or the data.
        """
        if not isinstance(config, self.model):
            raise TypeError(f"the trainer's model must have a {self.model.__name__}, not a {type(config).__name__}")
        expected = self.model_config(vars(config), tokenizers, SimpleNamespace(**data))
        for name, source in self.derived.items():
            if getattr(config, name) != getattr(expected, name):
                raise ValueError(
                    f"the model has {name}={getattr(config, name)}, not the {getattr(expected, name)} of {source}"
                )
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            self.save_tokenizers(folder, tokenizers)
            self.save_settings(folder, {"dataset": BY_HAND, **data}, config, train)

    def read_config(self, folder: Path | str) -> dict[str, dict[str, Any]]:
        """Return the settings of a run folder, by section: data, model, train.

        Raises:
            FileNotFoundError: the folder holds no run.
            ValueError: it holds a run of another kind, or an unknown setting.
        """
        path = Path(folder) / CONFIG
        if (kind := read_kind(folder)) != self.kind:
            other = application_of(kind)
            about = f"{folder} is a {other.title} run"
            raise ValueError(f"{about}; use `{other.use}` (or `{other.command} --resume` to train it further)")
        sections = self._load(path, REMOVED)
        needed = {each.name for each in dataclasses.fields(self.model) if each.default is MISSING}
        if missing := sorted(needed.difference(sections["model"])):
            raise ValueError(f"{path}: [model] has no {', '.join(missing)}: it is damaged")
        sections["model"] = befores(self.model) | sections["model"]
        return sections

    def read_settings(self, path: Path | None) -> dict[str, dict[str, Any]]:
        """Return what a user's file states, by section; nothing without a file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is for another kind of run, holds an unknown setting, or one that is not the user's.
        """
        if path is None:
            return {name: {} for name in ("data", "model", "train")}
        kind = stated(path, self.kind).kind
        if kind != self.kind:
            other = application_of(kind)
            raise ValueError(f"{path} is for a {other.title} run; use `{other.command}`")
        sections = self._load(path)
        for section, settings in (("data", self.data), ("model", self.model)):
            for name, source in _derived(settings).items():
                if name in sections[section]:
                    raise ValueError(f"{path}: [{section}] {name} is set from {source}; leave it out")
        return sections

    def _load(self, path: Path, removed: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        settings = {"run": RunConfig, "data": self.data, "model": self.model, "train": self.train}
        sections = load_toml(path, settings, removed)
        sections.pop("run")
        return sections

    def load_tokenizers(self, folder: Path | str) -> tuple[Tokenizer, ...]:
        """Return the tokenizers of a run folder.

        Raises:
            FileNotFoundError: there is no such run, or a file is missing.
            ValueError: a file is damaged, or not what the run's model has its sizes and ids from.
        """
        paths = [Path(folder) / name for name in self.tokenizers]
        found = tuple(load_tokenizer(path) for path in paths)
        config = self.model(**self.read_config(folder)["model"])
        facts = [(name, each.size, path) for name, each, path in zip(self.vocabularies, found, paths, strict=True)]
        facts += [(name, getattr(found[-1], name), paths[-1]) for name in _IDS if name in self.derived]
        for name, value, path in facts:
            if getattr(config, name) != value:
                raise ValueError(f"{path}: it is of another run: its {name} is {value}, not {getattr(config, name)}")
        return found

    def load_weights(self, folder: Path | str, checkpoint: str) -> Any:
        """Return the model of a run with its weights, on the CPU.

        Args:
            folder: of the run.
            checkpoint: "best" (by validation), "last" or "average".

        Raises:
            FileNotFoundError: there is no such run.
            ValueError: the run is of another kind, or this machine cannot hold the model.
            fastformer.apps.train.CheckpointError: there is no such checkpoint, or it is damaged or of another
                architecture.
        """
        config = self.model(**self.read_config(folder)["model"])
        found = Checkpoint.open(find_checkpoint(folder, checkpoint))
        found.check_architecture(config)
        found.check_size(config.matrix_numbers)
        check_memory(config)
        network = self.network(config)
        found.load_into(network, config)
        return network

    def load_for_inference(self, folder: Path | str, checkpoint: str, device: torch.device | str) -> Any:
        """Return the model of `load_weights` in evaluation mode on a device; errors as there."""
        return self.load_weights(folder, checkpoint).to(device).eval()


def _derived(settings: type[Settings]) -> dict[str, str]:
    return {item.name: facts(item)["derived"] for item in fields(settings) if facts(item)["derived"]}
