"""`Run`: base of the applications' runs, from a new folder to a trained model; see `runs.folder` for the folder."""

import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fastformer import functional
from fastformer.apps.models.sizes import check_memory
from fastformer.apps.runs.application import PRETRAINED, Application
from fastformer.apps.runs.automatic_settings import Choice, Task, choose, targets_per_second, vocabulary_size
from fastformer.apps.runs.folder import CONFIG, DATA, check_new, read_kind, read_run_section
from fastformer.apps.settings import Given, derived, refuse_fixed
from fastformer.apps.system.files import write_file
from fastformer.apps.system.run_lock import locked
from fastformer.apps.text import Tokenizer
from fastformer.apps.text.files import missing_file, read_json
from fastformer.apps.text.vocabulary import learn_tokenizer
from fastformer.apps.train import (
    BatchSource,
    CheckpointFolder,
    Processes,
    Result,
    TrainConfig,
    Trainer,
    Validation,
    read_metrics,
)
from fastformer.apps.train.config import check_machine
from fastformer.settings import check_value


class Run(ABC):
    """One run: settings, data, tokenizers and model.

    Use `create` for a new folder and `open` for one that exists. Subclasses set `application`.
    """

    application: ClassVar[Application]
    corpora: Mapping[Any, Any]
    tokenizers: tuple[Tokenizer, ...]
    model_config: Any
    initial: nn.Module | None = None  # the model from transformers that a new run begins with
    choice: Choice | None = None  # of the settings that the user of a new run left out
    origin: str | None = None  # folder of the model that the run began with

    def __init__(
        self,
        folder: Path,
        data: Any,
        model: Mapping[str, Any],
        train: TrainConfig,
        tokenizers: tuple[Tokenizer, ...] | None = None,
        device: torch.device | str = "cpu",
        given: Given | None = None,
        announce: Callable[[str], object] = str,
    ) -> None:
        """Read the data, learn the vocabularies unless tokenizers are given, encode, and choose what `create` says."""
        self.folder, self.train_config, self.device = folder, train, torch.device(device)
        self.data, self.corpora = self.read(data)
        for corpus in self.corpora.values():
            announce(str(corpus))  # before learning and encoding, which take minutes for a large text
        chosen = {} if given is None else self.chosen_data(given)
        self.data = replace(self.data, **chosen)
        self.tokenizers = tokenizers or self.learn(given is None or "vocabulary" in given["data"])
        self.training, self.encoded_arrays = self.encode()
        if given is not None:
            self.choice = self._choose(model, given, chosen)
            self.data, self.train_config = replace(self.data, **self.choice.data), replace(train, **self.choice.train)
            model = {**model, **self.choice.model}
        self.model_config = self.application.model_config(model, self.tokenizers, self.data)
        self.batches = self.make_batches(self.data, self.train_config)

    def chosen_data(self, given: Given) -> dict[str, Any]:
        """Choose the settings of the data that the vocabularies are learned with and that are not given."""
        pieces = self.data.tokenizer in ("bpe", "unigram")
        return {"vocabulary": vocabulary_size(self.sides())} if pieces and "vocabulary" not in given["data"] else {}

    def _choose(self, model: Mapping[str, Any], given: Given, data: Mapping[str, Any]) -> Choice:
        """Choose the settings that are not given; `data` holds settings chosen before."""
        names = {name for section in given.values() for name in section}
        if not {*self.application.automatic} - names - {"vocabulary"}:
            return Choice(data, {}, {})

        def speed(shape: Choice) -> float:
            """Measure the targets of the loss per second that all processes together train a model with."""
            text, train = replace(self.data, **shape.data), replace(self.train_config, **shape.train)
            config = self.application.model_config({**model, **shape.model}, self.tokenizers, text)
            check_memory(config)
            network = self.application.network(config).to(self.device)
            batches = self.make_batches(text, train)
            return targets_per_second(network, self.loss, batches, train, Processes.current().world)

        defaults, on_gpu = self.application.model, self.device.type != "cpu"
        return choose(self.task(given), defaults, model, self.train_config, names, speed, data, on_gpu)

    @classmethod
    @abstractmethod
    def read(cls, data: Any) -> tuple[Any, Mapping[Any, Any]]:
        """Read training, validation and test data; return the settings, completed from the data, and the data."""

    @abstractmethod
    def sides(self) -> Iterable[Iterable[str]]:
        """Return the lines of the training data, per vocabulary."""

    def learn(self, warns: bool) -> tuple[Tokenizer, ...]:
        """Learn the vocabularies from the training data only; warns: log a warning if one is smaller than set."""
        return tuple(learn_tokenizer(lines, self.data, warns) for lines in self.sides())

    @abstractmethod
    def encode(self) -> tuple[str, list[NDArray[Any]]]:
        """Encode the training data; return words about it, and arrays that must be equal in a resumed run."""

    @abstractmethod
    def task(self, given: Given) -> Task:
        """Describe the run for the choice of settings that are not given."""

    @abstractmethod
    def make_batches(self, data: Any, train: TrainConfig) -> BatchSource:
        """Return batches of the encoded training data, of the size in the settings."""

    @abstractmethod
    def validation_texts(self) -> list[Any]:
        """Return the validation data as read, whose fingerprint must be equal in a resumed run."""

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Tensor:
        """Return the sum of the loss over a batch's real tokens."""

    @abstractmethod
    def validation(self) -> Validation:
        """Return the `Validation` that scores a model on the validation data."""

    @classmethod
    @abstractmethod
    def metric_names(cls, data: Any) -> tuple[str, ...]:
        """Return the names of the metrics that validation computes with these settings of the data."""

    @classmethod
    def check(cls, data: Any, model: Mapping[str, Any], train: TrainConfig, device: torch.device | str = "cpu") -> None:
        """Raise an error for settings that would only fail late, before data is read and a folder is created.

        Raises ValueError naming the setting, FileNotFoundError for a file of the data, ImportError for a package that
        is not installed, BackendError if the chosen backend cannot run here.
        """
        config, computed = cls.application.expected_config(model, data), cls.metric_names(data)
        check_memory(config)
        try:
            x = torch.zeros(1, 1, 1, config.d_model // config.heads, device=device)
            x.sum().item()  # which raises for device "meta"
        except (RuntimeError, AssertionError, ImportError) as error:  # AssertionError: torch without CUDA
            raise ValueError(f"device={str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
        functional.check_backend(x)
        check_machine(train, device, Processes.current().world)
        check_value("metric", train.metric, str, choices=computed)
        packages = {"sacrebleu": "apps"} if "bleu" in computed else {}
        packages |= {"tensorboard": "tensorboard"} if train.tensorboard else {}
        for package, extra in packages.items():
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"this run needs {package}: pip install 'fastformer[{extra}]'")
        for path in (value for value in vars(data).values() if isinstance(value, Path)):
            if not path.exists():
                raise missing_file(path)

    def new_model(self) -> nn.Module:
        """Return the model with its initial values, on the CPU."""
        network = self.application.network(self.model_config)
        if self.initial is not None:
            network.load_state_dict(self.initial.state_dict())
        return network

    @classmethod
    def create(
        cls,
        folder: Path | str,
        data: Any,
        model: Mapping[str, Any],
        train: TrainConfig,
        device: torch.device | str = "cpu",
        pretrained: Path | str | None = None,
        given: Given | None = None,
        announce: Callable[[str], object] = str,
    ) -> Self:
        """Read the data, learn the vocabularies, and write a new run folder in process 0; other processes open it.

        Args:
            folder: new or empty, or a run of this kind that ended before its first checkpoint, which is replaced.
            data, model, train: settings; of the model, without those computed from the tokenizers.
            device: of the model.
            pretrained: folder that the run begins with, see `Application.load_initial_model`; `data.tokenizer` is
                "pretrained".
            given: names of the settings that a user stated, by section; others are chosen, with `pretrained` those of
                training except the rate. None: none is chosen.
            announce: called in process 0 with a line about each corpus once all are read.

        Raises before data is read: FileExistsError for a folder with a run or other files, RunLockedError if another
        process writes to it, and the errors of `check`.
        """
        if (data.tokenizer == PRETRAINED) != (pretrained is not None):
            raise ValueError(f"tokenizer must be {PRETRAINED} with a model to begin with (--from), and only then")
        folder, created, initial, tokenizers = Path(folder), list[Self](), None, None
        if pretrained is not None:
            initial, tokenizers, model, data = cls.application.load_initial_model(Path(pretrained), model, data, given)
            if given is not None:  # only settings of training are chosen, except the rate, which would be too high
                given = {"data": vars(data), "model": model, "train": {*given["train"], "lr"}}

        def create_in_main() -> None:
            check_new(folder, cls.application.kind)
            cls.check(data, model, train, device)
            run = cls(folder, data, model, train, tokenizers, device, given, announce)
            run.origin = None if pretrained is None else str(Path(pretrained).resolve())
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):
                check_new(folder, cls.application.kind)  # another process may have written it since
                write_file(folder / DATA, (json.dumps(run.data_report(), indent=1) + "\n").encode())
                run._save_settings()
                cls.application.save_tokenizers(folder, run.tokenizers)
            created.append(run)

        Processes.current().on_main(create_in_main)
        run = created[0] if created else cls._open(folder, None, device)
        run.initial = initial
        return run

    def _save_settings(self) -> None:
        self.application.save_settings(self.folder, self.data, self.model_config, self.train_config, self.origin)

    @classmethod
    def open(
        cls, folder: Path | str, train: Mapping[str, Any] | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Open a run to resume it, with changed [train] settings such as a longer budget; `fit` saves them.

        Raises FileNotFoundError without a run, RunLockedError if another process writes to it, and ValueError if the
        run is of another kind, a setting cannot change or has no effect, or the data differs from what it was.
        """
        folder = Path(folder)
        read_kind(folder)

        def check_unlocked() -> None:
            with locked(folder):
                pass

        Processes.current().on_main(check_unlocked)  # before data is read
        return cls._open(folder, train, device)

    @classmethod
    def _open(cls, folder: Path, train: Mapping[str, Any] | None, device: torch.device | str) -> Self:
        application, changes = cls.application, train or {}
        sections = application.read_config(folder)
        config = application.train(**{**sections["train"], **changes})
        model = {k: v for k, v in sections["model"].items() if k not in derived(application.model)}
        data = application.data(**sections["data"])
        refuse_fixed(changes, application.train(**sections["train"]))
        application.reject_unused_options({"train": changes}, data, model, config, device)
        cls.check(data, model, config, device)
        run = cls(folder, data, model, config, application.load_tokenizers(folder), device)
        run.origin = read_run_section(folder / CONFIG).origin
        saved, report = read_json(folder / DATA), run.data_report()
        for name, what in (("fingerprint", "training"), ("validation", "validation")):
            if name not in saved:
                raise ValueError(f"{folder / DATA}: damaged; it has no {name} of the data")
            if saved[name] != report[name]:
                raise ValueError(f"{folder}: the {what} data differs from what this run was started with")
        return run

    def data_report(self) -> dict[str, Any]:
        """Return counts and fingerprints of the data, which must be equal in a resumed run."""
        digest = hashlib.sha256()
        for array in self.encoded_arrays:
            digest.update(array.tobytes())
        return {
            "corpora": {name: str(corpus) for name, corpus in self.corpora.items()},
            "training": self.training,
            "vocabularies": [tokenizer.size for tokenizer in self.tokenizers],
            "fingerprint": digest.hexdigest(),
            "validation": hashlib.sha256(json.dumps(self.validation_texts()).encode()).hexdigest(),
        }

    def fit(self, resume: bool = False, show: bool = True) -> Result:
        """Train to the end of the budget, and show progress; see `fastformer.apps.train.Trainer`.

        resume: continue from the last checkpoint.
        """
        with ExitStack() as stack:

            def lock_and_check() -> None:
                stack.enter_context(locked(self.folder))
                if resume:  # before a model is allocated and changed settings are saved
                    last = CheckpointFolder(self.folder / "checkpoints").open()
                    last.check_architecture(self.model_config, self.model_config.matrix_numbers)
                    with suppress(FileNotFoundError):
                        read_metrics(self.folder)

            Processes.current().on_main(lock_and_check)
            torch.manual_seed(self.train_config.seed)
            model = self.new_model().to(self.device)
            trainer = Trainer(
                *(model, self.loss, self.batches, self.train_config, self.folder), validate=self.validation(), show=show
            )
            if resume:
                trainer.resume()
                if trainer.ended is None:  # a run that trains nothing keeps its settings
                    Processes.current().on_main(self._save_settings)
            return trainer.fit()
