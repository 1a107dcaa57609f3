"""One training step of the translation model: forward, backward, AdamW; dropout 0.1, label smoothing 0.1.

Batches have the sentence lengths of Multi30k en-de: random ones of 128 sentences, where 55 % of a padded batch is
padding, and bucketed ones of 4,096 positions, where 6 % is. Against torch.nn.Transformer on the same sentences, padded,
and against T1's fixed length of 200, which gets 8 of the sentences because 128 take a minute. Speeds are real target
tokens a second. "quick" is d128 with 2+2 layers, "usual" d256 with 3+3, both in fp32, "full" d512 with 6+6,
fp32 and bf16 by autocast.

From CUDA graphs: the trainer's step, which begins with a batch on the CPU, on four batches in turn, against the same
without graphs and against torch.nn.Transformer's on these batches.
"""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from benchmarks.competitors.known import require
from benchmarks.competitors.training import CONFIGS, TINY, race_graphs, race_training
from benchmarks.harness.lengths import VOCABULARY, first_pairs, random_pairs, typical_pairs
from benchmarks.harness.race import Race

Size = Literal["quick", "usual", "full"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = {"quick": 2, "usual": 3, "full": 2}  # on a CPU a full step takes 5 to 15 s
# Batches and dtype -> goal on a CPU, and on a GPU against eager and compiled. In bf16 a GPU waits for the host on both
# sides, which has as much to do for ours (`benchmarks.host`): to be ahead there is what CUDA graphs are for.
GOALS = {
    ("random", "fp32"): (1.8, 3.0, None),
    ("random", "bf16"): (3.0, 1.0, None),
    ("bucketed", "fp32"): (1.0, 1.5, 1.2),
    ("bucketed", "bf16"): (2.0, 1.0, 1.2),
}
GRAPHS_GOALS = {
    ("random", "fp32"): 3.0,
    ("random", "bf16"): 3.5,
    ("bucketed", "fp32"): 1.5,
    ("bucketed", "bf16"): 3.0,
}


@pytest.mark.parametrize("batches", ["random", "bucketed"])
@pytest.mark.parametrize(
    ("competitor", "size", "dtype", "vocabulary"),
    [
        pytest.param("torch.nn", "quick", "fp32", 8000, marks=pytest.mark.cpu),
        ("torch.nn", "usual", "fp32", 8000),
        ("torch.nn", "full", "fp32", 8000),
        ("torch.nn", "full", "bf16", 8000),
        ("torch.nn", "full", "bf16", 32000),
        # Last, and none of them quick: compiling a model takes minutes.
        ("torch.nn-compile", "full", "fp32", 8000),
        ("torch.nn-compile", "full", "bf16", 8000),
        ("torch.nn-compile", "full", "bf16", 32000),
    ],
)
def bench_training_step(race: Race, batches: str, competitor: str, size: Size, dtype: str, vocabulary: int) -> None:
    on_cpu, on_gpu, compiled = (None,) * 3 if size == "quick" else GOALS[batches, dtype]
    config = TINY if race.tiny else CONFIGS[size]
    race_training(
        race,
        f"training step, {batches} batches, {_name(size)}, V {vocabulary:,}, {dtype}",
        replace(config, source_vocabulary=vocabulary, target_vocabulary=vocabulary),
        random_pairs(4) if race.tiny else typical_pairs(batches),
        competitor=competitor,
        dtype=DTYPES[dtype],
        rounds=ROUNDS[size],
        goal=on_cpu if race.device.type == "cpu" else compiled if competitor.endswith("compile") else on_gpu,
        peak_goal=0.5 if vocabulary > VOCABULARY else None,
    )


@pytest.mark.parametrize("batches", ["random", "bucketed"])
@pytest.mark.parametrize(
    ("competitor", "size", "dtype"),
    [
        ("no-graphs", "usual", "bf16"),
        ("no-graphs", "full", "fp32"),
        ("no-graphs", "full", "bf16"),
        ("torch.nn", "full", "fp32"),
        ("torch.nn", "full", "bf16"),
    ],
)
def bench_training_step_graphs(race: Race, batches: str, competitor: str, size: Size, dtype: str) -> None:
    require("no-graphs", race.device)  # without a GPU there are none
    race_graphs(
        race,
        f"training step from CUDA graphs, {batches} batches, {_name(size)}, V {VOCABULARY:,}, {dtype}",
        TINY if race.tiny else CONFIGS[size],
        [random_pairs(4, seed) for seed in range(2)] if race.tiny else first_pairs(batches, 4),
        competitor=competitor,
        dtype=DTYPES[dtype],
        rounds=ROUNDS[size],
        goal=GRAPHS_GOALS[batches, dtype] if competitor == "torch.nn" else None,
    )


@pytest.mark.parametrize("size", [pytest.param("quick", marks=pytest.mark.cpu), "usual", "full"])
@pytest.mark.parametrize("competitor", ["tutorial"])
def bench_training_step_fixed_length(race: Race, competitor: str, size: Size) -> None:
    on_cpu = race.device.type == "cpu"
    goal = (16.0 if on_cpu else 30.0) if size == "full" else None
    race_training(
        race,
        f"training step, random batches, {_name(size)}, V {VOCABULARY:,}, fp32",
        TINY if race.tiny else CONFIGS[size],
        random_pairs(4) if race.tiny else typical_pairs("random"),
        competitor=competitor,
        competitor_pairs=random_pairs(2 if race.tiny else 8) if on_cpu else None,
        rounds=ROUNDS[size],
        goal=goal,
    )


def _name(size: str) -> str:
    config = CONFIGS[size]
    return f"d{config.d_model} {config.encoder_layers}+{config.decoder_layers}"
