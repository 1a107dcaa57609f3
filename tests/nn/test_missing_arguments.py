"""What is not a tensor, or missing: None and wrong types for every required argument of the modules, by name."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

import fastformer
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.packing import Layout

D, H, F, T = 8, 2, 16, 5
batch, tokens, ids = torch.randn(3, T, D), torch.randn(T, D), torch.arange(T)
layout = Layout.from_lengths([2, 3])
encoder_layer = fastformer.TransformerEncoderLayer(D, H, F, batch_first=True)
decoder_layer = fastformer.TransformerDecoderLayer(D, H, F, batch_first=True)
encoder, decoder = fastformer.TransformerEncoder(encoder_layer, 1), fastformer.TransformerDecoder(decoder_layer, 1)
attention, transformer = fastformer.MultiheadAttention(D, H), fastformer.Transformer(D, H, 1, 1, F, batch_first=True)
language_model = LanguageModel(LanguageConfig(50, d_model=D, heads=H, layers=1, feed_forward=F))
block = nn.Sequential(nn.Linear(D, F), nn.ReLU(), nn.Linear(F, D))
fastformer.convert(block)
PACKED = {"tokens": tokens, "layout": layout}
MEMORY = {"memory": tokens, "memory_layout": layout}
CALLS = {
    "LayerNorm": (fastformer.LayerNorm(D), {"input": batch}),
    "RMSNorm": (fastformer.RMSNorm(D), {"x": batch}),
    "SequentialFeedForward": (block, {"input": batch}),
    "FeedForward": (fastformer.FeedForward(D, F), {"x": batch}),
    "LinearCrossEntropy": (fastformer.LinearCrossEntropy(D, 7), {"input": tokens, "target": ids}),
    "MultiheadAttention": (attention, {"query": batch, "key": batch, "value": batch}),
    "MultiheadAttention.packed": (attention.packed, {"query": tokens, "layout": layout}),
    "TransformerEncoderLayer": (encoder_layer, {"src": batch}),
    "TransformerEncoderLayer.packed": (encoder_layer.packed, PACKED),
    "TransformerDecoderLayer": (decoder_layer, {"tgt": batch, "memory": batch}),
    "TransformerDecoderLayer.packed": (decoder_layer.packed, PACKED | MEMORY),
    "TransformerEncoder": (encoder, {"src": batch}),
    "TransformerEncoder.packed": (encoder.packed, PACKED),
    "TransformerDecoder": (decoder, {"tgt": batch, "memory": batch}),
    "TransformerDecoder.packed": (decoder.packed, PACKED | MEMORY),
    "Transformer": (transformer, {"src": batch, "tgt": batch}),
    "LanguageModel": (language_model, {"ids": ids}),
}
# A module hands these on to an op, whose name of them is the one that is told.
TOLD = {"LayerNorm-input": "x", "SequentialFeedForward-input": "x", "LinearCrossEntropy-input": "x"}
GIVEN = [(call, name) for call, (_, given) in CALLS.items() for name in given]


@pytest.mark.parametrize(("call", "name"), GIVEN, ids=["-".join(each) for each in GIVEN])
@pytest.mark.parametrize("wrong", [None, [1.0], 3, tokens.numpy()], ids=["None", "list", "int", "ndarray"])
def test_it_is_told_by_name(call, name, wrong):
    function, given = CALLS[call]
    more = {"lengths": [2, 3]} if call == "LanguageModel" else {}
    function(**given, **more)
    told = TOLD.get(f"{call}-{name}", name)
    with pytest.raises(TypeError, match=f"^{told} must be a (Tensor|Layout), not {type(wrong).__name__}$"):
        function(**given | {name: wrong}, **more)


hidden = torch.zeros(3, T).bool()
heads = torch.randn(3, H, T, D)
DECODER_MASKS = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
TRANSFORMER_MASKS = ("src_mask", "src_key_padding_mask", *DECODER_MASKS)
BOTH_PADDINGS = {"tgt_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
# Each call with its masks, and with masks that have the batch run packed.
MASKED = {
    "MultiheadAttention": (
        attention,
        {"query": batch, "key": batch, "value": batch},
        ("key_padding_mask", "attn_mask"),
    ),
    "MultiheadAttention.packed": (attention.packed, {"query": tokens, "layout": layout}, ("attn_mask",)),
    "TransformerEncoderLayer": (encoder_layer, {"src": batch}, ("src_mask", "src_key_padding_mask")),
    "TransformerDecoderLayer": (decoder_layer, {"tgt": batch, "memory": batch}, DECODER_MASKS),
    "TransformerEncoder": (encoder, {"src": batch}, ("mask", "src_key_padding_mask")),
    "TransformerEncoder, packed": (encoder, {"src": batch, "src_key_padding_mask": hidden}, ("mask",)),
    "TransformerEncoder.packed": (encoder.packed, PACKED, ("mask",)),
    "TransformerDecoder": (decoder, {"tgt": batch, "memory": batch}, DECODER_MASKS),
    "TransformerDecoder, packed": (decoder, {"tgt": batch, "memory": batch, **BOTH_PADDINGS}, DECODER_MASKS),
    "TransformerDecoder.packed": (decoder.packed, PACKED | MEMORY | {"causal": False}, ("tgt_mask", "memory_mask")),
    "TransformerDecoder.new_cache": (decoder.new_cache, {"memory": batch}, ("memory_key_padding_mask",)),
    "Transformer": (transformer, {"src": batch, "tgt": batch}, TRANSFORMER_MASKS),
    "Transformer, packed": (
        transformer,
        {"src": batch, "tgt": batch, "src_key_padding_mask": hidden, **BOTH_PADDINGS},
        TRANSFORMER_MASKS,
    ),
    "Transformer.new_cache": (
        transformer.new_cache,
        {"src": batch},
        ("src_mask", "src_key_padding_mask", "memory_key_padding_mask"),
    ),
    "attention": (fastformer.functional.attention, {"q": heads, "k": heads, "v": heads}, ("mask", "key_mask")),
    "from_mask": (Layout.from_mask, {"padding": hidden}, ("padding",)),
}
block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 128, 128, device="cpu")


@pytest.mark.parametrize("wrong", [[[False] * T] * 3, hidden.numpy(), block_mask], ids=["list", "ndarray", "BlockMask"])
@pytest.mark.parametrize(("call", "name"), [(call, name) for call in MASKED for name in MASKED[call][2]])
def test_masks_that_are_no_tensors_are_told_by_name(call, name, wrong):
    """A stack hands a mask on to its layers and attention, whose name of it may be the one that is told."""
    function, given, _ = MASKED[call]
    function(**given)
    kind = name.removeprefix("src_").removeprefix("tgt_").removeprefix("memory_")  # mask or key_padding_mask
    with pytest.raises(TypeError, match=rf"^\w*{kind} must be a Tensor, not {type(wrong).__name__}$"):
        function(**given | {name: wrong})


def test_padding_masks_do_not_hide_it():
    with pytest.raises(TypeError, match=r"^memory must be a Tensor, not NoneType$"):
        decoder(batch, None, tgt_key_padding_mask=hidden, memory_key_padding_mask=hidden)


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
    stack = nn.TransformerDecoder(kind(D, H, F, 0.0, batch_first=True), 1)
    hidden = torch.arange(T) >= torch.tensor([[5], [2], [3]])
    expected = stack(batch, None, tgt_key_padding_mask=hidden)
    fastformer.convert(stack, padding_free=False)
    assert type(stack) is fastformer.TransformerDecoder
    torch.testing.assert_close(stack(batch, None, tgt_key_padding_mask=hidden), expected)
