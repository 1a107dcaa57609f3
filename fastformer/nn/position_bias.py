"""Biases of scores by the distance of key and query, for `functional.attention`'s `distance_bias`.

Modules that are called with a length P and return `[H, 2 P - 1]`: column P - 1 + d is the bias at distance d, which is
the key's position less the query's. So a table of all pairs is never made.

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
        heads: H. The slopes are 2 ** (-8 i / H) for i from 1 to H where H is a power of 2; else those of the next lower
            power, then every other one of twice that, as the authors' code has it.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = check_value("heads", heads, int, at_least=1)
        # Says where the module is. No buffer of slopes: no checkpoint would hold it, and `to_empty` empties it.
        self.register_buffer("place", torch.empty(0), persistent=False)

    def forward(self, length: int) -> Tensor:
        """The bias at all distances below `length`: `[H, 2 P - 1]`, in fp32 at least, for bf16 counts to 256 only."""
        place: Tensor = self.place  # type: ignore[assignment]
        # `load_state_dict(assign=True)` takes no buffer off "meta"; attention moves the bias to where its weights are.
        device = "cpu" if place.is_meta else place.device
        where: Any = {"device": device, "dtype": torch.promote_types(place.dtype, torch.float32)}
        power = 1 << (self.heads.bit_length() - 1)
        i = torch.arange(1, self.heads + 1, **where)
        slopes = torch.exp2(-8 / power * torch.where(i > power, i - power - 0.5, i))
        return -slopes[:, None] * torch.arange(1 - length, length, **where).abs()

    def extra_repr(self) -> str:
        """Show the heads."""
        return f"heads={self.heads}"


class RelativeBias(nn.Module):
    """A trained bias for each head and bucket of distances (Raffel et al. 2020, section 2.1).

    Half of the buckets of a direction are a distance each, the others grow with its logarithm; all from max_distance on
    share the last.

    Args:
        heads: H.
        buckets: even where bidirectional: half of them for keys that come later.
        max_distance: above half of a direction's buckets.
        bidirectional: False: later keys have the bucket of distance 0, for causal attention.
        device, dtype: of `weight`, `[buckets, H]`, drawn from N(0, 1) as nn.Embedding's.

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
        """Draw the values that an nn.Embedding draws."""
        nn.init.normal_(self.weight)

    def forward(self, length: int) -> Tensor:
        """The bias at all distances below `length`: `[H, 2 P - 1]`."""
        distance = torch.arange(1 - length, length, device=self.weight.device)
        return self.weight[self.bucket(distance)].t()

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, int64."""
        buckets, first = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            first = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        # In fp32, as T5's: where a bucket begins depends on the rounding.
        logarithm = torch.log(distance.float().clamp(min=1) / exact) / math.log(self.max_distance / exact)
        far = exact + (logarithm * (buckets - exact)).to(torch.int64)
        return first + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))

    def extra_repr(self) -> str:
        """Show the sizes."""
        return (
            f"heads={self.heads}, buckets={self.buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )
