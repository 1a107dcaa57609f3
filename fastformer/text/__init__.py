"""Text: files, tokenizers, batches, the embedded number corpus and the datasets that are known by name.

files ─ ParallelCorpus ─ tokenizers ─ encode_pairs ─ Batches ─ Batch(source, target_in, target_out, lengths)
documents ─ tokenizers ─ encode_documents ─ LanguageBatches ─ LanguageBatch(ids_in, ids_out, lengths)
"""

from .batches import Batch, Batches, collate, collate_source
from .datasets import DATASETS, DatasetReport, open_dataset, prepare
from .documents import LanguageBatch, LanguageBatches, Pieces, collate_pieces, cut_documents
from .encoding import EncodedDocuments, EncodedPairs, Sequences, encode_documents, encode_pairs, encode_source
from .files import ParallelCorpus, TextError, read_lines, read_parallel, sample_lines, split, write_atomic, write_lines
from .numbers import english, french, german, number_corpus
from .special_ids import SpecialIds
from .tokenizers import SentencePieceTokenizer, Tokenizer, load_tokenizer, train_sentencepiece
from .vocabulary import WordTokenizer

__all__ = [
    "DATASETS",
    "Batch",
    "Batches",
    "DatasetReport",
    "EncodedDocuments",
    "EncodedPairs",
    "LanguageBatch",
    "LanguageBatches",
    "ParallelCorpus",
    "Pieces",
    "SentencePieceTokenizer",
    "Sequences",
    "SpecialIds",
    "TextError",
    "Tokenizer",
    "WordTokenizer",
    "collate",
    "collate_pieces",
    "collate_source",
    "cut_documents",
    "encode_documents",
    "encode_pairs",
    "encode_source",
    "english",
    "french",
    "german",
    "load_tokenizer",
    "number_corpus",
    "open_dataset",
    "prepare",
    "read_lines",
    "read_parallel",
    "sample_lines",
    "split",
    "train_sentencepiece",
    "write_atomic",
    "write_lines",
]
