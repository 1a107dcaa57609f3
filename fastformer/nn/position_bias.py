"""Biases of scores by the distance of key and query, for `functional.attention`'s `distance_bias`.

The modules are called with a length P and return `[H, 2 P - 1]`: column P - 1 + d is the bias at distance d, the key's
position minus the query's. A table of all pairs is never built.

Letters: H heads, P positions.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.packing.layout import MOST_TOKENS
from fastformer.settings import check_value


class ALiBi(nn.Module):
    """Attention with linear biases: -slope * abs(distance), without parameters (Press et al. 2022).

    Args:
        heads: number of attention heads H. If H is a power of 2, the slopes are 2 ** (-8 i / H) for i from 1 to H.
            Otherwise they are those of the next lower power, then every other slope of twice that power, as in the
            authors' code.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = check_value("heads", heads, int, at_least=1)
        # Tracks device and dtype. Not a buffer of slopes: no checkpoint would hold it, and `to_empty` would erase it.
        self.register_buffer("place", torch.empty(0), persistent=False)

    def forward(self, length: int) -> Tensor:
        """Return the bias at all distances below `length`: `[H, 2 P - 1]`, fp32 or fp64: bf16 counts only to 256."""
        place: Tensor = self.place  # type: ignore[assignment]
        # `load_state_dict(assign=True)` leaves the buffer on "meta"; attention moves the bias to the weights' device.
        device = "cpu" if place.is_meta else place.device
        options: Any = {"device": device, "dtype": torch.promote_types(place.dtype, torch.float32)}
        power = 1 << (self.heads.bit_length() - 1)
        i = torch.arange(1, self.heads + 1, **options)
        slopes = torch.exp2(-8 / power * torch.where(i > power, i - power - 0.5, i))
        return -slopes[:, None] * torch.arange(1 - length, length, **options).abs()

    def extra_repr(self) -> str:
        """Show the heads."""
        return f"heads={self.heads}"


class RelativeBias(nn.Module):
    """A trained bias for each head and bucket of distances (Raffel et al. 2020, section 2.1).

    Half of the buckets of a direction hold one distance each; the other half widen logarithmically. All distances from
    max_distance on share the last bucket.

    Args:
        heads: number of attention heads H.
        buckets: number of buckets; even if bidirectional, where half of them are for later keys.
        max_distance: more than half of a direction's buckets.
        bidirectional: whether later keys have their own buckets. If False, for causal attention, they have the bucket
            of distance 0.
        device, dtype: of `weight`, `[buckets, H]`, drawn from N(0, 1) as in nn.Embedding.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_value("heads", heads, int, at_least=1)
        check_value("buckets", buckets, int, at_least=4 if bidirectional else 2)
        check_value("bidirectional", bidirectional, bool)
        if bidirectional and buckets % 2:
            raise ValueError(f"buckets must be even where bidirectional, not {buckets}")
        exact = (buckets // 2 if bidirectional else buckets) // 2
        check_value("max_distance", max_distance, int, above=exact, at_most=MOST_TOKENS)
        self.heads, self.buckets, self.max_distance, self.bidirectional = heads, buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(buckets, heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 1), as nn.Embedding does."""
        nn.init.normal_(self.weight)

    def forward(self, length: int) -> Tensor:
        """Return the bias at all distances below `length`: `[H, 2 P - 1]`."""
        distance = torch.arange(1 - length, length, device=self.weight.device)
        return self.weight[self.bucket(distance)].t()

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance, int64."""
        buckets, first = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            first = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        # In fp32 as in T5, because rounding decides where a bucket begins.
        logarithm = torch.log(distance.float().clamp(min=1) / exact) / math.log(self.max_distance / exact)
        far = exact + (logarithm * (buckets - exact)).to(torch.int64)
        return first + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))

    def extra_repr(self) -> str:
        """Show the sizes."""
        return (
            f"heads={self.heads}, buckets={self.buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )
