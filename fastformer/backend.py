"""The requested implementation of the ops: `auto`, `triton` or `reference`.

The choice is held in an object, which torch.compile guards: it recompiles on a switch. The environment is read once, at
import: a compiled region would make a value of `os.environ` constant.

`fastformer.functional.choice` decides whether a request can be met.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast, get_args

__all__ = ["BackendError", "backend", "get_backend", "set_backend"]

Backend = Literal["auto", "triton", "reference"]
CHOICES: tuple[str, ...] = get_args(Backend)
ENVIRONMENT_VARIABLE = "FASTFORMER_BACKEND"


class BackendError(RuntimeError):
    """Raised if a backend that was requested by name cannot run an op; the message gives the reason."""


def _check_name(name: str, origin: str) -> Backend:
    if name not in CHOICES:
        raise ValueError(f"{origin} is {name!r}; it must be one of {', '.join(CHOICES)}")
    return cast(Backend, name)


class _Process:
    def __init__(self) -> None:
        # Checked on first use, not here: a failing import would show users of the command line a stack trace.
        self.backend: str = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"


process = _Process()


def set_backend(name: Backend) -> None:
    """Choose the implementation for the whole process.

    Args:
        name: "auto" takes a fused kernel where one applies, torch's SDPA for attention calls that it computes faster,
            and the reference elsewhere; "triton" raises where no fused kernel applies; "reference" is plain PyTorch.

    Raises:
        ValueError: name is none of these.
    """
    process.backend = _check_name(name, "backend")


def get_backend() -> Backend:
    """Return the backend in force: the innermost `with backend(...)`, else `set_backend`, else the environment.

    Raises:
        ValueError: the environment variable has another value.
    """
    return _check_name(process.backend, ENVIRONMENT_VARIABLE)


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Choose the implementation inside a `with` block, for all threads. Blocks nest.

    On a GPU autograd has a thread of its own, which computes checkpointed activations again: with
    `torch.utils.checkpoint`, let backward run inside the block, too.
    """
    previous = process.backend
    process.backend = _check_name(name, "backend")
    try:
        yield
    finally:
        process.backend = previous
