"""MultiheadAttention against torch.nn's, option by option and mask by mask."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.packing import Layout, pack
from tests.support.closeness import assert_close, gradients, random

pytestmark = pytest.mark.usefixtures("slow_path")

D, H, B, T, S = 6, 3, 2, 5, 7
INF = float("inf")


def twins(dtype=torch.float64, **settings):
    """Our module and torch's, with the same parameters, none of them zero."""
    ours = fastformer.MultiheadAttention(D, H, dtype=dtype, **settings)
    torchs = nn.MultiheadAttention(D, H, dtype=dtype, **settings)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4)
    torchs.load_state_dict(ours.state_dict(), strict=True)
    return ours, torchs


def inputs_for(kind, module, dtype=torch.float64, batched=True, length=T):
    """Query, key and value; the same tensors where `kind` says so."""

    def make(length, width):
        shape = (length, width) if not batched else (B, length, width) if module.batch_first else (length, B, width)
        return random(*shape, dtype=dtype)

    query = make(length, D)
    if kind == "self":
        return query, query, query
    if kind == "memory":
        key = make(S, D)
        return query, key, key
    if kind == "key is query":
        return query, query, make(length, D)
    return query, make(S, module.kdim), make(S, module.vdim)


def check(ours, torchs, inputs, **arguments):
    """Same outputs, same weights, same gradients of inputs, parameters and masks."""
    leaves = list(dict.fromkeys(x for x in (*inputs, *arguments.values()) if isinstance(x, Tensor) and x.requires_grad))
    out, weights = ours(*inputs, **arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched")
        expected, expected_weights = torchs(*inputs, **arguments)
    assert_close(out, expected)
    if arguments.get("need_weights", True):
        assert_close(weights, expected_weights)
    else:
        assert weights is None
    results, expecteds = ([out], [expected]) if weights is None else ([out, weights], [expected, expected_weights])
    actual = gradients(results, [*leaves, *ours.parameters()])
    wanted = gradients(expecteds, [*leaves, *torchs.parameters()])
    for a, w in zip(actual, wanted, strict=True):
        assert_close(a, w)


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


# One tensor cannot have two widths.
KINDS = [
    (kind, option)
    for kind in ("self", "memory", "key is query", "all different")
    for option in OPTIONS
    if kind == "all different" or "vdim" not in option
]


@pytest.mark.parametrize(("kind", "option"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_option(kind, option, dtype):
    ours, torchs = twins(dtype, **OPTIONS[option])
    for need_weights, average in ((True, True), (True, False), (False, True)):
        inputs = inputs_for(kind, ours, dtype)
        check(ours, torchs, inputs, need_weights=need_weights, average_attn_weights=average)


def padding(S, kind):
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, 2:] = True
    mask[1, :1] = True
    return mask if kind == "bool" else torch.zeros(B, S).masked_fill(mask, -INF) + torch.randn(B, S)


def pairs(T, S, kind, rows=None):
    shape = (T, S) if rows is None else (rows, T, S)
    mask = torch.rand(shape) < 0.4
    mask[..., 1] = False  # the second key is open to all and never padding: no query is left without keys
    return mask if kind == "bool" else torch.zeros(shape).masked_fill(mask, -INF) + torch.randn(shape)


@pytest.mark.parametrize("key_padding", [None, "bool", "float"])
@pytest.mark.parametrize("attn", [None, "bool 2", "bool 3", "float 2", "float 3", "learned 3"])
@pytest.mark.parametrize("option", ["default", "bias_kv and zero_attn, batch first", "kdim and vdim"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_every_mask(key_padding, attn, option, need_weights):
    ours, torchs = twins(**OPTIONS[option])
    inputs = inputs_for("all different", ours)
    arguments = {"need_weights": need_weights}
    if key_padding:
        mask = padding(S, key_padding)
        arguments["key_padding_mask"] = mask if key_padding == "bool" else mask.double()
    if attn:
        kind, dims = attn.split()
        mask = pairs(T, S, "bool" if kind == "bool" else "float", B * H if dims == "3" else None)
        arguments["attn_mask"] = mask if kind == "bool" else mask.double().requires_grad_(kind == "learned")
    check(ours, torchs, inputs, **arguments)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("key_padding", [None, "bool"])
@pytest.mark.parametrize("mask_kind", ["bool", "float"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_is_causal(need_weights, key_padding, mask_kind, batch_first):
    ours, torchs = twins(batch_first=batch_first)
    inputs = inputs_for("self", ours)
    mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    arguments = {"attn_mask": mask if mask_kind == "float" else mask.isinf(), "is_causal": True}
    if key_padding:
        arguments["key_padding_mask"] = torch.tensor([[False] * T, [False, False, True, True, True]])
    check(ours, torchs, inputs, need_weights=need_weights, **arguments)


@pytest.mark.parametrize("key_padding", [None, "bool", "float"])
def test_a_mask_that_is_said_to_be_causal_is_not_read(key_padding):
    """So kernels skip what lies ahead, with padding too; torch's documentation leaves a wrong hint undefined."""
    ours, _ = twins()
    inputs = inputs_for("self", ours)
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    arguments = {"need_weights": False, "is_causal": True}
    if key_padding:
        mask = padding(T, key_padding)
        arguments["key_padding_mask"] = mask if key_padding == "bool" else mask.double()
    expected = ours(*inputs, attn_mask=causal, **arguments)[0]
    assert torch.equal(ours(*inputs, attn_mask=torch.zeros_like(causal), **arguments)[0], expected)


def test_is_causal_leaves_the_extra_keys_open():
    """torch hides them with is_causal and need_weights=False alone; ours agrees with all its other forms."""
    ours, torchs = twins(add_bias_kv=True, add_zero_attn=True)
    mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    inputs = inputs_for("self", ours)
    out, _ = ours(*inputs, attn_mask=mask, is_causal=True, need_weights=False)
    assert_close(out, torchs(*inputs, attn_mask=mask, is_causal=True, need_weights=True)[0])


@pytest.mark.parametrize("kind", ["self", "all different"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "key_padding", "2", "3"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_unbatched(kind, batch_first, masks, need_weights):
    ours, torchs = twins(batch_first=batch_first, add_zero_attn=True)
    inputs = inputs_for(kind, ours, batched=False)
    keys = len(inputs[1])
    arguments = {
        "none": {},
        "key_padding": {"key_padding_mask": torch.tensor([False, True, False, True, False, True, False][:keys])},
        "2": {"attn_mask": pairs(T, keys, "bool")},
        "3": {"attn_mask": pairs(T, keys, "float", H).double()},
    }[masks]
    for average in (True, False):
        check(ours, torchs, inputs, need_weights=need_weights, average_attn_weights=average, **arguments)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (0, 2, 3), (2, 0, 3)])
def test_sizes_of_one_and_zero(sizes):
    batch, length, keys = sizes
    ours, torchs = twins(batch_first=True)
    query, key = random(batch, length, D), random(batch, keys, D)
    for need_weights in (True, False):
        out, _ = ours(query, key, key, need_weights=need_weights)
        assert out.shape == (batch, length, D)
        if out.numel():
            assert_close(out, torchs(query, key, key, need_weights=need_weights)[0])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("form", ["bool padding", "float padding", "bool attn", "float attn"])
def test_a_query_without_keys_gives_the_output_bias_alone(need_weights, form):
    ours, torchs = twins(batch_first=True)
    x = random(B, T, D)
    if "padding" in form:
        mask = torch.zeros(B, T, dtype=torch.bool)
        mask[1] = True
        dead, name = (slice(1, 2), slice(None)), "key_padding_mask"
    else:
        mask = torch.zeros(T, T, dtype=torch.bool)
        mask[2] = True
        dead, name = (slice(None), slice(2, 3)), "attn_mask"
    typed = mask if "bool" in form else torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -INF)
    out, weights = ours(x, x, x, need_weights=need_weights, **{name: typed})
    assert_close(out[dead], ours.out_proj.bias.expand_as(out[dead]))
    assert weights is None or not weights[dead].any()
    assert all(torch.isfinite(g).all() for g in gradients(out, [x, *ours.parameters()]))
    alive = torch.ones(B, T, dtype=torch.bool)
    alive[dead] = False
    with torch.no_grad():
        expected, _ = torchs(x, x, x, need_weights=need_weights, **{name: typed})
    assert_close(out[alive], expected[alive])


LENGTHS = [([5, 2, 4], [7, 1, 3]), ([4, 4], [3, 3]), ([0, 3], [2, 4]), ([2, 3], [0, 4]), ([], [])]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("form", "kdim"), [("self", None), ("causal", None), ("cross", None), ("cross", 4)])
def test_packed_is_padded_on_real_tokens(lengths, form, kdim):
    ours, _ = twins(batch_first=True, kdim=kdim, vdim=kdim)
    layout = Layout.from_lengths(lengths[0])
    memory_layout = Layout.from_lengths(lengths[1]) if form == "cross" else layout
    x, memory = random(layout.total, D), random(memory_layout.total, kdim or D)
    padded = x.new_zeros(layout.batch, layout.max_length, D).masked_scatter(layout.mask()[:, :, None], x)
    shape = (layout.batch, memory_layout.max_length, kdim or D)
    keys = memory.new_zeros(shape).masked_scatter(memory_layout.mask()[:, :, None], memory)
    if form == "cross":
        actual = ours.packed(x, layout, memory, memory_layout)
    else:
        keys, memory = padded, x
        actual = ours.packed(x, layout, causal=form == "causal")
    mask = torch.ones(layout.max_length, layout.max_length).triu(1).bool() if form == "causal" else None
    expected, _ = ours(padded, keys, keys, key_padding_mask=~memory_layout.mask(), attn_mask=mask, need_weights=False)
    expected = pack(expected, layout)
    assert_close(actual, expected)
    leaves = list(dict.fromkeys([x, memory, *ours.parameters()]))
    for a, w in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
        assert_close(a, w)


def test_packed_refuses_the_extra_keys():
    layout = Layout.from_lengths([2])
    for settings in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ValueError, match="add_bias_kv and add_zero_attn must be False"):
            twins(**settings)[0].packed(random(2, D), layout)


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=list(OPTIONS))
def test_constructor_initial_values_and_checkpoints_are_torchs(settings):
    torch.manual_seed(3)
    ours = fastformer.MultiheadAttention(D, H, dropout=0.1, **settings)
    torch.manual_seed(3)
    torchs = nn.MultiheadAttention(D, H, dropout=0.1, **settings)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in torchs.state_dict().items())
    assert repr(ours) == repr(torchs)
    ours.load_state_dict(torchs.state_dict(), strict=True)
    torchs.load_state_dict(ours.state_dict(), strict=True)


def test_dropout_is_of_the_weights_and_the_weights_returned_are_those_applied():
    torch.manual_seed(2)
    ours = fastformer.MultiheadAttention(4, 1, dropout=0.5, bias=False, batch_first=True)
    with torch.no_grad():
        ours.in_proj_weight[8:] = torch.eye(4)
        ours.out_proj.weight.copy_(torch.eye(4))
    x, value = torch.randn(50, 4, 4), torch.eye(4).expand(50, 4, 4)
    out, weights = ours(x, x, value)
    assert_close(out, weights)
    kept = weights != 0
    assert 0.35 < kept.double().mean() < 0.65
    plain = ours.eval()(x, x, value)[1]
    assert_close(weights[kept], 2 * plain[kept])
    assert torch.equal(ours(x, x, value)[1], plain)
    ours.train()
    for need_weights in (True, False):
        torch.manual_seed(5)
        first = ours(x, x, value, need_weights=need_weights)[0]
        torch.manual_seed(5)
        assert torch.equal(ours(x, x, value, need_weights=need_weights)[0], first)
        assert not torch.equal(ours(x, x, value, need_weights=need_weights)[0], first)


x, u = torch.zeros(T, B, D), torch.zeros(T, D)
BAD = {
    "four dimensions": ((x[None], x[None], x[None]), {}),
    "batched query, unbatched key": ((x, u, u), {}),
    "unbatched query, batched key": ((u, x, x), {}),
    "width of the query": ((x[..., :4], x, x), {}),
    "width of key and value": ((x, x[..., :4], x[..., :4]), {}),
    "key and value lengths": ((x, x, x[:3]), {}),
    "batches": ((x, x[:, :1], x[:, :1]), {}),
    "key_padding_mask dimensions": ((x, x, x), {"key_padding_mask": torch.zeros(T).bool()}),
    "key_padding_mask batch": ((x, x, x), {"key_padding_mask": torch.zeros(3, T).bool()}),
    "key_padding_mask length": ((x, x, x), {"key_padding_mask": torch.zeros(B, 4).bool()}),
    "key_padding_mask dtype": ((x, x, x), {"key_padding_mask": torch.zeros(B, T).int()}),
    "attn_mask dimensions": ((x, x, x), {"attn_mask": torch.zeros(T).bool()}),
    "attn_mask shape": ((x, x, x), {"attn_mask": torch.zeros(T, 4).bool()}),
    "attn_mask batch": ((x, x, x), {"attn_mask": torch.zeros(B, T, T).bool()}),
    "attn_mask dtype": ((x, x, x), {"attn_mask": torch.zeros(T, T).int()}),
    "unbatched attn_mask": ((u, u, u), {"attn_mask": torch.zeros(2, T, T).bool()}),
    "dtypes": ((x.double(), x.double(), x.double()), {}),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_mistake_raises_what_torch_raises(name, need_weights):
    ours, torchs = twins(torch.float32)
    inputs, arguments = BAD[name]
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        torchs(*inputs, need_weights=need_weights, **arguments)
    with pytest.raises(wanted.type) as raised:
        ours(*inputs, need_weights=need_weights, **arguments)
    assert raised.type is wanted.type
    assert str(raised.value).strip()


@pytest.mark.parametrize("arguments", [(5, 2), (0, 1), (4, 0), (-4, 2)])
def test_a_bad_constructor_raises_what_torch_raises(arguments):
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        nn.MultiheadAttention(*arguments)
    with pytest.raises(wanted.type):
        fastformer.MultiheadAttention(*arguments)


def test_a_mask_that_learns_gets_its_gradient_beside_a_hint_and_padding():
    """torch takes the hint in place of the mask only where no keys are padding."""
    ours, torchs = twins()
    x, padding, found = random(T, B, D), torch.zeros(B, T, dtype=torch.float64), []
    padding[0, 3:] = -INF
    for module in (ours, torchs):
        mask = (
            torch.zeros(T, T, dtype=torch.float64).masked_fill(torch.ones(T, T).triu(1).bool(), -INF).requires_grad_()
        )
        hints = {"is_causal": True, "need_weights": False}
        out, _ = module(x, x, x, attn_mask=mask, key_padding_mask=padding, **hints)
        found.append(gradients(out, [mask])[0])
    assert found[1].any()
    assert_close(*found)


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("kdim", [None, 6])
def test_the_number_of_heads_may_be_set_afterwards(heads, kdim):
    torchs = nn.MultiheadAttention(8, 4, kdim=kdim, batch_first=True, dtype=torch.float64)
    ours = copy.deepcopy(torchs)
    fastformer.convert(ours)
    x, memory = random(2, 3, 8), random(2, 5, kdim or 8)
    keys = [(memory, random(2, 5, 8))] if kdim else [(x, x), (memory, memory)]
    torchs.num_heads = ours.num_heads = heads
    for key, value in keys:
        for given in ({}, {"need_weights": False}, {"key_padding_mask": torch.ones(2, key.shape[1]).triu(3).bool()}):
            found, expected = (module(x, key, value, **given) for module in (ours, torchs))
            assert_close(found[0], expected[0])
            assert found[1] is expected[1] is None or torch.allclose(found[1], expected[1])
    ours.num_heads = 3
    with pytest.raises(AssertionError, match="embed_dim 8 must be divisible by num_heads, 3"):
        ours(x, *keys[0])
