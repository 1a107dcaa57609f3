"""Arguments that all attention ops share, besides q, k and v.

They are listed here only: the schemas of the ops are made of the fields, callers pass them in this order, and launchers
read them as `problem.Problem`. Does not import Triton, so that ops can be registered without it.
"""

from typing import NamedTuple, get_type_hints

from torch import Tensor


class Arguments(NamedTuple):
    """Arguments of an attention op: first the numbers, then the tensors, which autograd saves."""

    queries: int  # T; packed: that of the longest sequence
    keys: int  # S; likewise
    scale: float
    shift: int = 0  # of the diagonal, where there are no bounds
    left: int = -1  # of the window, -1 = unlimited
    right: int = -1  # likewise; 0 = causal
    softcap: float = 0.0  # 0 = none
    dropout_p: float = 0.0
    bounds: Tensor | None = None  # int32 [B, 8] of `problem.bounds`; in decoding also lengths of keys
    key_mask: Tensor | None = None  # bool [B, S]; required if the bounds state gaps
    seed: Tensor | None = None  # int64 [1]; None: no dropout
    mask: Tensor | None = None  # bool or additive, broadcastable to [B, H, T, S]
    distance_bias: Tensor | None = None  # [H, 2 * P - 1]
    sinks: Tensor | None = None  # [H]


_TYPES = {Tensor | None: "Tensor?", int: "SymInt", float: "float"}
_FIELDS = get_type_hints(Arguments)
NUMBERS = sum(kind != Tensor | None for kind in _FIELDS.values())  # how many of the fields are numbers
SCHEMA = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in _FIELDS.items())
