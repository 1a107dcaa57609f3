"""The settings of text and vocabularies that several applications have."""

from fastformer.apps.runs.application import PRETRAINED
from fastformer.apps.settings import SET, File, FolderOrName, Settings, setting
from fastformer.apps.text import SPLITTINGS
from fastformer.apps.text.sentencepiece_tokenizer import NORMALIZATIONS
from fastformer.apps.text.vocabulary import VOCABULARY

LEARNED = ("bpe", "unigram", "char", "word", "words")
IF_PIECES, IF_LEARNED = {"tokenizer": LEARNED[:-1]}, {"tokenizer": LEARNED}
TO_SPLIT, NUMBERS, DOCSTRINGS = "a text file to split", "number words", "docstrings"


class VocabularyConfig(Settings):
    """Settings of the tokenizer."""

    tokenizer: str = setting(
        "bpe",
        "sentencepiece's bpe, unigram, char or word; words: a plain word list, the choice for a text that has <unk>; "
        "pretrained: that of --from",
        choices=(*LEARNED, PRETRAINED),
    )
    vocabulary: int | None = setting(
        None, f"entries at most; unset: {VOCABULARY:,}, or every word", at_least=5, only=IF_LEARNED
    )
    splitting: str = setting("punctuation", "where words end", choices=SPLITTINGS, only={"tokenizer": "words"})
    minimum_frequency: int = setting(1, "rarer words become <unk>", at_least=1, only={"tokenizer": "words"})
    character_coverage: float = setting(
        1.0, "share of characters sentencepiece must cover", at_least=0.98, at_most=1, only=IF_PIECES
    )
    normalization: str = setting(
        "nmt_nfkc",
        "sentencepiece's rule: nmt_nfkc turns full-width letters and punctuation, as of Chinese, into ASCII; identity "
        "changes no character",
        choices=NORMALIZATIONS,
        only=IF_PIECES,
    )
    lowercase: bool = setting(False, "lower-case the text", only=IF_LEARNED)


class TextConfig(VocabularyConfig):
    """Settings of the text, of which training, validation and testing may have a file each, and of the tokenizer."""

    dataset: FolderOrName | None = setting("numbers", "name of a dataset", only={"train_text": None})
    train_text: File | None = setting(None, "text file (plain or compressed), instead of a dataset")
    valid_text: File | None = setting(
        None, "text file for validation; unset: split from training", only={"train_text": SET}
    )
    test_text: File | None = setting(
        None, "text file for testing; unset: split from training", only={"train_text": SET}
    )
    held_out: float = setting(
        0.1,
        "share of the texts split off for validation, and as many for testing",
        above=0,
        below=0.5,
        only={"corpus": (NUMBERS, TO_SPLIT)},
    )

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
            return "text files" if self.valid_text is not None and self.test_text is not None else TO_SPLIT
        return {"numbers": NUMBERS, "docstrings": DOCSTRINGS}.get(self.dataset or "", "a dataset folder")
