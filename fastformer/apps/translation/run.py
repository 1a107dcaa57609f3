"""Training runs of translation models, and functions that load and evaluate them.

`fastformer.apps.runs.folder` describes the files of a run folder.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.apps.runs.application import Application
from fastformer.apps.runs.automatic_settings import CHOSEN, Task
from fastformer.apps.runs.run import Run
from fastformer.apps.settings import Given
from fastformer.apps.text import Batches, EncodedPairs, ParallelCorpus, Tokenizer, encode_pairs
from fastformer.apps.text.scores import Scores, check_bleu_tokenizer, score_translations, warn_without_spaces
from fastformer.apps.train import TrainConfig, Validation
from fastformer.apps.translation.data import DataConfig, Split, build_tokenizers, read_corpora
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, describe, translation_loss
from fastformer.apps.translation.pretrained import ARCHITECTURES, read_pretrained
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import Translator
from fastformer.host.devices import device_of

APPLICATION = Application(
    kind="translation",
    title="translation",
    use="fastformer translate",
    command="fastformer train",
    data=DataConfig,
    model=TranslationConfig,
    network=TranslationModel,
    describe=describe,
    train=TrainConfig,
    length="max_length",
    vocabularies=("source_vocabulary", "target_vocabulary"),
    tokenizers=("tokenizer/source", "tokenizer/target"),
    metrics={
        "loss": "",
        "perplexity": "",
        "bleu": "a search: bleu_sentences above 0",
        "chrf": "a search: bleu_sentences above 0",
    },
    reading=("max_length",),
    automatic=(*CHOSEN, "encoder_layers", "decoder_layers", "embeddings", "batch_tokens", "schedule"),
    architectures=ARCHITECTURES,
    pretrained=read_pretrained,
)


@torch.no_grad()
def corpus_loss(model: TranslationModel, pairs: EncodedPairs, tokens: int = 4096) -> float:
    """Compute the mean cross entropy per target token, eos included, in nats; call `.eval()` first."""
    device = device_of(model)
    longest = int(max(pairs.source.lengths.max(), pairs.target.lengths.max())) + 1
    total, count = 0.0, 0
    for batch in Batches(pairs, tokens=max(tokens, longest), shuffle=False).epoch(0):
        total += float(translation_loss(model, batch.to(device)))
        count += batch.tokens
    return total / count


class TranslationRun(Run):
    """A run that learns to translate; see `fastformer.apps.runs.run.Run`."""

    application = APPLICATION
    data: DataConfig
    corpora: dict[Split, ParallelCorpus]
    model_config: TranslationConfig

    @classmethod
    def read(cls, data: DataConfig) -> tuple[DataConfig, dict[Split, ParallelCorpus]]:
        return data, read_corpora(data)

    def learn(self) -> tuple[Tokenizer, Tokenizer]:
        return build_tokenizers(self.data, self.corpora["train"])

    def sides(self) -> tuple[list[str], ...]:
        train = self.corpora["train"]
        return (train.source + train.target,) if self.data.joint else (train.source, train.target)

    def encode(self) -> None:
        data = self.data
        source, target = self.tokenizers
        self.pairs = encode_pairs(self.corpora["train"], source, target, data.max_length, data.too_long)  # type: ignore[arg-type]

    def task(self, given: Given) -> Task:
        lengths = self.pairs.target.lengths + 1  # eos
        tokens, by_pairs = int(lengths.sum()), self.train_config.batch_sentences is not None
        return Task(
            layers={"encoder_layers": (1, 2, 4, 4, 6), "decoder_layers": (1, 2, 4, 4, 6)},
            tokens=tokens,
            batch="batch_sentences" if by_pairs else "batch_tokens",
            unit=tokens / len(self.pairs) if by_pairs else 1.0,
            longest=1 if by_pairs else int(max(self.pairs.source.lengths.max() + 1, lengths.max())),
            model={"embeddings": "shared"} if self.data.joint else {},
            train={"schedule": "linear"},
        )

    def make_batches(self, data: DataConfig, train: TrainConfig) -> Batches:
        return Batches(
            self.pairs,
            tokens=train.batch_tokens if train.batch_sentences is None else None,
            sentences=train.batch_sentences,
            seed=train.seed,
            bucket=data.bucket,
        )

    @classmethod
    def computed(cls, data: DataConfig) -> tuple[str, ...]:
        return ("loss", "perplexity", *(("bleu", "chrf") if data.bleu_sentences else ()))

    @classmethod
    def check(
        cls, data: DataConfig, model: Mapping[str, Any], train: TrainConfig, device: torch.device | str = "cpu"
    ) -> None:
        super().check(data, model, train, device)
        if model.get("embeddings") == "shared" and not data.joint:
            raise ValueError("embeddings 'shared' needs one joint vocabulary, but joint=False")
        if data.bleu_sentences:
            check_bleu_tokenizer(data.tokenizer_for_bleu)

    def fingerprinted(self) -> Iterable[bytes]:
        for side in (self.pairs.source, self.pairs.target):
            yield from (side.ids.tobytes(), side.offsets.tobytes())

    def validation_texts(self) -> list[Any]:
        return [self.corpora["valid"].source, self.corpora["valid"].target]

    def training(self) -> str:
        return str(self.pairs)

    def loss(self, model: TranslationModel, batch: Any) -> torch.Tensor:
        return translation_loss(model, batch, self.train_config.label_smoothing)

    def validation(self) -> Validation:
        corpus, data = self.corpora["valid"], self.data
        source, target = self.tokenizers
        pairs = encode_pairs(corpus, source, target, data.max_length, too_long="truncate")
        tokenizer = data.tokenizer_for_bleu
        warn_without_spaces(tokenizer, corpus.target[: data.bleu_sentences])  # before hours of training

        def score(model: TranslationModel, indices: NDArray[np.int64]) -> dict[str, float | str]:
            values: dict[str, float | str] = {"loss": corpus_loss(model, pairs.take(indices))}
            scored = corpus.take([i for i in indices.tolist() if i < data.bleu_sentences], "valid")
            if len(scored):
                translator = Translator(model, source, target, data.max_length)
                translations = translator.translate(scored.source, SearchOptions(beam=1))
                scores = score_translations(translations, scored.target, tokenizer=tokenizer)
                values |= {"bleu": scores.bleu, "bleu_signature": scores.bleu_signature, "chrf": scores.chrf}
            return values

        return Validation(len(pairs), score)


def load_translator(folder: Path | str, checkpoint: str = "best", device: torch.device | str = "cpu") -> Translator:
    """Load a run's model and tokenizers, ready to translate.

    Args:
        folder: the run folder.
        checkpoint: "best" (by validation), "last" or "average".
        device: where the model is loaded.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: the run is of another kind, or the model exceeds this machine's memory.
        fastformer.apps.train.CheckpointError: there is no such checkpoint, or it is damaged.
    """
    model, (source, target), data = APPLICATION.load(folder, checkpoint, device)
    return Translator(model, source, target, data.max_length)


def evaluate(
    translator: Translator,
    corpus: ParallelCorpus,
    options: SearchOptions | None = None,
    lowercase: bool = False,
    bleu_tokenizer: str = "13a",
) -> tuple[Scores, list[str]]:
    """Translate a corpus and compare with its target side; return the scores and the translations."""
    translations = translator.translate(corpus.source, options)
    return score_translations(translations, corpus.target, lowercase, bleu_tokenizer), translations
