"""The public ops, and the only place where an implementation is chosen.

Every op checks its arguments, then runs its fused kernel or the reference: `auto` takes the kernel where it applies,
`triton` raises with the reason where it does not. `explain` says which it would be, and why.

Letters: B batch, H heads, T queries, S keys, D model width, K head size, F feed-forward width, M rows, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fastformer import fused, reference
from fastformer.arguments import (
    REDUCTIONS,
    Activation,
    Alignment,
    AttentionRules,
    Reduction,
    Window,
    check_attention,
    check_choice,
    check_classes,
    check_embedding,
    check_feed_forward,
    check_packed_attention,
    check_probability,
)
from fastformer.backend import BackendError, get_backend
from fastformer.fused.attention import attention as fused_attention
from fastformer.fused.attention import limit as attention_limit
from fastformer.fused.attention import packed_attention as fused_packed_attention
from fastformer.fused.differentiation import Formula
from fastformer.fused.dropout_add_layer_norm import dropout_add_layer_norm as fused_dropout_add_layer_norm
from fastformer.fused.embedding import embedding as fused_embedding
from fastformer.fused.feed_forward import feed_forward as fused_feed_forward
from fastformer.fused.layer_norm import layer_norm as fused_layer_norm
from fastformer.fused.layer_norm import norm_limit
from fastformer.fused.linear_cross_entropy import linear_cross_entropy as fused_linear_cross_entropy
from fastformer.fused.rms_norm import rms_norm as fused_rms_norm
from fastformer.packed_reference import packed_attention as packed_attention_reference
from fastformer.packing import Layout

OPS = (
    "attention",
    "attention_with_weights",
    "packed_attention",
    "layer_norm",
    "rms_norm",
    "dropout_add_layer_norm",
    "feed_forward",
    "embedding",
    "linear_cross_entropy",
)


def _runs_fused(op: str, x: Tensor, limit: Callable[[], str | None] | None = None) -> bool:
    """Choose the implementation of one call: whether the fused kernel takes it.

    Args:
        op: its name in OPS.
        x: the tensor that decides.
        limit: says why this call is beyond the kernel, if its arguments are.

    Raises:
        BackendError: backend "triton" was asked for and cannot run this.
    """
    choice = get_backend()
    if choice == "reference" or (choice == "auto" and x.is_cpu):  # the latter without asking why
        return False
    reason = fused.unsupported(op, x)
    if reason is None and limit is not None:
        reason = limit()
    if reason is not None and choice == "triton":
        raise BackendError(f"backend 'triton' was asked for, but {reason}")
    return reason is None


def _formula(plain: Callable[..., Tensor | tuple[Tensor, ...]]) -> Formula | None:
    """Hand an op's plain formula to its fused Function, for second derivatives; torch.compile has none."""
    return None if torch.compiler.is_compiling() else plain


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


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    softcap: float | None = None,
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
        window: (left, right): query t attends to keys t + shift - left <= s <= t + shift + right, None: no limit on
            that side (Beltagy et al. 2020).
        query_lengths: integers `[B]`; outputs of later queries are 0.
        key_lengths: integers `[B]`; later keys are padding.
        key_mask: bool `[B, S]`, True = a real key; for padding on the left or with gaps.
        softcap: scaled scores x become softcap * tanh(x / softcap) before the mask is added (Gemma 2, 2024).
        dropout_p: dropout of the attention weights; applied whenever it is not 0.
        scale: K ** -0.5 if None.

    Returns:
        `[B, H, T, Kv]`, of q's dtype (autocast: the autocast dtype).

    Raises:
        ValueError, TypeError: an argument does not fit, before anything runs.
        fastformer.backend.BackendError: backend "triton" was asked for and cannot run this.
    """
    rules = AttentionRules(
        mask=mask,
        causal=causal,
        alignment=alignment,
        window=window,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        key_mask=key_mask,
        softcap=softcap,
        dropout_p=dropout_p,
        scale=scale,
    )
    rules = check_attention(q, k, v, rules)
    if _runs_fused("attention", q, lambda: attention_limit(q, k, v)):
        formula = _formula(lambda q, k, v, mask: reference.attention(q, k, v, replace(rules, mask=mask)))
        return fused_attention(q, k, v, rules, formula)[0]
    return reference.attention(q, k, v, rules)


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `attention`, and the weights `[B, H, T, S]` that were applied, after dropout as in torch.

    Costs memory for the weights; a query that may attend to nothing has weights 0.
    """
    rules = AttentionRules(
        mask=mask,
        causal=causal,
        alignment=alignment,
        window=window,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        key_mask=key_mask,
        softcap=softcap,
        dropout_p=dropout_p,
        scale=scale,
    )
    rules = check_attention(q, k, v, rules)
    if _runs_fused("attention_with_weights", q, lambda: attention_limit(q, k, v)):
        formula = _formula(lambda q, k, v, mask: reference.attention_with_weights(q, k, v, replace(rules, mask=mask)))
        out, weights = fused_attention(q, k, v, rules, formula, wants_weights=True)
        assert weights is not None
        return out, weights
    return reference.attention_with_weights(q, k, v, rules)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    key_layout: Layout | None = None,
    *,
    causal: bool = False,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    softcap: float | None = None,
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
        causal: query t of a sequence attends to its keys s <= t + shift.
        alignment: "top_left": shift 0; "bottom_right": the last query of each sequence meets its last key.
        window, softcap, dropout_p, scale: as in `attention`, within each sequence.

    Returns:
        `[T, H, Kv]`; zeros for a sequence without keys.
    """
    key_layout = layout if key_layout is None else key_layout
    rules = AttentionRules(
        causal=causal, alignment=alignment, window=window, softcap=softcap, dropout_p=dropout_p, scale=scale
    )
    rules = check_packed_attention(q, k, v, layout, key_layout, rules)
    if _runs_fused("packed_attention", q, lambda: attention_limit(q, k, v)):
        formula = _formula(lambda q, k, v: packed_attention_reference(q, k, v, layout, key_layout, rules))
        return fused_packed_attention(q, k, v, layout, key_layout, rules, formula)
    return packed_attention_reference(q, k, v, layout, key_layout, rules)


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p); no change where p is 0.

    Args:
        x: any shape, floating point.
        p: quantised to 1/65536 where that is faster, and the quantised value is used in the scale.
    """
    check_probability("p", p)
    return reference.dropout(x, p)


def _normalized_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _fits(x: Tensor, shape: tuple[int, ...], *parameters: Tensor | None) -> bool:
    """Whether x `[..., *shape]` and the parameters have the shapes that a norm takes."""
    for parameter in parameters:
        if parameter is not None and parameter.shape != shape:
            return False
    return shape != () and x.shape[-len(shape) :] == shape


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
    shape = _normalized_shape(normalized_shape)
    runs_fused = _runs_fused("layer_norm", x, lambda: norm_limit("layer_norm", x, weight, bias))
    if runs_fused and _fits(x, shape, weight, bias):  # what does not fit raises in torch
        formula = _formula(lambda x, weight, bias: reference.layer_norm(x, x.shape[-1:], weight, bias, eps))
        return fused_layer_norm(x, shape, weight, bias, eps, formula=formula)
    return reference.layer_norm(x, shape, weight, bias, eps)


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
        eps: added to the mean square; the machine epsilon if None, of fp32 for half precision too.
    """
    shape = _normalized_shape(normalized_shape)
    runs_fused = _runs_fused("rms_norm", x, lambda: norm_limit("rms_norm", x, weight))
    if runs_fused and _fits(x, shape, weight):
        formula = _formula(lambda x, weight: reference.rms_norm(x, x.shape[-1:], weight, eps))
        return fused_rms_norm(x, shape, weight, eps, formula=formula)
    return reference.rms_norm(x, shape, weight, eps)


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
    check_probability("dropout_p", dropout_p)
    shape = _normalized_shape(normalized_shape)
    runs_fused = _runs_fused(
        "dropout_add_layer_norm", x, lambda: norm_limit("dropout_add_layer_norm", x, residual, weight, bias)
    )
    if runs_fused and _fits(x, shape, weight, bias):
        formula = _formula(lambda s, weight, bias: reference.layer_norm(s, s.shape[-1:], weight, bias, eps))
        return fused_dropout_add_layer_norm(
            x, residual, shape, weight, bias, eps=eps, dropout_p=dropout_p, formula=formula
        )
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
    recompute: bool = False,
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
        recompute: keep x alone for backward, which costs one matrix product more there.

    Returns:
        `[..., Dout]`.

    Raises:
        ValueError: an argument does not fit.
    """
    check_feed_forward(x, weight1, bias1, weight2, bias2, activation)
    check_probability("dropout_p", dropout_p)
    if _runs_fused("feed_forward", x):
        return fused_feed_forward(
            x,
            weight1,
            bias1,
            weight2,
            bias2,
            activation=activation,
            dropout_p=dropout_p,
            recompute=recompute,
            formula=_formula(partial(reference.feed_forward, activation=activation, dropout_p=0.0)),
        )
    return reference.feed_forward(
        x, weight1, bias1, weight2, bias2, activation=activation, dropout_p=dropout_p, recompute=recompute
    )


def embedding(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    scale: float = 1.0,
    dropout_p: float = 0.0,
) -> Tensor:
    """dropout(scale * weight[ids] + table[positions]), what stands before the first layer of a Transformer.

    Args:
        ids: int64 `[...]`.
        weight: `[V, D]`.
        table: `[P, D]`, learned or fixed; None for no positions.
        positions: int64, of the shape of ids; given if and only if table is.
        scale: of the weight.
        dropout_p: dropout of the sum; applied whenever it is not 0.

    Returns:
        `[..., D]`, of the dtype to which those of weight and table promote.

    Raises:
        ValueError, TypeError: an argument does not fit.
        IndexError: an id or a position on the CPU is no row. On a GPU nothing waits to look: torch's kernel stops with
            an assertion, the fused one gives NaN.
    """
    check_embedding(ids, weight, table, positions)
    check_probability("dropout_p", dropout_p)

    def limit() -> str | None:
        if table is None or table.dtype in fused.DTYPES:
            return None
        return f"embedding takes a table of float32, float16 or bfloat16, not {table.dtype}"

    if _runs_fused("embedding", weight, limit):
        return fused_embedding(
            ids,
            weight,
            table,
            positions,
            scale=scale,
            dropout_p=dropout_p,
            formula=_formula(lambda w, t: reference.embedding(ids, w, t, positions, scale=scale, dropout_p=0.0)),
        )
    return reference.embedding(ids, weight, table, positions, scale=scale, dropout_p=dropout_p)


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
    check_choice("reduction", reduction, REDUCTIONS)
    check_probability("label_smoothing", label_smoothing)
    if x.shape[:-1] != target.shape:
        raise ValueError(f"target must be of shape {list(x.shape[:-1])}, not {list(target.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be of shape [V, {x.shape[-1]}], not {list(weight.shape)}")
    check_classes(target, weight.shape[0], ignore_index)
    shape = target.shape
    x, target = x.reshape(math.prod(shape), x.shape[-1]), target.reshape(-1)
    if _runs_fused("linear_cross_entropy", x):
        loss = fused_linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            rows=reduction == "none",
            formula=_formula(
                lambda x, w, b: reference.linear_cross_entropy(
                    x, w, target, b, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
                )
            ),
        )
        loss = loss / (target != ignore_index).sum() if reduction == "mean" else loss
    else:
        loss = reference.linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    return loss.view(shape) if reduction == "none" else loss
