"""The random choice of the next token, and the random numbers that a sequence draws.

Letters: B rows, V vocabulary.
"""

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastformer.host.devices import send, widest_dtype

# Tokens ranked at first for top-p. V 33,278, one CPU core: ranking 256 takes 0.18 ms, sorting all of them 3.1 ms.
_FIRST_RANKED = 256


def choose_ids(
    logits: Tensor, options: Any, draws: Sequence[float] | Tensor = (), forbidden: Sequence[int] = ()
) -> Tensor:
    """Choose the next token of each row, by these steps in this order, in fp32.

    1. `forbidden` ids are ruled out.
    2. Temperature 0: the largest logit, the lowest id among equals; done. Else logits are divided by the temperature.
    3. top-k (Fan et al. 2018): the k largest logits remain.
    4. top-p (Holtzman et al. 2020): of softmax over them, the smallest set whose mass is at least p remains.
       Both steps keep no more ids than necessary: among equals, the lowest ones.
    5. The first id, in order of ids, at which the cumulative probability of the set exceeds the row's number in `draws`
       (fp64 sums: in fp32 the rare words of a large vocabulary would round to nothing).

    Args:
        logits: `[B, V]`; not changed.
        options: has temperature, top_k (None or 0: all ids may be drawn) and top_p.
        draws: a number in [0, 1) for each row, on the CPU; none for temperature 0.
        forbidden: ids that must not be chosen.

    Returns:
        int64 `[B]`; -1 if the logits of a row hold NaN, or no id is allowed.
    """
    limits = torch.finfo(torch.float32)
    logits = logits.float().clone()
    for i in forbidden:  # a list of indices would be copied to the device, for which the host waits
        logits[:, i] = -math.inf
    best, ids = logits.max(-1, keepdim=True)
    valid = best.squeeze(1).isfinite()
    if options.temperature == 0:
        return torch.where(valid, ids.squeeze(1), -1)
    # The largest is subtracted first, so that no score overflows; beyond the limits, 0 / 0 and inf / inf would be NaN.
    logits = (logits - best) / min(max(options.temperature, limits.tiny), limits.max)
    V = logits.shape[-1]
    if options.top_k and options.top_k < V:
        ranked = logits.topk(options.top_k).values
        logits = logits.masked_fill(~_largest(logits, ranked, torch.full_like(ids, options.top_k)), -math.inf)
    p = logits.softmax(-1)
    if options.top_p < 1:
        p = p.masked_fill(~_largest(p, *_nucleus(p, options.top_p)), 0.0)
    cumulative = p.cumsum(-1, dtype=widest_dtype(p.device))
    (uniform,) = send(p.device, torch.as_tensor(draws, dtype=cumulative.dtype, device="cpu"))
    total = cumulative[:, -1:]
    # Below the total even where the product is rounded up to it: the chosen id has a probability above 0.
    drawn = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.where(valid, torch.searchsorted(cumulative, drawn, right=True).squeeze(1), -1)


def _nucleus(p: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Return the largest of p `[B, V]` in order, `[B, n]`, and the least number of them that adds up to `mass`."""
    V = p.shape[-1]
    n = min(V, _FIRST_RANKED)
    while True:
        ranked = p.topk(n).values
        sums = ranked.cumsum(-1, dtype=widest_dtype(p.device))
        if n == V or bool((sums[:, -1] >= mass).all()):
            return ranked, ((sums < mass).sum(-1, keepdim=True) + 1).clamp(max=n)
        n = min(V, 8 * n)


def _largest(x: Tensor, ranked: Tensor, counts: Tensor) -> Tensor:
    """Mark the `counts` `[B, 1]` largest elements of each row `[B, V]`, the first ones among equals.

    `ranked` `[B, n]` holds each row's largest in order.
    """
    threshold = ranked.gather(-1, counts - 1)
    above, tied = x > threshold, x == threshold
    return above | (tied & (tied.cumsum(-1) <= counts - above.sum(-1, keepdim=True)))


class RandomStreams:
    """Makes a generator for each prompt, seeded by the seed, the prompt, and how often the prompt occurred before."""

    def __init__(self, seed: int | None) -> None:
        self._seed = secrets.randbits(63) if seed is None else seed
        self._copies: Counter[int] = Counter()  # by hash: a file may have millions of prompts

    def take(self, prompts: Sequence[Sequence[int]]) -> list[np.random.Generator]:
        """Return the generators of the next prompts."""
        streams = []
        for prompt in map(tuple, prompts):
            # The length is included because numpy ignores zeros at the end of the entropy.
            streams.append(np.random.default_rng((self._seed, self._copies[hash(prompt)], len(prompt), *prompt)))
            self._copies[hash(prompt)] += 1
        return streams
