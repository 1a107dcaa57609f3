"""Seed, save and restore all random generators of training; states are values that JSON can hold."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (the CUDA ones too)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the generators' states; those of torch as hexadecimal digits."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": list(random.getstate()),
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in on_gpus],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the generators from `random_state()`. States of GPUs that this machine lacks are left out.

    Raises ValueError, TypeError, KeyError or RuntimeError if `state` does not hold states of generators.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    if not 0 <= position <= len(keys) == 624:  # NumPy does not check where it reads
        raise ValueError("NumPy's generator has 624 words")
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    on_cpu, *on_gpus = (
        torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8) for digits in (state["torch"], *state["cuda"])
    )
    torch.set_rng_state(on_cpu)
    for device, digits in enumerate(on_gpus[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(digits, device)


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Restore the states of the generators after the block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
