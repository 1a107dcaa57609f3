"""Text: files, tokenizers, batches, the embedded number corpus and datasets by name.

files ─ ParallelCorpus ─ tokenizers ─ encode_pairs ─ Batches ─ Batch(source, target_in, target_out, lengths)
documents ─ tokenizers ─ encode_documents or encode_lines ─ LanguageBatches or ColumnBatches ─ LanguageBatch
ids and labels as Sequences ─ LabelledBatches ─ LabelledBatch(ids, labels, lengths)
"""

from .batch import Batch, LabelledBatch, LanguageBatch, Side
from .batches import Batches, LabelledBatches, collate, collate_source
from .corpora import (
    DOCUMENT_KINDS,
    DocumentKind,
    ParallelCorpus,
    TextCorpus,
    cut_lines,
    hold_out,
    read_parallel,
    read_text,
    split,
    split_text,
)
from .datasets import DATASETS, DatasetReport, open_dataset, open_text_dataset, prepare
from .docstrings import docstring_corpora
from .encoding import (
    EncodedDocuments,
    EncodedPairs,
    Sequences,
    encode_documents,
    encode_lines,
    encode_pairs,
    encode_source,
)
from .files import TextError, check_texts, checked_lines, lines_of, read_json, read_lines, write_lines, write_texts
from .language_batches import (
    ColumnBatches,
    LanguageBatches,
    Pieces,
    collate_pieces,
    counted_positions,
    cut_documents,
    cut_stream,
    token_stream,
)
from .marian_tokenizer import MarianTokenizer, read_marian
from .numbers import english, french, german, number_corpus
from .sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from .tokenizer import SpecialIds, Tokenizer
from .vocabulary import learn_tokenizer, load_tokenizer
from .word_tokenizer import SPLITTINGS, WordTokenizer

__all__ = [
    "DATASETS",
    "DOCUMENT_KINDS",
    "SPLITTINGS",
    "Batch",
    "Batches",
    "ColumnBatches",
    "DatasetReport",
    "DocumentKind",
    "EncodedDocuments",
    "EncodedPairs",
    "LabelledBatch",
    "LabelledBatches",
    "LanguageBatch",
    "LanguageBatches",
    "MarianTokenizer",
    "ParallelCorpus",
    "Pieces",
    "SentencePieceTokenizer",
    "Sequences",
    "Side",
    "SpecialIds",
    "TextCorpus",
    "TextError",
    "Tokenizer",
    "WordTokenizer",
    "check_texts",
    "checked_lines",
    "collate",
    "collate_pieces",
    "collate_source",
    "counted_positions",
    "cut_documents",
    "cut_lines",
    "cut_stream",
    "docstring_corpora",
    "encode_documents",
    "encode_lines",
    "encode_pairs",
    "encode_source",
    "english",
    "french",
    "german",
    "hold_out",
    "learn_tokenizer",
    "lines_of",
    "load_tokenizer",
    "number_corpus",
    "open_dataset",
    "open_text_dataset",
    "prepare",
    "read_json",
    "read_lines",
    "read_marian",
    "read_parallel",
    "read_text",
    "split",
    "split_text",
    "token_stream",
    "train_sentencepiece",
    "write_lines",
    "write_texts",
]
