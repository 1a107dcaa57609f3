"""What every attention op takes besides the tensors of heads: one record, and the text of its part of a schema.

Without Triton, so that ops can be registered before it is imported. A field is written here and nowhere else: schemas
are made of it, callers name the fields, and `problem.Problem` is what launchers make of it.
"""

from typing import NamedTuple, get_type_hints

from torch import Tensor


class Arguments(NamedTuple):
    """The numbers come first, then the tensors, which autograd keeps."""

    queries: int  # T; of the longest sequence where packed
    keys: int  # S; likewise
    scale: float
    shift: int = 0  # of the diagonal, where there are no bounds
    left: int = -1  # of the window, -1 = unlimited
    right: int = -1  # likewise; 0 = causal
    softcap: float = 0.0  # 0 = none
    dropout_p: float = 0.0
    bounds: Tensor | None = None  # int32 [B, 8] of `problem.bounds`
    key_mask: Tensor | None = None  # bool [B, S]; needed where the bounds say that there are gaps
    seed: Tensor | None = None  # int64 [1]; dropout if given
    mask: Tensor | None = None  # bool or additive, broadcastable to [B, H, T, S]
    distance_bias: Tensor | None = None  # [H, 2 * P - 1]
    sinks: Tensor | None = None  # [H]


_TYPES = {Tensor | None: "Tensor?", int: "SymInt", float: "float"}
_FIELDS = get_type_hints(Arguments)
NUMBERS = sum(kind != Tensor | None for kind in _FIELDS.values())  # how many of the fields are numbers
SCHEMA = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in _FIELDS.items())
