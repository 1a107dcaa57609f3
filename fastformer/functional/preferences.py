"""Which implementation is faster for plain attention calls: a table, and its lookup.

A plain call is one that torch's `scaled_dot_product_attention` (SDPA) computes with a fused backend: dense heads, with
or without causality and dropout, and no mask, lengths, window, softcap, bias or sinks. Backend "auto" takes SDPA where
the kernels are slower, and where no row has a speed. A measured row replaces the rows of its GPU: put it before them.
"""

from typing import Literal, NamedTuple

import torch

Use = Literal["decoding", "inference", "training"]
Source = Literal["published", "predicted", "measured"]

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
NVIDIA = ("sm_80", "sm_86", "sm_90", "sm_100")


class Preference(NamedTuple):
    """The speed of the kernels in some plain calls as a multiple of SDPA's: SDPA's time over the kernels' time."""

    architectures: tuple[str, ...]  # of `fastformer_kernels.host.architecture`
    dtypes: tuple[torch.dtype, ...]
    uses: tuple[Use, ...]
    largest_head: int
    longest: int | None  # most keys; None: any number
    speed: float
    source: Source
    date: str
    evidence: str


_FP32, _ALL = (torch.float32,), (torch.float32, *SIXTEEN_BITS)
_INFERENCE: tuple[Use, ...] = ("inference",)
_TRAINING: tuple[Use, ...] = ("training",)
_BOTH = _INFERENCE + _TRAINING
# SDPA takes cuDNN for 16 bits there, and its memory-efficient backend for fp32; the slowest case of a row counts.
_H200 = "one H200, 16,384 positions, lengths 40 to 16,384 (benchmarks/RESULTS.md, NOTES.md)"

# A call takes the first row that fits it.
PREFERENCES: tuple[Preference, ...] = (
    Preference(
        *(NVIDIA, _ALL, ("decoding",), 256, None, 1.0, "predicted", "2026-11-26"),
        "memory binds both; the kernels split the keys and read each once for all heads that share it",
    ),
    *(
        Preference(("sm_90",), dtypes, uses, head, longest, speed, "measured", "2026-11-26", _H200)
        for dtypes, uses, head, longest, speed in (
            (SIXTEEN_BITS, _INFERENCE, 128, 64, 1.19),
            (SIXTEEN_BITS, _INFERENCE, 32, None, 0.99),
            (SIXTEEN_BITS, _INFERENCE, 64, None, 0.69),
            (SIXTEEN_BITS, _INFERENCE, 128, None, 0.51),
            (SIXTEEN_BITS, _INFERENCE, 256, None, 0.42),
            (SIXTEEN_BITS, _TRAINING, 32, None, 1.02),
            (SIXTEEN_BITS, _TRAINING, 64, 128, 1.19),
            (SIXTEEN_BITS, _TRAINING, 64, None, 0.73),
            (SIXTEEN_BITS, _TRAINING, 128, None, 0.59),
            (SIXTEEN_BITS, _TRAINING, 256, None, 0.44),
            (_FP32, _TRAINING, 64, 64, 0.78),
            (_FP32, _BOTH, 64, None, 1.12),
            (_FP32, _INFERENCE, 128, None, 0.68),
            (_FP32, _TRAINING, 128, None, 0.78),
        )
    ),
    Preference(
        *(("sm_80",), SIXTEEN_BITS, _BOTH, 256, None, 0.77, "published", "2023-07-17"),
        "Dao 2023, section 4.1: FlashAttention-2 is 1.3 to 2.5 times as fast as FlashAttention in Triton",
    ),
)


def why_sdpa(architecture: str | None, dtype: torch.dtype, use: Use, head_size: int, keys: int) -> str | None:
    """Return why SDPA takes a plain call, or None if the kernels do."""
    for row in PREFERENCES:
        if architecture in row.architectures and dtype in row.dtypes and use in row.uses:
            if head_size <= row.largest_head and (row.longest is None or keys <= row.longest):
                if row.speed >= 1.0:
                    return None
                speed = f"the kernels have {row.speed:g} of SDPA's speed in {use} on {architecture}"
                return f"{speed}, {row.source} {row.date}"
    return f"the kernels' speed is not known for {use} on {architecture}"
