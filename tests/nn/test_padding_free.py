"""The drop-in stacks with padding: what real tokens get is torch's, padded rows are 0, and nothing works on padding."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer import functional
from fastformer.backend import backend, get_backend
from fastformer.packing import Layout, from_nested, to_nested
from fastformer.packing.layout import RowMap
from tests.nn.layer_cases import AHEAD, BESIDE_TORCH, PADDING, STACKS, B, D, H, S, T, check, inputs_for, twins
from tests.support.all_pairs import all_pairs
from tests.support.closeness import assert_close, assert_same, gradients, random
from tests.support.masks import left, minus_infinity, right

pytestmark = BESIDE_TORCH


# Each query ignores its third neighbour, which leaves no row without keys under any padding.
BAND = (torch.arange(T)[:, None] - torch.arange(T)).abs() == 3
# What says who attends to whom among T targets.
MASKS = {
    "none": lambda: {},
    "causal": lambda: {"mask": AHEAD},
    "causal, additive": lambda: {"mask": minus_infinity(AHEAD)},
    "causal, stated": lambda: {"mask": AHEAD, "is_causal": True},
    "causal, near": lambda: {"mask": AHEAD | AHEAD.T.tril(-2)},
    "causal, biased": lambda: {"mask": minus_infinity(AHEAD) + torch.randn(T, T, dtype=torch.float64).tril()},
    "the future is unlikely": lambda: {"mask": -AHEAD.double()},
    "any": lambda: {"mask": BAND},
    "additive": lambda: {"mask": torch.randn(T, T, dtype=torch.float64)},
    "of each head": lambda: {"mask": torch.randn(B * H, T, T, dtype=torch.float64)},
}


@pytest.mark.parametrize(("mask", "padding", "norm_first"), all_pairs(MASKS, PADDING, [True, False]))
def test_an_encoder_computes_torchs_numbers_on_real_tokens_alone(mask, padding, norm_first, tokens_seen):
    if mask.startswith("causal") and PADDING[padding][0][:, 0].any():
        padding = "right"  # torch gives NaN where the first real query may attend to nothing before it
    model, torchs = twins("TransformerEncoder", norm_first=norm_first, activation="gelu")
    hidden = PADDING[padding][0]
    check(model, torchs, (random(B, T, D),), hidden, src_key_padding_mask=hidden, **MASKS[mask]())
    assert set(tokens_seen) == {int((~hidden).sum())}


@pytest.mark.parametrize("kind", STACKS)
def test_pre_norm_and_post_norm_layers_in_one_stack_compute_torchs_numbers(kind):
    stack, torchs = twins(kind)
    stack.layers[0].norm_first = torchs.layers[0].norm_first = True
    hidden = PADDING["right"][0]
    masks = {"src_key_padding_mask" if "Encoder" in kind else "tgt_key_padding_mask": hidden}
    check(stack, torchs, inputs_for(kind), hidden, **masks)


@pytest.mark.parametrize("hidden", [left([5, 2, 3], T), PADDING["gaps"][0]], ids=["left", "gaps"])
def test_causal_padding_on_the_left_is_each_sequence_alone(hidden):
    """torch gives NaN for the rows of padding there, which then reach all gradients."""
    model, torchs = twins("TransformerEncoder")
    x = random(B, T, D)
    out = model(x, AHEAD, src_key_padding_mask=hidden)
    expected = torch.zeros_like(x)
    for b in range(B):
        real = (~hidden[b]).nonzero().squeeze(1)
        expected = expected.index_put(
            (torch.tensor(b), real), torchs(x[b, real][None], AHEAD[: len(real), : len(real)])[0]
        )
    assert_same(out, expected, [x, *model.parameters()], [x, *torchs.parameters()])


@pytest.mark.parametrize(
    ("padding", "which", "batch_first"), all_pairs(PADDING, ["both", "target", "source"], [True, False])
)
def test_a_decoder_computes_torchs_numbers_on_real_tokens_alone(padding, which, batch_first, tokens_seen):
    model, torchs = twins("TransformerDecoder", batch_first=batch_first)
    hidden, hidden_keys = PADDING[padding]
    arguments = {"tgt_mask": BAND, "memory_mask": torch.randn(T, S, dtype=torch.float64)}
    if not hidden[:, 0].any():
        arguments = {"tgt_mask": minus_infinity(AHEAD), "tgt_is_causal": True}
    if which != "source":
        arguments["tgt_key_padding_mask"] = hidden
    if which != "target":
        arguments["memory_key_padding_mask"] = minus_infinity(hidden_keys)
    padded = hidden if which != "source" else torch.zeros(B, T).bool()
    inputs = inputs_for("TransformerDecoder", batch_first)
    check(model, torchs, inputs, padded if batch_first else padded.T, **arguments)
    assert set(tokens_seen) == {int((~padded).sum())}


@pytest.mark.parametrize(
    ("memory", "batch_first", "norm_first"),
    all_pairs(["same", "equal", "additive", "other", "none"], [True, False], [True, False]),
)
def test_a_transformer_computes_torchs_numbers_on_real_tokens_alone(memory, batch_first, norm_first, tokens_seen):
    """Where the decoder attends to padded sources, it gets what torch's encoder makes of them."""
    model, torchs = twins("Transformer", batch_first=batch_first, norm_first=norm_first)
    hidden, hidden_source = PADDING["right"]
    masks = {"same": hidden_source, "equal": hidden_source.clone(), "other": right([2, 3, 3], S), "none": None}
    masks["additive"] = minus_infinity(hidden_source)
    arguments = {
        "src_mask": torch.randn(S, S, dtype=torch.float64),
        "tgt_mask": AHEAD,
        "memory_mask": torch.randn(T, S, dtype=torch.float64),
        "src_key_padding_mask": hidden_source,
        "tgt_key_padding_mask": hidden,
        "memory_key_padding_mask": masks[memory],
    }
    inputs = inputs_for("Transformer", batch_first)
    check(model, torchs, inputs, hidden if batch_first else hidden.T, **arguments)
    source = (~hidden_source).sum() if memory in ("same", "equal") else B * S
    assert set(tokens_seen) == {int(source), int((~hidden).sum())}


def test_a_bias_of_ones_is_not_the_padding_mask_of_the_source():
    """torch.equal says that True equals 1.0."""
    model, torchs = twins("Transformer")
    hidden = PADDING["right"][1]
    masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden.double()}
    check(model, torchs, inputs_for("Transformer"), torch.zeros(B, T).bool(), **masks)


def test_transformer_never_pads_in_between(monkeypatch):
    """One gather a side and one scatter at the end, whatever the number of layers."""
    calls, gather, spread = [], RowMap.gather, RowMap.spread
    monkeypatch.setattr(RowMap, "gather", lambda self, x: (calls.append("gather"), gather(self, x))[1])
    monkeypatch.setattr(RowMap, "spread", lambda self, x: (calls.append("spread"), spread(self, x))[1])
    model, _ = twins("Transformer", activation="gelu")
    hidden, hidden_source = PADDING["right"]
    # The ops of attention may pad the scores.
    monkeypatch.setattr(functional, "packed_attention", lambda q, k, v, *_, **__: q)
    padding = {"src_key_padding_mask": hidden_source, "memory_key_padding_mask": hidden_source}
    with torch.no_grad():  # for gradients, an autograd Function calls the same methods again
        model(*inputs_for("Transformer"), tgt_mask=AHEAD, tgt_key_padding_mask=hidden, **padding)
    assert calls == ["gather", "gather", "spread"]


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("hooked", [False, True])
def test_unbatched_input_with_padding_is_torchs(kind, hooked):
    model, torchs = twins(kind, batch_first=False)
    if hooked:  # it then runs padded
        model.layers[1].register_forward_hook(lambda *_: None)
    hidden, source = torch.tensor([False, True, False, False, True]), torch.tensor([False, False, True, True])
    masks = {"tgt_mask": BAND, "tgt_key_padding_mask": hidden, "memory_key_padding_mask": source}
    masks = {"src_key_padding_mask": hidden} if "Encoder" in kind else masks
    check(model, torchs, inputs_for(kind, batched=False), hidden, **masks)


@pytest.mark.parametrize("kind", STACKS)
def test_a_sequence_of_padding_alone_gives_zeros_and_changes_no_other_sequence(kind):
    model, _ = twins(kind)
    inputs, hidden, hidden_source = inputs_for(kind), right([5, 0, 3], T), right([4, 0, 2], S)
    masks = {"tgt_mask": AHEAD, "tgt_key_padding_mask": hidden, "memory_key_padding_mask": hidden_source}
    masks = {"src_key_padding_mask": hidden} if "Encoder" in kind else masks
    others = [0, 2]
    out = model(*inputs, **masks)
    assert not out[1].any()
    masks_of_others = {name: mask if name == "tgt_mask" else mask[others] for name, mask in masks.items()}
    expected = model(*(x[others] for x in inputs), **masks_of_others)
    assert_same(out[others], expected, [*inputs, *model.parameters()])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("hooked", [False, True])
def test_padding_of_minus_infinity_comes_out_as_zeros(hooked, batch_first):
    model, torchs = twins("TransformerEncoder", batch_first=batch_first)
    if hooked:
        model.layers[1].linear1.register_forward_hook(lambda *_: None)
    hidden = PADDING["left"][0]
    x, padding = (random(B, T, D), hidden) if batch_first else (random(T, B, D), hidden.T)
    check(model, torchs, (x,), padding, src_key_padding_mask=minus_infinity(hidden))


def test_masks_that_learn_get_their_gradients():
    """A bias that is still 0 and hides the future is not taken for the causal mask, nor one of keys for no padding."""
    model, torchs = twins("TransformerEncoder", norm_first=True)
    model.norm = torchs.norm = None
    x, hidden = random(B, T, D), PADDING["right"][0]
    bias, of_keys = (torch.zeros(*shape, dtype=torch.float64, requires_grad=True) for shape in ((T, T), (B, T)))

    def learned(stack: nn.Module) -> list[Tensor]:
        one = stack(x, bias.masked_fill(AHEAD, -math.inf), src_key_padding_mask=hidden)[~hidden]
        return [*gradients(one, [bias]), *gradients(stack(x, src_key_padding_mask=of_keys), [of_keys])]

    actual = learned(model)
    assert all(x.any() for x in actual)
    assert_close(actual, learned(torchs))


def test_an_additive_padding_mask_that_hides_nothing_is_added(tokens_seen):
    model, torchs = twins("TransformerEncoder")
    bias = -torch.rand(B, T, dtype=torch.float64)
    check(model, torchs, (random(B, T, D),), torch.zeros(B, T).bool(), src_key_padding_mask=bias)
    assert set(tokens_seen) == {B * T}


def test_nested_tensors_go_in_and_come_out():
    model, _ = twins("Transformer", batch_first=False)  # which means nothing to a nested tensor
    layout, source = Layout.from_lengths([5, 2, 3]), Layout.from_lengths([1, 4, 2])
    x, memory = random(layout.total, D), random(source.total, D)
    out = model(to_nested(memory, source), to_nested(x, layout), tgt_is_causal=True)
    assert out.is_nested
    assert out.layout == torch.jagged
    tokens, again = from_nested(out)
    assert again.lengths.tolist() == [5, 2, 3]
    expected = model.decoder.packed(x, layout, model.encoder.packed(memory, source), source)
    assert_same(tokens, expected, [x, memory, *model.parameters()])
    tokens, _ = from_nested(model.encoder(to_nested(memory, source), is_causal=True))
    assert_close(tokens, model.encoder.packed(memory, source, causal=True))
    tokens, _ = from_nested(model.decoder(to_nested(x, layout), to_nested(memory, source)))
    assert_close(tokens, model.decoder.packed(x, layout, memory, source, causal=False))


def test_layers_that_are_computed_again_in_backward_change_no_bit():
    model, _ = twins("TransformerEncoder", dtype=torch.float32, dropout=0.25)
    x, masks, outs = random(B, T, D, dtype=torch.float32), {"src_key_padding_mask": PADDING["right"][0]}, []
    for model.checkpoint_activations in (False, True):
        torch.manual_seed(3)
        outs.append(model(x, **masks))
    assert_same(*outs, [x, *model.parameters()], roundings=0)


def test_layers_that_are_computed_again_in_backward_use_the_backend_of_the_forward_pass():
    model, seen = twins("TransformerEncoder")[0], []
    model.checkpoint_activations = True
    model.layers[0].linear1.register_forward_hook(lambda *_: seen.append(get_backend()))
    with backend("reference"):
        out = model(random(B, T, D))
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    assert seen == ["reference"] * 3


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_by_vmap_are_those_of_each_sequence():
    model, _ = twins("TransformerEncoder")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x, hidden = random(B, T, D, grad=False), PADDING["gaps"][0]

    def loss(parameters: dict[str, Tensor], x: Tensor, hidden: Tensor) -> Tensor:
        out = torch.func.functional_call(model, parameters, (x[None],), {"src_key_padding_mask": hidden[None]})
        return out.pow(3).sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, hidden)
    for b in range(B):
        alone = torch.func.grad(loss)(parameters, x[b], hidden[b])
        assert_close([together[name][b] for name in alone], list(alone.values()))


def attend(model, x, padding, masks, need_weights=False):
    causal = masks.get("is_causal", False)
    outputs = model(x, x, x, padding, need_weights=need_weights, attn_mask=masks.get("mask"), is_causal=causal)
    return torch.cat([out for out in outputs if out is not None], -1)


FEW = {
    "MultiheadAttention": attend,
    "MultiheadAttention with weights": partial(attend, need_weights=True),
    "TransformerEncoderLayer": lambda model, x, padding, masks: model(x, src_key_padding_mask=padding),
    "TransformerEncoder": lambda model, x, padding, masks: model(x, src_key_padding_mask=padding, **masks),
    "TransformerDecoder": lambda model, x, padding, masks: model(
        x,
        x.flip(1),
        tgt_key_padding_mask=padding,
        memory_key_padding_mask=padding.flip(1),
        **{f"tgt_{name}": value for name, value in masks.items()},
    ),
}


def few_model(kind, norm_first=False):
    """Build a model in inference, with an even number of heads, as torch's fused op needs."""
    if "Multihead" in kind:
        return fastformer.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64).eval()
    return twins(kind, nhead=2, norm_first=norm_first)[0].eval()


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("mask", ["none", "causal, additive", "causal, stated", "any"])
@pytest.mark.parametrize(("padding", "norm_first"), [("right", True), ("left", False), ("gaps", True), ("none", False)])
def test_few_tokens_in_inference_are_those_of_training(kind, mask, padding, norm_first, few_tokens_run_padded):
    """Also what a query without keys gets, in a layer or attention alone; what padding holds changes no real token."""
    model, is_stack = few_model(kind, norm_first), kind in STACKS
    hidden, masks = PADDING[padding][0], MASKS[mask]()
    x = random(B, T, D).detach()
    expected, outputs = FEW[kind](model, x, hidden, masks).detach(), []
    few_tokens_run_padded()
    for filling in (None, math.nan, math.inf, 1e300):
        with torch.no_grad():
            dirty = x if filling is None else x.masked_fill(hidden[..., None], filling)
            outputs.append(FEW[kind](model, dirty, hidden, masks))
    assert_close(outputs[0], expected)
    for out in outputs[1:]:
        if is_stack:
            assert torch.equal(out, outputs[0])
        assert_close(out[~hidden], expected[~hidden])


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("mask", ["none", "causal, additive", "causal, stated", "any"])
@pytest.mark.parametrize(("padding", "norm_first"), [("right", True), ("left", False), ("gaps", True)])
def test_few_tokens_in_training_run_padded_with_the_gradients_of_a_packed_batch(
    kind, mask, padding, norm_first, few_tokens_run_padded, tokens_seen
):
    model, hidden, masks, x = few_model(kind, norm_first).train(), PADDING[padding][0], MASKS[mask](), random(B, T, D)
    leaves = [x, *model.parameters()]
    packed = FEW[kind](model, x, hidden, masks)
    expected, expected_gradients = packed.detach(), gradients(packed, leaves)
    few_tokens_run_padded()
    tokens_seen.clear()
    for filling in (0.0, math.nan, math.inf, 1e300):
        out = FEW[kind](model, x.masked_fill(hidden[..., None], filling), hidden, masks)
        assert_close(out, expected)
        assert_close(gradients(out, leaves), expected_gradients)
    assert set(tokens_seen) == {B * T}


@pytest.mark.parametrize(("kind", "mask"), [*((kind, "none") for kind in FEW), *((kind, "causal") for kind in STACKS)])
def test_few_tokens_in_inference_run_by_torchs_ops(kind, mask, monkeypatch, few_tokens_run_padded):
    few_tokens_run_padded()
    model, (hidden, _) = few_model(kind), PADDING["right"]
    for name in ("attention", "attention_with_weights", "packed_attention"):
        monkeypatch.delattr(functional, name)
    with torch.no_grad():
        FEW[kind](model, random(B, T, D).detach(), hidden, MASKS[mask]())


def attend(need_weights):
    def call(model, x, mask, hidden):
        outputs = model(x, x, x, attn_mask=mask, key_padding_mask=hidden, need_weights=need_weights)
        return torch.cat([out for out in outputs if out is not None], -1)

    return call


@pytest.mark.parametrize("hidden", [None, PADDING["right"][0]], ids=["no padding", "padding"])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("MultiheadAttention", attend(need_weights=False)),
        ("MultiheadAttention", attend(need_weights=True)),
        ("TransformerEncoderLayer", lambda model, x, mask, hidden: model(x, mask, hidden)),
    ],
    ids=["attention", "weights", "layer"],
)
def test_few_tokens_with_a_mask_in_inference_run_by_torchs_ops(kind, call, additive, hidden, monkeypatch):
    """If the output is finite; with weights, and in torch's fused ops, it is NaN for a query that sees no key."""
    model, x = few_model(kind), random(B, T, D).detach()
    mask = torch.ones(T, T).triu(1).bool()
    blind = mask.index_fill(0, torch.tensor(1), True)
    if additive:
        mask, blind = (torch.randn(T, T).double().masked_fill(m, -math.inf) for m in (mask, blind))
    expected, expected_blind = (call(model, x, m, hidden).detach() for m in (mask, blind))
    with torch.no_grad():
        assert_close(call(model, x, blind, hidden), expected_blind)
        for name in ("attention", "attention_with_weights"):
            monkeypatch.delattr(functional, name)
        assert_close(call(model, x, mask, hidden), expected)


@pytest.mark.parametrize("filling", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize(("dropout", "need_weights"), [(0.0, False), (0.0, True), (0.3, False)])
@pytest.mark.parametrize("one_query", [False, True])
def test_few_keys_of_padding_change_no_gradient(one_query, dropout, need_weights, filling):
    model, hidden = few_model("MultiheadAttention").train(), PADDING["gaps"][0]
    model.dropout = dropout
    query, memory = random(B, 1 if one_query else T, D), random(B, T, D).detach()
    hidden = hidden[hidden.any(1)][:1] if one_query else hidden  # an attn_mask of one query states padding, too
    masks = {"attn_mask" if one_query else "key_padding_mask": hidden}

    def gradient(keys):
        torch.manual_seed(0)
        out, _ = model(query, keys, keys, **masks, need_weights=need_weights)
        return gradients(out, [query])[0]

    assert_close(gradient(memory.masked_fill(hidden[..., None], filling)), gradient(memory))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_few_queries_that_see_no_key_have_no_gradient(additive, need_weights):
    model, x, keys = few_model("MultiheadAttention").train(), random(B, T, D), random(B, T, D)
    mask = torch.zeros(T, T, dtype=torch.bool).index_fill(0, torch.tensor(1), True)
    mask = torch.zeros(T, T).double().masked_fill(mask, -math.inf) if additive else mask
    query, key = gradients(model(x, keys, keys, attn_mask=mask, need_weights=need_weights)[0], [x, keys])
    assert_close(query[:, 1], torch.zeros(B, D).double())
    assert query.isfinite().all()
    assert key.isfinite().all()


@pytest.mark.parametrize("kind", FEW)
def test_few_tokens_with_a_sequence_of_padding_alone_are_finite(kind):
    with torch.no_grad():
        assert FEW[kind](few_model(kind), random(B, T, D).detach(), right([5, 0, 3], T), {}).isfinite().all()
