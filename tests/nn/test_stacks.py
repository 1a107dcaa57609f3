"""Stacks and nn.Transformer against torch.nn's, packed against padded, and the returned weights."""

import copy
import math

import pytest
import torch
from torch import nn

import fastformer
from fastformer.packing import Layout, pack, unpack
from tests.nn.layer_cases import AHEAD, BESIDE_TORCH, FF, STACKS, B, D, H, S, T, Twice, inputs_for, twins
from tests.support.all_pairs import all_pairs
from tests.support.closeness import assert_close, assert_same, random
from tests.support.fused_op import DEVICE
from tests.support.masks import ahead, right

pytestmark = BESIDE_TORCH
LENGTHS = [([5, 2, 3], [1, 4, 2]), ([3, 3], [2, 2]), ([0, 3], [2, 4]), ([], [])]
HIDDEN, SOURCE_HIDDEN = right([5, 2, 4], T), right([1, 4, 3], S)


@pytest.mark.parametrize(
    ("lengths", "kind", "norm_first"),
    all_pairs(LENGTHS, ["encoder", "causal encoder", "decoder"], [True, False]),
    ids=str,
)
def test_packed_stacks_are_padded_ones_on_real_tokens(lengths, kind, norm_first):
    stack, _ = twins(STACKS[kind == "decoder"], norm_first=norm_first, activation="gelu")
    layout, memory_layout = (Layout.from_lengths(x) for x in lengths)
    causal = ahead(layout.max_length)
    x, memory = random(layout.total, D), random(memory_layout.total, D)
    if kind == "decoder":
        actual = stack.packed(x, layout, memory, memory_layout)
        masks = {"tgt_mask": causal, "memory_key_padding_mask": ~memory_layout.mask()}
        expected = stack(unpack(x, layout), unpack(memory, memory_layout), **masks)
    elif kind == "encoder":
        actual, expected = stack.packed(x, layout), stack(unpack(x, layout), src_key_padding_mask=~layout.mask())
    else:
        actual, expected = stack.packed(x, layout, causal=True), stack(unpack(x, layout), mask=causal)
    leaves = [x, *([memory] if kind == "decoder" else []), *stack.parameters()]
    assert_same(actual, pack(expected, layout), leaves)


@pytest.mark.parametrize("kind", STACKS)
def test_is_causal_stands_for_a_mask_of_another_size(kind):
    """As torch has it without padding of the targets, also where the padding of the sources is skipped."""
    model, torchs = twins(kind)
    inputs = inputs_for(kind)
    name = "" if kind == STACKS[0] else "tgt_"
    masks = {f"{name}mask": ahead(T + 1), f"{name}is_causal": True}
    assert_close(model(*inputs, **masks), torchs(*inputs, **masks))
    if name:
        masks["memory_key_padding_mask"] = SOURCE_HIDDEN
        assert_close(model(*inputs, **masks), torchs(*inputs, **masks))


@pytest.mark.parametrize("kind", STACKS)
def test_a_stack_copies_a_layer_of_torch_as_layers_of_fastformer(kind):
    layer = getattr(nn, kind + "Layer")(D, H, FF, activation=Twice(), dtype=torch.float64, batch_first=True)
    layer.norm2 = layer.norm1
    stack = getattr(fastformer, kind)(layer, 2)
    assert all(type(x) is getattr(fastformer, kind + "Layer") for x in stack.layers)
    assert all(isinstance(x.activation, Twice) for x in stack.layers)
    assert stack.layers[0].norm1 is stack.layers[0].norm2
    assert type(stack.layers[0].norm1) is fastformer.LayerNorm
    assert (type(layer), type(layer.norm1)) == (getattr(nn, kind + "Layer"), nn.LayerNorm)


def test_inference_agrees_with_training_where_torchs_fast_path_does_not():
    """tanh-GELU stays tanh-GELU and a float mask gives no NaN."""
    torch.backends.mha.set_fastpath_enabled(True)
    layer = fastformer.TransformerEncoderLayer(8, 2, 16, 0.0, nn.GELU("tanh"), batch_first=True)
    stack = fastformer.TransformerEncoder(layer, 2)
    x = 3 * torch.randn(B, T, 8)
    for padding in (HIDDEN, torch.zeros(B, T).masked_fill(HIDDEN, -math.inf)):
        expected = stack.train()(x, src_key_padding_mask=padding)
        with torch.no_grad():
            assert_close(stack.eval()(x, src_key_padding_mask=padding), expected.detach())


@pytest.mark.parametrize("side", ["src", "tgt", "memory"])
def test_is_causal_stands_for_the_causal_mask(side):
    model, torchs = twins("Transformer")
    inputs = inputs_for("Transformer")
    rows, columns = {"src": (S, S), "tgt": (T, T), "memory": (T, S)}[side]
    for hidden in ({}, {"src_key_padding_mask": SOURCE_HIDDEN, "memory_key_padding_mask": SOURCE_HIDDEN}):
        expected = torchs(*inputs, **hidden, **{f"{side}_mask": torch.ones(rows, columns).triu(1).bool()})
        assert_close(model(*inputs, **hidden, **{f"{side}_is_causal": True}), expected)
        assert not torch.allclose(model(*inputs, **hidden), expected)


def collect_weights(model):
    """Return a dict that collects the weights of each kind of attention of torch.nn when the model is called."""
    weights = {}

    def request(module, args, kwargs):
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            layers = weights.setdefault(f"{name.split('.')[0]} {name.split('.')[-1]}", [])
            module.register_forward_pre_hook(request, with_kwargs=True)
            module.register_forward_hook(lambda module, args, out, layers=layers: layers.append(out[1]))
    return weights


@pytest.mark.parametrize("batch_first", [True, False])
def test_weights_are_those_of_torchs_layers(batch_first):
    model, torchs = twins("Transformer", batch_first=batch_first, norm_first=batch_first)
    source, target = inputs_for("Transformer", batch_first)
    expected = collect_weights(torchs)
    memory = torchs.encoder(source, src_key_padding_mask=SOURCE_HIDDEN)
    torchs.decoder(target, memory, AHEAD, None, HIDDEN, SOURCE_HIDDEN)
    _, weights = model.encoder(source, src_key_padding_mask=SOURCE_HIDDEN, need_weights=True)
    masks = {"tgt_key_padding_mask": HIDDEN, "memory_key_padding_mask": SOURCE_HIDDEN, "tgt_is_causal": True}
    out, decoder_weights, cross_weights = model.decoder(target, memory, **masks, need_weights=True)
    assert (weights.shape, cross_weights.shape) == ((1, B, H, S, S), (2, B, H, T, S))
    assert_close(weights, torch.stack(expected["encoder self_attn"]))
    assert_close(decoder_weights, torch.stack(expected["decoder self_attn"]))
    assert_close(cross_weights, torch.stack(expected["decoder multihead_attn"]))
    assert_same(out, model.decoder(target, memory, **masks), model.decoder.parameters())


def test_need_weights_refuses_hooks_and_stacks_without_layers():
    stack, _ = twins("TransformerEncoder")
    x = random(B, S, D)
    with pytest.raises(ValueError, match="need_weights takes padded batches, not nested tensors"):
        stack(torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged), need_weights=True)
    empty = copy.deepcopy(stack)
    empty.layers = nn.ModuleList()
    with pytest.raises(RuntimeError, match="the stack has no layers, which need_weights needs"):
        empty(x, need_weights=True)
    stack.layers[1].register_forward_hook(print)
    with pytest.raises(RuntimeError, match=r"layers\.1 has hooks, which need_weights does not call"):
        stack(x, need_weights=True)


def test_hooks_of_a_pre_norm_stack_are_called_with_tensors_in_torchs_dtype():
    layer = fastformer.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=True)
    stack, inputs = fastformer.TransformerEncoder(layer, 2, fastformer.LayerNorm(16)).to(DEVICE), []
    for module in (stack.layers[1].norm1, stack.layers[0].dropout2, stack.norm, stack.layers[0].linear1):
        module.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.autocast(DEVICE, torch.bfloat16):
        stack.packed(torch.randn(5, 16, device=DEVICE), Layout.from_lengths([3, 2]).to(DEVICE))
    assert [x.shape for x in inputs] == [(5, 16)] * 4
    assert inputs[0].dtype == torch.float32  # linear1's input: the norm is not written in 16 bits
