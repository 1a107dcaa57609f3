"""Find the queries and keys of each row that are not padding, for long sequences on a CPU.

There SDPA also computes the scores that a mask hides. `attend_in_spans` calls it for each row of the batch, on the
visible queries and keys only.

Letters: B batch, T queries, S keys, L positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastformer.functional.attention.rules import AttentionRules
from fastformer.modes import compiling, readable

SHORTEST = 128  # of queries and of keys; for shorter ones one call with a mask is faster
# How many keys of a query must be hidden on average. Process CPU time of one call with a mask made beforehand, divided
# by that of a call for each row; 8 and 32 rows, 4 to 12 heads of 64, forward and with backward: 0.7 to 1.0 with 32
# hidden keys, 0.9 to 1.1 with 64, 1.2 to 1.4 with 128, 1.5 to 1.8 with 256. If the one call makes its mask: 1.05 to 1.9
# with 48.
_LEAST_HIDDEN = 48
# With a window or a bias, for which each call makes a mask: 0.8 to 1.2 with 48 hidden keys, 0.94 to 2.5 from 96 on.
_LEAST_HIDDEN_OF_MASKED = 96


class Span(NamedTuple):
    """The visible queries and keys of one row: from the first one to the end, which is not visible."""

    first: int
    end: int
    first_key: int
    end_key: int


def first_and_end(real: Tensor) -> tuple[list[int], list[int]] | None:
    """Return the first position of each row `[B, L]` that is real, and the end of these; None if a row has gaps."""
    place = torch.arange(real.shape[1], device=real.device)
    end = torch.where(real, place + 1, 0).amax(1)
    first = torch.minimum(torch.where(real, place, real.shape[1]).amin(1), end)  # both 0 without a real place
    return (first.tolist(), end.tolist()) if torch.equal(end - first, real.sum(1)) else None


def visible_spans(q: Tensor, k: Tensor, rules: AttentionRules) -> list[Span] | None:
    """Return what is visible in each row of a call on a CPU.

    None if there is no padding, if it has gaps or is not readable, or if one call with a mask is faster.
    """
    padding = [x for x in (rules.query_lengths, rules.key_lengths, rules.key_mask) if x is not None]
    if not padding or not q.is_cpu or compiling() or min(q.shape[2], k.shape[2]) < SHORTEST:
        return None
    if not all(readable(x) for x in padding):
        return None
    (B, _, T, _), S = q.shape, k.shape[2]
    makes_masks = rules.window is not None or rules.distance_bias is not None
    firsts, first_keys = [0] * B, [0] * B
    ends, end_keys = (
        [length] * B if lengths is None else lengths.tolist()
        for length, lengths in ((T, rules.query_lengths), (S, rules.key_lengths))
    )
    if rules.key_mask is not None:
        keys = first_and_end(rules.key_mask)
        if keys is None or rules.key_lengths is not None:
            return None
        first_keys, end_keys = keys
        # Positions count from the first query and key, or from the last ones, and so they must in each span.
        if rules.causal or makes_masks:
            if rules.alignment == "bottom_right":
                if rules.query_lengths is not None or min(end_keys) < S:
                    return None
            elif rules.causal:  # earlier queries see no key
                firsts = [min(first, end) for first, end in zip(first_keys, ends, strict=True)]
            elif any(first_keys):
                return None
    spans = list(map(Span, firsts, ends, first_keys, end_keys))
    return spans if faster_in_spans(T, S, spans, _LEAST_HIDDEN_OF_MASKED if makes_masks else _LEAST_HIDDEN) else None


def faster_in_spans(T: int, S: int, spans: list[Span], least_hidden: int = _LEAST_HIDDEN) -> bool:
    """Return whether a call for each row is faster than one call with a mask, from SHORTEST queries and keys on.

    Returns False if nothing is visible, where a call without keys would not depend on the mask and the sinks.
    """
    visible = sum((span.end - span.first) * (span.end_key - span.first_key) for span in spans)
    return visible > 0 and (len(set(spans)) == 1 or visible <= (S - least_hidden) * T * len(spans))
