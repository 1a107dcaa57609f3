"""Training runs of language models: data and settings, training, and functions that load and evaluate runs.

Every line of text ends with eos, which is predicted like a word: WikiText-2 has 2,088,628, 217,646 and 245,569 tokens,
as published, and its vocabulary of 33,278 has two more entries here, `<pad>` and `<bos>`. The text is read as separate
documents, each between bos and eos; or as a stream of all lines, in training as columns (`ColumnBatches`). A model sees
at most `context` tokens. `fastformer.apps.runs.folder` describes the files of a run folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.apps.language.model import LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.language.sampling import TextGenerator
from fastformer.apps.runs.application import Application
from fastformer.apps.runs.automatic_settings import CHOSEN, Task
from fastformer.apps.runs.data_settings import DOCSTRINGS, TO_SPLIT, TextConfig
from fastformer.apps.runs.run import Run
from fastformer.apps.settings import FolderOrName, Given, inherited, setting
from fastformer.apps.text import (
    DOCUMENT_KINDS,
    ColumnBatches,
    EncodedDocuments,
    LanguageBatch,
    LanguageBatches,
    TextCorpus,
    Tokenizer,
    docstring_corpora,
    encode_lines,
    open_text_dataset,
    read_text,
    split_text,
)
from fastformer.apps.text.batches import Pieces, cut_documents, divide_by_tokens
from fastformer.apps.text.encoding import describe_unknown
from fastformer.apps.text.tokenizer import UNK
from fastformer.apps.train import TrainConfig, Validation
from fastformer.apps.train.progress import readable
from fastformer.apps.train.validation import to_perplexity
from fastformer.host.devices import device_of
from fastformer.settings import check_value

_EVALUATION_TOKENS = 4096  # in a batch; more did not make it faster on a CPU


class LanguageDataConfig(TextConfig):
    """Settings of the text, the tokenizer and the batches."""

    texts: ClassVar[str] = "running text"  # the content of batches, as conditions name it
    dataset: FolderOrName | None = inherited(
        TextConfig,
        "dataset",
        default="docstrings",
        help="docstrings (of the installed Python and torch), or a folder made by `fastformer data wikitext2`",
    )
    held_out: float = inherited(
        TextConfig,
        "held_out",
        default=0.05,
        help="share of the documents split off for validation, and as many for testing",
        only={"corpus": TO_SPLIT},
    )
    splitting: str = inherited(TextConfig, "splitting", default="whitespace")
    size: int = setting(2_000_000, "characters to collect", at_least=1, only={"corpus": DOCSTRINGS})
    document: str | None = setting(
        None,
        "where a document ends; article is WikiText's; unset: article for a dataset of articles, else line",
        choices=DOCUMENT_KINDS,
        only={"parts": "documents to tell apart"},
    )
    stream: str = setting(
        "documents",
        "documents, which do not attend to one another; or columns of the whole text",
        choices=("documents", "columns"),
    )
    columns: int = setting(20, "how many columns", at_least=1, only={"stream": "columns"})
    context: int = setting(256, "most tokens that the model reads at once (bptt)", at_least=1)

    @property
    def parts(self) -> str:
        """Whether `document` has an effect, in words: each docstring is one line, and columns have no documents."""
        separate = self.corpus == TO_SPLIT or (self.stream == "documents" and self.corpus != DOCSTRINGS)
        return "documents to tell apart" if separate else "none"


def read_text_corpora(data: LanguageDataConfig) -> dict[str, TextCorpus]:
    """Read the training, validation and test text."""
    if data.train_text is None:
        if data.dataset == "docstrings":
            splits = docstring_corpora(data.size)
        else:
            assert data.dataset is not None
            splits = open_text_dataset(data.dataset, data.document)  # type: ignore[arg-type]
        return {corpus.name: corpus for corpus in splits}
    document: Any = data.document or "line"
    paths = {"train": data.train_text, "valid": data.valid_text, "test": data.test_text}
    files = {name: read_text(path, document, name) for name, path in paths.items() if path is not None}
    if len(files) == len(paths):
        return files
    corpora = {corpus.name: corpus for corpus in split_text(files.pop("train"), data.held_out, seed=1)}
    for name in files:  # a corpus with a file stays as it is; what would be held out for it goes back to training
        corpora["train"].documents.extend(corpora[name].documents)
    return corpora | files


class LanguageTrainConfig(TrainConfig):
    """`TrainConfig` with defaults for language models.

    No label smoothing, which raises perplexity, and a learning rate that falls until the end of the budget. Batches of
    1,024 tokens: after 2 minutes of a core (d_model 256, 4 layers) perplexity was 1,010, with 4,096 tokens 1,429.
    """

    schedule: str = inherited(TrainConfig, "schedule", default="cosine")
    warmup_steps: int = inherited(TrainConfig, "warmup_steps", default=50)
    label_smoothing: float = inherited(TrainConfig, "label_smoothing", default=0.0)
    batch_tokens: int = inherited(TrainConfig, "batch_tokens", default=1024, help="most tokens in a batch")
    batch_sentences: int | None = inherited(TrainConfig, "batch_sentences", derived="batch_tokens")


APPLICATION = Application(
    kind="language",
    title="language-model",
    use="fastformer generate",
    command="fastformer train lm",
    data=LanguageDataConfig,
    model=LanguageConfig,
    network=LanguageModel,
    train=LanguageTrainConfig,
    length="context",
    tokenizers={"vocabulary": "tokenizer"},
    corpus=("dataset", "train_text", "valid_text", "test_text", "size"),
    automatic=(*CHOSEN, "layers", "context", "batch_tokens"),
)


class LanguageRun(Run):
    """A run that learns to predict text; see `fastformer.apps.runs.run.Run`."""

    application = APPLICATION
    data: LanguageDataConfig
    corpora: dict[str, TextCorpus]
    model_config: LanguageConfig

    @classmethod
    def read(cls, data: LanguageDataConfig) -> tuple[LanguageDataConfig, dict[str, TextCorpus]]:
        return data, read_text_corpora(data)

    def chosen_data(self, given: Given) -> dict[str, Any]:
        stated = {"tokenizer", "vocabulary", "character_coverage", "normalization"} & set(given["data"])
        if not stated and any(UNK in line.split() for line in self.corpora["train"].lines):
            return {"tokenizer": "words"}  # <unk> stands for rare words, as in WikiText: pieces would learn it
        return super().chosen_data(given)

    def sides(self) -> tuple[list[str]]:
        return (self.corpora["train"].lines,)

    def encode(self) -> tuple[str, list[NDArray[Any]]]:
        (self.tokenizer,) = self.tokenizers
        self.encoded = _encode(self.corpora["train"], self.tokenizer, self.data.stream)
        return str(self.encoded), [self.encoded.documents.ids, self.encoded.documents.offsets]

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
    def metric_names(cls, data: LanguageDataConfig) -> tuple[str, ...]:
        return ("loss", "perplexity")

    @classmethod
    def check(
        cls, data: LanguageDataConfig, model: Mapping[str, Any], train: TrainConfig, device: torch.device | str = "cpu"
    ) -> None:
        super().check(data, model, train, device)
        if train.batch_sentences is not None:
            raise ValueError("batch_sentences is for translation; give batch_tokens, or columns and context")
        if data.stream == "documents" and train.batch_tokens < data.context:
            raise ValueError(f"batch_tokens ({train.batch_tokens}) must be at least context ({data.context})")

    def validation_texts(self) -> list[Any]:
        valid = self.corpora["valid"]
        return valid.documents if self.data.stream == "documents" else valid.lines

    def loss(self, model: LanguageModel, batch: LanguageBatch) -> torch.Tensor:
        return language_model_loss(model, batch, self.train_config.label_smoothing)

    def validation(self) -> Validation:
        _, pieces = _pieces(self.corpora["valid"], self.tokenizer, self.data.context, self.data.stream)

        def score(model: LanguageModel, indices: NDArray[np.int64]) -> dict[str, float]:
            chosen = pieces.take(indices)
            return {"loss": _nats(model, chosen) / chosen.predictions}  # the trainer adds the perplexity

        return Validation(len(pieces), score)


def _encode(corpus: TextCorpus, tokenizer: Tokenizer, stream: str) -> EncodedDocuments:
    """Encode the documents of a corpus; of a stream, all lines are one document."""
    documents = [corpus.lines] if stream == "columns" else corpus.documents
    try:
        return encode_lines(documents, tokenizer)
    except ValueError as error:
        raise ValueError(f"{corpus.name}: {error}") from None


def _pieces(corpus: TextCorpus, tokenizer: Tokenizer, context: int, stream: str) -> tuple[EncodedDocuments, Pieces]:
    """Encode a corpus, and cut it into pieces in which a model predicts every token once."""
    documents = _encode(corpus, tokenizer, stream)
    return documents, cut_documents(documents, context, tokenizer.eos_id if stream == "columns" else None)


@torch.no_grad()
def _nats(model: LanguageModel, pieces: Pieces) -> float:
    """Sum the loss over all predictions."""
    most = max(_EVALUATION_TOKENS, int(pieces.lengths.max()))
    batches = divide_by_tokens(np.arange(len(pieces)), pieces.lengths[None], most)
    return sum(float(language_model_loss(model, pieces.collate(each).to(device_of(model)))) for each in batches)


@dataclass(frozen=True)
class Perplexity:
    """The loss of a model on a text.

    Attributes:
        nats: sum of -log p over the predicted tokens.
        tokens: number of predicted tokens, eos included.
        words: number of words between spaces in the same text, with an <eos> a line.
        unknown: number of predicted tokens that are <unk>.
    """

    nats: float
    tokens: int
    words: int
    unknown: int

    @property
    def per_token(self) -> float:
        """exp(nats / tokens)."""
        return to_perplexity(self.nats / self.tokens)

    @property
    def per_word(self) -> float:
        """exp(nats / words), which compares models of different tokenizers without unknown tokens."""
        return to_perplexity(self.nats / self.words)

    def __str__(self) -> str:
        unknown = describe_unknown(self.unknown)
        text = f"perplexity {readable(self.per_token)} per token ({self.tokens:,} predicted, <eos> counted{unknown})"
        if self.tokens != self.words:
            text += f"; {readable(self.per_word)} per word ({self.words:,} words, one <eos> a line counted)"
        return text


def perplexity(model: LanguageModel, corpus: TextCorpus, tokenizer: Tokenizer, context: int, stream: str) -> Perplexity:
    """Compute the perplexity of a text, of which a model predicts every token once; call `model.eval()` first.

    Args:
        model: the model.
        corpus: the text; documents without a token are skipped.
        tokenizer: the model's tokenizer.
        context: most tokens that a prediction looks back on.
        stream: "documents" or "columns", as the model was trained.

    Raises:
        ValueError: context is below 1, or no document has a token.
    """
    documents, pieces = _pieces(corpus, tokenizer, context, stream)
    unknown = documents.documents.count(tokenizer.unk_id)
    # Each skipped document is a line without a token, of which corpus.words counts the <eos>.
    return Perplexity(_nats(model, pieces), pieces.predictions, corpus.words - documents.dropped, unknown)


def load_generator(folder: Path | str, checkpoint: str = "best", device: torch.device | str = "cpu") -> TextGenerator:
    """Load a run's model and tokenizer as a text generator.

    With stream=columns, texts begin after eos, because the model has never read bos.

    checkpoint: "best", "last", "average", a name such as "step-200", or several with commas, which are averaged.
    Raises the errors of `fastformer.apps.runs.application.Application.load_weights`.
    """
    model, (tokenizer,), data = APPLICATION.load(folder, checkpoint, device)
    first = tokenizer.eos_id if data.stream == "columns" else tokenizer.bos_id
    return TextGenerator(model, tokenizer, data.context, first_id=first)


def evaluate_text(
    folder: Path | str,
    split: Literal["test", "valid"] | Path = "test",
    checkpoint: str = "best",
    device: torch.device | str = "cpu",
) -> tuple[TextCorpus, Perplexity]:
    """Compute the perplexity of a run's test or validation text, or of a file.

    Args:
        folder, checkpoint, device: as in `load_generator`.
        split: the run's test or validation text; or a file, whose documents are what they are in the run's text: lines
            in place of articles if the file has no titles.

    Raises the errors of `load_generator`, `read_text_corpora` and `perplexity`.
    """
    model, (tokenizer,), data = APPLICATION.load(folder, checkpoint, device)
    if isinstance(split, Path):
        reads_articles = data.train_text is None and data.dataset != "docstrings"
        corpus = read_text(split, data.document or (None if reads_articles else "line"))
    else:
        check_value("split", split, str, choices=("test", "valid"))
        corpus = read_text_corpora(data)[split]
    return corpus, perplexity(model, corpus, tokenizer, data.context, data.stream)
