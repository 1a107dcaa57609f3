"""The translation application: data, tokenizers, model, training and decoding around one run folder.

What a run folder is stands in `fastformer.apps.runs.folder`; its tokenizers lie in tokenizer/source and
tokenizer/target, the same one twice if they are joint.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.apps.runs.application import PRETRAINED, Application
from fastformer.apps.runs.automatic_settings import CHOSEN, Task
from fastformer.apps.runs.folder import refuse_by_hand
from fastformer.apps.runs.run import Run
from fastformer.apps.settings import SET, File, FolderOrName, Given, Settings, setting
from fastformer.apps.text import (
    SPLITTINGS,
    Batches,
    EncodedPairs,
    ParallelCorpus,
    SpecialIds,
    Tokenizer,
    encode_pairs,
    learn_tokenizer,
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
from fastformer.apps.text.tokenizers import split_symbols
from fastformer.apps.train import Processes, TrainConfig, Trainer, Validation
from fastformer.apps.translation.export import ctranslate2_spec
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, describe, translation_loss
from fastformer.apps.translation.pretrained import ARCHITECTURES, read_pretrained
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import Translator
from fastformer.host.devices import device_of

_LEARNED = ("bpe", "unigram", "char", "word", "words")
TOKENIZERS = (*_LEARNED, PRETRAINED)
_PIECEWISE, _OURS = {"tokenizer": _LEARNED[:-1]}, {"tokenizer": _LEARNED}
_NUMBERS = 10_000  # pairs of number words, when nothing is said
_HELD_OUT = {"corpus": ("number words", "sentence files")}
Split = Literal["train", "valid", "test"]


class DataConfig(Settings):
    """Where the text comes from, and how it becomes ids and batches."""

    texts: ClassVar[str] = "sentence pairs"  # what batches are made of, for conditions
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
        None, "the same for validation; unset: split from training", only={"train_source": SET}
    )
    valid_target: File | None = setting(None, "see valid_source", only={"train_source": SET, "valid_source": SET})
    test_source: File | None = setting(
        None, "the same for testing; unset: split from training", only={"train_source": SET}
    )
    test_target: File | None = setting(None, "see test_source", only={"train_source": SET, "test_source": SET})
    valid_size: int = setting(
        500, "pairs split off (or generated) for validation", at_least=1, only=_HELD_OUT | {"valid_source": None}
    )
    test_size: int = setting(
        500, "pairs split off (or generated) for testing", at_least=1, only=_HELD_OUT | {"test_source": None}
    )
    train_size: int | None = setting(
        None, f"pairs to train on, the first ones; unset: all, or {_NUMBERS:,} of numbers", at_least=1
    )
    tokenizer: str = setting(
        "bpe",
        "sentencepiece's bpe, unigram, char or word; words: a plain word list; pretrained: those of --from",
        choices=TOKENIZERS,
    )
    vocabulary: int = setting(
        8000, "entries of each vocabulary, clamped to what the text allows", at_least=5, only=_OURS
    )
    joint: bool = setting(True, "one vocabulary for both languages", only=_OURS)
    character_coverage: float = setting(
        1.0, "share of characters sentencepiece must cover", at_least=0.98, at_most=1, only=_PIECEWISE
    )
    symbols: str | None = setting(
        None, "tags such as <2de>,<2fr> that are one piece each, separated by commas", only={"tokenizer": _LEARNED[:3]}
    )
    splitting: str = setting("punctuation", "where words end", choices=SPLITTINGS, only={"tokenizer": "words"})
    minimum_frequency: int = setting(2, "rarer words become <unk>", at_least=1, only={"tokenizer": "words"})
    lowercase: bool = setting(False, "lower-case both sides", only=_OURS)
    unk_id: int = setting(0, "id of the unknown token", at_least=0, below="vocabulary", only=_OURS)
    pad_id: int = setting(1, "id of padding", at_least=0, below="vocabulary", only=_OURS)
    bos_id: int = setting(2, "id of the begin token", at_least=0, below="vocabulary", only=_OURS)
    eos_id: int = setting(3, "id of the end token", at_least=0, below="vocabulary", only=_OURS)
    max_length: int = setting(256, "longest sentence in tokens with eos", at_least=2)
    too_long: str = setting("drop", "what happens to longer training pairs", choices=("drop", "truncate"))
    bucket: bool = setting(False, "batches of similar lengths (only padded execution needs them)")
    bleu_sentences: int = setting(500, "validation sentences translated greedily for BLEU; 0: none", at_least=0)
    target_language: str | None = setting(
        None, "language of the target files, such as zh, which chooses bleu_tokenizer", only={"train_source": SET}
    )
    bleu_tokenizer: str | None = setting(
        None, "sacrebleu's tokenizer for BLEU; unset: by the target language", choices=BLEU_TOKENIZERS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in ("train", "valid", "test"):
            if (getattr(self, f"{part}_source") is None) != (getattr(self, f"{part}_target") is None):
                raise ValueError(f"{part}_source and {part}_target must be given together")
        if self.train_source is None and (self.valid_source is not None or self.test_source is not None):
            raise ValueError("valid_source and test_source need train_source")
        if self.dataset is None and self.train_source is None:
            raise ValueError("no data: give dataset, or train_source and train_target")
        self.special_ids.distinct()
        split_symbols(self.symbols)

    @property
    def corpus(self) -> str:
        """What kind of data it is, in words."""
        if self.train_source is not None:
            return "sentence files"
        return "number words" if self.dataset == "numbers" else "a dataset folder"

    @property
    def tokenizer_for_bleu(self) -> str:
        """The tokenizer that BLEU is computed with: the setting, or the one for the target language."""
        language = self.target if self.train_source is None else self.target_language or ""
        return self.bleu_tokenizer or bleu_tokenizer(language)

    def files(self) -> list[Path]:
        """What stands where the text comes from."""
        given = [path for path in vars(self).values() if isinstance(path, Path)]
        folder = Path(self.dataset or "") if self.corpus == "a dataset folder" else None
        return given + (sorted(folder.iterdir()) if folder is not None and folder.is_dir() else [])

    @property
    def special_ids(self) -> SpecialIds:
        """The four special ids as one value."""
        return SpecialIds(self.unk_id, self.pad_id, self.bos_id, self.eos_id)


def _without_idle_size(sections: dict[str, dict[str, Any]]) -> None:
    """Runs of version 1 hold a train_size whatever the data, which counted for numbers only."""
    data = sections["data"]
    if "train_source" in data or data.get("dataset", "numbers") != "numbers":
        data.pop("train_size", None)


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
    ctranslate2=ctranslate2_spec,
    architectures=ARCHITECTURES,
    pretrained=read_pretrained,
    upgrade=_without_idle_size,
)


def read_corpora(data: DataConfig) -> dict[Split, ParallelCorpus]:
    """Read or generate the training, validation and test pairs.

    Of `train_size` pairs the first are taken, after those that are split off: `head` shows the same, nothing else is
    held in memory, and where the order means something (Europarl's is that of its sessions) `fastformer data` has
    shuffled it.

    Raises:
        FileNotFoundError, ValueError: naming file and line, or the setting.
    """
    if data.train_source is not None and data.train_target is not None:
        held: dict[Split, ParallelCorpus] = {}
        if data.valid_source is not None and data.valid_target is not None:
            held["valid"] = read_parallel(data.valid_source, data.valid_target, "valid")
        if data.test_source is not None and data.test_target is not None:
            held["test"] = read_parallel(data.test_source, data.test_target, "test")
        valid_size = 0 if "valid" in held else data.valid_size
        test_size = 0 if "test" in held else data.test_size
        limit = None if data.train_size is None else data.train_size + valid_size + test_size
        train = read_parallel(data.train_source, data.train_target, "train", limit)
        train, valid, test = split(train, valid_size, test_size, seed=1)
        return {"train": train, "valid": held.get("valid", valid), "test": held.get("test", test)}
    if data.dataset == "numbers":
        if data.source != "en":
            raise ValueError(f"source must be 'en' for dataset 'numbers', not {data.source!r}")
        parts = number_corpus(data.target, data.train_size or _NUMBERS, data.valid_size, data.test_size)
    else:
        assert data.dataset is not None
        refuse_by_hand(data.dataset)
        parts = open_dataset(data.dataset, data.source, data.target, data.train_size)
    return dict(zip(("train", "valid", "test"), parts, strict=True))


def build_tokenizers(data: DataConfig, train: ParallelCorpus) -> tuple[Tokenizer, Tokenizer]:
    """Learn the vocabularies, from the training pairs only."""
    if data.joint:
        both = learn_tokenizer(train.source + train.target, data, data.special_ids)
        return both, both
    source, target = (learn_tokenizer(lines, data, data.special_ids) for lines in (train.source, train.target))
    return source, target


@torch.no_grad()
def corpus_loss(model: TranslationModel, pairs: EncodedPairs, tokens: int = 4096) -> float:
    """Mean cross entropy per target token (eos included, no smoothing), in nats; call `.eval()` first."""
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
            layers={"encoder_layers": (4, 4, 6), "decoder_layers": (4, 4, 6)},
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
            shown = corpus.take([i for i in indices.tolist() if i < data.bleu_sentences], "valid")
            if len(shown):
                translator = Translator(model, source, target, data.max_length)
                found = translator.translate(shown.source, SearchOptions(beam=1))
                scores = score_translations(found, shown.target, tokenizer=tokenizer)
                values |= {"bleu": scores.bleu, "bleu_signature": scores.bleu_signature, "chrf": scores.chrf}
            return values

        return Validation(len(pairs), score)


def load_translator(
    folder: Path | str, checkpoint: str = "best", device: torch.device | str = "cpu", weights: str = "fp32"
) -> Translator:
    """Load a run's model and tokenizers, ready to translate.

    Args:
        folder: of the run.
        checkpoint: "best" (by validation), "last" or "average".
        device: of the model.
        weights: "fp32", or on a CPU "bf16" or "int8": see `fastformer.nn.pack_weights`.

    Raises:
        FileNotFoundError, ValueError, fastformer.apps.train.CheckpointError: see
            `fastformer.apps.runs.application.Application.load_weights`.
    """
    model = APPLICATION.load_for_inference(folder, checkpoint, device, weights)
    source, target = APPLICATION.load_tokenizers(folder)
    length = APPLICATION.read_config(folder)["data"].get("max_length", DataConfig.max_length)
    return Translator(model, source, target, length)


def complete_run(
    trainer: Trainer, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, max_length: int = 256
) -> None:
    """Make the folder of a `Trainer` a run folder, which `load_translator` and every command open.

    Writes the tokenizers and config.toml beside the checkpoints: the kind of run, the settings of model and training.
    Call it before or after `fit`, in all processes. The folder does not know the text, so the run goes on in Python
    only, and `fastformer evaluate` needs `--source` and `--target`.

    Args:
        trainer: of a `TranslationModel`.
        source_tokenizer, target_tokenizer: the same one twice if it is joint.
        max_length: longest sentence in tokens with eos; `translate` cuts longer ones.

    Raises:
        TypeError: the trainer's model is another one.
        ValueError: the model does not fit the tokenizers, or max_length its positions.
    """
    config, tokenizers = getattr(trainer.model, "config", None), (source_tokenizer, target_tokenizer)
    data = {"max_length": max_length}
    Processes.current().on_main(lambda: APPLICATION.complete(trainer.folder, config, tokenizers, data, trainer.config))


def evaluate(
    translator: Translator,
    corpus: ParallelCorpus,
    options: SearchOptions | None = None,
    lowercase: bool = False,
    bleu_tokenizer: str = "13a",
) -> tuple[Scores, list[str]]:
    """Translate a corpus and compare with its target side: the scores and the translations."""
    translations = translator.translate(corpus.source, options)
    return score_translations(translations, corpus.target, lowercase, bleu_tokenizer), translations
