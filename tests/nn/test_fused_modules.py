"""Modules with the kernels inside are as accurate as on the reference: outputs, gradients of inputs, masks, parameters.

Kernels have their own tests, option by option; modules have theirs, on the reference, against torch.nn. Here is what
lies between: masks, layouts and options mean the same to both. Backend "triton" never falls back.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.packing import Layout, pack
from tests.nn.options.test_layers_with_options import LENGTHS, OPTIONS, L, batch, decoder, encoder, hidden
from tests.support.closeness import random
from tests.support.fused_op import (
    DEVICE,
    assert_model_as_accurate_as_reference,
    assert_module_as_accurate_as_reference,
    needs_kernels,
)
from tests.support.masks import ahead, minus_infinity, right
from tests.support.protocol_cases import CASES, DROP_INS

pytestmark = [needs_kernels, pytest.mark.usefixtures("slow_path")]
D, H, FF, B, T, S = 16, 2, 24, 2, 5, 7


MODULES = [*DROP_INS, "FeedForward", "LinearCrossEntropy", "TransformerEncoder.packed", "TransformerDecoder.packed"]
IN_FP16 = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer, pre-norm")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in MODULES), *((name, torch.float16) for name in IN_FP16)],
)
def test_every_module(name, dtype):
    case = CASES[name]
    args, kwargs = case.inputs(3, 5, dtype)
    assert_module_as_accurate_as_reference(case.pair()[0], args, dtype, case.method, **kwargs)


@pytest.mark.parametrize(("norm", "op"), [(fastformer.LayerNorm, "layer_norm"), (fastformer.RMSNorm, "rms_norm")])
def test_modules_run_kernels(norm, op):
    """The tests above would pass as well if a module went past its op."""
    layer = fastformer.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=True, norm_first=True)
    layer.norm1, layer.norm2 = norm(D), norm(D)
    layer, x = layer.to(DEVICE), torch.randn(1, T, D, device=DEVICE)
    with fastformer.backend("triton"), torch.profiler.profile() as profile:
        layer(x)
    ops = {event.name for event in profile.events() if event.name.startswith("fastformer::")}
    assert ops == {
        f"fastformer::{name}" for name in ("attention_forward", op, "dropout_add_norm", "feed_forward_activate")
    }


def pairs(*shape: int) -> Tensor:
    """Return bool at random; key 1 is visible to all, so that no query is left without keys."""
    mask = torch.rand(shape) < 0.4
    mask[..., 1] = False
    return mask


def additive(mask: Tensor) -> Tensor:
    return minus_infinity(mask) + torch.randn(mask.shape, dtype=torch.float64)


# Settings of the module, whether queries, keys and values are one tensor, and masks.
ATTENTION: dict[str, tuple[dict[str, Any], bool, Callable[[], dict[str, Any]]]] = {
    "bool pairs of each head, bool padding, weights of each head": (
        {"batch_first": True},
        False,
        lambda: {"attn_mask": pairs(B * H, T, S), "key_padding_mask": pairs(B, S), "average_attn_weights": False},
    ),
    "float pairs of each head, float padding, weights": (
        {},
        False,
        lambda: {"attn_mask": additive(pairs(B * H, T, S)), "key_padding_mask": additive(pairs(B, S))},
    ),
    "causal, bool padding": (
        {},
        True,
        lambda: {
            "attn_mask": ahead(T),
            "is_causal": True,
            "need_weights": False,
            "key_padding_mask": right([3, 5], T),
        },
    ),
    "extra keys, causal, weights": (
        {"add_bias_kv": True, "add_zero_attn": True},
        True,
        lambda: {"attn_mask": ahead(T), "is_causal": True},
    ),
    "widths of keys and values": (
        {"kdim": 12, "vdim": 20, "batch_first": True},
        False,
        lambda: {"need_weights": False},
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_masks_of_attention(name):
    settings, same, masks = ATTENTION[name]
    module = fastformer.MultiheadAttention(D, H, **settings)

    def tokens(length: int, width: int | None) -> Tensor:
        return random(*((B, length) if module.batch_first else (length, B)), width or D)

    query = tokens(T, D)
    keys = (query, query) if same else (tokens(S, module.kdim), tokens(S, module.vdim))
    assert_module_as_accurate_as_reference(module, (query, *keys), **masks())


@pytest.mark.parametrize("norm", [fastformer.RMSNorm, nn.RMSNorm])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_layers_with_rms_norms_and_additive_masks(kind, norm_first, norm):
    layer = getattr(fastformer, f"Transformer{kind}Layer")(
        D, H, FF, 0.0, nn.GELU("tanh"), batch_first=True, norm_first=norm_first
    )
    for name in [name for name, part in layer.named_children() if isinstance(part, nn.LayerNorm)]:
        setattr(layer, name, norm(D, eps=1e-5))
    own = "src" if kind == "Encoder" else "tgt"
    masks = {f"{own}_mask": additive(pairs(B * H, T, T)), f"{own}_key_padding_mask": additive(right([5, 2], T))}
    if kind == "Decoder":
        masks |= {"memory_mask": additive(pairs(T, S)), "memory_key_padding_mask": additive(right([4, 7], S))}
    assert_module_as_accurate_as_reference(
        layer, (random(B, T, D), random(B, S, D))[: 1 + (kind == "Decoder")], **masks
    )


# One option is enough for what they share; "all" has each of them, and CI leaves the others to `make long`.
each_option = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("rms", "all") else [pytest.mark.long]) for name in OPTIONS]
)


@each_option
@pytest.mark.parametrize("padding_free", [True, pytest.param(False, marks=pytest.mark.long)])
def test_causal_encoders_with_options(name, padding_free):
    masks = {"src_key_padding_mask": hidden("right"), "is_causal": True, "padding_free": padding_free}
    assert_module_as_accurate_as_reference(encoder(name), (batch(),), **masks)


@each_option
def test_decoders_with_options(name):
    masks = {"memory_key_padding_mask": hidden("right"), "tgt_mask": ahead(6), "tgt_is_causal": True}
    assert_module_as_accurate_as_reference(decoder(name), (batch(6), batch()), **masks)


@each_option
def test_steps_with_options(name):
    x, layout = batch(), Layout.from_lengths(LENGTHS - 1, DEVICE, L)

    def results(stack: Any) -> list[Tensor]:
        given = x.to(DEVICE, next(stack.parameters()).dtype)
        cache = stack.new_cache(len(x))
        return [stack.step(pack(given, layout), cache, layout), stack.step(given[:, -1:], cache)]

    assert_model_as_accurate_as_reference(encoder(name).to(DEVICE, torch.float32), results)
