"""Transformer stacks against torch.nn's, and padded against packed."""

import math

import pytest
import torch
from torch import nn

import fastformer
from fastformer.packing import Layout, pack
from tests.nn.layer_cases import (
    FF,
    MASKS,
    B,
    D,
    H,
    S,
    T,
    Twice,
    arguments_for,
    causal_mask,
    check,
    inputs_for,
    stacks,
    transformers,
)
from tests.support.closeness import assert_close, gradients, random

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("masks", [None, *MASKS])
def test_stacks(kind, norm, masks):
    ours, torchs = stacks(kind, norm, norm_first=norm)
    arguments = {} if masks is None else arguments_for(kind, masks, "float")
    if "src_mask" in arguments:
        arguments["mask"] = arguments.pop("src_mask")
    ours.padding_free = False  # to compare padded rows too
    check(ours, torchs, inputs_for(kind), **arguments)


@pytest.mark.parametrize("settings", [{}, {"norm_first": True, "batch_first": True}, {"bias": False}], ids=str)
def test_transformer(settings):
    ours, torchs = transformers(activation="gelu", layer_norm_eps=0.01, **settings)
    inputs = inputs_for("Decoder", settings.get("batch_first", False))[::-1]
    check(ours, torchs, inputs)
    padding = torch.tensor([[False, False, True, True], [False] * 4])
    arguments = {
        "tgt_mask": causal_mask(T, "bool"),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    check(ours, torchs, inputs, **arguments)
    check(ours, torchs, inputs, tgt_is_causal=True, **arguments)


def test_transformer_with_custom_stacks():
    class Encoder(nn.Module):
        def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=False):
            return src * 2

    class Decoder(nn.Module):
        def forward(self, tgt, memory, **masks):
            return tgt + memory.mean(0)

    encoder, decoder = Encoder(), Decoder()
    module = fastformer.Transformer(D, H, custom_encoder=encoder, custom_decoder=decoder)
    assert module.encoder is encoder
    assert module.decoder is decoder
    src, tgt = random(S, B, D), random(T, B, D)
    assert_close(module(src, tgt), tgt + 2 * src.mean(0))
    torchs = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H), 1)
    assert fastformer.Transformer(D, H, custom_encoder=torchs).encoder is torchs


LENGTHS = [([5, 2, 3], [1, 4, 2]), ([3, 3], [2, 2]), ([0, 3], [2, 4]), ([], [])]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", ["encoder", "causal encoder", "decoder"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_packed_stacks_are_padded_ones_on_real_tokens(lengths, kind, norm_first):
    which = "TransformerDecoder" if kind == "decoder" else "TransformerEncoder"
    ours, _ = stacks(which, True, norm_first=norm_first, batch_first=True, activation="gelu")
    layout, memory_layout = (Layout.from_lengths(x) for x in lengths)
    causal = torch.ones(layout.max_length, layout.max_length).triu(1).bool()
    x, memory = random(layout.total, D), random(memory_layout.total, D)
    padded, keys = (
        t.new_zeros(y.batch, y.max_length, D).masked_scatter(y.mask()[:, :, None], t)
        for t, y in ((x, layout), (memory, memory_layout))
    )
    if kind == "decoder":
        actual = ours.packed(x, layout, memory, memory_layout)
        expected = ours(padded, keys, tgt_mask=causal, memory_key_padding_mask=~memory_layout.mask())
    elif kind == "encoder":
        actual, expected = ours.packed(x, layout), ours(padded, src_key_padding_mask=~layout.mask())
    else:
        actual, expected = ours.packed(x, layout, causal=True), ours(padded, mask=causal)
    expected = pack(expected, layout)
    assert_close(actual, expected)
    leaves = [x, *([memory] if kind == "decoder" else []), *ours.parameters()]
    for a, w in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
        assert_close(a, w)


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder"])
def test_a_stack_makes_torchs_layer_its_own(kind):
    layer = getattr(nn, kind + "Layer")(D, H, FF, activation=Twice(), dtype=torch.float64, batch_first=True)
    stack = getattr(fastformer, kind)(layer, 2)
    assert all(type(x) is getattr(fastformer, kind + "Layer") for x in stack.layers)
    assert all(isinstance(x.activation, Twice) for x in stack.layers)
    assert type(layer) is getattr(nn, kind + "Layer")


def test_inference_agrees_with_training_where_torchs_fast_path_does_not():
    """tanh-GELU stays tanh-GELU and a float mask gives no NaN."""
    torch.backends.mha.set_fastpath_enabled(True)
    layer = fastformer.TransformerEncoderLayer(8, 2, 16, 0.0, nn.GELU("tanh"), batch_first=True)
    ours = fastformer.TransformerEncoder(layer, 2)
    x = 3 * torch.randn(B, T, 8)
    mask = torch.arange(T) >= torch.tensor([[5], [2]])
    for padding in (mask, torch.zeros(B, T).masked_fill(mask, -math.inf)):
        expected = ours.train()(x, src_key_padding_mask=padding)
        with torch.no_grad():
            assert_close(ours.eval()(x, src_key_padding_mask=padding), expected.detach())
