"""Small language models, and batches for them."""

from collections.abc import Sequence
from typing import Any

import torch

from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.text import LanguageBatch
from tests.support import single_stack
from tests.support.single_stack import SIZES
from tests.support.translation_task import IDS, random_ids


def config(**changes: Any) -> LanguageConfig:
    return LanguageConfig(**{**SIZES, **CLASSICAL, **changes})  # type: ignore[arg-type]


def random_model(seed: int = 0, **changes: Any) -> LanguageModel:
    """Return a model whose norms and biases are random too, so that swapped ones show."""
    model: LanguageModel = single_stack.random_model(LanguageModel, seed, **changes)
    return model


def random_batch(lengths: Sequence[int], seed: int = 0, vocabulary: int = 17) -> LanguageBatch:
    """Return a batch of random ids with documents of these lengths, bos counted; zero is allowed."""
    generator = torch.Generator().manual_seed(seed)
    documents = [random_ids(n, generator, vocabulary) for n in lengths]
    read = [i for ids in documents for i in [IDS.bos_id, *ids][: len(ids)]]
    predicted = [i for ids in documents for i in ids]
    return LanguageBatch(*(torch.tensor(x, dtype=torch.int64) for x in (read, predicted, list(lengths))))
