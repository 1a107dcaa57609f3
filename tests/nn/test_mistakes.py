"""A mistake in shapes, dtypes and masks raises what torch raises; None and wrong types are named."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

import fastformer
from fastformer.packing import Layout, to_nested
from tests.nn.layer_cases import BESIDE_TORCH, FF, PADDING, B, D, S, T, twins
from tests.support.closeness import random
from tests.support.masks import ahead

pytestmark = BESIDE_TORCH


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(*shape, dtype=dtype)


x, memory = zeros(B, T, D), zeros(B, S, D)
hidden = PADDING["right"][0]
HIDDEN = {"src_key_padding_mask": hidden}
BOOL = torch.bool
# The fuzz test of modules draws masks of other dtypes and shapes. A padding mask has the batch run packed.
MISTAKES = {
    "MultiheadAttention: dtypes": ((x.float(), x.float(), x.float()), {"need_weights": False}),
    "TransformerEncoder: dtype": ((x.float(),), {}),
    "TransformerEncoder: padding, transposed": ((x,), {"src_key_padding_mask": zeros(T, B, dtype=BOOL)}),
    "TransformerEncoder: padding of another batch": ((x,), {"src_key_padding_mask": zeros(B + 1, T, dtype=BOOL)}),
    "TransformerEncoder: padding, causal of another size": ((x,), {**HIDDEN, "mask": ahead(T + 1), "is_causal": True}),
    "TransformerEncoder: padding, dtype of causal": ((x,), {**HIDDEN, "mask": ahead(T).int(), "is_causal": True}),
    "TransformerDecoderLayer: without memory": ((x,), {}),
    "TransformerDecoder: padding, memory of another batch": (
        (x, zeros(B + 1, S, D)),
        {"memory_key_padding_mask": zeros(B + 1, S, dtype=BOOL)},
    ),
    "TransformerDecoder: padding, width": (
        (zeros(B, T, D + 1), memory),
        {"memory_key_padding_mask": zeros(B, S, dtype=BOOL)},
    ),
    "TransformerDecoder: padding, a batch for one": (
        (x[0], memory[:1]),
        {"memory_key_padding_mask": zeros(1, S, dtype=BOOL)},
    ),
    "Transformer: padding": ((x, x), {"memory_key_padding_mask": zeros(B, 2, dtype=BOOL)}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_what_torch_raises(name):
    kind, (inputs, arguments) = name.partition(":")[0], MISTAKES[name]
    model, torchs = twins(kind, **({"batch_first": True} if kind == "MultiheadAttention" else {}))
    with pytest.raises(Exception) as expected:  # noqa: PT011
        torchs(*inputs, **arguments)
    with pytest.raises(expected.type) as raised:
        model(*inputs, **arguments)
    assert raised.type is expected.type
    assert str(raised.value).strip()


def test_nested_tensors_take_no_mask():
    model, _ = twins("Transformer")
    layout = Layout.from_lengths([5, 2, 3])
    x, mask = to_nested(random(layout.total, D), layout), torch.zeros(5, 5).bool()
    for name in ("mask", "src_key_padding_mask"):
        with pytest.raises(ValueError, match="src must not be nested where a mask is given"):
            model.encoder(x, **{name: mask})
    for name in ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask"):
        with pytest.raises(ValueError, match="tgt and memory must not be nested where a mask is given"):
            model.decoder(x, x, **{name: mask})
    with pytest.raises(TypeError, match=r"nested must be a nested tensor, not one of shape \[3, 4, 6\]"):
        model.decoder(x, torch.zeros(3, 4, D))
    with pytest.raises(TypeError, match=r"nested must be a nested tensor, not one of shape \[3, 4, 6\]"):
        model(x, torch.zeros(3, 4, D))


WIDTH, HEADS = 8, 2
batch, tokens = torch.randn(B, T, WIDTH), torch.randn(T, WIDTH)
layout = Layout.from_lengths([2, 3])
encoder_layer = fastformer.TransformerEncoderLayer(WIDTH, HEADS, FF, batch_first=True)
decoder_layer = fastformer.TransformerDecoderLayer(WIDTH, HEADS, FF, batch_first=True)
encoder, decoder = fastformer.TransformerEncoder(encoder_layer, 1), fastformer.TransformerDecoder(decoder_layer, 1)
attention = fastformer.MultiheadAttention(WIDTH, HEADS)
transformer = fastformer.Transformer(WIDTH, HEADS, 1, 1, FF, batch_first=True)
PACKED = {"tokens": tokens, "layout": layout}
MEMORY = {"memory": tokens, "memory_layout": layout}
PADDED = {"tgt": batch, "memory": batch}
QUERIES = {"query": batch, "key": batch, "value": batch}
DECODER_MASKS = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
TRANSFORMER_MASKS = ("src_mask", "src_key_padding_mask", *DECODER_MASKS)
real = torch.zeros(B, T).bool()
REAL = {"tgt_key_padding_mask": real, "memory_key_padding_mask": real}
# Each call with its required arguments, and its masks; masks that are given have the batch run packed.
CALLS = {
    "MultiheadAttention": (attention, QUERIES, ("key_padding_mask", "attn_mask")),
    "MultiheadAttention.packed": (attention.packed, {"query": tokens, "layout": layout}, ("attn_mask",)),
    "TransformerEncoderLayer": (encoder_layer, {"src": batch}, ("src_mask", "src_key_padding_mask")),
    "TransformerDecoderLayer": (decoder_layer, PADDED, DECODER_MASKS),
    "TransformerEncoder": (encoder, {"src": batch}, ("mask", "src_key_padding_mask")),
    "TransformerEncoder, packed": (encoder, {"src": batch, "src_key_padding_mask": real}, ("mask",)),
    "TransformerEncoder.packed": (encoder.packed, PACKED, ("mask",)),
    "TransformerDecoder": (decoder, PADDED, DECODER_MASKS),
    "TransformerDecoder, packed": (decoder, PADDED | REAL, DECODER_MASKS),
    "TransformerDecoder.packed": (decoder.packed, PACKED | MEMORY | {"causal": False}, ("tgt_mask", "memory_mask")),
    "TransformerDecoder.new_cache": (decoder.new_cache, {"memory": batch}, ("memory_key_padding_mask",)),
    "Transformer": (transformer, {"src": batch, "tgt": batch}, TRANSFORMER_MASKS),
    "Transformer, packed": (
        transformer,
        {"src": batch, "tgt": batch, "src_key_padding_mask": real, **REAL},
        TRANSFORMER_MASKS,
    ),
    "Transformer.new_cache": (transformer.new_cache, {"src": batch}, (*TRANSFORMER_MASKS[:2], DECODER_MASKS[-1])),
}
WRONG = {"list": [[False] * T] * B, "ndarray": real.numpy(), "BlockMask": None}
WRONG["BlockMask"] = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 128, 128, device="cpu")


@pytest.mark.parametrize("call", [call for call in CALLS if ", packed" not in call and ".new_cache" not in call])
def test_a_required_argument_of_a_wrong_type_is_named(call):
    function, arguments, _ = CALLS[call]
    function(**arguments)
    for name in (name for name in arguments if "mask" not in name and name != "causal"):
        for wrong in (None, [1.0], 3, tokens.numpy()):
            with pytest.raises(TypeError, match=f"^{name} must be a (Tensor|Layout), not {type(wrong).__name__}$"):
                function(**arguments | {name: wrong})


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", [call for call in CALLS if CALLS[call][2]])
def test_a_mask_that_is_no_tensor_is_named(call, wrong):
    """A stack hands a mask on to its layers and attention, whose name of it may be the one that is told."""
    function, arguments, masks = CALLS[call]
    for name in masks:
        kind = name.removeprefix("src_").removeprefix("tgt_").removeprefix("memory_")  # mask or key_padding_mask
        with pytest.raises(TypeError, match=rf"^\w*{kind} must be a Tensor, not {type(WRONG[wrong]).__name__}$"):
            function(**arguments | {name: WRONG[wrong]})


def test_padding_masks_do_not_hide_a_missing_memory():
    with pytest.raises(TypeError, match=r"^memory must be a Tensor, not NoneType$"):
        decoder(batch, None, **REAL)


class Alone(nn.TransformerDecoderLayer):
    """A decoder layer that reads no memory, as decoder-only models of torch's parts have them."""

    def forward(self, tgt, memory, **_):
        return self.norm1(tgt + self.self_attn(tgt, tgt, tgt, need_weights=False)[0])


class OwnBlock(nn.TransformerDecoderLayer):
    def _mha_block(self, x, mem, *_):
        assert mem is None
        return x


@pytest.mark.parametrize("kind", [Alone, OwnBlock])
def test_layers_of_your_own_may_do_without_a_memory_as_in_torch(kind):
    stack = nn.TransformerDecoder(kind(WIDTH, HEADS, FF, 0.0, batch_first=True), 1)
    expected = stack(batch, None, tgt_key_padding_mask=hidden)
    fastformer.convert(stack, padding_free=False)
    assert type(stack) is fastformer.TransformerDecoder
    torch.testing.assert_close(stack(batch, None, tgt_key_padding_mask=hidden), expected)
