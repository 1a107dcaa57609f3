"""Options of layers and attention beyond torch's: keywords that add no state unless they are used.

Letters: D model width, H heads, K head size.
"""

from typing import Any, TypedDict

from torch import nn

from fastformer.functional.attention.op import check_softcap, check_window
from fastformer.functional.attention.rules import Window
from fastformer.nn.rotary import Rotary
from fastformer.settings import check_value

NORMS = ("layer", "rms")


class AttentionOptions(TypedDict, total=False):
    """Keywords of `MultiheadAttention`, and of layers for their attention.

    Attributes:
        kv_heads: heads of keys and values, a divisor of H (grouped queries: Ainslie et al. 2023); H if None.
        head_size: K; D / H if None.
        qkv_bias: whether the projections to queries, keys and values have a bias; None: as `bias`, which is that of
            the output projection (Qwen 2: qkv_bias True, bias False).
        qk_norm: RMS norms over the numbers of each head of queries and of keys, with weights and eps 1e-6 (Henry et al.
            2020; as in Qwen 3).
        softcap: as of `functional.attention`.
        rotary: rotates queries and keys by their positions; in layers, only of self-attention.
        window: as of `functional.attention`; in layers, only of self-attention. It does not imply causality, which the
            mask sets.
        position_bias: `ALiBi`, `RelativeBias` or any module that takes a number of positions P and returns the
            `distance_bias` of `functional.attention`, `[H, 2 P - 1]`; in layers, only of self-attention. Each layer of
            a stack has a separate copy.
        sinks: whether each head has a trained logit that takes weight and adds no value (as in gpt-oss), initially 0;
            in layers, only of self-attention.
    """

    kv_heads: int | None
    head_size: int | None
    qkv_bias: bool | None
    qk_norm: bool
    softcap: float | None
    rotary: Rotary | None
    window: Window | None
    position_bias: nn.Module | None
    sinks: bool


class LayerOptions(AttentionOptions, total=False):
    """Keywords of layers and of `Transformer`: those of attention, and these.

    Attributes:
        norm: "layer", or "rms" for RMS norms (Zhang and Sennrich 2019).
    """

    norm: str


_SELF_ATTENTION_ONLY = ("rotary", "window", "position_bias", "sinks")


def attention_options(options: LayerOptions, cross: bool = False) -> AttentionOptions:
    """Return the options of a layer for one attention; cross: attention to a memory, without options of positions."""
    excluded = {"norm", *(_SELF_ATTENTION_ONLY if cross else ())}
    return {name: value for name, value in options.items() if name not in excluded}  # type: ignore[return-value]


def check_options(options: Any, kind: Any) -> None:
    """Raise TypeError if a keyword is not in `kind`, a TypedDict of this module, ValueError for a wrong value."""
    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(
                f"unexpected keyword argument {name!r}; there are {', '.join(sorted(kind.__annotations__))}"
            )
    if "norm" in options:
        check_value("norm", options["norm"], str, choices=NORMS)
    for name in ("kv_heads", "head_size"):
        check_value(name, options.get(name), int | None, at_least=1)
    check_value("qkv_bias", options.get("qkv_bias"), bool | None)
    for name in ("qk_norm", "sinks"):
        check_value(name, options.get(name, False), bool)
    check_window(options.get("window"))
    check_softcap(options.get("softcap"))
    for name, expected_type in (("rotary", Rotary), ("position_bias", nn.Module)):
        if not isinstance(value := options.get(name), expected_type | None):
            raise ValueError(f"{name} must be a {expected_type.__name__} or None, not {value!r}")
