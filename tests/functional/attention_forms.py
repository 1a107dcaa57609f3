"""What attention is compared with, a loop over queries, and the forms in which it is called."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INF = math.inf


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    alignment: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    distance_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention one query at a time, as the documentation of the op words it."""
    (B, H, T, K), S, group = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    scale = 1 / math.sqrt(K) if scale is None else scale
    mask = None if mask is None else mask.expand(B, H, T, S)
    left, right = window or (None, None)
    out, weights = [], []
    for b in range(B):
        query_length = T if query_lengths is None else int(query_lengths[b])
        key_length = S if key_lengths is None else int(key_lengths[b])
        shift = key_length - query_length if alignment == "bottom_right" else 0
        for h in range(H):
            for t in range(T):
                scores = {}
                for s in range(S):
                    hidden = t >= query_length or s >= key_length or (causal and s > t + shift)
                    hidden = hidden or (left is not None and s < t + shift - left)
                    hidden = hidden or (right is not None and s > t + shift + right)
                    hidden = hidden or (key_mask is not None and not key_mask[b, s])
                    score = scale * (q[b, h, t] * k[b, h // group, s]).sum()
                    score = score if softcap is None else softcap * (score / softcap).tanh()
                    if distance_bias is not None and not hidden:
                        added = distance_bias[h, (distance_bias.shape[1] + 1) // 2 - 1 + s - (t + shift)]
                        hidden = added == -INF
                        score = score + added
                    if mask is not None and mask.dtype == torch.bool:
                        hidden = hidden or not mask[b, h, t, s]
                    elif mask is not None:
                        hidden = hidden or mask[b, h, t, s] == -INF
                        score = score + mask[b, h, t, s]
                    if not hidden:
                        scores[s] = score
                row = torch.zeros(S, dtype=q.dtype)
                if scores:
                    exponentials = torch.stack(list(scores.values())).exp()
                    total = exponentials.sum() + (0 if sinks is None else sinks[h].exp())
                    row = row.index_put((torch.tensor(list(scores)),), exponentials / total)
                weights.append(row)
                out.append(row @ v[b, h // group])
    return torch.stack(out).view(B, H, T, -1), torch.stack(weights).view(B, H, T, S)


def additive(*shape: int, dead: bool = False) -> Tensor:
    mask = torch.randn(*shape, dtype=torch.float64)
    mask[..., 0, 1:3] = -INF
    if dead:
        mask[..., 1, :] = -INF
    return mask


def boolean(*shape: int) -> Tensor:
    mask = torch.rand(*shape) < 0.6
    mask[..., 0, :] = False  # the first query may attend to nothing
    return mask


B, H, T, S = 3, 4, 5, 7


def by_distance(positions: int = S, heads: int = H) -> Tensor:
    return torch.randn(heads, 2 * positions - 1, dtype=torch.float64)


def sinks(heads: int = H) -> Tensor:
    return torch.randn(heads, dtype=torch.float64)


def keys_between(first: list[int], end: list[int]) -> Tensor:
    places = torch.arange(S)
    return (places >= torch.tensor(first)[:, None]) & (places < torch.tensor(end)[:, None])


def form(**rules: Any) -> Callable[[], dict[str, Any]]:
    """Make the rules of a call anew each time: tensors of lists, and what functions draw."""
    tensors = {name: torch.tensor(x) for name, x in rules.items() if isinstance(x, list)}
    return lambda: {name: tensors.get(name, x() if callable(x) else x) for name, x in rules.items()}


FORMS = {
    "plain": form(),
    "causal": form(causal=True),
    "causal bottom_right": form(causal=True, alignment="bottom_right"),
    "both lengths": form(query_lengths=[2, 5, 0], key_lengths=[7, 1, 3]),
    "lengths in other integers": form(
        query_lengths=lambda: torch.tensor([2, 5, 0], dtype=torch.uint8),
        key_lengths=lambda: torch.tensor([7, 1, 3], dtype=torch.int32),
    ),
    "causal with lengths": form(causal=True, key_lengths=[2, 7, 0]),
    # The second sequence has fewer keys than queries: its first queries may attend to nothing.
    "causal bottom_right with lengths": form(
        causal=True, alignment="bottom_right", query_lengths=[3, 5, 2], key_lengths=[7, 2, 2]
    ),
    "key_mask": form(key_mask=lambda: torch.arange(S) % torch.tensor([[9], [1], [2]]) > 0),
    "key_mask, left": form(key_mask=lambda: keys_between([2, 7, 4], [7, 7, 7])),
    "key_mask, left, causal": form(causal=True, key_mask=lambda: keys_between([2, 6, 0], [7, 7, 7])),
    "key_mask, left, causal bottom_right": form(
        causal=True, alignment="bottom_right", key_mask=lambda: keys_between([2, 6, 0], [7, 7, 7])
    ),
    "key_mask, left, window": form(window=(1, 1), key_mask=lambda: keys_between([2, 0, 3], [7, 5, 7])),
    "key_mask, both sides, window, lengths of queries": form(
        window=(2, None), causal=True, query_lengths=[5, 2, 3], key_mask=lambda: keys_between([1, 0, 3], [7, 5, 4])
    ),
    "key_mask, right, causal bottom_right": form(
        causal=True, alignment="bottom_right", key_mask=lambda: keys_between([0, 0, 0], [7, 5, 0])
    ),
    "key_mask, left, distance_bias": form(
        distance_bias=by_distance, key_mask=lambda: keys_between([2, 0, 4], [7, 7, 7])
    ),
    "key_mask of the same keys, causal, additive": form(
        causal=True, mask=lambda: additive(H, T, S), key_mask=lambda: keys_between([1, 1, 1], [6, 6, 6])
    ),
    "additive [T, S], lengths, not the same for all": form(
        mask=lambda: additive(T, S), query_lengths=[5, 2, 0], key_lengths=[7, 3, 2]
    ),
    "bool [S], sinks, key_mask": form(
        mask=lambda: torch.rand(S) < 0.6, sinks=sinks, key_mask=lambda: keys_between([0, 0, 0], [7, 4, 1])
    ),
    "bool [T, S]": form(mask=lambda: boolean(T, S)),
    "bool [S]": form(mask=lambda: torch.rand(S) < 0.6),
    "bool [B, 1, T, S]": form(mask=lambda: boolean(B, 1, T, S)),
    "additive [H, T, S]": form(mask=lambda: additive(H, T, S)),
    "additive [B, H, T, S], dead row": form(mask=lambda: additive(B, H, T, S, dead=True)),
    "additive [T, 1]": form(mask=lambda: torch.randn(T, 1, dtype=torch.float64)),
    "window": form(window=(1, 2)),
    "window of one key": form(window=(0, 0), alignment="bottom_right"),
    "window, no limit on the left": form(window=(None, 1)),
    "window, no limit on the right": form(window=(1, None), alignment="bottom_right"),
    "window beyond all keys": form(window=(10**30, 7), alignment="bottom_right"),
    # One less on either side than what limits nothing.
    "window that just limits, bottom_right": form(
        window=(5, 3), alignment="bottom_right", query_lengths=[5, 5, 2], key_lengths=[7, 2, 7]
    ),
    "causal window": form(window=(2, 3), causal=True),
    # The first sequence has queries whose window lies before its first key, the third none at all.
    "window with lengths": form(
        window=(1, 0), alignment="bottom_right", query_lengths=[5, 2, 4], key_lengths=[2, 7, 0]
    ),
    "window top_left beyond the keys": form(window=(1, 1), key_lengths=[1, 7, 3]),
    "softcap": form(softcap=0.8),
    "softcap, additive, dead row": form(softcap=0.8, mask=lambda: additive(H, T, S, dead=True), scale=2.0),
    "distance_bias": form(distance_bias=by_distance),
    "distance_bias, bottom_right": form(distance_bias=lambda: by_distance(9), alignment="bottom_right"),
    "distance_bias, causal, lengths of keys": form(distance_bias=by_distance, causal=True, key_lengths=[7, 0, 3]),
    "distance_bias to the last key of each": form(
        distance_bias=lambda: by_distance(8), alignment="bottom_right", query_lengths=[5, 0, 2], key_lengths=[7, 7, 3]
    ),
    "distance_bias that hides": form(distance_bias=lambda: by_distance().index_fill(1, torch.arange(7, 13), -INF)),
    "sinks": form(sinks=sinks),
    "sinks, causal, no keys": form(sinks=sinks, causal=True, key_lengths=[7, 0, 3]),
    "sinks, window, dead row": form(sinks=sinks, window=(1, 0), mask=lambda: boolean(T, S)),
}
EVERYTHING: dict[str, Any] = {
    "mask": lambda: additive(B, 1, T, S, dead=True),
    "causal": True,
    "alignment": "bottom_right",
    "query_lengths": [5, 4, 5],
    "key_lengths": [7, 6, 3],
    "key_mask": lambda: torch.rand(B, S) < 0.7,
    "window": (3, 1),
    "softcap": 1.5,
}
FORMS["everything by distance"] = form(**EVERYTHING, distance_bias=by_distance, sinks=sinks)
FORMS["everything"] = form(**EVERYTHING, scale=0.7)
