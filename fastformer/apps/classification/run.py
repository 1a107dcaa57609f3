"""Training runs of classifiers, and functions that load and evaluate them.

`fastformer.apps.runs.folder` describes the files of a run folder. Labels are a setting of the data: config.toml lists
them in the order of the classes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.apps.classification.classifier import Classifier, Scores, class_logits, score_logits
from fastformer.apps.classification.corpus import LabelledCorpus, encode_texts, list_labels, number_texts, read_labelled
from fastformer.apps.classification.model import ClassifierConfig, SequenceClassifier, sequence_classification_loss
from fastformer.apps.runs.application import Application
from fastformer.apps.runs.automatic_settings import CHOSEN, Task
from fastformer.apps.runs.data_settings import NUMBERS, TextConfig
from fastformer.apps.runs.run import Run
from fastformer.apps.settings import File, FolderOrName, Given, Texts, inherited, setting
from fastformer.apps.text import LabelledBatch, LabelledBatches
from fastformer.apps.text.corpora import hold_out
from fastformer.apps.text.encoding import describe_unknown
from fastformer.apps.train import TrainConfig, Validation
from fastformer.settings import check_value


class ClassificationDataConfig(TextConfig):
    """Settings of the labelled text, the tokenizer and the batches."""

    texts: ClassVar[str] = "labelled texts"  # the content of batches, as conditions name it
    dataset: FolderOrName | None = inherited(
        TextConfig, "dataset", help="numbers: how many digits a number has, from its words (generated)"
    )
    train_text: File | None = inherited(
        TextConfig,
        "train_text",
        help="labelled text (plain or compressed), a line each: label, tab, text; instead of a dataset",
    )
    size: int = setting(4000, "texts to generate", at_least=100, only={"corpus": NUMBERS})
    labels: Texts | None = setting(None, "the classes, in order", derived="the training text")
    max_length: int = setting(256, "most tokens of a text, bos counted; longer texts are cut", at_least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_text is None and self.dataset != "numbers":
            raise ValueError(f"dataset must be numbers, unless train_text is given, not {self.dataset!r}")
        if self.labels is not None and (len(set(self.labels)) < max(2, len(self.labels))):
            raise ValueError(f"labels must be at least two different ones, not {list(self.labels)}")


class ClassificationTrainConfig(TrainConfig):
    """`TrainConfig` with defaults for classifiers, and batch sizes in texts."""

    schedule: str = inherited(TrainConfig, "schedule", default="cosine")
    warmup_steps: int = inherited(TrainConfig, "warmup_steps", default=50)
    label_smoothing: float = inherited(
        TrainConfig, "label_smoothing", default=0.0, help="probability mass spread over all labels"
    )
    batch_tokens: int = inherited(TrainConfig, "batch_tokens", derived="batch_sentences")
    batch_sentences: int = inherited(TrainConfig, "batch_sentences", default=32, help="most texts in a batch", only={})
    metric: str = inherited(
        TrainConfig, "metric", default="loss", help="validation value that decides best weights and early stopping"
    )

    def graphs_obstacle(self, processes: int = 1) -> str | None:
        """Return why CUDA graphs cannot repeat the steps of classifiers."""
        return "cuda_graphs=True is not for classifiers, whose batches have one label a text"


APPLICATION = Application(
    kind="classification",
    title="classification",
    use="fastformer classify",
    command="fastformer train classify",
    data=ClassificationDataConfig,
    model=ClassifierConfig,
    network=SequenceClassifier,
    train=ClassificationTrainConfig,
    length="max_length",
    tokenizers={"vocabulary": "tokenizer"},
    corpus=("dataset", "train_text", "valid_text", "test_text", "size"),
    automatic=(*CHOSEN, "layers", "batch_sentences"),
)


def read_labelled_corpora(data: ClassificationDataConfig) -> dict[str, LabelledCorpus]:
    """Read or generate training, validation and test text; labels are those of the settings, or else of training.

    Sets without a file are split off at random, equal texts together. Raises TextError for too few texts.
    """
    if data.train_text is None:
        whole, files = number_texts(data.size), {}
    else:
        whole = read_labelled(data.train_text, data.labels, "train")
        paths = {"valid": data.valid_text, "test": data.test_text}
        files = {name: read_labelled(path, whole.labels, name) for name, path in paths.items() if path is not None}
    if len(files) == 2:
        return {"train": whole, **files}
    train, valid, test = hold_out(whole.texts, data.held_out, 1, whole.name, "texts")
    held_out = {"valid": valid, "test": test}
    for name in files:  # its share is for training
        train = sorted(train + held_out[name])
    rest = replace(whole.take(train, "train"), dropped=whole.dropped)
    return {"train": rest, **{name: whole.take(indices, name) for name, indices in held_out.items()}, **files}


class ClassificationRun(Run):
    """A run that learns to label texts; see `fastformer.apps.runs.run.Run`."""

    application = APPLICATION
    data: ClassificationDataConfig
    train_config: ClassificationTrainConfig
    corpora: dict[str, LabelledCorpus]
    model_config: ClassifierConfig

    @classmethod
    def read(cls, data: ClassificationDataConfig) -> tuple[ClassificationDataConfig, dict[str, LabelledCorpus]]:
        corpora = read_labelled_corpora(data)
        return replace(data, labels=corpora["train"].labels), corpora

    def sides(self) -> tuple[list[str]]:
        return (self.corpora["train"].texts,)

    def encode(self) -> tuple[str, list[NDArray[Any]]]:
        (self.tokenizer,) = self.tokenizers
        train = self.corpora["train"]
        self.sequences, cut = encode_texts(train.texts, self.tokenizer, self.data.max_length)
        unknown = describe_unknown(self.sequences.count(self.tokenizer.unk_id))
        shortened = f", {cut:,} cut" if cut else ""
        tokens = f"{len(self.sequences):,} texts, {len(self.sequences.ids):,} tokens{unknown}{shortened}"
        arrays: list[NDArray[Any]] = [self.sequences.ids, self.sequences.offsets, train.classes]
        return f"{tokens}, {len(train.labels):,} labels: {list_labels(train.labels)}", arrays

    def task(self, given: Given) -> Task:
        tokens = len(self.sequences.ids)
        length = tokens / len(self.sequences)
        return Task({"layers": (2, 2, 2, 4, 6)}, tokens, batch="batch_sentences", unit=length, per_target=length)

    def make_batches(self, data: ClassificationDataConfig, train: Any) -> LabelledBatches:
        classes = self.corpora["train"].classes
        return LabelledBatches(self.sequences, classes, size=train.batch_sentences, seed=train.seed)

    @classmethod
    def metric_names(cls, data: ClassificationDataConfig) -> tuple[str, ...]:
        return "loss", "accuracy", "macro_f1"

    def validation_texts(self) -> list[Any]:
        return [self.corpora["valid"].texts, self.corpora["valid"].classes.tolist()]

    def loss(self, model: SequenceClassifier, batch: LabelledBatch) -> torch.Tensor:
        return sequence_classification_loss(model, batch, self.train_config.label_smoothing)

    def validation(self) -> Validation:
        corpus = self.corpora["valid"]
        sequences, _ = encode_texts(corpus.texts, self.tokenizer, self.data.max_length)

        def score(model: SequenceClassifier, indices: NDArray[np.int64]) -> dict[str, float]:
            scores = score_logits(class_logits(model, sequences.take(indices)), corpus.take(indices.tolist(), "valid"))
            return {"loss": scores.loss, "accuracy": scores.accuracy, "macro_f1": scores.macro_f1}

        return Validation(len(corpus), score)


def load_classifier(folder: Path | str, checkpoint: str = "best", device: torch.device | str = "cpu") -> Classifier:
    """Load a run's model, tokenizer and labels as a classifier.

    checkpoint: "best", "last", "average", a name such as "step-200", or several with commas, which are averaged.
    Raises the errors of `fastformer.apps.runs.application.Application.load_weights`.
    """
    model, (tokenizer,), data = APPLICATION.load(folder, checkpoint, device)
    if data.labels is None:
        raise ValueError(f"{Path(folder) / 'config.toml'}: [data] has no labels: it is damaged")
    return Classifier(model, tokenizer, data.labels, data.max_length)


def evaluate(
    folder: Path | str,
    split: Literal["test", "valid"] | Path = "test",
    checkpoint: str = "best",
    device: torch.device | str = "cpu",
) -> tuple[LabelledCorpus, Scores]:
    """Score a run on its test or validation text, or on a labelled file; errors as in `load_classifier`."""
    classifier = load_classifier(folder, checkpoint, device)
    if isinstance(split, Path):
        corpus = read_labelled(split, classifier.labels)
    else:
        check_value("split", split, str, choices=("test", "valid"))
        corpus = read_labelled_corpora(ClassificationDataConfig(**APPLICATION.read_config(folder)["data"]))[split]
    return corpus, score_logits(class_logits(classifier.model, classifier.encode(corpus.texts)), corpus)
