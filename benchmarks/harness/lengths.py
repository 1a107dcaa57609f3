"""Sentence lengths of Multi30k en-de as counts of (source, target) token lengths, and batches drawn from them.

The counts are joint, because bucketing depends on both sides of a pair being about as long. Token ids are random.
Counted were the training pairs under one joint BPE vocabulary of 8,000, without special ids.
"""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastformer.apps.text import Batch, Batches, EncodedPairs, Sequences, SpecialIds, collate

Lengths = NDArray[np.int64]
HISTOGRAM = Path(__file__).with_name("multi30k_lengths.json")
VOCABULARY = 8000
SPECIAL = SpecialIds()


def random_pairs(number: int = 29_000, seed: int = 0) -> EncodedPairs:
    """Draw pairs whose lengths are those of Multi30k and whose ids are random; 29,000 is the corpus's own size."""
    table = np.array(json.loads(HISTOGRAM.read_text())["source_target_count"])  # [cells, 3]
    random = np.random.default_rng(seed)
    lengths = table[random.choice(len(table), number, p=table[:, 2] / table[:, 2].sum()), :2]  # [number, 2]
    source, target = (random_sequences(side, random) for side in lengths.T)
    return EncodedPairs(source, target, SPECIAL, SPECIAL)


def random_sequences(lengths: np.ndarray, random: np.random.Generator) -> Sequences:
    """Return sequences of random ids of these lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Sequences(random.integers(4, VOCABULARY, offsets[-1], np.int32), offsets)


def typical_batch(kind: str) -> Batch:
    """Return `typical_pairs` as a packed batch."""
    return collate(typical_pairs(kind), packed=True)


def first_pairs(kind: str, number: int) -> list[EncodedPairs]:
    """Return the pairs of the first batches of an epoch; kinds as in `typical_pairs`."""
    batches = _batches(kind)
    return [batches.pairs.take(indices) for indices in batches.plan(0)[:number]]


def _batches(kind: str) -> Batches:
    if kind == "random":
        return Batches(random_pairs(), sentences=128, bucket=False, packed=False)
    return Batches(random_pairs(), tokens=4096, bucket=True, packed=False)


def typical_pairs(kind: str) -> EncodedPairs:
    """Return the pairs of one batch whose share of padding is nearest to that of an epoch.

    Args:
        kind: "random" = 128 sentences in random order; "bucketed" = 4,096 positions a side, padding counted, of pairs
            sorted by (target, source) length.
    """
    batches = _batches(kind)
    pairs = batches.pairs
    source, target = pairs.source.lengths + 1, pairs.target.lengths + 1
    plan = [indices for indices in batches.plan(0) if kind == "bucketed" or len(indices) == 128]

    def padding(indices: np.ndarray) -> float:
        positions = len(indices) * int(source[indices].max() + target[indices].max())
        return 1 - int(source[indices].sum() + target[indices].sum()) / positions

    share = batches.padding_share()
    return pairs.take(min(plan, key=lambda indices: abs(padding(indices) - share)))


def uniform_lengths(number: int, longest: int, share: float) -> Lengths:
    """Return evenly spread lengths with `share` of `[number, longest]` padding; one is the longest, none is empty."""
    mean = longest if number == 1 else ((1 - share) * number - 1) * longest / (number - 1)  # of all but the longest
    spread = min(longest - mean, mean - 1)
    quantiles = (np.arange(number - 1) + 0.5) / max(number - 1, 1)
    others = np.maximum(np.round(mean + spread * (2 * quantiles - 1)), 1).astype(np.int64)
    return np.random.default_rng(0).permutation(np.append(others, longest))


def multi30k_lengths(number: int = 128) -> Lengths:
    """Return target lengths, eos counted, of the first sentences of a typical random batch."""
    return typical_pairs("random").target.lengths[:number].astype(np.int64) + 1
