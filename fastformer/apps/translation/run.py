"""Training runs of translation models: data and settings, training, and functions that load and evaluate runs.

`fastformer.apps.runs.folder` describes the files of a run folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.apps.runs.application import Application
from fastformer.apps.runs.automatic_settings import CHOSEN, Task
from fastformer.apps.runs.data_settings import IF_LEARNED, LEARNED, NUMBERS, VocabularyConfig
from fastformer.apps.runs.run import Run
from fastformer.apps.settings import SET, File, FolderOrName, Given, inherited, setting
from fastformer.apps.text import (
    Batches,
    ParallelCorpus,
    SampledBatches,
    SpecialIds,
    Tokenizer,
    encode_pairs,
    number_corpus,
    open_dataset,
    read_parallel,
    split,
)
from fastformer.apps.text.scores import (
    BLEU_TOKENIZERS,
    Scores,
    bleu_tokenizer,
    check_bleu_tokenizer,
    score_translations,
    warn_without_spaces,
)
from fastformer.apps.text.sentencepiece_tokenizer import read_marian
from fastformer.apps.text.vocabulary import VOCABULARY, split_symbols
from fastformer.apps.train import TrainConfig, Validation
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, corpus_loss, translation_loss
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import Translator

_NUMBER_PAIRS = 10_000  # pairs of number words if train_size is unset
_MOST_SPLIT_OFF = 500  # pairs for validation and for testing, if their number is unset
_SPLIT_OFF = f"{_MOST_SPLIT_OFF}, or a tenth of fewer than {10 * _MOST_SPLIT_OFF:,} pairs"
_HELD_OUT = {"corpus": (NUMBERS, "sentence files")}


class DataConfig(VocabularyConfig):
    """Settings of the text, the tokenizers and the batches."""

    texts: ClassVar[str] = "sentence pairs"  # the content of batches, as conditions name it
    dataset: FolderOrName | None = setting(
        "numbers",
        "numbers (generated number words, en to fr or de), or a folder made by `fastformer data`",
        only={"train_source": None},
    )
    source: str = setting("en", "source language, as the dataset names it", only={"train_source": None})
    target: str = setting("fr", "target language", only={"train_source": None})
    train_source: File | None = setting(None, "file of source sentences (plain or compressed), instead of a dataset")
    train_target: File | None = setting(None, "file of their translations, line by line", only={"train_source": SET})
    valid_source: File | None = setting(
        None, "file of source sentences for validation; unset: split from training", only={"train_source": SET}
    )
    valid_target: File | None = setting(
        None, "file of translations of valid_source", only={"train_source": SET, "valid_source": SET}
    )
    test_source: File | None = setting(
        None, "file of source sentences for testing; unset: split from training", only={"train_source": SET}
    )
    test_target: File | None = setting(
        None, "file of translations of test_source", only={"train_source": SET, "test_source": SET}
    )
    valid_size: int | None = setting(
        None,
        f"pairs split off (or generated) for validation; unset: {_SPLIT_OFF}",
        at_least=1,
        only=_HELD_OUT | {"valid_source": None},
    )
    test_size: int | None = setting(
        None,
        f"pairs split off (or generated) for testing; unset: {_SPLIT_OFF}",
        at_least=1,
        only=_HELD_OUT | {"test_source": None},
    )
    train_size: int | None = setting(
        None, f"pairs to train on, the first ones; unset: all, or {_NUMBER_PAIRS:,} of numbers", at_least=1
    )
    vocabulary: int = inherited(
        VocabularyConfig,
        "vocabulary",
        default=VOCABULARY,
        help="entries of each vocabulary, clamped to what the text allows",
    )
    minimum_frequency: int = inherited(VocabularyConfig, "minimum_frequency", default=2)
    joint: bool = setting(True, "one vocabulary for both languages", only=IF_LEARNED)
    symbols: str | None = setting(
        None, "tags such as <2de>,<2fr> that are one piece each, separated by commas", only={"tokenizer": LEARNED[:3]}
    )
    sampling: float | None = setting(
        None,
        "how much pieces vary between epochs, such as 0.1: share of merges left out by bpe, alpha of unigram; unset: "
        "not at all",
        above=0,
        at_most=1,
        only={"tokenizer": LEARNED[:2]},
    )
    unk_id: int = setting(0, "id of the unknown token", at_least=0, below="vocabulary", only=IF_LEARNED)
    pad_id: int = setting(1, "id of padding", at_least=0, below="vocabulary", only=IF_LEARNED)
    bos_id: int = setting(2, "id of the begin token", at_least=0, below="vocabulary", only=IF_LEARNED)
    eos_id: int = setting(3, "id of the end token", at_least=0, below="vocabulary", only=IF_LEARNED)
    max_length: int = setting(256, "longest sentence in tokens with eos", at_least=2)
    too_long: str = setting("drop", "what happens to longer training pairs", choices=("drop", "truncate"))
    bucket: bool = setting(False, "batches of sentences of similar length, which packed batches do not need")
    bleu_sentences: int = setting(500, "validation sentences translated greedily for BLEU; 0: none", at_least=0)
    target_language: str | None = setting(
        None, "language of the target files, such as zh, which chooses bleu_tokenizer", only={"train_source": SET}
    )
    bleu_tokenizer: str | None = setting(
        None, "sacrebleu's tokenizer for BLEU; unset: by the target language", choices=BLEU_TOKENIZERS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train", "valid", "test"):
            if (getattr(self, f"{name}_source") is None) != (getattr(self, f"{name}_target") is None):
                raise ValueError(f"{name}_source and {name}_target must be given together")
        if self.train_source is None and (self.valid_source is not None or self.test_source is not None):
            raise ValueError("valid_source and test_source need train_source")
        if self.dataset is None and self.train_source is None:
            raise ValueError("no data: give dataset, or train_source and train_target")
        self.special_ids.distinct()
        split_symbols(self.symbols)

    @property
    def corpus(self) -> str:
        """Name the kind of data."""
        if self.train_source is not None:
            return "sentence files"
        return NUMBERS if self.dataset == "numbers" else "a dataset folder"

    @property
    def tokenizer_for_bleu(self) -> str:
        """Return the tokenizer of BLEU: the setting, or the one for the target language."""
        language = self.target if self.train_source is None else self.target_language or ""
        return self.bleu_tokenizer or bleu_tokenizer(language)

    def files(self) -> list[Path]:
        """Return the files that the text is read from."""
        paths = [path for path in vars(self).values() if isinstance(path, Path)]
        folder = Path(self.dataset or "") if self.corpus == "a dataset folder" else None
        return paths + (sorted(folder.iterdir()) if folder is not None and folder.is_dir() else [])

    @property
    def special_ids(self) -> SpecialIds:
        """Return the four special ids."""
        return SpecialIds(self.unk_id, self.pad_id, self.bos_id, self.eos_id)


def _sizes_split_off(data: DataConfig, pairs: int) -> tuple[int, int]:
    """Return how many pairs are split off for validation and for testing, of a corpus or of `pairs` to train on."""
    unset = min(_MOST_SPLIT_OFF, max(1, pairs // 10))
    valid_size = 0 if data.valid_source is not None else data.valid_size or unset
    return valid_size, 0 if data.test_source is not None else data.test_size or unset


def read_corpora(data: DataConfig) -> dict[str, ParallelCorpus]:
    """Read or generate training, validation and test pairs; train on the first `train_size` that are not split off."""
    if data.train_source is not None and data.train_target is not None:
        files = {"valid": (data.valid_source, data.valid_target), "test": (data.test_source, data.test_target)}
        held_out = {
            name: read_parallel(source, target, name) for name, (source, target) in files.items() if source and target
        }
        limit = None if data.train_size is None else data.train_size + sum(_sizes_split_off(data, data.train_size))
        train = read_parallel(data.train_source, data.train_target, "train", limit)
        sizes = _sizes_split_off(data, min(data.train_size or len(train), len(train)))
        return {corpus.name: corpus for corpus in split(train, *sizes, 1)} | held_out
    if data.dataset == "numbers":
        if data.source != "en":
            raise ValueError(f"source must be 'en' for dataset 'numbers', not {data.source!r}")
        pairs = data.train_size or _NUMBER_PAIRS
        corpora = number_corpus(data.target, pairs, *_sizes_split_off(data, pairs))
    else:
        assert data.dataset is not None
        corpora = open_dataset(data.dataset, data.source, data.target, data.train_size)
    return {corpus.name: corpus for corpus in corpora}


APPLICATION = Application(
    kind="translation",
    title="translation",
    use="fastformer translate",
    command="fastformer train",
    data=DataConfig,
    model=TranslationConfig,
    network=TranslationModel,
    train=TrainConfig,
    length="max_length",
    tokenizers={"source_vocabulary": "tokenizer/source", "target_vocabulary": "tokenizer/target"},
    corpus=(
        *("dataset", "train_source", "source", "target", "train_target", "valid_source", "valid_target"),
        *("test_source", "test_target", "valid_size", "test_size", "train_size"),
    ),
    automatic=(*CHOSEN, "encoder_layers", "decoder_layers", "embeddings", "batch_tokens", "schedule"),
    pretrained=read_marian,
)


class TranslationRun(Run):
    """A run that learns to translate; see `fastformer.apps.runs.run.Run`."""

    application = APPLICATION
    data: DataConfig
    corpora: dict[str, ParallelCorpus]
    model_config: TranslationConfig

    @classmethod
    def read(cls, data: DataConfig) -> tuple[DataConfig, dict[str, ParallelCorpus]]:
        return data, read_corpora(data)

    def learn(self, warns: bool) -> tuple[Tokenizer, Tokenizer]:
        learned = super().learn(warns)
        return learned[0], learned[-1]

    def sides(self) -> tuple[list[str], ...]:
        train = self.corpora["train"]
        return (train.source + train.target,) if self.data.joint else (train.source, train.target)

    def encode(self) -> tuple[str, list[NDArray[Any]]]:
        data = self.data
        source, target = self.tokenizers
        self.pairs = encode_pairs(self.corpora["train"], source, target, data.max_length, data.too_long)  # type: ignore[arg-type]
        sides = self.pairs.source, self.pairs.target
        return str(self.pairs), [array for side in sides for array in (side.ids, side.offsets)]

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

    def make_batches(self, data: DataConfig, train: TrainConfig) -> Batches | SampledBatches:
        options: dict[str, Any] = {
            "tokens": train.batch_tokens if train.batch_sentences is None else None,
            "sentences": train.batch_sentences,
            "seed": train.seed,
            "bucket": data.bucket,
        }
        if data.sampling is None:
            return Batches(self.pairs, **options)
        source, target = self.tokenizers
        options |= {"max_length": data.max_length, "too_long": data.too_long}
        return SampledBatches(self.corpora["train"], source, target, data.sampling, **options)

    @classmethod
    def metric_names(cls, data: DataConfig) -> tuple[str, ...]:
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

    def validation_texts(self) -> list[Any]:
        return [self.corpora["valid"].source, self.corpora["valid"].target]

    def loss(self, model: TranslationModel, batch: Any) -> torch.Tensor:
        return translation_loss(model, batch, self.train_config.label_smoothing)

    def validation(self) -> Validation:
        corpus, data = self.corpora["valid"], self.data
        source, target = self.tokenizers
        pairs = encode_pairs(corpus, source, target, data.max_length, too_long="truncate")
        tokenizer = data.tokenizer_for_bleu
        graphs = False if self.train_config.cuda_graphs is False else None
        warn_without_spaces(tokenizer, corpus.target[: data.bleu_sentences])  # before hours of training

        def score(model: TranslationModel, indices: NDArray[np.int64]) -> dict[str, float | str]:
            values: dict[str, float | str] = {"loss": corpus_loss(model, pairs.take(indices))}
            scored = corpus.take([i for i in indices.tolist() if i < data.bleu_sentences], "valid")
            if len(scored):
                translator = Translator(model, source, target, data.max_length)
                translations = translator.translate(scored.source, SearchOptions(beam=1, cuda_graphs=graphs))
                scores = score_translations(translations, scored.target, tokenizer=tokenizer, warn=False)
                values |= {"bleu": scores.bleu, "bleu_signature": scores.bleu_signature, "chrf": scores.chrf}
            return values

        return Validation(len(pairs), score)


def load_translator(folder: Path | str, checkpoint: str = "best", device: torch.device | str = "cpu") -> Translator:
    """Load a run's model and tokenizers, ready to translate.

    checkpoint: "best", "last", "average", a name such as "step-200", or several with commas, which are averaged.
    Raises the errors of `fastformer.apps.runs.application.Application.load_weights`.
    """
    model, (source, target), data = APPLICATION.load(folder, checkpoint, device)
    return Translator(model, source, target, data.max_length)


def evaluate(
    translator: Translator,
    corpus: ParallelCorpus,
    options: SearchOptions | None = None,
    lowercase: bool = False,
    bleu_tokenizer: str = "13a",
    **scoring: Any,
) -> tuple[Scores, list[str]]:
    """Translate a corpus and compare with its target side; return the scores and the translations.

    scoring: further arguments of `score_translations`.
    """
    translations = translator.translate(corpus.source, options)
    return score_translations(translations, corpus.target, lowercase, bleu_tokenizer, **scoring), translations
