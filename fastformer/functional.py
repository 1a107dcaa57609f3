"""The public ops, and the only place where an implementation is chosen.

Every op checks its arguments, then runs the reference; fused kernels will be reached from here too: `auto` takes one
where it applies, `triton` raises with the reason where none does. `explain` says which it would be, and why.

Letters: B batch, H heads, T queries, S keys, D model width, K head size, F feed-forward width, M rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from fastformer import fused, reference
from fastformer.backend import BackendError, get_backend
from fastformer.packing import Layout
from fastformer.reference import Activation, Alignment, Reduction

OPS = (
    "attention",
    "attention_with_weights",
    "packed_attention",
    "layer_norm",
    "rms_norm",
    "dropout_add_layer_norm",
    "feed_forward",
    "linear_cross_entropy",
)
GATED = ("geglu", "swiglu", "reglu")
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
ALIGNMENTS: tuple[str, ...] = get_args(Alignment)
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


def _require_backend(op: str, x: Tensor) -> None:
    """Raise if the backend that was asked for by name cannot run `op` on x; here each call will choose."""
    reason = fused.unsupported(op, x) if get_backend() == "triton" else None
    if reason is not None:
        raise BackendError(f"backend 'triton' was asked for, but {reason}")


def explain(subject: nn.Module | Tensor) -> str:
    """Say which implementation would run each op on a tensor, or on a module's parameters, and why.

    Args:
        subject: a tensor, or a module (its first parameter stands for it).

    Returns:
        One line an op: `layer_norm: reference (…reason…)`.

    Raises:
        TypeError: subject is neither.
    """
    if isinstance(subject, nn.Module):
        x = next(subject.parameters(), torch.empty(0))
    elif isinstance(subject, Tensor):
        x = subject
    else:
        raise TypeError(f"subject must be a module or a tensor, not {type(subject).__name__}")
    choice = get_backend()
    lines = []
    for op in OPS:
        reason = "chosen" if choice == "reference" else fused.unsupported(op, x)
        if reason is None:
            lines.append(f"{op}: triton")
        elif choice == "triton":
            lines.append(f"{op}: raises ({reason})")
        else:
            lines.append(f"{op}: reference ({reason})")
    return "\n".join(lines)


def _check_probability(name: str, p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head size, not {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must have the same number of heads, not {k.shape[1]} and {v.shape[1]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of q ({q.shape[1]}) must be a multiple of those of k ({k.shape[1]})")


def _check_lengths(name: str, lengths: Tensor, batch: int, limit: str, device: torch.device) -> Tensor:
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, not {lengths.dtype}")
    if lengths.shape != (batch,):
        raise ValueError(f"{name} must be of shape [{batch}], not {list(lengths.shape)}")
    if lengths.device.type == "cpu" and lengths.numel() and not torch.compiler.is_compiling():
        low, high = int(lengths.min()), int(lengths.max())
        bound = int(limit.rsplit(" ", 1)[1])
        if low < 0 or high > bound:
            raise ValueError(f"{name} must lie between 0 and {limit}: {low if low < 0 else high}")
    return lengths.to(device)


def _check_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be of shape [batch, heads, length, head size], not {list(x.shape)}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have the same batch: {q.shape[0]}, {k.shape[0]}, {v.shape[0]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v must have the same length, not {k.shape[2]} and {v.shape[2]}")
    _check_heads(q, k, v)
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


def _masks(
    q: Tensor,
    k: Tensor,
    causal: bool,
    alignment: Alignment,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor | None:
    batch, device = q.shape[0], q.device
    if query_lengths is not None:
        query_lengths = _check_lengths("query_lengths", query_lengths, batch, f"the length of q, {q.shape[2]}", device)
    if key_lengths is not None:
        key_lengths = _check_lengths("key_lengths", key_lengths, batch, f"the length of k, {k.shape[2]}", device)
    return reference.allowed_positions(
        (batch, q.shape[2], k.shape[2]),
        device,
        causal=causal,
        alignment=alignment,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        key_mask=key_mask,
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    alignment: Alignment = "top_left",
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention, softmax(scale * q k^T + mask) v (Vaswani et al. 2017, equation 1).

    All restrictions given combine. A query that may attend to nothing gives output 0 and gradient 0.

    Args:
        q: `[B, H, T, K]`, floating point.
        k: `[B, Hkv, S, K]`; H is a multiple of Hkv (grouped-query attention).
        v: `[B, Hkv, S, Kv]`.
        mask: as in SDPA: bool (True = may attend) or additive, broadcastable to `[B, H, T, S]`; an additive mask may
            require a gradient.
        causal: query t attends to keys s <= t + shift.
        alignment: "top_left": shift 0, as SDPA's `is_causal`; "bottom_right": the last query of a sequence meets its
            last key, shift = key length - query length (S - T without lengths).
        query_lengths: integers `[B]`; outputs of later queries are 0.
        key_lengths: integers `[B]`; later keys are padding.
        key_mask: bool `[B, S]`, True = a real key; for padding on the left or with gaps.
        dropout_p: dropout of the attention weights; applied whenever it is not 0.
        scale: K ** -0.5 if None.

    Returns:
        `[B, H, T, Kv]`, of q's dtype (autocast: the autocast dtype).

    Raises:
        ValueError, TypeError: an argument does not fit, before anything runs.
        fastformer.backend.BackendError: backend "triton" was asked for and cannot run this.
    """
    _check_attention(q, k, v, mask, key_mask)
    _check_choice("alignment", alignment, ALIGNMENTS)
    _check_probability("dropout_p", dropout_p)
    _require_backend("attention", q)
    mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 1 else mask  # SDPA takes [T, S] at least
    if causal and mask is None and query_lengths is None and key_lengths is None and key_mask is None:
        if alignment == "top_left" or q.shape[2] == k.shape[2]:
            return reference.attention(q, k, v, None, None, causal=True, dropout_p=dropout_p, scale=scale)
    allowed = _masks(q, k, causal, alignment, query_lengths, key_lengths, key_mask)
    return reference.attention(q, k, v, mask, allowed, dropout_p=dropout_p, scale=scale)


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    alignment: Alignment = "top_left",
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `attention`, and the weights `[B, H, T, S]` that were applied, after dropout as in torch.

    Costs memory for the weights; a query that may attend to nothing has weights 0.
    """
    _check_attention(q, k, v, mask, key_mask)
    _check_choice("alignment", alignment, ALIGNMENTS)
    _check_probability("dropout_p", dropout_p)
    _require_backend("attention_with_weights", q)
    allowed = _masks(q, k, causal, alignment, query_lengths, key_lengths, key_mask)
    return reference.attention_with_weights(q, k, v, mask, allowed, dropout_p=dropout_p, scale=scale)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    key_layout: Layout | None = None,
    *,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention within each of B packed sequences; none attends across sequences.

    Args:
        q: `[T, H, K]`, the queries of all sequences, one after another.
        k: `[S, Hkv, K]`; H is a multiple of Hkv.
        v: `[S, Hkv, Kv]`.
        layout: where the sequences of q lie.
        key_layout: where those of k and v lie; `layout` if None.
        causal: query t of a sequence attends to its keys s <= t.
        dropout_p: dropout of the attention weights.
        scale: K ** -0.5 if None.

    Returns:
        `[T, H, Kv]`; zeros for a sequence without keys.
    """
    key_layout = layout if key_layout is None else key_layout
    for name, x, its in (("q", q, layout), ("k", k, key_layout), ("v", v, key_layout)):
        if x.dim() != 3 or x.shape[0] != its.total:
            raise ValueError(f"{name} must be of shape [{its.total}, heads, head size], not {list(x.shape)}")
    if layout.batch != key_layout.batch:
        raise ValueError(f"layout has {layout.batch} sequences, key_layout {key_layout.batch}")
    _check_heads(q, k, v)
    _check_probability("dropout_p", dropout_p)
    _require_backend("packed_attention", q)
    return reference.packed_attention(q, k, v, layout, key_layout, causal=causal, dropout_p=dropout_p, scale=scale)


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p); no change where p is 0.

    Args:
        x: any shape, floating point.
        p: quantised to 1/65536 where that is faster, and the quantised value is used in the scale.
    """
    _check_probability("p", p)
    return reference.dropout(x, p)


def _normalized_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation over the last dimensions (Ba et al. 2016), as `torch.nn.functional.layer_norm`.

    Args:
        x: `[..., *normalized_shape]`, floating point.
        normalized_shape: the trailing dimensions; a number stands for one.
        weight: `normalized_shape`, or None for ones.
        bias: `normalized_shape`, or None for zeros.
        eps: added to the variance.
    """
    _require_backend("layer_norm", x)
    return reference.layer_norm(x, _normalized_shape(normalized_shape), weight, bias, eps)


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Root-mean-square normalisation (Zhang and Sennrich 2019), as `torch.nn.functional.rms_norm`.

    Args:
        x: `[..., *normalized_shape]`, floating point.
        normalized_shape: the trailing dimensions; a number stands for one.
        weight: `normalized_shape`, or None for ones.
        eps: added to the mean square; the machine epsilon of x's dtype if None.
    """
    _require_backend("rms_norm", x)
    return reference.rms_norm(x, _normalized_shape(normalized_shape), weight, eps)


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The step between two sublayers: s = residual + dropout(x), and its layer norm.

    Args:
        x: `[..., *normalized_shape]`, the output of a sublayer.
        residual: of x's shape.
        normalized_shape, weight, bias, eps: as in `layer_norm`.
        dropout_p: applied to x whenever it is not 0.

    Returns:
        (norm(s), s). Pre-norm layers carry on with both, post-norm layers with the first.
    """
    if x.shape != residual.shape:
        raise ValueError(f"x and residual must have the same shape, not {list(x.shape)} and {list(residual.shape)}")
    _check_probability("dropout_p", dropout_p)
    _require_backend("dropout_add_layer_norm", x)
    shape = _normalized_shape(normalized_shape)
    return reference.dropout_add_layer_norm(x, residual, shape, weight, bias, eps=eps, dropout_p=dropout_p)


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: Activation = "relu",
    dropout_p: float = 0.0,
) -> Tensor:
    """dropout(activation(x weight1^T + bias1)) weight2^T + bias2.

    Args:
        x: `[..., D]`.
        weight1: `[F, D]`, or `[2F, D]` = (gate, value) for the gated activations (Shazeer 2020).
        bias1: of weight1's first dimension, or None.
        weight2: `[Dout, F]`.
        bias2: `[Dout]`, or None.
        activation: "relu", "gelu" (exact), "gelu_tanh", "geglu", "swiglu", "reglu".
        dropout_p: dropout of the hidden activations; applied whenever it is not 0.

    Returns:
        `[..., Dout]`.
    """
    _check_choice("activation", activation, ACTIVATIONS)
    _check_probability("dropout_p", dropout_p)
    width = weight1.shape[0] // 2 if activation in GATED else weight1.shape[0]
    if weight2.shape[1] != width or (activation in GATED and weight1.shape[0] % 2):
        raise ValueError(
            f"weight2 must be of shape [out, {width}] for activation {activation!r} "
            f"and weight1 of shape {list(weight1.shape)}, not {list(weight2.shape)}"
        )
    _require_backend("feed_forward", x)
    return reference.feed_forward(x, weight1, bias1, weight2, bias2, activation=activation, dropout_p=dropout_p)


def _check_classes(target: Tensor, classes: int, ignore_index: int) -> None:
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64, not {target.dtype}")
    if target.device.type == "cpu" and target.numel() and not torch.compiler.is_compiling():
        wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
        if wrong.numel():
            raise IndexError(f"target must lie between 0 and {classes - 1} or be {ignore_index}, not {int(wrong[0])}")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross entropy of softmax(x weight^T + bias) against target, as `F.cross_entropy(F.linear(...), target)`.

    Args:
        x: `[M, D]` or `[..., D]`.
        weight: `[V, D]`; may be tied to an embedding.
        target: int64, of x's shape without the last dimension.
        bias: `[V]`, or None.
        ignore_index: targets of this value count for nothing.
        label_smoothing: share of the probability spread over all classes (Szegedy et al. 2016).
        reduction: "mean" over the targets that count, "sum", or "none" (of target's shape).

    Raises:
        ValueError, TypeError: an argument does not fit.
        IndexError: a target on the CPU is no class.
    """
    _check_choice("reduction", reduction, REDUCTIONS)
    _check_probability("label_smoothing", label_smoothing)
    if x.shape[:-1] != target.shape:
        raise ValueError(f"target must be of shape {list(x.shape[:-1])}, not {list(target.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be of shape [V, {x.shape[-1]}], not {list(weight.shape)}")
    _check_classes(target, weight.shape[0], ignore_index)
    _require_backend("linear_cross_entropy", x)
    loss = reference.linear_cross_entropy(
        x.reshape(math.prod(target.shape), x.shape[-1]),
        weight,
        target.reshape(-1),
        bias,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return loss.view(target.shape) if reduction == "none" else loss
