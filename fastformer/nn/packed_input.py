"""Padded batches as packed tokens and back; key padding masks, causal masks and torch's form of masks.

Letters: B batch, L length, T packed tokens, D model width.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.transformer import _detect_is_causal_mask

from fastformer.host.devices import check_types
from fastformer.modes import has_values, readable
from fastformer.packing import Layout, from_nested, pack, to_nested, unpack


class Masks(NamedTuple):
    """The masks of one attention in a padded batch, as torch's modules take them.

    Attributes:
        mask: `[L, S]` or `[B * H, L, S]`: bool (True = may not attend) or additive.
        padding: `[B, S]`: bool (True = ignore) or additive.
        is_causal: states that mask is the causal mask, which may then be None; None: not stated.
    """

    mask: Tensor | None = None
    padding: Tensor | None = None
    is_causal: bool | None = None


class PackedInput(NamedTuple):
    """The real tokens `[T, D]` of a padded or nested batch, and the form of that batch."""

    tokens: Tensor
    layout: Layout
    batch_first: bool = True
    batched: bool = True
    nested: bool = False

    def unpack(self) -> Tensor:
        """Return the tokens in the form of the batch, zeros in place of padding."""
        if self.nested:
            return to_nested(self.tokens, self.layout)
        x = unpack(self.tokens, self.layout, self.batch_first)
        return x if self.batched else x.squeeze(0 if self.batch_first else 1)


def pack_input(
    x: Tensor,
    padding: Tensor | None,
    batch_first: bool | None,
    counts_positions: bool = False,
    from_start: bool = False,
) -> PackedInput | None:
    """Pack the real tokens of x `[B, L, D]`, `[L, B, D]` or `[L, D]`; None if the batch must run padded.

    Args:
        x: a padded batch.
        padding: its key padding mask as in torch, `[B, L]` or `[L]`; None for no padding.
        batch_first: the order of the dimensions; None if unknown.
        counts_positions: whether distances between tokens must not change, so that no padding may lie between them.
        from_start: whether no padding may lie on the left either, as for attention to a memory that counts positions.
    """
    batched = x.dim() == 3
    if x.dim() not in (2, 3) or batch_first is None:
        return None
    rows = x if batched else x.unsqueeze(0 if batch_first else 1)
    B, L = rows.shape[:2] if batch_first else (rows.shape[1], rows.shape[0])
    if padding is None:
        layout = Layout.from_lengths([L] * B, x.device, L)
    else:
        if not isinstance(padding, Tensor) or padding.shape != ((B, L) if batched else (L,)):
            return None
        hidden = hidden_keys(padding)
        if hidden is None:
            return None
        layout = Layout.from_mask(hidden.view(B, L))
        if (counts_positions and layout.has_gaps) or (from_start and not layout.starts_rows):
            return None
        layout = layout.to(x.device)
    return PackedInput(pack(rows, layout, batch_first), layout, batch_first, batched)


def pack_nested(
    names: str, inputs: Sequence["Tensor | PackedInput"], masks: Sequence[Masks], obstacle: str | None = None
) -> list[PackedInput]:
    """Pack the nested input of a stack, and the nested memory if there is one; names: of the inputs, for messages."""
    if any(x is not None for m in masks for x in (m.mask, m.padding)):
        raise ValueError(f"{names} must not be nested where a mask is given: nested tensors hold no padding")
    if obstacle is not None:
        raise RuntimeError(f"{names} must not be nested where layers need a padded batch: {obstacle}")
    return [x if isinstance(x, PackedInput) else PackedInput(*from_nested(x), nested=True) for x in inputs]


def hidden_keys(padding: Tensor) -> Tensor | None:
    """Return a mask of padding or attention, bool or of 0 and -inf, as bool, True = hidden; None for any other mask."""
    if not has_values(padding):
        return None
    if padding.dtype == torch.bool:
        return padding
    if not padding.is_floating_point() or padding.requires_grad:
        return None
    hidden = padding == float("-inf")
    return None if bool(((padding != 0) & ~hidden).any()) else hidden


def same_mask(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two key padding masks hide the same keys, or both are None."""
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and has_values(one) and has_values(other) and torch.equal(one, other)


def zero_padding(x: Tensor, padding: Tensor | None, batch_first: bool | None) -> Tensor:
    """Set the rows of a padded output to 0 where its mask is True or -inf, as a packed run does."""
    hidden = _hidden_rows(x, padding, batch_first)
    return x if hidden is None else x.masked_fill(hidden, 0.0)


def finite_padding(x: Tensor, padding: Tensor | None, batch_first: bool | None) -> Tensor:
    """Set NaN and inf to 0 in the padded rows of x, which a packed run does not read.

    Attention and the gradients of weights multiply padded rows by 0, and 0 * NaN is NaN.
    """
    hidden = _hidden_rows(x, padding, batch_first)
    if hidden is None or (readable(x) and math.isfinite(x.detach().sum().item())):
        return x
    return x.masked_fill(hidden & ~x.isfinite(), 0.0)


def _hidden_rows(x: Tensor, padding: Tensor | None, batch_first: bool | None) -> Tensor | None:
    """Return where a padding mask hides rows of x, as bool `[..., 1]`; None if there is none, or it does not fit x."""
    if not isinstance(padding, Tensor) or batch_first is None or not isinstance(x, Tensor) or x.is_nested:
        return None
    # A copy of a bool mask: the caller may change the mask before the backward pass.
    hidden = padding.clone() if padding.dtype == torch.bool else padding == float("-inf")
    hidden = hidden if padding.dim() == 1 or batch_first else hidden.mT
    return hidden[..., None] if hidden.shape == x.shape[:-1] else None


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return torch's causal mask, bool `[T, S]`: True at the later keys, which are hidden."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(1)


def mask_of_packed(causal: bool, mask: Tensor | None, layout: Layout) -> Tensor | None:
    """Return the attention mask for the padded batch that packed tokens are unpacked to."""
    if not causal:
        return mask
    if mask is not None:
        raise ValueError("causal must be False with attn_mask, which defines the keys of each query")
    return causal_mask(layout.columns, layout.columns, layout.offsets.device)


def is_causal_mask(masks: Masks, length: int) -> bool:
    """Return whether the mask `[L, L]` of self-attention hides the later keys and nothing else: as stated, or by value.

    Without key padding, a statement stands for a mask of any size, as in torch. Otherwise False for a mask that does
    not fit or that requires a gradient.
    """
    mask, stated = masks.mask, bool(masks.is_causal)
    if mask is None or (stated and masks.padding is None):
        return stated
    if not isinstance(mask, Tensor) or mask.shape != (length, length) or mask.requires_grad:
        return False
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return False
    if stated or not has_values(mask):
        return stated
    later = causal_mask(length, length, mask.device)
    if mask.dtype == torch.bool:
        return torch.equal(mask, later)
    return torch.equal(mask == float("-inf"), later) and not bool(mask.tril().any())


def torchs_form(masks: Masks, x: Tensor, batch_first: bool | None, canonical: bool) -> Masks:
    """Return the masks as torch's stacks pass them to layers: `is_causal` as stated, or read from the mask's values.

    canonical: whether bool masks become additive ones of x's dtype, as in torch's encoder.
    """
    mask, padding = masks.mask, masks.padding
    check_types(("mask",), mask, optional=True)
    if canonical:
        other = F._none_or_dtype(mask)
        padding = F._canonical_mask(padding, "src_key_padding_mask", other, "mask", x.dtype)
        mask = F._canonical_mask(mask, "mask", None, "", x.dtype, False)
    length = x.shape[1 if batch_first and x.dim() == 3 else 0]
    return Masks(mask, padding, _detect_is_causal_mask(mask, masks.is_causal, length))
