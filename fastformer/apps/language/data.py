"""Data of language models: the settings, the corpora that they name, and the vocabulary learned from the corpora.

Every line of text ends with eos, which is predicted like a word: WikiText-2 has 2,088,628, 217,646 and 245,569 tokens,
as published, and its vocabulary of 33,278 has two more entries here, `<pad>` and `<bos>`.

The text is read as separate documents, each between bos and eos; or as a stream of all lines, in training as columns
(`fastformer.apps.text.ColumnBatches`). A model sees at most `context` tokens.
"""

from typing import Any, ClassVar, Literal

from fastformer.apps.runs.folder import refuse_by_hand
from fastformer.apps.settings import SET, File, FolderOrName, Settings, setting
from fastformer.apps.text import (
    DOCUMENT_KINDS,
    SPLITTINGS,
    TextCorpus,
    Tokenizer,
    docstring_corpora,
    learn_tokenizer,
    open_text_dataset,
    read_text,
    split_text,
)

TOKENIZERS = ("bpe", "unigram", "char", "words")
_IF_PIECES = {"tokenizer": TOKENIZERS[:-1]}
STREAMS = ("documents", "columns")
Split = Literal["train", "valid", "test"]
_SPLITS: tuple[Split, ...] = ("train", "valid", "test")
_TO_SPLIT = "a text file to split"
_PIECES = 8000  # entries of a sentencepiece vocabulary if `vocabulary` is unset


class LanguageDataConfig(Settings):
    """Settings of the text, the tokenizer and the batches."""

    texts: ClassVar[str] = "running text"  # the content of batches, as conditions name it
    dataset: FolderOrName | None = setting(
        "docstrings",
        "docstrings (of the installed Python and torch), or a folder made by `fastformer data wikitext2`",
        only={"train_text": None},
    )
    train_text: File | None = setting(None, "text file (plain or compressed), instead of a dataset")
    valid_text: File | None = setting(
        None, "the same for validation; unset: split from training", only={"train_text": SET}
    )
    test_text: File | None = setting(None, "the same for testing; unset: split from training", only={"train_text": SET})
    held_out: float = setting(
        0.05, "share of the documents split off for each of both", above=0, below=0.5, only={"corpus": _TO_SPLIT}
    )
    size: int = setting(2_000_000, "characters to collect", at_least=1, only={"corpus": "docstrings"})
    document: str | None = setting(
        None,
        "where a document ends; article is WikiText's; unset: article for a dataset of articles, else line",
        choices=DOCUMENT_KINDS,
        only={"parts": "documents to tell apart"},
    )
    stream: str = setting(
        "documents", "documents, none of which sees another; or columns of the whole text", choices=STREAMS
    )
    columns: int = setting(20, "how many columns", at_least=1, only={"stream": "columns"})
    context: int = setting(256, "most tokens that a model looks back on, itself counted (bptt)", at_least=1)
    tokenizer: str = setting(
        "bpe",
        "sentencepiece's bpe, unigram or char; or words: a plain word list, the choice for a text that has <unk>",
        choices=TOKENIZERS,
    )
    vocabulary: int | None = setting(None, f"entries at most; unset: {_PIECES:,}, or every word", at_least=5)
    splitting: str = setting("whitespace", "where words end", choices=SPLITTINGS, only={"tokenizer": "words"})
    minimum_frequency: int = setting(1, "rarer words become <unk>", at_least=1, only={"tokenizer": "words"})
    character_coverage: float = setting(
        1.0, "share of characters sentencepiece must cover", at_least=0.98, at_most=1, only=_IF_PIECES
    )
    lowercase: bool = setting(False, "lower-case the text")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_text is None and (self.valid_text is not None or self.test_text is not None):
            raise ValueError("valid_text and test_text need train_text")
        if self.dataset is None and self.train_text is None:
            raise ValueError("no data: give dataset or train_text")

    @property
    def corpus(self) -> str:
        """Name the kind of data."""
        if self.train_text is not None:
            return "text files" if self.valid_text is not None and self.test_text is not None else _TO_SPLIT
        return "docstrings" if self.dataset == "docstrings" else "a dataset folder"

    @property
    def parts(self) -> str:
        """Whether document boundaries matter, in words: a docstring is one line, and columns have no documents."""
        separate = self.corpus == _TO_SPLIT or (self.stream == "documents" and self.corpus != "docstrings")
        return "documents to tell apart" if separate else "none"


def read_text_corpora(data: LanguageDataConfig) -> dict[Split, TextCorpus]:
    """Read the training, validation and test text."""
    if data.train_text is None:
        if data.dataset == "docstrings":
            splits = docstring_corpora(data.size)
        else:
            assert data.dataset is not None
            refuse_by_hand(data.dataset)
            splits = open_text_dataset(data.dataset, data.document)  # type: ignore[arg-type]
        return dict(zip(_SPLITS, splits, strict=True))
    document: Any = data.document or "line"
    paths = {"train": data.train_text, "valid": data.valid_text, "test": data.test_text}
    corpora = {name: read_text(path, document, name) for name, path in paths.items() if path is not None}
    if len(corpora) < len(paths):
        train, *held_out = split_text(corpora["train"], data.held_out, seed=1)
        # A corpus with a file stays as it is, and what would be held out for it goes back to training.
        missing = {corpus.name: corpus for corpus in held_out if corpus.name not in corpora}
        back = [lines for corpus in held_out if corpus.name in corpora for lines in corpus.documents]
        corpora |= {"train": TextCorpus(train.documents + back, "train"), **missing}
    return {name: corpora[name] for name in _SPLITS}


def build_tokenizer(data: LanguageDataConfig, train: TextCorpus) -> Tokenizer:
    """Learn the tokenizer from the training text only."""
    return learn_tokenizer(train.lines, data, pieces=_PIECES)
