"""Fused attention: registration of its kernels, the autograd Function, and the functions that public ops call.

Dense and packed attention are one Function: the kernels tell them apart by the number of dimensions. Saved for
backward: q, k, v, the output and the log-sum-exp of each row, no scores; the weights only if they are requested. All
other arguments are one record, `Arguments`: every schema has its fields, and the fakes take them by name.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fastformer.functional.attention.rules import AttentionRules, as_key_mask
from fastformer.host.autograd_function import (
    Formula,
    call,
    define,
    dropout_seed,
    needs_double_backward,
    plain_gradients,
)
from fastformer.host.devices import to_autocast
from fastformer.packing import Layout
from fastformer_kernels.attention.arguments import NUMBERS, SCHEMA, Arguments

LARGEST_HEAD = 256
# Queries times query heads per key head: the rows of one tile of the decoding kernel. With more of them, the training
# kernel fills the matrix units, too.
LARGEST_DECODED_ROWS = 16
_UNLIMITED = -1  # a side of the window, in the kernels
_LOG2E = math.log2(math.e)


def _like(x: Tensor, v: Tensor | None = None) -> Tensor:
    """Return an empty tensor of x's shape, or of v's head size; dense ones are laid out as `[B, T, H, K]`."""
    K = (x if v is None else v).shape[-1]
    if x.dim() == 3:
        return x.new_empty((*x.shape[:2], K))
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], K)).transpose(1, 2)


def _rows(q: Tensor) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if q.dim() == 3 else tuple(q.shape[:3])


def _forward_fake(q: Tensor, v: Tensor, mask: Tensor | None, distance_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    added = distance_bias is not None or (mask is not None and mask.dtype != torch.bool)
    rows = (2, *_rows(q)) if added else _rows(q)
    return _like(q, v), q.new_empty(rows, dtype=torch.float32)


def _backward_fake(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, wants_q: bool, wants_keys: bool) -> tuple[Tensor, ...]:
    keys = (_like(k), _like(v)) if wants_keys else (q.new_empty(0), q.new_empty(0))
    return _like(q) if wants_q else q.new_empty(0), *keys, lse.new_empty(_rows(q))


def _mask_gradient_fake(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    B, H = (1, 1, *mask.shape)[-4:-2]  # of a mask of 2 dimensions at least
    return q.new_empty((B, H, q.shape[2], -(-k.shape[2] // 16) * 16), dtype=torch.float32)


_HEADS = "Tensor q, Tensor k, Tensor v"

_forward = define(
    f"attention_forward({_HEADS}, {SCHEMA}) -> (Tensor, Tensor)", "attention.forward.forward", _forward_fake
)
_decode = define(f"attention_decode({_HEADS}, {SCHEMA}) -> Tensor", "attention.decode.decode", lambda q, v: _like(q, v))
_weights = define(
    f"attention_weights(Tensor q, Tensor k, Tensor lse, {SCHEMA}) -> Tensor",
    "attention.weights.weights",
    lambda q, k: q.new_empty((*q.shape[:3], k.shape[2])),
)
_backward = define(
    f"attention_backward(Tensor dout, {_HEADS}, Tensor out, Tensor lse, Tensor? added, Tensor? dweights, "
    f"bool wants_q, bool wants_keys, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    "attention.backward.backward",
    _backward_fake,
)
_mask_gradient = define(
    f"attention_mask_gradient(Tensor dout, {_HEADS}, Tensor lse, Tensor delta, Tensor? dweights, {SCHEMA}) -> Tensor",
    "attention.mask_gradient.mask_gradient",
    _mask_gradient_fake,
)
_bias_gradient = define(
    f"attention_bias_gradient(Tensor dout, {_HEADS}, Tensor lse, Tensor delta, Tensor? dweights, {SCHEMA}) -> Tensor",
    "attention.bias_gradient.bias_gradient",
    lambda q, distance_bias: q.new_empty(distance_bias.shape, dtype=torch.float32),
)
_bounds = define(
    "attention_bounds(Tensor? query_lengths, Tensor? key_lengths, Tensor? key_mask, SymInt batch, SymInt queries, "
    "SymInt keys, bool packed, bool bottom_right, Tensor like) -> Tensor",
    "attention.problem.bounds",
    lambda batch, like: like.new_empty((batch, 8), dtype=torch.int32),
)


class _Attention(torch.autograd.Function):
    """q, k, v, the tensors of `Arguments`, its numbers, wants_weights, formula -> (output, weights or None, lse).

    The log-sum-exp lse is not differentiable. Of the arguments, only mask, distance_bias and sinks are differentiable.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        arguments = (*rest[len(_TENSORS)], *rest[: len(_TENSORS)])
        wants_weights = rest[len(_TENSORS) + 1]
        out, lse = _forward(q, k, v, *arguments)
        return out, _weights(q, k, lse, *arguments) if wants_weights else None, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None, Tensor]) -> None:
        *tensors, ctx.numbers, _, ctx.formula = inputs
        out, weights, lse = output
        ctx.save_for_backward(*tensors, out, weights, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dweights: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, *tensors, out, weights, lse = ctx.saved_tensors
        arguments = Arguments(*ctx.numbers, *tensors)
        mask, bias, sinks = arguments.mask, arguments.distance_bias, arguments.sinks
        needs_grad = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[_MASK:_NUMBERS])
        wants_q, wants_k, wants_v, wants_mask, wants_bias, wants_sinks = needs_grad
        if dout is None and dweights is None:
            return _ordered(*[None] * 6)
        if needs_double_backward("attention", ctx.formula, arguments.seed):
            grads = (dout,) if weights is None else (dout, dweights)
            return _ordered(*plain_gradients(ctx.formula, (q, k, v, mask, bias, sinks), needs_grad, grads))
        if dout is None:
            dout = out.new_zeros(out.shape)
        added = None if dweights is None else (weights * dweights).sum(-1, dtype=torch.float32)
        results = (dout, q, k, v, out, lse, added, dweights)
        dq, dk, dv, delta = _backward(*results, wants_q, wants_k or wants_v, *arguments)
        dmask = None
        if wants_mask and mask is not None:
            dmask = _mask_gradient(dout, q, k, v, lse, delta, dweights, *arguments)  # [B or 1, H or 1, T, S or more]
            dmask = dmask[..., : k.shape[2]].sum_to_size((1,) * (4 - mask.dim()) + mask.shape)
            dmask = dmask.reshape(mask.shape).to(mask.dtype)
        dbias = dsinks = None
        if wants_bias and bias is not None:
            dbias = _bias_gradient(dout, q, k, v, lse, delta, dweights, *arguments).to(bias.dtype)
        if wants_sinks and sinks is not None:
            dsinks = _sink_gradient(lse, delta, sinks)
        return _ordered(dq if wants_q else None, dk if wants_k else None, dv if wants_v else None, dmask, dbias, dsinks)


def _sink_gradient(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks: minus the sum of weight * delta over the rows of each head.

    lse is in units of log2, sinks included, `[B, H, T]` or packed `[H, T]`, or maximum and logarithm of the sum,
    `[2, ...]`; +inf for a row that sees no key, which makes its weight 0.
    """
    exponents = sinks.float()[:, None] * _LOG2E
    for term in lse.unbind() if lse.dim() > delta.dim() else (lse,):
        exponents = exponents - term
    products = exponents.exp2() * delta
    return -products.sum([d for d in range(delta.dim()) if d != delta.dim() - 2]).to(sinks.dtype)


_TENSORS = Arguments._fields[NUMBERS:]
_MASK = 3 + _TENSORS.index("mask")  # index among the Function's inputs; distance_bias and sinks follow it
_NUMBERS = 3 + len(_TENSORS)  # index of the numbers
_BEFORE, _AFTER = (None,) * (_MASK - 3), (None,) * 4


def _ordered(*gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, mask, distance_bias and sinks at the places of these inputs, else None."""
    return *gradients[:3], *_BEFORE, *gradients[3:], *_AFTER


def limit(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the kernels cannot take these dtypes and head sizes, or None."""
    if not q.dtype == k.dtype == v.dtype and (
        torch.float64 in (q.dtype, k.dtype, v.dtype) or not torch.is_autocast_enabled(q.device.type)
    ):
        return f"attention takes q, k and v of one dtype, not {q.dtype}, {k.dtype} and {v.dtype}"
    for x in (q, v):
        if not 0 < x.shape[-1] <= LARGEST_HEAD:
            return f"attention takes head sizes from 1 to {LARGEST_HEAD}, not {x.shape[-1]}"
    return None


def decodes(q: Tensor, k: Tensor, v: Tensor, *optional: Tensor | None) -> bool:
    """Return whether a call is a step of decoding: few queries on many keys, and no tensor needs a gradient."""
    if q.dim() == 3 or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in optional):
        return False
    return 0 < q.shape[2] * (q.shape[1] // k.shape[1]) <= LARGEST_DECODED_ROWS and q.shape[2] < k.shape[2]


def _apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: AttentionRules,
    bounds: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    sizes: tuple[int, int, int],
    wants_weights: bool,
    formula: Formula | None,
    decoding: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run the Function, or the kernel of decoding; sizes: (queries, keys, shift of the diagonal without bounds)."""
    q, k, v = to_autocast(q, k, v)  # type: ignore[assignment]
    # `check_attention` has put causality into the window, if there is one.
    sides = rules.window or (None, 0 if rules.causal else None)
    left, right = (_UNLIMITED if side is None else side for side in sides)
    queries, keys, shift = sizes
    scale = float(q.shape[-1] ** -0.5 if rules.scale is None else rules.scale)
    softcap, dropout_p = rules.softcap or 0.0, rules.dropout_p
    seed = dropout_seed(q) if dropout_p > 0.0 else None
    # By position, which takes a quarter of the time of keywords; a test compares the order with the fields.
    distance_bias, sinks = rules.distance_bias, rules.sinks
    arguments = Arguments(
        queries, keys, scale, shift, left, right, softcap, dropout_p, bounds, key_mask, seed, mask, distance_bias, sinks
    )
    if decoding:
        return _decode(q, k, v, *arguments), None
    numbers, tensors = arguments[:NUMBERS], arguments[NUMBERS:]
    out, weights, _ = call(_Attention, q, k, v, *tensors, numbers, wants_weights, formula)
    return out, weights


def attention(
    q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, formula: Formula | None, wants_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Run `functional.attention` with the kernels; the weights `[B, H, T, S]` are None unless wants_weights.

    The rules are from `check_attention`; formula: the op in plain PyTorch, of q, k, v, mask, bias and sinks.
    """
    (B, _, T, _), S = q.shape, k.shape[2]
    bottom_right = rules.alignment == "bottom_right"
    mask, key_mask = rules.mask, rules.key_mask
    if (keys := as_key_mask(mask, B, S)) is not None:  # kernels skip the hidden tiles of a key mask
        mask, key_mask = None, keys if key_mask is None else keys & key_mask
    decoding = mask is None and rules.dropout_p == 0.0 and not wants_weights
    decoding = decoding and decodes(q, k, v, rules.distance_bias, rules.sinks)
    bounds = None
    if decoding and key_mask is None and rules.query_lengths is None and not bottom_right:
        bounds = rules.key_lengths  # saves a kernel a layer and token
    elif key_mask is not None or rules.query_lengths is not None or rules.key_lengths is not None:
        bounds = _bounds(rules.query_lengths, rules.key_lengths, key_mask, B, T, S, False, bottom_right, q)
    sizes = T, S, S - T if bottom_right else 0
    return _apply(q, k, v, rules, bounds, key_mask, mask, sizes, wants_weights, formula, decoding)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, key_layout: Layout, rules: AttentionRules, formula: Formula | None
) -> Tensor:
    """Run `functional.packed_attention` with the kernels; rules and formula as in `attention`."""
    bounds = _bounds_of(q, layout, key_layout, rules.alignment == "bottom_right")
    sizes = layout.max_length, key_layout.max_length, 0
    return _apply(q, k, v, rules, bounds, None, None, sizes, False, formula)[0]


def packed_attention_kernel(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, key_layout: Layout, causal: bool
) -> Tensor:
    """Run `functional.packed_attention` with the kernels, without options and gradients; nothing is checked."""
    numbers = layout.max_length, key_layout.max_length, q.shape[-1] ** -0.5, 0, _UNLIMITED, 0 if causal else _UNLIMITED
    arguments = Arguments(*numbers, 0.0, 0.0, _bounds_of(q, layout, key_layout, False), None, None, None, None, None)
    return _forward(q, k, v, *arguments)[0]  # type: ignore[no-any-return]


def _bounds_of(q: Tensor, layout: Layout, key_layout: Layout, bottom_right: bool) -> Tensor:
    """Return the bounds of packed sequences, which all layers share."""

    def make() -> Tensor:
        sizes = layout.batch, layout.max_length, key_layout.max_length
        bounds: Tensor = _bounds(layout.offsets, key_layout.offsets, None, *sizes, True, bottom_right, q.detach())
        return bounds

    return layout.cached(("bounds", bottom_right), make, key_layout)
