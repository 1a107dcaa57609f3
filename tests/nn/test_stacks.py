"""Stacks and nn.Transformer against torch.nn's, packed against padded, and the returned weights."""

import copy
import math

import pytest
import torch
from torch import nn

import fastformer
from fastformer.packing import Layout, pack, unpack
from tests.nn.layer_cases import AHEAD, FF, STACKS, B, D, H, S, T, Twice, inputs_for, twins
from tests.support.all_pairs import all_pairs
from tests.support.closeness import assert_close, assert_same, random
from tests.support.fused_op import DEVICE
from tests.support.masks import right

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]


LENGTHS = [([5, 2, 3], [1, 4, 2]), ([3, 3], [2, 2]), ([0, 3], [2, 4]), ([], [])]


@pytest.mark.parametrize(
    ("lengths", "kind", "norm_first"),
    all_pairs(LENGTHS, ["encoder", "causal encoder", "decoder"], [True, False]),
    ids=str,
)
def test_packed_stacks_are_padded_ones_on_real_tokens(lengths, kind, norm_first):
    which = "TransformerDecoder" if kind == "decoder" else "TransformerEncoder"
    ours, _ = twins(which, norm_first=norm_first, activation="gelu")
    layout, memory_layout = (Layout.from_lengths(x) for x in lengths)
    causal = torch.ones(layout.max_length, layout.max_length).triu(1).bool()
    x, memory = random(layout.total, D), random(memory_layout.total, D)
    padded, keys = unpack(x, layout), unpack(memory, memory_layout)
    if kind == "decoder":
        actual = ours.packed(x, layout, memory, memory_layout)
        expected = ours(padded, keys, tgt_mask=causal, memory_key_padding_mask=~memory_layout.mask())
    elif kind == "encoder":
        actual, expected = ours.packed(x, layout), ours(padded, src_key_padding_mask=~layout.mask())
    else:
        actual, expected = ours.packed(x, layout, causal=True), ours(padded, mask=causal)
    leaves = [x, *([memory] if kind == "decoder" else []), *ours.parameters()]
    assert_same(actual, pack(expected, layout), leaves)


@pytest.mark.parametrize("kind", STACKS)
def test_a_stack_makes_torchs_layer_its_own(kind):
    layer = getattr(nn, kind + "Layer")(D, H, FF, activation=Twice(), dtype=torch.float64, batch_first=True)
    layer.norm2 = layer.norm1
    stack = getattr(fastformer, kind)(layer, 2)
    assert all(type(x) is getattr(fastformer, kind + "Layer") for x in stack.layers)
    assert all(isinstance(x.activation, Twice) for x in stack.layers)
    assert stack.layers[0].norm1 is stack.layers[0].norm2
    assert type(stack.layers[0].norm1) is fastformer.LayerNorm
    assert type(layer) is getattr(nn, kind + "Layer")
    assert type(layer.norm1) is nn.LayerNorm


def test_inference_agrees_with_training_where_torchs_fast_path_does_not():
    """tanh-GELU stays tanh-GELU and a float mask gives no NaN."""
    torch.backends.mha.set_fastpath_enabled(True)
    layer = fastformer.TransformerEncoderLayer(8, 2, 16, 0.0, nn.GELU("tanh"), batch_first=True)
    ours = fastformer.TransformerEncoder(layer, 2)
    x, mask = 3 * torch.randn(B, T, 8), right([5, 2, 3], T)
    for padding in (mask, torch.zeros(B, T).masked_fill(mask, -math.inf)):
        expected = ours.train()(x, src_key_padding_mask=padding)
        with torch.no_grad():
            assert_close(ours.eval()(x, src_key_padding_mask=padding), expected.detach())


HIDDEN, SOURCE_HIDDEN = right([5, 2, 4], T), right([1, 4, 3], S)


@pytest.mark.parametrize("side", ["src", "tgt", "memory"])
def test_is_causal_stands_for_the_causal_mask(side):
    ours, torchs = twins("Transformer")
    inputs = inputs_for("Transformer")
    rows, columns = {"src": (S, S), "tgt": (T, T), "memory": (T, S)}[side]
    for hidden in ({}, {"src_key_padding_mask": SOURCE_HIDDEN, "memory_key_padding_mask": SOURCE_HIDDEN}):
        expected = torchs(*inputs, **hidden, **{f"{side}_mask": torch.ones(rows, columns).triu(1).bool()})
        assert_close(ours(*inputs, **hidden, **{f"{side}_is_causal": True}), expected)
        assert not torch.allclose(ours(*inputs, **hidden), expected)


def weights_of(model):
    """What the attentions of torch.nn's layers weigh, by name, once the model is called."""
    seen = {}

    def ask(module, given, named):
        return given, {**named, "need_weights": True, "average_attn_weights": False}

    for name, part in model.named_modules():
        if type(part) is nn.MultiheadAttention:
            part.register_forward_pre_hook(ask, with_kwargs=True)
            kind = name.split(".")[0] + " " + name.split(".")[-1]
            part.register_forward_hook(lambda module, given, out, kind=kind: seen.setdefault(kind, []).append(out[1]))
    return seen


@pytest.mark.parametrize("batch_first", [True, False])
def test_weights_are_those_of_torchs_layers(batch_first):
    ours, torchs = twins("Transformer", batch_first=batch_first, norm_first=batch_first)
    source, target = inputs_for("Transformer", batch_first)
    seen = weights_of(torchs)
    memory = torchs.encoder(source, src_key_padding_mask=SOURCE_HIDDEN)
    torchs.decoder(target, memory, AHEAD, None, HIDDEN, SOURCE_HIDDEN)
    expected = {name: torch.stack(found) for name, found in seen.items()}
    _, own = ours.encoder(source, src_key_padding_mask=SOURCE_HIDDEN, need_weights=True)
    masks = {"tgt_key_padding_mask": HIDDEN, "memory_key_padding_mask": SOURCE_HIDDEN, "tgt_is_causal": True}
    out, decoder, cross = ours.decoder(target, memory, **masks, need_weights=True)
    assert own.shape == (1, B, H, S, S)
    assert cross.shape == (2, B, H, T, S)
    assert_close(own, expected["encoder self_attn"])
    assert_close(decoder, expected["decoder self_attn"])
    assert_close(cross, expected["decoder multihead_attn"])
    assert_same(out, ours.decoder(target, memory, **masks), ours.decoder.parameters())


def test_need_weights_refuses_hooks_and_stacks_without_layers():
    ours, _ = twins("TransformerEncoder")
    x = random(B, S, D)
    with pytest.raises(ValueError, match="need_weights takes padded batches, not nested tensors"):
        ours(torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged), need_weights=True)
    empty = copy.deepcopy(ours)
    empty.layers = nn.ModuleList()
    with pytest.raises(RuntimeError, match="the stack has no layers, which need_weights needs"):
        empty(x, need_weights=True)
    ours.layers[1].register_forward_hook(lambda module, given, out: None)
    with pytest.raises(RuntimeError, match=r"layers\.1 has hooks, which need_weights does not call"):
        ours(x, need_weights=True)


def test_hooks_of_a_pre_norm_stack_are_called_with_tensors_in_torchs_dtype():
    layer = fastformer.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=True)
    stack, seen = fastformer.TransformerEncoder(layer, 2, fastformer.LayerNorm(16)).to(DEVICE), []
    for module in (stack.layers[1].norm1, stack.layers[0].dropout2, stack.norm, stack.layers[0].linear1):
        module.register_forward_pre_hook(lambda module, inputs: seen.append((inputs[0].shape, inputs[0].dtype)))
    with torch.autocast(DEVICE, torch.bfloat16):
        stack.packed(torch.randn(5, 16, device=DEVICE), Layout.from_lengths([3, 2]).to(DEVICE))
    assert len(seen) == 4
    assert {shape for shape, _ in seen} == {(5, 16)}
    assert seen[0][1] == torch.float32  # what linear1 gets: the norm is not written in 16 bits
