"""Atomic operations on an array of bits, in the order of the threads."""

from typing import Any

import numpy as np

_REAL = {"f32": np.float32, "f64": np.float64}
_FLOAT = {"add": np.add, "min": np.fmin, "max": np.fmax}
_INTEGER = {"add": np.add, "min": np.minimum, "max": np.maximum}
_INTEGER |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
OPERATIONS = {*_INTEGER, "exch", "cas", "inc", "dec"}


def _combine(kind: str, operation: str, old: Any, new: Any) -> Any:
    if operation == "exch":
        return new
    if kind in ("f32", "f64"):
        return _FLOAT[operation](old.view(_REAL[kind]), new.view(_REAL[kind])).view(old.dtype)
    a, b = (x.view(f"i{x.itemsize}") if kind[0] == "s" else x for x in (old, new))
    return _INTEGER[operation](a, b).view(old.dtype)


def atomic(kind: str, operation: str, view: Any, index: Any, *operands: Any) -> Any:
    """Read, change and write one after the other; return what was read.

    Args:
        operands: the values; of `cas` two, what to compare with, and what to put there.

    Raises:
        NotImplementedError: floats of 16 bits, `inc` and `dec`, which Triton does not emit for our kernels.
    """
    if kind in ("f16x2", "bf16x2", "f16", "bf16") or operation in ("inc", "dec"):
        raise NotImplementedError(f"atomic {operation} {kind}")
    values = operands[-1]
    if operation != "cas" and len(np.unique(index)) == len(index):
        old = view[index]
        view[index] = _combine(kind, operation, old, values)
        return old
    old = np.empty(len(index), view.dtype)
    for n, at in enumerate(index):
        old[n] = view[at]
        if operation == "cas":
            view[at] = values[n] if view[at] == operands[0][n] else view[at]
        else:
            view[at : at + 1] = _combine(kind, operation, view[at : at + 1], values[n : n + 1])
    return old
