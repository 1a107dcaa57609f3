"""Which implementation the user asks for: `auto`, `triton` or `reference`.

The choice is held in a module variable (process-wide) and a `threading.local` (the innermost `with backend(...)`).
torch.compile guards both and recompiles on a switch; a read of `os.environ` inside a compiled region would be baked in
stale, and a ContextVar cannot be read there up to torch 2.13. So the environment is read once, at import.

Whether a request can be met is decided in `fastformer.functional`, next to the call.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast, get_args

__all__ = ["BackendError", "allow_nondeterminism", "allows_nondeterminism", "backend", "get_backend", "set_backend"]

Backend = Literal["auto", "triton", "reference"]
CHOICES: tuple[str, ...] = get_args(Backend)
ENVIRONMENT_VARIABLE = "FASTFORMER_BACKEND"


class BackendError(RuntimeError):
    """The backend that was asked for by name cannot run an op; the message says why."""


def _checked(name: str, origin: str) -> Backend:
    if name not in CHOICES:
        raise ValueError(f"{origin} is {name!r}; it must be one of {', '.join(CHOICES)}")
    return cast(Backend, name)


# Checked when it is first used, not here: an import that fails would give the command line's users a stack trace.
_default: str = os.environ.get(ENVIRONMENT_VARIABLE, "auto")


class _Local(threading.local):
    def __init__(self) -> None:
        # In the instance: torch.compile puts no guard on a default that the class holds, and would miss the switch.
        self.override: Backend | None = None


_local = _Local()


def set_backend(name: Backend) -> None:
    """Choose the implementation for the whole process.

    Args:
        name: "auto" takes a fused kernel where one applies and the reference elsewhere; "triton" raises where no
            fused kernel applies; "reference" is plain PyTorch.

    Raises:
        ValueError: for any other name.
    """
    global _default
    _default = _checked(name, "backend")


def get_backend() -> Backend:
    """Return the choice in force: the innermost `with backend(...)`, else `set_backend`, else the environment.

    Raises:
        ValueError: the environment variable has another value.
    """
    return _local.override or _checked(_default, ENVIRONMENT_VARIABLE)


_nondeterminism = False


def allow_nondeterminism(allowed: bool = True) -> None:
    """Let kernels add gradients in an order that changes from run to run where that is faster; off by default.

    Attention then computes the gradient of the queries with atomic additions, 5 matrix products a tile instead of 7.
    Has no effect under `torch.use_deterministic_algorithms(True)`.
    """
    global _nondeterminism
    _nondeterminism = allowed


def allows_nondeterminism() -> bool:
    """Return whether the user allows it; the ops that make use of it also ask torch."""
    return _nondeterminism


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Choose the implementation inside a `with` block, in this thread only. Blocks nest."""
    previous = _local.override
    _local.override = _checked(name, "backend")
    try:
        yield
    finally:
        _local.override = previous
