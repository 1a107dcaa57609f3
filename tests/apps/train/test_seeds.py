"""Seeds: of every generator that a run may draw from, of the order of batches, and of batches made in worker processes.

The loaders make batches in the calling process and draw from a generator of their own, made of seed and epoch alone.
"""

import hashlib
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.apps.text import (
    Batches,
    ColumnBatches,
    EncodedDocuments,
    EncodedPairs,
    LabelledBatches,
    LanguageBatches,
    Sequences,
    SpecialIds,
)
from fastformer.apps.train import seed_everything
from fastformer.apps.train.randomness import preserved_randomness, random_state, set_random_state
from tests.support.python import python

IDS = SpecialIds(unk_id=0, pad_id=1, bos_id=2, eos_id=3)
GENERATORS: dict[str, Callable[[], float]] = {
    "Python": random.random,
    "Python, normal": lambda: random.gauss(0, 1),  # keeps the second of a pair
    "NumPy": np.random.random,
    "NumPy, normal": np.random.standard_normal,  # likewise
    "torch": lambda: torch.rand(()).item(),
}
if torch.cuda.is_available():
    GENERATORS["torch, GPU"] = lambda: torch.rand((), device="cuda").item()


def texts(count: int = 60) -> Sequences:
    numbers = np.random.default_rng(0)
    return Sequences.from_lists([[10 + i, *[9] * n] for i, n in enumerate(numbers.integers(0, 12, count).tolist())])


def sources(seed: int) -> dict[str, Any]:
    """Every loader there is, over the same made-up texts."""
    documents = EncodedDocuments(texts(), IDS)
    return {
        "Batches": Batches(EncodedPairs(texts(), texts(), IDS, IDS), tokens=40, seed=seed),
        "LanguageBatches": LanguageBatches(documents, context=6, tokens=30, seed=seed),
        "ColumnBatches": ColumnBatches(documents, columns=4, context=6),
        "LabelledBatches": LabelledBatches(texts(), np.arange(60) % 3, size=7, seed=seed),
    }


LOADERS = tuple(sources(0))


def digest(batch: Any) -> str:
    """Of all tensors of a batch, in order."""
    found = hashlib.sha256()
    for value in vars(batch).values():
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {list(value.shape)}".encode() + value.numpy().tobytes())
    return found.hexdigest()


def digests(source: Any, epoch: int) -> list[str]:
    return [digest(batch) for batch in source.epoch(epoch)]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_decides_each_generator(name: str) -> None:
    draw = GENERATORS[name]
    drawn = []
    for seed in (3, 3, 4):
        draw()  # whatever was drawn before
        seed_everything(seed)
        drawn.append([draw() for _ in range(3)])
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_saved_state_carries_each_generator_on(name: str) -> None:
    """Through a file that holds no code; the normal draws before it leave half of a pair behind."""
    draw = GENERATORS[name]
    seed_everything(5)
    draw()
    file = io.BytesIO()
    torch.save(random_state(), file)
    expected = [draw() for _ in range(3)]
    with preserved_randomness():
        seed_everything(6)
        assert [draw() for _ in range(3)] != expected
    following = draw()
    file.seek(0)
    set_random_state(torch.load(file, weights_only=True))
    assert [draw() for _ in range(4)] == [*expected, following]


@pytest.mark.parametrize("name", LOADERS)
def test_the_order_of_batches_is_of_seed_and_epoch_alone(name: str) -> None:
    """Neither what is drawn elsewhere, nor earlier epochs, nor another process's hash seed change it."""
    first = [digests(sources(1)[name], epoch) for epoch in (0, 1)]
    seed_everything(123)
    source = sources(1)[name]
    found: list[list[str]] = [[], []]
    for epoch in (1, 0):
        for batch in source.epoch(epoch):
            found[epoch].append(digest(batch))
            for draw in GENERATORS.values():
                draw()
    assert found == first
    assert len(first[0]) > 3
    if name != "ColumnBatches":  # text goes on from batch to batch: there is one order
        assert len({tuple(first[0]), tuple(first[1]), tuple(digests(sources(2)[name], 0))}) == 3


@pytest.mark.slow
def test_another_process_makes_the_same_batches() -> None:
    code = "from tests.apps.train.test_seeds import *; print([digests(s, 1) for s in sources(1).values()])"
    run = python("-c", code, PYTHONHASHSEED="77")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str([digests(source, 1) for source in sources(1).values()])
