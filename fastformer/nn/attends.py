"""What a layer's `compose` takes: functions that attend, in a padded batch or within packed sequences.

Letters: B batch, H heads, T queries, S keys.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastformer.nn.hooks import has_hooks, plain
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.nn.wrappers import levels, unwrap, within

Attention = Callable[[Tensor], Tensor]  # normalised input -> attention output, of the same shape


def padded_attention(
    attention: Any,
    memory: Tensor | None,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    weights: list[Tensor] | None = None,
) -> Attention:
    """Attention in a padded batch, to itself or to memory, called as torch's layers call it.

    weights: gets its weights, `[B, H, T, S]`.
    """

    def attend(x: Tensor) -> Tensor:
        kv = x if memory is None else memory
        rules = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": is_causal}
        if weights is None:
            return attention(x, kv, kv, need_weights=False, **rules)[0]  # type: ignore[no-any-return]
        out, found = attention(x, kv, kv, need_weights=True, average_attn_weights=False, **rules)
        weights.append(found)
        return out  # type: ignore[no-any-return]

    return attend


def packed_attention(attention: Any, *where: Any, **rules: Any) -> Attention:
    """Attention within packed sequences; arguments as of `MultiheadAttention.packed`, behind query."""
    if isinstance(attention, MultiheadAttention):
        return lambda x: attention.packed(x, *where, **rules)
    # An adapter around it, whose call returns a pair.
    return lambda x: within(attention, lambda inner, x: inner.packed(x, *where, **rules), x)[0]


def is_watched(attention: nn.Module) -> bool:
    """Whether code that is not ours sees how an attention is called."""
    return not plain(unwrap(attention), MultiheadAttention) or any(map(has_hooks, levels(attention)))
