"""What the ops' arguments may be: the named choices, the rules of one attention call, and the checks.

A check raises ValueError or TypeError, naming the argument, what it was and what is allowed, before anything runs.

Letters: B batch, H heads, T queries, S keys, K head size, D model width, F feed-forward width, V vocabulary.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fastformer.host.devices import DeviceError, autocasts, check_tensors
from fastformer.packing import Layout, offsets_of

Activation = Literal["relu", "gelu", "gelu_tanh", "geglu", "swiglu", "reglu"]
Alignment = Literal["top_left", "bottom_right"]
Reduction = Literal["mean", "sum", "none"]
Window = tuple[int | None, int | None]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
ALIGNMENTS: tuple[str, ...] = get_args(Alignment)
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
GATED = ("geglu", "swiglu", "reglu")


@dataclass(frozen=True, eq=False)
class AttentionRules:
    """One attention call but for q, k and v; the fields mean what `functional.attention` says.

    What `check_attention` and `check_packed_attention` return says each thing in one way only: mask has at least two
    dimensions; lengths are int64 on q's device; a side of window is None where it reaches beyond all positions, its
    right is 0 where `causal` is True, and window is None where nothing is left to say; `alignment` is "top_left" where
    both alignments are the same; softcap is a float.
    """

    mask: Tensor | None = None
    causal: bool = False
    alignment: Alignment = "top_left"
    window: Window | None = None
    query_lengths: Tensor | None = None
    key_lengths: Tensor | None = None
    key_mask: Tensor | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    scale: float | None = None

    @property
    def band(self) -> Window:
        """How far to the (left, right) of position t + shift query t attends; None: to the end."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of the caller: the mask, and what is not differentiable."""
        return self.mask, self.query_lengths, self.key_lengths, self.key_mask

    def with_tensors(self, *tensors: Tensor | None) -> "AttentionRules":
        """Return the same rules with these in place of `tensors`."""
        mask, query_lengths, key_lengths, key_mask = tensors
        return replace(self, mask=mask, query_lengths=query_lengths, key_lengths=key_lengths, key_mask=key_mask)


def check_probability(name: str, p: float) -> None:
    """Raise unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_feed_forward(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, activation: str
) -> None:
    """Check the arguments of `feed_forward`, shapes included."""
    check_choice("activation", activation, ACTIVATIONS)
    if weight1.dim() != 2 or x.dim() == 0 or weight1.shape[1] != x.shape[-1]:
        raise ValueError(f"weight1 must be of shape [F, D] for x of shape {list(x.shape)}, not {list(weight1.shape)}")
    gated = activation in GATED
    width = weight1.shape[0] // 2 if gated else weight1.shape[0]
    if weight2.dim() != 2 or weight2.shape[1] != width or (gated and weight1.shape[0] % 2):
        raise ValueError(
            f"weight2 must be of shape [out, {width}] for activation {activation!r} "
            f"and weight1 of shape {list(weight1.shape)}, not {list(weight2.shape)}"
        )
    for name, bias, weight in (("bias1", bias1, weight1), ("bias2", bias2, weight2)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name} must be of shape [{weight.shape[0]}], not {list(bias.shape)}")


def readable(x: Tensor) -> bool:
    """Whether a tensor has values to look at, where that waits for no device."""
    known = x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling()
    return known and not isinstance(x, FakeTensor) and not stands_for_many(x)


def stands_for_many(x: Tensor) -> bool:
    """Whether x is one of many to vmap, be it inside other transforms of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def _check_indices(name: str, indices: Tensor, of: str, matrix: Tensor) -> None:
    """Raise unless indices are rows of a matrix; values are looked at on the CPU only, where that waits for nothing."""
    if indices.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, not {indices.dtype}")
    if matrix.dim() != 2:
        raise ValueError(f"{of} must have two dimensions, not shape {list(matrix.shape)}")
    if readable(indices):
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= matrix.shape[0]:
            wrong = low if low < 0 else high
            raise IndexError(f"{name} must lie between 0 and {matrix.shape[0] - 1}, the last row of {of}, not {wrong}")


def check_embedding(ids: Tensor, weight: Tensor, table: Tensor | None, positions: Tensor | None) -> None:
    """Check the arguments of `embedding`."""
    _check_indices("ids", ids, "weight", weight)
    if table is None or positions is None:
        if table is not None or positions is not None:
            raise ValueError(f"{'table' if table is None else 'positions'} is None, and the other is not")
        return
    _check_indices("positions", positions, "table", table)
    if positions.shape != ids.shape:
        raise ValueError(f"positions must be of the shape of ids, {list(ids.shape)}, not {list(positions.shape)}")
    if table.shape[1] != weight.shape[1]:
        raise ValueError(f"table must be of shape [P, {weight.shape[1]}], not {list(table.shape)}")


def check_classes(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise unless target holds classes; values are checked on the CPU only, where that waits for no device."""
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64, not {target.dtype}")
    if readable(target):
        wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
        if wrong.numel():
            raise IndexError(f"target must lie between 0 and {classes - 1} or be {ignore_index}, not {int(wrong[0])}")


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head size, not {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must have the same number of heads, not {k.shape[1]} and {v.shape[1]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of q ({q.shape[1]}) must be a multiple of those of k ({k.shape[1]})")


def _check_lengths(name: str, lengths: Tensor, of: str, x: Tensor) -> Tensor:
    """Return the lengths of sequences in x `[B, H, L, K]`, int64 on its device; values are checked on the CPU only.

    They may lie on the CPU, where batches keep them.
    """
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{name} must be a Tensor, not {type(lengths).__name__}")
    if not lengths.is_cpu and lengths.device != x.device:
        raise DeviceError(f"{name} is on {lengths.device}, {of} on {x.device}: it must be there or on the CPU")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, not {lengths.dtype}")
    if lengths.shape != (x.shape[0],):
        raise ValueError(f"{name} must be of shape [{x.shape[0]}], not {list(lengths.shape)}")
    unsigned = lengths.dtype == torch.uint64
    lengths = lengths.to(torch.int64)  # of unsigned ones, torch has no lowest
    if readable(lengths):
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > x.shape[2]:
            wrong = low if low < 0 else high
            wrong += 2**64 if low < 0 and unsigned else 0
            raise ValueError(f"{name} must lie between 0 and the length of {of}, {x.shape[2]}: {wrong}")
    return lengths.to(x.device, torch.int64)


def _check_masks(q: Tensor, k: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> None:
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"mask must be bool or floating point, not {mask.dtype}")
        if mask.dim() > 4 or any(m not in (1, f) for m, f in zip(reversed(mask.shape), reversed(full), strict=False)):
            raise ValueError(f"mask must be broadcastable to {list(full)}, not of shape {list(mask.shape)}")
    if key_mask is not None:
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask must be bool, not {key_mask.dtype}")
        if key_mask.shape != (q.shape[0], k.shape[2]):
            raise ValueError(f"key_mask must be of shape {[q.shape[0], k.shape[2]]}, not {list(key_mask.shape)}")


def _in_dtype_of_scores(mask: Tensor, q: Tensor) -> Tensor:
    """Return an additive mask in the dtype that is computed in, where that is narrower, as torch does.

    What a query sees is decided there: the lowest number of fp32 is -inf in bf16, -1e9 is in fp16.
    """
    autocast = q.dtype != torch.float64 and autocasts(q)
    dtype = torch.get_autocast_dtype(q.device.type) if autocast else q.dtype
    fits = mask.dtype == torch.bool or torch.promote_types(mask.dtype, dtype) == dtype
    return mask if fits else mask.to(dtype)


def _check_window(window: Window | None, causal: bool, length: int) -> Window | None:
    """Return the window with causality in it, or None where it says no more than `causal` does.

    Args:
        length: of the longest sequence of queries or keys; a side that reaches as far limits nothing.
    """
    if window is None:
        return None
    if not isinstance(window, tuple):
        raise TypeError(f"window must be a tuple (left, right), not {type(window).__name__}")
    if len(window) != 2:
        raise ValueError(f"window must be a tuple (left, right), not of {len(window)} elements")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window must hold integers or None, not {side!r}")
        if side is not None and side < 0:
            raise ValueError(f"window must not hold negative numbers: {side}")
    left, right = (None if side is None or side >= length else side for side in window)
    if left is None and (causal or right is None):
        return None
    return left, 0 if causal else right


def _check_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise TypeError(f"softcap must be a number, not {type(softcap).__name__}")
    if not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap must be positive and finite, not {softcap}")
    return float(softcap)


def _alignment(rules: AttentionRules, window: Window | None, same: bool) -> Alignment:
    """Return the alignment, "top_left" where it makes no difference: `same` lengths, or no rule about positions."""
    check_choice("alignment", rules.alignment, ALIGNMENTS)
    return "top_left" if same or not (rules.causal or window is not None) else rules.alignment


def _restated(
    rules: AttentionRules,
    mask: Tensor | None,
    alignment: Alignment,
    window: Window | None,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    softcap: float | None,
) -> AttentionRules:
    """Return the rules with these fields; the rules themselves, which saves 2 us, where that changes nothing."""
    if (
        mask is rules.mask
        and alignment == rules.alignment
        and window is rules.window
        and query_lengths is rules.query_lengths
        and key_lengths is rules.key_lengths
        and softcap == rules.softcap
    ):
        return rules
    return AttentionRules(
        mask,
        rules.causal,
        alignment,
        window,
        query_lengths,
        key_lengths,
        rules.key_mask,
        softcap,
        rules.dropout_p,
        rules.scale,
    )


def check_attention(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> AttentionRules:
    """Check one call of `attention` and return its rules, each said in one way only."""
    check_tensors(("q", "k", "v", "mask", "key_mask"), q, (k, v), (rules.mask, rules.key_mask))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be of shape [batch, heads, length, head size], not {list(x.shape)}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have the same batch: {q.shape[0]}, {k.shape[0]}, {v.shape[0]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v must have the same length, not {k.shape[2]} and {v.shape[2]}")
    _check_heads(q, k, v)
    _check_masks(q, k, rules.mask, rules.key_mask)
    check_probability("dropout_p", rules.dropout_p)
    mask, query_lengths, key_lengths = rules.mask, rules.query_lengths, rules.key_lengths
    if mask is not None:
        mask = _in_dtype_of_scores(mask, q)
        mask = mask.expand(1, mask.numel()) if mask.dim() < 2 else mask  # SDPA takes [T, S] at least
    if query_lengths is not None:
        query_lengths = _check_lengths("query_lengths", query_lengths, "q", q)
    if key_lengths is not None:
        key_lengths = _check_lengths("key_lengths", key_lengths, "k", k)
    window = _check_window(rules.window, rules.causal, max(q.shape[2], k.shape[2]))
    same = query_lengths is None and key_lengths is None and q.shape[2] == k.shape[2]
    found = (mask, _alignment(rules, window, same), window, query_lengths, key_lengths, _check_softcap(rules.softcap))
    return _restated(rules, *found)


def check_packed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, key_layout: Layout, rules: AttentionRules
) -> AttentionRules:
    """Check one call of `packed_attention` and return its rules, each said in one way only; they hold no mask."""
    offsets = offsets_of("layout", layout), offsets_of("key_layout", key_layout)
    check_tensors(("q", "k", "v", "layout", "key_layout"), q, (k, v, *offsets))
    for name, x, its in (("q", q, layout), ("k", k, key_layout), ("v", v, key_layout)):
        if x.dim() != 3 or x.shape[0] != its.total:
            raise ValueError(f"{name} must be of shape [{its.total}, heads, head size], not {list(x.shape)}")
    if layout.batch != key_layout.batch:
        raise ValueError(f"layout has {layout.batch} sequences, key_layout {key_layout.batch}")
    _check_heads(q, k, v)
    check_probability("dropout_p", rules.dropout_p)
    window = _check_window(rules.window, rules.causal, max(layout.max_length, key_layout.max_length))
    alignment = _alignment(rules, window, layout is key_layout)
    return _restated(rules, None, alignment, window, None, None, _check_softcap(rules.softcap))
