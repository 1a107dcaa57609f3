"""Text: files, tokenizers, batches, the embedded number corpus and datasets by name.

files ─ ParallelCorpus ─ tokenizers ─ encode_pairs ─ Batches ─ Batch(source, target_in, target_out, lengths)
documents ─ tokenizers ─ encode_documents or encode_lines ─ LanguageBatches or ColumnBatches ─ LanguageBatch
ids and labels as Sequences ─ LabelledBatches ─ LabelledBatch(ids, labels, lengths)
"""

from .batch import Batch, LabelledBatch, LanguageBatch, Side
from .batches import Batches, ColumnBatches, LabelledBatches, LanguageBatches, SampledBatches, collate, collate_source
from .corpora import DOCUMENT_KINDS, ParallelCorpus, TextCorpus, read_parallel, read_text, split, split_text
from .datasets import DATASETS, open_dataset, open_text_dataset, prepare
from .embedded import docstring_corpora, english, number_corpus
from .encoding import (
    EncodedDocuments,
    EncodedPairs,
    Sequences,
    encode_documents,
    encode_lines,
    encode_pairs,
    encode_source,
)
from .files import TextError, read_lines, write_lines
from .sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from .tokenizer import SpecialIds, Tokenizer
from .vocabulary import load_tokenizer
from .word_tokenizer import SPLITTINGS, WordTokenizer

__all__ = [
    "DATASETS",
    "DOCUMENT_KINDS",
    "SPLITTINGS",
    "Batch",
    "Batches",
    "ColumnBatches",
    "EncodedDocuments",
    "EncodedPairs",
    "LabelledBatch",
    "LabelledBatches",
    "LanguageBatch",
    "LanguageBatches",
    "ParallelCorpus",
    "SampledBatches",
    "SentencePieceTokenizer",
    "Sequences",
    "Side",
    "SpecialIds",
    "TextCorpus",
    "TextError",
    "Tokenizer",
    "WordTokenizer",
    "collate",
    "collate_source",
    "docstring_corpora",
    "encode_documents",
    "encode_lines",
    "encode_pairs",
    "encode_source",
    "english",
    "load_tokenizer",
    "number_corpus",
    "open_dataset",
    "open_text_dataset",
    "prepare",
    "read_lines",
    "read_parallel",
    "read_text",
    "split",
    "split_text",
    "train_sentencepiece",
    "write_lines",
]
