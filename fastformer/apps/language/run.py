"""Training runs of language models, and functions that load and evaluate them.

`fastformer.apps.runs.folder` describes the files of a run folder.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.apps.language.data import LanguageDataConfig, Split, build_tokenizer, read_text_corpora
from fastformer.apps.language.evaluation import HeldOutText, Perplexity, encode_corpus, perplexity
from fastformer.apps.language.model import LanguageConfig, LanguageModel, describe, language_model_loss
from fastformer.apps.language.pretrained import ARCHITECTURES
from fastformer.apps.language.text_generator import TextGenerator
from fastformer.apps.runs.application import Application
from fastformer.apps.runs.automatic_settings import CHOSEN, Task
from fastformer.apps.runs.run import Run
from fastformer.apps.settings import Given, inherited
from fastformer.apps.text import ColumnBatches, LanguageBatch, LanguageBatches, TextCorpus, Tokenizer, read_text
from fastformer.apps.text.tokenizer import UNK
from fastformer.apps.train import TrainConfig, Validation
from fastformer.settings import check_value


class LanguageTrainConfig(TrainConfig):
    """`TrainConfig` with defaults for language models.

    No label smoothing, which raises perplexity, and a learning rate that falls until the end of the budget;
    docs/language-models.md has measurements of other settings.
    """

    schedule: str = inherited(TrainConfig, "schedule", default="cosine")
    warmup_steps: int = inherited(TrainConfig, "warmup_steps", default=50)
    label_smoothing: float = inherited(TrainConfig, "label_smoothing", default=0.0)
    batch_tokens: int = inherited(TrainConfig, "batch_tokens", default=1024)


APPLICATION = Application(
    kind="language",
    title="language-model",
    use="fastformer generate",
    command="fastformer train lm",
    data=LanguageDataConfig,
    model=LanguageConfig,
    network=LanguageModel,
    describe=describe,
    train=LanguageTrainConfig,
    length="context",
    vocabularies=("vocabulary",),
    tokenizers=("tokenizer",),
    metrics={"loss": "", "perplexity": "", "word_perplexity": "tokens that are not the words between spaces"},
    reading=("context", "stream"),
    automatic=(*CHOSEN, "layers", "context", "batch_tokens"),
    architectures=ARCHITECTURES,
)


def _contains_unk(corpus: TextCorpus) -> bool:
    """Return whether the text has <unk> for rare words, as WikiText does: it needs a word list, not pieces."""
    return any(UNK in line.split() for line in corpus.lines)


class LanguageRun(Run):
    """A run that learns to predict text; see `fastformer.apps.runs.run.Run`."""

    application = APPLICATION
    data: LanguageDataConfig
    corpora: dict[Split, TextCorpus]
    model_config: LanguageConfig

    @classmethod
    def read(cls, data: LanguageDataConfig) -> tuple[LanguageDataConfig, dict[Split, TextCorpus]]:
        return data, read_text_corpora(data)

    def learn(self) -> tuple[Tokenizer]:
        return (build_tokenizer(self.data, self.corpora["train"]),)

    def chosen_data(self, given: Given) -> dict[str, Any]:
        stated = {"tokenizer", "vocabulary", "character_coverage"} & given["data"].keys()
        if not stated and self.train_config.metric != "word_perplexity" and _contains_unk(self.corpora["train"]):
            return {"tokenizer": "words"}
        return super().chosen_data(given)

    def sides(self) -> tuple[list[str]]:
        return (self.corpora["train"].lines,)

    def encode(self) -> None:
        (self.tokenizer,) = self.tokenizers
        self.encoded = encode_corpus(self.corpora["train"], self.tokenizer, self.data.stream)

    def task(self, given: Given) -> Task:
        data, columns = self.data, self.data.stream == "columns"
        return Task(
            layers={"layers": (2, 2, 2, 4, 6)},
            tokens=len(self.encoded.documents.ids),
            batch=None if columns else "batch_tokens",
            unit=data.columns * data.context if columns else 1.0,
            longest=data.context if "context" in given["data"] and not columns else 1,
            data={} if columns else {"context": (64, 64, 64, 128, 256)},
        )

    def make_batches(self, data: LanguageDataConfig, train: TrainConfig) -> LanguageBatches | ColumnBatches:
        if data.stream == "columns":
            return ColumnBatches(self.encoded, columns=data.columns, context=data.context)
        return LanguageBatches(self.encoded, context=data.context, tokens=train.batch_tokens, seed=train.seed)

    @classmethod
    def computed(cls, data: LanguageDataConfig) -> tuple[str, ...]:
        words = data.tokenizer == "words" and data.splitting == "whitespace"
        return ("loss", "perplexity", *(() if words else ("word_perplexity",)))

    @classmethod
    def check(
        cls, data: LanguageDataConfig, model: Mapping[str, Any], train: TrainConfig, device: torch.device | str = "cpu"
    ) -> None:
        super().check(data, model, train, device)
        if train.batch_sentences is not None:
            raise ValueError("batch_sentences is for translation; give batch_tokens, or columns and context")
        if data.stream == "documents" and train.batch_tokens < data.context:
            raise ValueError(f"batch_tokens ({train.batch_tokens}) must be at least context ({data.context})")

    def fingerprinted(self) -> Iterable[bytes]:
        yield from (self.encoded.documents.ids.tobytes(), self.encoded.documents.offsets.tobytes())

    def validation_texts(self) -> list[Any]:
        valid = self.corpora["valid"]
        return valid.documents if self.data.stream == "documents" else valid.lines

    def training(self) -> str:
        return str(self.encoded)

    def loss(self, model: LanguageModel, batch: LanguageBatch) -> torch.Tensor:
        return language_model_loss(model, batch, self.train_config.label_smoothing)

    def validation(self) -> Validation:
        held_out = HeldOutText(self.corpora["valid"], self.tokenizer, self.data.context, self.data.stream)
        computed = self.computed(self.data)

        def score(model: LanguageModel, indices: NDArray[np.int64]) -> dict[str, float]:
            result = held_out.perplexity(model, indices)
            values = {"loss": result.nats / result.tokens, "perplexity": result.per_token}
            return values | ({"word_perplexity": result.per_word} if "word_perplexity" in computed else {})

        return Validation(len(held_out.pieces), score)


def load_generator(folder: Path | str, checkpoint: str = "best", device: torch.device | str = "cpu") -> TextGenerator:
    """Load a run's model and tokenizer as a text generator.

    With stream=columns, texts begin after eos, because the model has never read bos.

    Args:
        folder: the run folder.
        checkpoint: "best" (by validation), "last" or "average".
        device: where the model is loaded.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: the run is of another kind, or the model exceeds this machine's memory.
        fastformer.apps.train.CheckpointError: there is no such checkpoint, or it is damaged.
    """
    model, (tokenizer,), data = APPLICATION.load(folder, checkpoint, device)
    first = tokenizer.eos_id if data.stream == "columns" else tokenizer.bos_id
    return TextGenerator(model, tokenizer, data.context, first_id=first)


def evaluate_text(
    folder: Path | str,
    split: Literal["test", "valid"] | Path = "test",
    checkpoint: str = "best",
    device: torch.device | str = "cpu",
    overlap: int = 0,
) -> tuple[TextCorpus, Perplexity]:
    """Compute the perplexity of a run's test or validation text, or of a file.

    Args:
        folder, checkpoint, device: as in `load_generator`.
        split: the run's test or validation text, or a file.
        overlap: how many tokens each window reads again from before it; see `fastformer.apps.language.evaluation`.

    Raises the errors of `load_generator`, `read_text_corpora` and `perplexity`.
    """
    model, (tokenizer,), data = APPLICATION.load(folder, checkpoint, device)
    if isinstance(split, Path):
        corpus = read_text(split, data.document or "line")
    else:
        check_value("split", split, str, choices=("test", "valid"))
        corpus = read_text_corpora(data)[split]
    return corpus, perplexity(model, corpus, tokenizer, data.context, data.stream, overlap)
