"""MultiheadAttention against torch.nn's, option by option and mask by mask."""

import pytest
import torch
from torch import nn

import fastformer
from tests.nn.layer_cases import AHEAD, BESIDE_TORCH, B, D, H, T, check, twins
from tests.support.all_pairs import all_pairs
from tests.support.closeness import assert_close, random
from tests.support.masks import minus_infinity, right

pytestmark = BESIDE_TORCH
S = 7
OPTIONS = {
    "default": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv and zero_attn, batch first": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "batch first": {"batch_first": True},
    "kdim and vdim": {"kdim": 4, "vdim": 9},
    "vdim, no bias": {"vdim": 5, "bias": False, "batch_first": True},
}


def attention(dtype=torch.float64, **options):
    return twins("MultiheadAttention", dtype, **options)


def inputs_for(kind, module, dtype=torch.float64, batched=True):
    """Query, key and value; the same tensors where `kind` says so."""

    def make(length, width):
        shape = (length, width) if not batched else (B, length, width) if module.batch_first else (length, B, width)
        return random(*shape, dtype=dtype)

    query = make(T, D)
    key = query if kind in ("self", "key is query") else make(S, module.kdim)
    value = {"self": query, "memory": key, "key is query": None, "all different": None}[kind]
    return query, key, make(T if key is query else S, module.vdim) if value is None else value


KINDS = ("self", "memory", "key is query", "all different")


def padding(additive, keys, dtype):
    mask = torch.stack([torch.arange(keys) >= 2, torch.arange(keys) < 1, torch.zeros(keys).bool()])
    return minus_infinity(mask, dtype) + torch.randn(B, keys, dtype=dtype) if additive else mask


def pairs(T, S, additive, rows=None, dtype=torch.float64):
    shape = (T, S) if rows is None else (rows, T, S)
    mask = torch.rand(shape) < 0.4
    mask[..., 1] = False  # the second key is open to all and never padding: no query is left without keys
    return minus_infinity(mask, dtype) + torch.randn(shape, dtype=dtype) if additive else mask


KEY_PADDING = [None, "bool", "float"]
MASKS = [None, "bool 2", "bool 3", "float 2", "float 3", "learned 3"]
WEIGHTS = [(True, True), (True, False), (False, True)]  # need_weights, average_attn_weights


@pytest.mark.parametrize(
    ("option", "attn", "kind", "key_padding", "weights", "dtype"),
    all_pairs(OPTIONS, MASKS, KINDS, KEY_PADDING, WEIGHTS, [torch.float64, torch.float32]),
    ids=str,
)
def test_every_option_with_every_mask_computes_what_torch_does(option, attn, kind, key_padding, weights, dtype):
    """One tensor cannot have two widths: where they differ, all inputs do."""
    model, torchs = attention(dtype, **OPTIONS[option])
    inputs = inputs_for("all different" if "vdim" in option else kind, model, dtype)
    keys = inputs[1].shape[1 if model.batch_first else 0]
    arguments = {"need_weights": weights[0], "average_attn_weights": weights[1]}
    if key_padding:
        arguments["key_padding_mask"] = padding(key_padding == "float", keys, dtype)
    if attn:
        mask_kind, dims = attn.split()
        mask = pairs(T, keys, mask_kind != "bool", B * H if dims == "3" else None, dtype)
        arguments["attn_mask"] = mask.requires_grad_(mask_kind == "learned")
    check(model, torchs, inputs, **arguments)


# torch takes the hint in place of a mask that learns where no keys are padding, and gives it no gradient.
CAUSAL = [(None, "bool"), (None, "float"), *((x, y) for x in ("bool", "learned") for y in ("bool", "float", "learned"))]


@pytest.mark.parametrize(
    ("masks", "need_weights", "batch_first"), all_pairs(CAUSAL, [True, False], [True, False]), ids=str
)
def test_is_causal_computes_what_torch_does(masks, need_weights, batch_first):
    key_padding, mask_kind = masks
    model, torchs = attention(batch_first=batch_first)
    arguments = {"attn_mask": AHEAD if mask_kind == "bool" else minus_infinity(AHEAD), "is_causal": True}
    arguments["attn_mask"].requires_grad_(mask_kind == "learned")
    if key_padding:
        mask = right([T, 2, 3], T)
        arguments["key_padding_mask"] = mask if key_padding == "bool" else minus_infinity(mask).requires_grad_()
    check(model, torchs, inputs_for("self", model), need_weights=need_weights, **arguments)


@pytest.mark.parametrize("training", [True, False])
def test_is_causal_stands_for_a_mask_of_other_sizes(training):
    """As torch has it: models keep one mask for their longest input."""
    model, torchs = (each.train(training) for each in attention())
    mask = minus_infinity(torch.ones(2 * T, 2 * T).triu(1).bool())
    check(model, torchs, inputs_for("self", model), need_weights=False, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("kind", ["memory", "padding", "causal", "causal, stated"])
def test_weights_of_few_tokens_are_computed_without_the_op(kind, average, monkeypatch):
    """In inference, where fastformer's op takes up to 1.9 times as long."""
    model, torchs = attention(torch.float32, batch_first=True)
    query, key, value = inputs_for("self" if "causal" in kind else "memory", model, torch.float32)
    masks = {"key_padding_mask": padding(False, S, torch.float32)} if kind == "padding" else {}
    monkeypatch.setattr(fastformer.functional, "attention_with_weights", None)
    with torch.no_grad():
        ahead = {"attn_mask": AHEAD} if "causal" in kind else {}
        expected = torchs.eval()(query, key, value, average_attn_weights=average, **masks, **ahead)
        if "causal" in kind:
            masks = {"is_causal": True} if "stated" in kind else {"is_causal": True, **ahead}
        assert_close(model.eval()(query, key, value, average_attn_weights=average, **masks), expected)


def test_an_output_projection_whose_bias_was_removed_computes_what_torch_does():
    model, torchs = (library.MultiheadAttention(16, 4, batch_first=True).eval() for library in (fastformer, nn))
    model.load_state_dict(torchs.state_dict())
    for module in (model, torchs):
        module.out_proj.bias = None
    x = torch.randn(B, T, 16)
    with torch.no_grad():
        assert_close(model(x, x, x), torchs(x, x, x))


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}, {"add_bias_kv": True}], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("stated", ["mask and hint", "hint alone"])
def test_is_causal_leaves_the_extra_keys_open(options, need_weights, stated):
    """torch hides them with is_causal and need_weights=False alone, and wants a mask."""
    model, torchs = attention(**options)
    query, key, value = inputs_for("memory", model)
    ahead = torch.ones(T, S).triu(1).bool()
    mask = ahead if stated == "mask and hint" else None
    out, weights = model(query, key, value, attn_mask=mask, is_causal=True, need_weights=need_weights)
    expected, expected_weights = torchs(query, key, value, attn_mask=ahead, need_weights=True)
    assert_close(out, expected)
    if need_weights:
        assert_close(weights, expected_weights)


@pytest.mark.parametrize(
    ("masks", "kind", "batch_first", "need_weights"),
    all_pairs(["none", "key_padding", "2", "3"], ["self", "all different"], [True, False], [True, False]),
)
def test_unbatched_input_computes_what_torch_does(masks, kind, batch_first, need_weights):
    model, torchs = attention(batch_first=batch_first, add_zero_attn=True)
    inputs = inputs_for(kind, model, batched=False)
    keys = len(inputs[1])
    arguments = {
        "none": {},
        "key_padding": {"key_padding_mask": torch.arange(keys) % 2 == 1},
        "2": {"attn_mask": pairs(T, keys, False)},
        "3": {"attn_mask": pairs(T, keys, True, H)},
    }[masks]
    for average in (True, False):
        check(model, torchs, inputs, need_weights=need_weights, average_attn_weights=average, **arguments)


def test_dropout_is_of_the_weights_and_the_weights_returned_are_those_applied():
    torch.manual_seed(2)
    model = fastformer.MultiheadAttention(4, 1, dropout=0.5, bias=False, batch_first=True)
    with torch.no_grad():
        model.in_proj_weight[8:] = torch.eye(4)
        model.out_proj.weight.copy_(torch.eye(4))
    x, value = torch.randn(50, 4, 4), torch.eye(4).expand(50, 4, 4)
    out, weights = model(x, x, value)
    assert_close(out, weights)
    applied = weights != 0
    assert 0.35 < applied.double().mean() < 0.65
    plain = model.eval()(x, x, value)[1]
    assert_close(weights[applied], 2 * plain[applied])
    assert torch.equal(model(x, x, value)[1], plain)
    model.train()
    for need_weights in (True, False):
        torch.manual_seed(5)
        first = model(x, x, value, need_weights=need_weights)[0]
        torch.manual_seed(5)
        assert torch.equal(model(x, x, value, need_weights=need_weights)[0], first)
        assert not torch.equal(model(x, x, value, need_weights=need_weights)[0], first)


def test_a_mask_of_fp32_beside_inputs_of_fp64_hides_what_a_bool_mask_does():
    """torch's SDPA reads such a mask of 16 keys or more as fp64 on a CPU, without an error."""
    model, _ = attention(batch_first=True)
    x, hidden = random(B, 20, D), right([20, 9, 6], 20)
    expected = model(x, x, x, hidden, need_weights=False)[0]
    assert_close(model(x, x, x, minus_infinity(hidden, torch.float32), need_weights=False)[0], expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_attended_to_as_in_torch():
    torch.backends.mha.set_fastpath_enabled(True)
    model, torchs = (library.MultiheadAttention(16, 4, batch_first=True).eval() for library in (fastformer, nn))
    model.load_state_dict(torchs.state_dict())
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with torch.no_grad():
        actual, expected = (module(x, x, x, need_weights=False)[0] for module in (model, torchs))
    assert all(map(torch.equal, actual.unbind(), expected.unbind()))
    for module in (model, torchs):
        with pytest.raises(AssertionError, match="does not support NestedTensor"):
            module(torch.randn(2, 5, 16), x, x, need_weights=False)
