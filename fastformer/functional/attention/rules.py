"""One attention call but for q, k and v: who attends to whom, and how.

Letters: B batch, H heads, T queries, S keys.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

Alignment = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]

ALIGNMENTS: tuple[str, ...] = get_args(Alignment)


@dataclass(frozen=True, eq=False)
class AttentionRules:
    """One attention call but for q, k and v; the fields mean what `functional.attention` says.

    What `check_attention` and `check_packed_attention` return says each thing in one way only: mask has at least two
    dimensions; lengths are int64 on q's device; a side of window is None where it reaches beyond all positions, its
    right is 0 where `causal` is True, and window is None where nothing is left to say; `alignment` is "top_left" where
    both alignments are the same; softcap is a float.
    """

    mask: Tensor | None = None
    causal: bool = False
    alignment: Alignment = "top_left"
    window: Window | None = None
    query_lengths: Tensor | None = None
    key_lengths: Tensor | None = None
    key_mask: Tensor | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    scale: float | None = None

    @property
    def band(self) -> Window:
        """How far to the (left, right) of position t + shift query t attends; None: to the end."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of the caller: the mask, and what is not differentiable."""
        return self.mask, self.query_lengths, self.key_lengths, self.key_mask

    def with_tensors(self, *tensors: Tensor | None) -> "AttentionRules":
        """Return the same rules with these in place of `tensors`."""
        mask, query_lengths, key_lengths, key_mask = tensors
        return replace(self, mask=mask, query_lengths=query_lengths, key_lengths=key_lengths, key_mask=key_mask)
