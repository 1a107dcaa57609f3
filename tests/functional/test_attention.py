"""functional.attention and attention_with_weights against a loop over queries, and SDPA where that is defined."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad, gradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fastformer
from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.functional.attention import spans
from fastformer.functional.attention.spans import SHORTEST
from fastformer.packing import Layout
from tests.functional.attention_forms import FORMS, INF, B, H, S, T, boolean, by_distance, naive, sinks
from tests.support.all_pairs import all_pairs, name
from tests.support.closeness import (
    assert_close,
    assert_derivatives,
    assert_dropout_rate,
    assert_formula,
    assert_same,
    gradients,
    random,
)


@pytest.fixture(autouse=True)
def _reference():
    with fastformer.backend("reference"):
        yield


def output(*x: Tensor, **rules: object) -> Tensor:
    """The output of attention_with_weights, without the weights."""
    return attention_with_weights(*x, **rules)[0]


both_ops = pytest.mark.parametrize("op", [attention, output], ids=["attention", "attention_with_weights"])
LEARNT = ("mask", "distance_bias", "sinks")


def with_leaves(op, rules, names, *x):
    """Call an op with q, k, v, and tensors in the place of rules of these names."""
    return op(*x[:3], **rules | dict(zip(names, x[3:], strict=True)))


@pytest.mark.parametrize(("form", "kv_heads", "op"), all_pairs(FORMS, [H, 2], ["whole", "in spans", "with weights"]))
def test_values_and_gradients_are_those_of_the_formula(form, kv_heads, op, monkeypatch):
    if op == "in spans":
        monkeypatch.setattr(spans, "SHORTEST", 0)
        monkeypatch.setattr(spans, "_LEAST_HIDDEN", 0)
        monkeypatch.setattr(spans, "_LEAST_HIDDEN_OF_MASKED", 0)
    rules = FORMS[form]()
    inputs = [random(B, H, T, 3), random(B, kv_heads, S, 3), random(B, kv_heads, S, 5 - kv_heads // 2)]
    names = [name for name in LEARNT if name in rules and rules[name].is_floating_point()]
    inputs += [rules[name] for name in names]
    if op == "with weights":
        formula, called = naive, attention_with_weights
    else:
        formula, called = (lambda *x, **more: naive(*x, **more)[0]), attention
    assert_formula(partial(with_leaves, formula, rules, names), inputs, partial(with_leaves, called, rules, names))


# Rules, and the shapes of those that are leaves.
SMALL = {
    "causal": ({"causal": True}, {}),
    "bool mask, dead row": ({"mask": torch.tensor([[True] * 4, [False] * 4, [True] * 4])}, {"sinks": (2,)}),
    "mask of heads and keys": ({"softcap": 0.7, "window": (1, 1)}, {"mask": (2, 1, 4)}),
    "distance_bias and sinks, causal, to the last key, first query dead": (
        {"causal": True, "alignment": "bottom_right", "key_lengths": torch.tensor([2])},
        {"distance_bias": (2, 9), "sinks": (2,)},
    ),
}


@pytest.mark.parametrize(("form", "kv_heads", "op"), all_pairs(SMALL, [1, 2], [attention, output]))
def test_first_and_second_derivative(form, kv_heads, op):
    """SDPA with torch's math backend, which alone has a second derivative on a CPU."""
    rules, leaves = SMALL[form]
    inputs = [random(1, 2, 3, 2), random(1, kv_heads, 4, 2), random(1, kv_heads, 4, 2)]
    inputs += [random(*shape) for shape in leaves.values()]
    with sdpa_kernel(SDPBackend.MATH):
        assert_derivatives(partial(with_leaves, op, rules, tuple(leaves)), inputs)


@pytest.mark.parametrize(
    ("rules", "sizes", "alignment", "op"),
    all_pairs(
        [{}, {"causal": True}, {"key_mask": True}, {"window": (1, 0)}, {"softcap": 1.0}, {"distance_bias": True}],
        [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 2, 0, 0)],
        ["top_left", "bottom_right"],
        [attention, output],
    ),
    ids=name,
)
def test_empty_sizes_give_empty_or_zero(rules, sizes, alignment, op):
    B, H, T, S = sizes
    inputs = [random(B, H, T, 3), random(B, H, S, 3), random(B, H, S, 2)]
    if "key_mask" in rules:
        rules = {"key_mask": torch.ones(B, S, dtype=torch.bool)}
    if "distance_bias" in rules:
        inputs += [random(H, 9), random(H)]
        rules = {"distance_bias": inputs[3], "sinks": inputs[4]}
    out = op(*inputs[:3], alignment=alignment, **rules)
    assert out.shape == (B, H, T, 2)
    assert not out.any()
    assert not any(x.any() for x in gradients(out, inputs))


@both_ops
def test_a_query_without_keys_gives_zero_and_changes_no_gradient(op):
    """A query without keys: output and gradient 0, and the gradients of keys and values are those without it."""
    q, k, v = random(1, 1, 2, 4), random(1, 1, 3, 4), random(1, 1, 3, 4)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    out = op(q, k, v, mask)
    assert not out[:, :, 1].any()
    assert_same(out[:, :, :1], op(q[:, :, :1], k, v, mask[:1]), [q, k, v])
    out = op(q, k, v, mask)[:, :, 1]
    assert not any(x.any() for x in gradients(out, [q, k, v]))


@pytest.fixture
def masks_of_sdpa(monkeypatch):
    """The masks that torch's SDPA gets."""
    seen, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, **more: seen.append(x[3]) or sdpa(*x, **more))
    return seen


@pytest.mark.parametrize("rules", [{"mask": random(T, 1)}, {"query_lengths": torch.tensor([T, 2, 0])}], ids=list)
def test_a_mask_of_queries_reaches_sdpa_with_all_keys(rules, masks_of_sdpa):
    """On a GPU SDPA refuses a mask that is broadcast over the keys."""
    attention(*(random(B, H, n, 3) for n in (T, S, S)), **rules)
    (mask,) = masks_of_sdpa
    assert mask.shape[-1] == S
    assert mask.stride(-1) == 1


PLACES, LENGTHS = torch.arange(SHORTEST), torch.tensor([50, 40, 0])
REAL = LENGTHS[:, None] > PLACES  # [B, S]


@pytest.mark.parametrize(
    ("calls", "rules"),
    [
        (2, {"query_lengths": LENGTHS, "key_lengths": LENGTHS}),
        (2, {"key_mask": REAL, "window": (9, 9)}),
        (2, {"key_mask": REAL.flip(1), "causal": True}),
        (1, {"key_mask": REAL & (PLACES != 5)}),  # a gap
        (1, {"key_lengths": LENGTHS + 70}),  # fewer than 48 hidden keys in the mean
    ],
    ids=["lengths", "right", "left", "gap", "little"],
)
def test_padding_of_long_sequences_costs_nothing(calls, rules, masks_of_sdpa):
    """Each row with keys is a call of SDPA, which gets no padding, and no mask but for a window."""
    q, k, v = (random(B, H, SHORTEST, 3) for _ in range(3))
    expected = output(q, k, v, **rules)
    real = rules["key_mask"] if "key_mask" in rules else rules["key_lengths"][:, None] > PLACES
    out = attention(q, *(x.masked_fill(~real[:, None, :, None], torch.nan) for x in (k, v)), **rules)
    assert_close(out, expected)
    assert len(masks_of_sdpa) == calls
    assert any(mask is not None for mask in masks_of_sdpa) == ("window" in rules or calls == 1)


def test_padding_that_only_the_mask_states_is_not_read_beside_lengths():
    q, k, v = (random(B, H, SHORTEST, 3) for _ in range(3))
    mask = (PLACES < 30)[None, None, None] | (torch.arange(B) > 0)[:, None, None, None]  # [B, 1, 1, S]
    expected = output(q, k, v, mask, key_lengths=LENGTHS)
    for x in (k, v):
        x.data[0, :, 30:] = torch.nan
    assert_close(attention(q, k, v, mask, key_lengths=LENGTHS), expected)


def test_rows_without_keys_leave_gradients_of_zero():
    inputs = [*(random(B, H, SHORTEST, 3) for _ in range(3)), random(H), random(SHORTEST, SHORTEST)]
    out = attention(*inputs[:3], inputs[4], sinks=inputs[3], key_lengths=torch.zeros(B, dtype=torch.int64))
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("rules", [{"mask": random(T, S)}, {"distance_bias": random(H, 2 * S - 1)}], ids=list)
def test_a_mask_that_is_trained_alone_does_without_sdpa(rules, masks_of_sdpa):
    """On a GPU SDPA's backward pass lacks what only a gradient of q, k or v makes its forward pass keep."""
    x, trained = [random(B, H, n, 3) for n in (T, S, S)], list(rules.values())
    expected = gradients(attention(*x, **rules), trained)
    assert masks_of_sdpa.pop().requires_grad
    assert_close(gradients(attention(*(y.detach() for y in x), **rules), trained), expected)
    assert not masks_of_sdpa


def test_a_bias_that_is_finite_hides_nothing():
    q, k, ones = (random(B, H, n, 8, dtype=torch.bfloat16) for n in (T, S, S))
    ones = torch.ones_like(ones)
    low = torch.full((H, 2 * S - 1), torch.finfo(torch.float32).min)
    assert_close(attention(q, k, ones, distance_bias=low), ones[:, :, :T], roundings=8)


def test_the_gradient_of_the_bias_is_added_up_in_fp32():
    """In bf16, 1,024 addends of 1 add up to 256."""
    n = 1024
    q, k = torch.zeros(1, 1, n, 1, dtype=torch.bfloat16), torch.zeros(1, 1, n, 1, dtype=torch.bfloat16)
    v = torch.full((1, 1, n, 1), n / 2, dtype=torch.bfloat16)
    v[:, :, 0] = -n / 2
    bias = torch.zeros(1, 2 * n - 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.full((n, n), -INF)
    hidden[:, 0] = hidden.diagonal()[:] = 0  # each query sees itself and the first key, half each
    (gradient,) = torch.autograd.grad(attention(q, k, v, hidden.bfloat16(), distance_bias=bias).sum(), bias)
    assert gradient[0, n - 1] == n / 4 * (n - 1)  # 1/4 of the difference of the two values, of all but the first query


@pytest.mark.slow
def test_attention_compiles_without_a_break():
    inputs = [random(2, heads, 5, 8, dtype=torch.float32) for heads in (4, 2, 2)]
    inputs += [random(4, 13, dtype=torch.float32), random(4, dtype=torch.float32)]
    mask = boolean(T, T)

    def call(q, k, v, bias, sink):
        rules = {"causal": True, "alignment": "bottom_right", "distance_bias": bias, "sinks": sink, "window": (3, 1)}
        lengths = {"query_lengths": torch.tensor([5, 4]), "key_lengths": torch.tensor([5, 2])}
        return output(q, k, v, mask, softcap=1.5, **rules, **lengths)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*inputs), call(*inputs), inputs)


def test_dropout_is_of_the_weights_at_its_rate_and_scale():
    q, k, v = random(2, 4, 40, 8), random(2, 4, 50, 8), torch.eye(50, dtype=torch.float64).expand(2, 4, 50, 50)
    plain = attention(q, k, v)  # v is the identity, so the output is the weights
    p = 0.3
    torch.manual_seed(1)
    dropped = attention(q, k, v, dropout_p=p)
    assert_dropout_rate(dropped == 0, p)
    remaining = dropped != 0
    assert_close(
        (dropped / plain)[remaining], torch.full_like(plain[remaining], 1 / (1 - p)), roundings=1e12
    )  # 16 bits of p
    torch.manual_seed(1)
    again, weights = attention_with_weights(q, k, v, dropout_p=p)
    assert_close([again, weights], [dropped, dropped])  # the weights returned are those applied
    assert not attention(q, k, v, dropout_p=1.0).any()
    windowed = attention(q, k, v, window=(2, 1), softcap=1.0, dropout_p=p)
    assert not windowed.triu(2).any()
    assert not windowed.tril(-3).any()


def test_dropout_leaves_sinks_alone():
    """The weights that stay are those of attention with sinks, times their scale."""
    q, k = random(2, 2, 40, 8, grad=False), random(2, 2, 50, 8, grad=False)
    rules = {"sinks": sinks(2), "distance_bias": by_distance(50, 2)}
    _, whole = attention_with_weights(q, k, k, **rules)
    _, dropped = attention_with_weights(q, k, k, dropout_p=0.25, **rules)
    remaining = dropped != 0
    assert_dropout_rate(~remaining, 0.25)
    assert_close(dropped[remaining], whole[remaining] / 0.75)


def test_the_gradient_uses_the_dropout_mask_of_the_forward_pass():
    def seeded(*x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention(*x, dropout_p=0.4, causal=True)

    assert gradcheck(seeded, (random(1, 2, 3, 2), random(1, 2, 4, 2), random(1, 2, 4, 1)))


@pytest.mark.parametrize(
    ("numbers", "options", "op"),
    all_pairs(
        [
            (torch.bfloat16, torch.finfo(torch.float32).min, False),
            (torch.bfloat16, torch.finfo(torch.float32).min, True),
            (torch.float16, -1e9, False),
            (torch.float16, -1e9, True),
            (torch.float32, -1e300, False),  # autocast does not compute in float32
        ],
        [{}, {"dropout_p": 0.5}, {"softcap": 3.0}],
        [attention, output],
    ),
    ids=name,
)
def test_what_a_query_sees_is_decided_in_the_dtype_of_the_scores(numbers, options, op):
    dtype, lowest, autocast = numbers
    inputs = [random(1, 2, 4, 8, dtype=torch.float32 if autocast else dtype) for _ in range(3)]
    mask = torch.zeros(4, 4, dtype=torch.float64 if dtype == torch.float32 else torch.float32)
    mask[1] = lowest  # -inf in dtype
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = op(*inputs, mask, **options)
    assert not out[:, :, 1].any()
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :, 1].any()


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-60])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_causal_call_takes_any_scale(scale, dtype):
    """On a CPU, SDPA multiplies the -inf of what lies ahead with the scale: NaN where that is not above 0."""
    q, k, v = (random(1, 2, length, 4, dtype=dtype) for length in (3, 5, 5))
    out = attention(q, k, v, causal=True, scale=scale)
    assert torch.equal(out, attention(q, k, v, torch.ones(3, 5, dtype=torch.bool).tril(), scale=scale))
    assert all(x.isfinite().all() for x in (out, *gradients(out, [q, k, v])))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own, of every linearize
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_derivatives_in_forward_mode_under_a_dispatch_mode(form):
    """A fault here is the end of the process; torch.func.linearize makes its program under such a mode."""
    layout = Layout.from_lengths([3, 2])

    def attend(x: Tensor) -> Tensor:
        return output(x, x, x) if form == "padded" else packed_attention(x, x, x, layout, causal=True)

    x = random(2, 2, 3, 4) if form == "padded" else random(5, 2, 4)
    expected = torch.func.jvp(attend, (x,), (x,))[1]
    with FlopCounterMode(display=False), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(attend(forward_ad.make_dual(x, x))).tangent
    assert_close([tangent, torch.func.linearize(attend, x)[1](x)], [expected, expected])
