"""How the cost of a translation training step grows with length, batch and width, against torch.nn.Transformer.

Forward, backward and AdamW; fp32, dropout 0.1. Length: lengths on both sides spread evenly from a tenth of the longest
to the longest, 45 % padding, as many sentences as give about the same number of positions; 1+1 layers of d256. Batch:
so many pairs with the lengths of Multi30k in random order; 3+3 layers of d256. Width: 64 such pairs, 3+3 layers.
Running out of memory is a result too.
"""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.competitors.training import CONFIGS, TINY, race_training
from benchmarks.harness.lengths import SPECIAL, random_pairs, random_sequences
from benchmarks.harness.race import Race
from fastformer.apps.text import EncodedPairs
from fastformer.apps.translation.model import TranslationConfig

MODEL = CONFIGS["usual"]
POSITIONS = {"cpu": 4096, "cuda": 32768}  # of a batch in `bench_length`, padding counted, a side
ROUNDS = {"cpu": 3, "cuda": 10}


def spread_pairs(longest: int, sentences: int) -> EncodedPairs:
    """Return pairs of random ids; lengths on both sides, eos or bos counted, from a tenth of the longest to it."""
    random = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        lengths = np.linspace(longest / 10, longest, sentences).round().astype(np.int64) - 1
        sides.append(random_sequences(random.permutation(np.maximum(lengths, 1)), random))
    return EncodedPairs(sides[0], sides[1], SPECIAL, SPECIAL)


def _race(
    race: Race, axis: str, value: int, config: TranslationConfig, pairs: EncodedPairs, goal: float | None = None
) -> None:
    race_training(
        race,
        f"training step, {axis} {value:,}",
        TINY if race.tiny else config,
        pairs.take(np.arange(2)) if race.tiny else pairs,
        rounds=max(ROUNDS[race.device.type], 0 if goal is None else 9),
        goal=goal,
    )


@pytest.mark.parametrize("competitor", ["torch.nn"])
@pytest.mark.parametrize(
    ("size", "longest"),
    [("usual", n) for n in (64, 256, 1024)] + [("full", n) for n in (2048, 4096, 8192, 16384)],
)
def bench_length(race: Race, size: str, longest: int, competitor: str) -> None:
    sentences = max(2, POSITIONS[race.device.type] // longest)
    config = replace(MODEL, encoder_layers=1, decoder_layers=1)
    _race(race, "length", longest, config, spread_pairs(40 if race.tiny else longest, sentences))


@pytest.mark.parametrize("competitor", ["torch.nn"])
@pytest.mark.parametrize(
    ("size", "sentences"), [("usual", 1), ("quick", 8), ("usual", 64), ("full", 256), ("full", 1024)]
)
def bench_batch(race: Race, size: str, sentences: int, competitor: str) -> None:
    pairs = random_pairs(max(2, sentences) if race.tiny else sentences)
    _race(race, "batch", sentences, MODEL, pairs, 1.0 if sentences == 1 else None)  # nothing to pack


@pytest.mark.parametrize("competitor", ["torch.nn"])
@pytest.mark.parametrize(("size", "width"), [("usual", n) for n in (128, 256, 512)] + [("full", 1024)])
def bench_width(race: Race, size: str, width: int, competitor: str) -> None:
    config = replace(MODEL, d_model=width, heads=width // 64, feed_forward=4 * width)
    _race(race, "width", width, config, random_pairs(64))
