"""What torch's stacks and layers pass to the parts inside them.

Our own layers and attention take masks as the caller gave them: a bool mask takes a byte an element, and a padding mask
never becomes one of scores. A subclass, a replaced module or a hook may look at what it is given, and counts on torch's
form: an encoder's masks are of the input's dtype, 0 and -inf, and a causal mask comes with a hint that says so. It gets
both, made by torch's own functions, so that they are torch's in every version.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.transformer import _detect_is_causal_mask


def ahead(queries: int, keys: int, device: torch.device) -> Tensor:
    """torch's causal mask, bool `[T, S]`: True at the keys that come later, which may not be attended to."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(1)


def encoder_masks(
    mask: Tensor | None, padding: Tensor | None, x: Tensor, name: str, padding_name: str = "src_key_padding_mask"
) -> tuple[Tensor | None, Tensor | None]:
    """Return attn_mask and key padding mask as torch.nn.TransformerEncoder and its layer pass them on: floating point.

    Args:
        mask: bool (True = may not attend) or additive.
        padding: likewise, True = ignore.
        x: the input of stack or layer; a bool mask becomes one of its dtype.
        name: of mask, for errors and warnings; padding_name likewise.

    Raises:
        AssertionError: a mask is of integers.
    """
    other = F._none_or_dtype(mask)
    padding = F._canonical_mask(padding, padding_name, other, name, x.dtype)
    return F._canonical_mask(mask, name, None, "", x.dtype, False), padding


def causal_hint(mask: Tensor | None, stated: bool | None, x: Tensor, batch_first: bool | None) -> bool:
    """Return the hint that torch's stacks pass on: what was stated, else whether the mask is the causal one.

    It looks at the values of the mask, which waits for a device.

    Args:
        mask: of the self-attention.
        stated: by the caller; None = not stated.
        x: the input of the stack, `[L, B, D]`, `[B, L, D]` or `[L, D]`.
        batch_first: the order of its dimensions.
    """
    length = x.shape[1 if batch_first and x.dim() == 3 else 0]
    return _detect_is_causal_mask(mask, stated, length)
