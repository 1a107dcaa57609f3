"""Text: files, tokenizers, batches, the embedded number corpus and the datasets that are known by name.

files ─ ParallelCorpus ─ tokenizers ─ encode_pairs ─ Batches ─ Batch(source, target_in, target_out, lengths)
"""

from .batches import Batch, Batches, collate, collate_source
from .datasets import DATASETS, DatasetReport, open_dataset, prepare
from .encoding import EncodedPairs, Sequences, encode_pairs, encode_source
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
    "EncodedPairs",
    "ParallelCorpus",
    "SentencePieceTokenizer",
    "Sequences",
    "SpecialIds",
    "TextError",
    "Tokenizer",
    "WordTokenizer",
    "collate",
    "collate_source",
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
