"""Run folders: what the applications share, from a new folder to a trained model.

A run folder describes itself, so that nothing but its path is needed to resume, evaluate or use it:

    config.toml      [run] its kind, [data] [model] [train]: every setting, defaults included
    data.json        what was read: counts, and a fingerprint that a resumed run must meet again
    tokenizer/       one tokenizer, or one in a folder for each side
    checkpoints/     weights as safetensors, resumable state
    metrics.jsonl    losses, speed, validation scores; metrics.csv the same
"""

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from fastformer.text import Tokenizer, load_tokenizer, read_json
from fastformer.train import (
    BatchSource,
    Checkpoint,
    CheckpointFolder,
    Processes,
    Result,
    TrainConfig,
    Trainer,
    find_checkpoint,
    load_toml,
    save_toml,
)
from fastformer.train.compilation import check_compiler
from fastformer.train.config import check_values, option, read_toml

# kind -> what it is called, the command that uses such a run, and the one that trains it.
KINDS = {
    "translation": ("translation", "fastformer translate", "fastformer train"),
    "language": ("language-model", "fastformer generate", "fastformer train lm"),
}

_IDS = ("pad_id", "bos_id", "eos_id")

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class RunConfig:
    """What a run is. Folders written before there was a choice say nothing and hold translation."""

    kind: str = option("translation", "what the model does", choices=tuple(KINDS))

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class Application:
    """One kind of run: its classes of settings, and where its tokenizers lie.

    `train` is `TrainConfig`, or a subclass of it with defaults that suit this kind of model. A setting that is unset by
    default must stay so: config.toml leaves unset values out, so that a run which has none would take the new default.

    `length` names the setting of `data` that says how long sequences are; `vocabularies` those of `model` that are the
    sizes of the tokenizers; `tokenizers` are folders within the run's.
    """

    kind: str
    data: type
    model: type
    train: type[TrainConfig]
    length: str
    vocabularies: tuple[str, ...]
    tokenizers: tuple[str, ...]

    @property
    def derived(self) -> tuple[str, ...]:
        """The settings of `model` that follow from the tokenizers and are never a user's."""
        return (*self.vocabularies, *_IDS)

    def model_config(self, model: Mapping[str, Any], tokenizers: Sequence[Tokenizer], data: Any) -> Any:
        """The configuration of a model: its settings, and what follows from the tokenizers.

        Args:
            model: settings of the model.
            tokenizers: of the run; the model writes the special ids of the last.
            data: settings of the data.

        Raises:
            ValueError: a setting is out of range, or sequences are longer than learned positions hold.
        """
        sizes = {name: each.size for name, each in zip(self.vocabularies, tokenizers, strict=True)}
        config = self.model(**{**model, **sizes, **{name: getattr(tokenizers[-1], name) for name in _IDS}})
        length = getattr(data, self.length)
        if config.longest is not None and length > config.longest:
            raise ValueError(
                f"{self.length} ({length}) is beyond max_positions ({config.longest}) of the learned positions; lower "
                "it, or raise max_positions"
            )
        return config

    def read_config(self, folder: Path | str) -> dict[str, dict[str, Any]]:
        """The settings of a run folder, by section: data, model, train.

        Raises:
            FileNotFoundError: the folder holds no run.
            ValueError: it holds a run of another kind, or an unknown setting.
        """
        kind = read_kind(folder)
        if kind != self.kind:
            name, use, train = KINDS[kind]
            raise ValueError(f"{folder} is a {name} run; use `{use}` (or `{train} --resume` to train it further)")
        sections = self._load(Path(folder) / "config.toml")
        needed = {each.name for each in dataclasses.fields(self.model) if each.default is dataclasses.MISSING}
        if missing := sorted(needed.difference(sections["model"])):
            raise ValueError(f"{Path(folder) / 'config.toml'}: [model] has no {', '.join(missing)}: it is damaged")
        return sections

    def read_settings(self, path: Path | None) -> dict[str, dict[str, Any]]:
        """What a user's file states, by section; nothing without a file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is for another kind of run, holds an unknown setting, or one that is not the user's.
        """
        if path is None:
            return {name: {} for name in ("data", "model", "train")}
        kind = _stated_kind(path) or self.kind
        if kind != self.kind:
            name, _, train = KINDS[kind]
            raise ValueError(f"{path} is for a {name} run; use `{train}`")
        sections = self._load(path)
        for name in self.derived:
            if name in sections["model"]:
                raise ValueError(f"{path}: [model] {name} is set from the tokenizer; leave it out")
        return sections

    def load_tokenizers(self, folder: Path | str) -> tuple[Tokenizer, ...]:
        """The tokenizers of a run folder."""
        return tuple(load_tokenizer(Path(folder) / name) for name in self.tokenizers)

    def load_weights(self, folder: Path | str, checkpoint: str, model: type[Model]) -> Model:
        """The model of a run with its weights, on the CPU.

        Args:
            folder: of the run.
            checkpoint: "best" (by validation), "last" or "average".
            model: the class that is made from the settings.

        Raises:
            FileNotFoundError: there is no such run.
            ValueError: the run is of another kind.
            fastformer.train.CheckpointError: there is no such checkpoint, or it is damaged or of another architecture.
        """
        config = self.model(**self.read_config(folder)["model"])
        made = model(config)
        Checkpoint.open(find_checkpoint(folder, checkpoint)).load_into(made, config)
        return made

    def _load(self, path: Path) -> dict[str, dict[str, Any]]:
        sections = {"run": RunConfig, "data": self.data, "model": self.model, "train": self.train}
        return {name: values for name, values in load_toml(path, sections).items() if name != "run"}


def read_kind(folder: Path | str) -> str:
    """What a run folder holds: one of `KINDS`.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: its config.toml is damaged.
    """
    path = Path(folder) / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a run folder: it has no config.toml")
    return _stated_kind(path) or "translation"


def _stated_kind(path: Path) -> str | None:
    """The kind that a file states; None where it states none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such configuration file")
    run = read_toml(path).get("run", {})
    if not isinstance(run, dict) or "kind" not in run:
        return None
    return RunConfig(run["kind"]).kind


class Run(ABC):
    """One run: its settings, its data, its tokenizers and its model.

    Use `create` for a new folder and `open` for one that exists.

    Subclasses set `application`, and `corpora`, `tokenizers` and `model_config` when they are made.
    """

    application: ClassVar[Application]
    folder: Path
    data: Any
    train_config: TrainConfig
    device: torch.device
    corpora: Mapping[Any, Any]
    tokenizers: tuple[Tokenizer, ...]
    model_config: Any

    @abstractmethod
    def __init__(
        self,
        folder: Path,
        data: Any,
        model: Mapping[str, Any],
        train: TrainConfig,
        tokenizers: tuple[Tokenizer, ...] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Read the data, and learn the vocabularies unless they are given."""

    @abstractmethod
    def fingerprinted(self) -> Iterable[bytes]:
        """The encoded training data, which a resumed run must meet again."""

    @abstractmethod
    def training(self) -> str:
        """The encoded training data, in words."""

    @abstractmethod
    def new_model(self) -> nn.Module:
        """The model with its initial values, on the CPU."""

    @abstractmethod
    def batches(self) -> BatchSource:
        """The training data as batches."""

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Tensor:
        """Sum of the loss over a batch's real tokens."""

    @abstractmethod
    def validation(self) -> Callable[[Any], dict[str, float]]:
        """The function that scores a model on the validation data."""

    @classmethod
    def create(
        cls,
        folder: Path | str,
        data: Any,
        model: Mapping[str, Any],
        train: TrainConfig,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Read the data, learn the vocabularies, and write a new run folder.

        Of several processes, the first does that, and the others open what it made.

        Args:
            folder: must not hold a run with checkpoints; one that ended before its first is replaced.
            data: where the text comes from.
            model: settings of the model, without those that follow from the tokenizers.
            train: hyperparameters.
            device: of the model.

        Raises:
            FileExistsError: the folder holds a run already.
            ValueError: the compiler that `train` asks for is missing; before anything is read.
            FileNotFoundError: a process does not see the folder that the first one made.
        """
        check_compiler(train.compile, device)
        made: list[Self] = []
        Processes.current().on_main(lambda: made.append(cls._create(Path(folder), data, model, train, device)))
        if made:
            return made[0]
        try:
            return cls.open(folder, device=device)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}; all processes need the run folder and the data in one place") from None

    @classmethod
    def _create(
        cls, folder: Path, data: Any, model: Mapping[str, Any], train: TrainConfig, device: torch.device | str
    ) -> Self:
        if CheckpointFolder(folder / "checkpoints").paths():
            raise FileExistsError(f"{folder} holds a run already; resume it, or choose another folder")
        run = cls(folder, data, model, train, device=device)
        folder.mkdir(parents=True, exist_ok=True)
        for name, tokenizer in zip(cls.application.tokenizers, run.tokenizers, strict=True):
            tokenizer.save(folder / name)
        (folder / "data.json").write_text(json.dumps(run.data_report(), indent=1) + "\n", encoding="utf-8")
        # Written last: a folder with a config.toml is a run.
        kind = RunConfig(cls.application.kind)
        save_toml(folder / "config.toml", {"run": kind, "data": data, "model": run.model_config, "train": train})
        return run

    @classmethod
    def open(
        cls, folder: Path | str, train: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Open a run to resume it, with changes to its [train] settings such as a longer budget.

        Raises:
            FileNotFoundError: the folder holds no run.
            ValueError: it is a run of another kind, or the training data is not what the run was started with.
        """
        folder, application = Path(folder), cls.application
        sections = application.read_config(folder)
        config = application.train(**{**sections["train"], **(train or {})})
        check_compiler(config.compile, device)
        model = {k: v for k, v in sections["model"].items() if k not in application.derived}
        data = application.data(**sections["data"])
        run = cls(folder, data, model, config, application.load_tokenizers(folder), device)
        before = read_json(folder / "data.json")
        if not isinstance(before, dict) or "fingerprint" not in before:
            raise ValueError(f"{folder / 'data.json'}: damaged; it has no fingerprint of the training data")
        if before["fingerprint"] != run.data_report()["fingerprint"]:
            raise ValueError(f"{folder}: the training data differs from what this run was started with")
        return run

    def data_report(self) -> dict[str, Any]:
        """Counts of what was read, and a fingerprint of the encoded training data."""
        digest = hashlib.sha256()
        for part in self.fingerprinted():
            digest.update(part)
        return {
            "corpora": {name: str(corpus) for name, corpus in self.corpora.items()},
            "training": self.training(),
            "vocabularies": [tokenizer.size for tokenizer in self.tokenizers],
            "fingerprint": digest.hexdigest(),
        }

    def fit(self, resume: bool = False, fallback: bool = False, show: bool = True) -> Result:
        """Train to the end of the budget; see `fastformer.train.Trainer`.

        Args:
            resume: continue from the last checkpoint.
            fallback: where that one is damaged, take the one before.
            show: progress on the terminal.
        """
        torch.manual_seed(self.train_config.seed)
        trainer = Trainer(
            self.new_model().to(self.device),
            self.loss,
            self.batches(),
            self.train_config,
            self.folder,
            validate=self.validation(),
            architecture=self.model_config,
            show=show,
        )
        if resume:
            trainer.resume(fallback=fallback)
        return trainer.fit()
