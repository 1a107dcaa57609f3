"""Attention within packed sequences, in plain PyTorch: the specification, and the implementation without a GPU.

A batch of scores is one matrix product, so short sequences attend in groups of about the same length, each padded to
its longest. On a CPU, long sequences attend one by one, without padding. docs/kernels/attention.md has the gain.

Letters: B sequences, H heads, T queries, S keys, K head size; of a group: N sequences.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastformer.functional.attention.reference import (
    attention_over_zeros,
    products,
    softmax,
    weighted_sum,
    wide,
    widens,
)
from fastformer.functional.attention.rules import AttentionRules, expand_distance_bias
from fastformer.functional.dropout import drop
from fastformer.host.devices import send
from fastformer.modes import compiling, readable
from fastformer.packing import Layout
from fastformer.packing.layout import RowMap

# A group ends before the sequence from which on all sequences, padded to one size, have at most this share of the
# scores that a sequence of the group has with its padding ...
_SHRINK = 0.7
# ... if that saves at least this many scores of all heads: a group costs some 20 calls, forward and backward.
_WORTH = 16_384
# Up to this length matrix products and softmax are faster than SDPA on a CPU, forward and backward (128 sequences of up
# to 29 tokens, 6 heads of 32: 13.6 against 18.0 ms, one core). The scores of longer ones do not stay in the cache.
_SHORT = 64
# The same for a trained bias by distance, for which SDPA has no fused gradient (8 sequences of 256 tokens,
# 12 heads of 64: 118 against 146 ms; 16 of up to 128: 34 against 48).
_SHORT_TRAINED = 256

# From this mean length on, a call of SDPA for each sequence is faster than groups. Ratios of process CPU time, 16 and
# 64 sequences, 4 to 12 heads of 64, lengths evenly from a tenth of 80 to 512 tokens and from 0.7 of it: 1.2 to 2.3,
# with backward 1.1 to 1.9; 62 sequences of 5 to 30 tokens and two of 128: 0.8 to 1.2.
_LONG_MEAN = 32

Ints = NDArray[np.int64]


class Group(NamedTuple):
    """Some sequences of a batch, padded to the longest of them."""

    sequences: int  # N
    queries: int  # T, the longest
    keys: int  # S, likewise
    query_lengths: Tensor  # int64 [N], on the device
    key_lengths: Tensor  # likewise
    shortest: int  # the shortest key length
    key_bias: Tensor | None  # [H * N, 1, S]: 0 at real keys, -inf behind them; None where all are real, or on a GPU


class Plan(NamedTuple):
    """The groups of one call, and the maps of packed rows to rows of groups.

    rows: from query rows `[T * H]` and key rows `[S * Hkv]` to the rows of all groups, `[H, N, L]` each; None if there
        is one group without padding, in the order of the batch.
    """

    groups: list[Group]
    rows: tuple[RowMap, RowMap] | None


def _lengths(layout: Layout) -> Ints:
    return np.array(layout.lengths.tolist(), np.int64)  # numpy() fails on tensors that torch.func wraps


def _cuts(queries: Ints, keys: Ints, heads: int) -> list[int]:
    """Return the index of each group's first sequence, for lengths in descending order of queries + keys."""
    # The longest queries times the longest keys, of each sequence and all after it.
    area = np.maximum.accumulate(queries[::-1])[::-1] * np.maximum.accumulate(keys[::-1])[::-1]
    cuts, first = [0], 0
    while first < len(area) and area[first] > 0:
        after = first + int(np.searchsorted(-area[first:], -_SHRINK * area[first]))
        if after >= len(area) or (len(area) - after) * (area[first] - area[after]) * heads < _WORTH:
            break
        cuts.append(after)
        first = after
    return cuts


def _slots(layout: Layout, order: Ints, cuts: list[int], heads: int) -> tuple[Tensor, int]:
    """Return the row of each token's heads `[T * heads]` in padded groups `[heads, N, L]`, and the number of rows."""
    lengths = _lengths(layout)
    ends = [*cuts[1:], len(order)]
    start = np.empty(len(order), np.int64)  # of each sequence: first row of head 0
    stride = np.empty(len(order), np.int64)  # from head to head
    base = 0
    for first, end in zip(cuts, ends, strict=True):
        members = order[first:end]
        longest = int(lengths[members].max(initial=0))
        start[members] = base + np.arange(len(members)) * longest
        stride[members] = len(members) * longest
        base += heads * len(members) * longest
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(sequences)) - (np.cumsum(lengths) - lengths)[sequences]
    slots = (start[sequences] + position)[:, None] + stride[sequences][:, None] * np.arange(heads)
    return torch.from_numpy(slots.reshape(-1)), base


def _plan(layout: Layout, key_layout: Layout, heads: int, key_heads: int) -> Plan:
    """Group the sequences of a batch by length; from the CPU, everything is sent in one transfer."""
    queries, keys = _lengths(layout), _lengths(key_layout)
    order = np.argsort(-(queries + keys), kind="stable")
    queries, keys = queries[order], keys[order]
    cuts, device = _cuts(queries, keys, heads), layout.offsets.device
    maps = []
    if not (len(order) and 0 < queries.min() == queries.max() and 0 < keys.min() == keys.max()):
        maps.append(_slots(layout, order, cuts, heads))
        if key_layout is not layout or heads != key_heads:
            maps.append(_slots(key_layout, order, cuts, key_heads))
    lengths, *slots = send(device, torch.from_numpy(np.stack([queries, keys])), *(rows for rows, _ in maps))
    groups = []
    for first, end in zip(cuts, [*cuts[1:], len(order)], strict=True):
        T, S = int(queries[first:end].max(initial=0)), int(keys[first:end].max(initial=0))
        shortest = int(keys[first:end].min(initial=S))  # a Python int: invisible to modes and traces
        q, k = lengths[:, first:end].unbind()
        bias = None
        if shortest < S and device.type == "cpu":
            hidden = torch.arange(S, device="cpu") >= k[:, None, None]
            bias = torch.where(hidden, -math.inf, 0.0).repeat(heads, 1, 1)
        groups.append(Group(end - first, T, S, q, k, shortest, bias))
    numbers = (heads, key_heads)[: len(maps)]
    rows = [RowMap.of(x, places, n) for x, (_, places), n in zip(slots, maps, numbers, strict=True)]
    return Plan(groups, (rows[0], rows[-1]) if rows else None)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, key_layout: Layout, rules: AttentionRules
) -> Tensor:
    """Compute `functional.packed_attention` with rules from `check_packed_attention`."""
    if compiling() or not layout.known:
        return _in_one_group(q, k, v, layout, key_layout, rules)
    if _attends_one_by_one(q, layout, key_layout, rules):
        return _one_by_one(q, k, v, layout, key_layout, rules)
    (tokens, H, K), Hkv, Kv = q.shape, k.shape[1], v.shape[2]
    plan = layout.cached(("plan", H, Hkv), lambda: _plan(layout, key_layout, H, Hkv), key_layout)
    same = layout is key_layout
    if plan.rows is None:
        group = plan.groups[0]
        forms = ((q, group.queries), (k, group.keys), (v, group.keys))
        q, k, v = (x.view(group.sequences, length, *x.shape[1:]).transpose(1, 2) for x, length in forms)
        if _trains_bias(rules):
            heads = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
            out = _attend(*heads, group, same, rules).transpose(0, 1)
        else:  # SDPA reads the heads in place: 1.0 to 1.6 times as fast as `_attend`, up to 64 tokens, one core
            out = attention_over_zeros(q, k, v, rules)
        out = out.transpose(1, 2)
        # A copy of what backward reads: callers may view the output, and change it in place.
        return (out.clone(memory_format=torch.contiguous_format) if out.requires_grad else out).flatten(0, 1)
    rows, key_rows = plan.rows
    q, k, v = rows.spread_heads(q), key_rows.spread_heads(k), key_rows.spread_heads(v)
    of_queries = q.split_with_sizes([H * group.sequences * group.queries for group in plan.groups])
    sizes = [Hkv * group.sequences * group.keys for group in plan.groups]
    outs = []
    for group, *qkv in zip(plan.groups, of_queries, k.split_with_sizes(sizes), v.split_with_sizes(sizes), strict=True):
        N, T, S = group.sequences, group.queries, group.keys
        heads = qkv[0].view(H, N, T, K), qkv[1].view(Hkv, N, S, K), qkv[2].view(Hkv, N, S, Kv)
        outs.append(_attend(*heads, group, same, rules).flatten(0, 2))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return rows.gather(out).view(tokens, H, Kv)


def _trains_bias(rules: AttentionRules) -> bool:
    return rules.distance_bias is not None and rules.distance_bias.requires_grad and torch.is_grad_enabled()


def _is_short(T: int, S: int, rules: AttentionRules) -> bool:
    """Return whether matrix products and softmax are faster than SDPA."""
    return max(T, S) <= (_SHORT_TRAINED if _trains_bias(rules) else _SHORT)


def _attends_one_by_one(q: Tensor, layout: Layout, key_layout: Layout, rules: AttentionRules) -> bool:
    """Return whether a call of SDPA for each sequence is faster than groups."""
    if not q.is_cpu or (layout.full and key_layout.full):
        return False
    tokens = max(layout.total, key_layout.total)
    is_short = _is_short(layout.max_length, key_layout.max_length, rules)
    return not is_short and tokens >= _LONG_MEAN * layout.batch


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, layout: Layout, key_layout: Layout, rules: AttentionRules) -> Tensor:
    lengths, key_lengths = layout.lengths.tolist(), key_layout.lengths.tolist()
    sides = torch.split(q, lengths), torch.split(k, key_lengths), torch.split(v, key_lengths)
    outputs = []
    for row in zip(*sides, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in row)  # [1, H, L, K]
        outputs.append(attention_over_zeros(q, k, v, rules)[0].transpose(0, 1))
    return torch.cat(outputs)


def _attend(q: Tensor, k: Tensor, v: Tensor, group: Group, same: bool, rules: AttentionRules) -> Tensor:
    """Attend within one group: q `[H, N, T, K]`, k and v `[Hkv, N, S, K]` -> `[H, N, T, Kv]`.

    same: whether queries and keys are of the same sequences.
    """
    (H, N, T), (Hkv, _, S) = q.shape[:3], k.shape[:3]
    by_start = rules.alignment == "top_left"
    # Causal self-attention needs no lengths: the keys up to a real query are real.
    needs_no_lengths = group.shortest == S or (rules.causal and same)
    bias = rules.distance_bias
    plain = q.is_cpu and by_start and Hkv == H and (rules.window, rules.softcap, rules.sinks) == (None, None, None)
    if bias is not None:
        plain = plain and readable(bias) and bool(bias.isfinite().all())  # no query has all keys hidden
    if plain and _is_short(T, S, rules) and group.shortest > 0:
        scale = q.shape[3] ** -0.5 if rules.scale is None else rules.scale
        later = torch.full((1, T, S), -math.inf, device=q.device).triu_(1) if rules.causal else None
        ends = None if needs_no_lengths else group.key_bias
        added = later if ends is None else (ends if later is None else ends + later)
        scores = products(q.flatten(0, 1), k.flatten(0, 1), scale, added)
        if bias is not None:
            pairs = expand_distance_bias(bias, q, k, rules).transpose(0, 1)  # [H, 1, T, S]
            scores = (wide(scores).view(H, N, T, S) + pairs).flatten(0, 1)
        weights = softmax(scores)
        weights = weights if weights.dtype == v.dtype or widens(v) else weights.to(v.dtype)
        weights = drop(weights, rules.dropout_p) if rules.dropout_p else weights
        out = weighted_sum(weights, v.flatten(0, 1))
        return out.view(H, N, T, v.shape[3])
    key_lengths = None if needs_no_lengths else group.key_lengths
    padded = replace(rules, query_lengths=None if by_start else group.query_lengths, key_lengths=key_lengths)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [N, H, L, K]
    return attention_over_zeros(q, k, v, padded).transpose(0, 1)


def _in_one_group(q: Tensor, k: Tensor, v: Tensor, layout: Layout, key_layout: Layout, rules: AttentionRules) -> Tensor:
    """Compute `packed_attention` without reading lengths, as torch.compile and CUDA graphs require."""

    def padded(x: Tensor, layout: Layout) -> Tensor:  # [T, H, K] -> [B, H, max_length, K]
        B, L = layout.batch, layout.max_length
        return x.new_zeros(B * L, *x.shape[1:]).index_copy(0, layout.slots, x).view(B, L, *x.shape[1:]).transpose(1, 2)

    out = attention_over_zeros(
        padded(q, layout),
        padded(k, key_layout),
        padded(v, key_layout),
        replace(rules, query_lengths=layout.offsets.diff(), key_lengths=key_layout.offsets.diff()),
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, layout.slots)
