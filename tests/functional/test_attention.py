"""functional.attention and attention_with_weights against a loop over queries, and SDPA where that is defined."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.functional.attention.arguments import check_attention
from fastformer.functional.attention.rules import AttentionRules
from fastformer.packing import Layout
from tests.functional.attention_forms import FORMS, INF, B, H, S, T, additive, cast, naive
from tests.support.closeness import assert_close, gradients, random


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_values_and_gradients(form, kv_heads):
    arguments = FORMS[form]()
    inputs = [random(B, H, T, 3), random(B, kv_heads, S, 3), random(B, kv_heads, S, 2)]
    expected, expected_weights = naive(*inputs, **arguments)
    expected_gradients = gradients(expected, inputs)
    for dtype in (torch.float64, torch.float32):
        x = [t.detach().to(dtype).requires_grad_() for t in inputs]
        typed = cast(arguments, dtype)
        out = attention(*x, **typed)
        with_weights, weights = attention_with_weights(*x, **typed)
        assert_close(weights, expected_weights.to(dtype))
        for result in (out, with_weights):
            assert_close(result, expected.to(dtype))
            for actual, wanted in zip(gradients(result, x), expected_gradients, strict=True):
                assert_close(actual, wanted.to(dtype))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 3, 1, 130, 17), (2, 1, 67, 65, 33)])
@pytest.mark.parametrize("causal", [False, True])
def test_against_sdpa_on_shapes_of_other_blocks(shape, causal):
    """One element; one query, as in decoding; lengths and head size beyond a block of 64 or 32, no multiple of it."""
    B, H, T, S, K = shape
    inputs = [random(B, H, T, K), random(B, H, S, K), random(B, H, S, K)]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    out = attention(*inputs, causal=causal)
    assert_close(out, expected)
    for actual, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "form", ["causal with lengths", "additive [B, H, T, S], dead row", "bool [T, S]", "softcap, additive, dead row"]
)
def test_half_precision_with_masks_of_either_precision(dtype, form):
    arguments = FORMS[form]()
    inputs = [random(B, H, T, 8, dtype=dtype), random(B, H, S, 8, dtype=dtype), random(B, H, S, 8, dtype=dtype)]
    expected, _ = naive(*(x.double() for x in inputs), **arguments)
    for typed in (arguments, cast(arguments, torch.float32), cast(arguments, dtype)):
        assert_close(attention(*inputs, **typed), expected.to(dtype), roundings=8)
        assert_close(attention_with_weights(*inputs, **typed)[0], expected.to(dtype), roundings=8)


SMALL = {
    "plain": lambda: {},
    "causal": lambda: {"causal": True},
    "bottom_right, first query dead": lambda: {
        "causal": True,
        "alignment": "bottom_right",
        "key_lengths": torch.tensor([2]),
    },
    "key_lengths": lambda: {"key_lengths": torch.tensor([1])},
    "no keys": lambda: {"key_lengths": torch.tensor([0])},
    "query_lengths": lambda: {"query_lengths": torch.tensor([1])},
    "additive": lambda: {"mask": additive(3, 4, dead=True)},
    "window, last query dead": lambda: {"window": (0, 1), "key_lengths": torch.tensor([2])},
    "softcap": lambda: {"softcap": 0.7, "mask": additive(3, 4, dead=True)},
}


@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_first_and_second_derivative(form, kv_heads):
    arguments = SMALL[form]()
    inputs = (random(1, 2, 3, 2), random(1, kv_heads, 4, 2), random(1, kv_heads, 4, 1))
    for function in (attention, lambda *x, **y: attention_with_weights(*x, **y)[0]):
        assert gradcheck(lambda *x, function=function: function(*x, **arguments), inputs)
        assert gradgradcheck(lambda *x, function=function: function(*x, **arguments), inputs)


@pytest.mark.parametrize("shape", [(3, 4), (2, 1, 4), (1, 1, 3, 1)])
def test_derivatives_of_an_additive_mask(shape):
    inputs = (random(1, 2, 3, 2), random(1, 2, 4, 2), random(1, 2, 4, 1), random(*shape))
    for function in (attention, lambda *x, **y: attention_with_weights(*x, **y)[0]):
        for arguments in ({}, {"softcap": 0.7, "window": (1, 1)}):
            call = lambda *x, f=function, y=arguments: f(*x, key_lengths=torch.tensor([3]), **y)  # noqa: E731
            assert gradcheck(call, inputs)
            assert gradgradcheck(call, inputs)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 2, 0, 0)])
@pytest.mark.parametrize(
    "arguments", [{}, {"causal": True}, {"key_mask": True}, {"window": (1, 0)}, {"softcap": 1.0}], ids=str
)
def test_empty_sizes_give_empty_or_zero(sizes, arguments):
    B, H, T, S = sizes
    if "key_mask" in arguments:
        arguments = {"key_mask": torch.ones(B, S, dtype=torch.bool)}
    inputs = [random(B, H, T, 3), random(B, H, S, 3), random(B, H, S, 2)]
    for out in (attention(*inputs, **arguments), attention_with_weights(*inputs, **arguments)[0]):
        assert_close(out, torch.zeros(B, H, T, 2, dtype=torch.float64) if S == 0 else out)
        assert all(torch.isfinite(g).all() for g in gradients(out, inputs))


def test_a_dead_query_moves_nothing():
    """A query without keys: output and gradient 0, and the gradients of keys and values are those without it."""
    q, k, v = random(1, 1, 2, 4), random(1, 1, 3, 4), random(1, 1, 3, 4)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    for function in (attention, lambda *x: attention_with_weights(*x)[0]):
        out = function(q, k, v, mask)
        assert not out[:, :, 1].any()
        dq, dk, dv = gradients(out, [q, k, v])
        assert not dq[:, :, 1].any()
        only = function(q[:, :, :1], k, v, mask[:1])
        direction = torch.randn(1, 1, 2, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)[:, :, :1]
        for actual, wanted in zip((dk, dv), torch.autograd.grad(only, [k, v], direction), strict=True):
            assert_close(actual, wanted)


def test_as_many_queries_as_keys_but_not_in_each_sequence():
    x = [random(2, 2, 5, 4) for _ in range(3)]
    rules = {"query_lengths": torch.tensor([5, 3]), "key_lengths": torch.tensor([2, 5])}
    for more in ({"causal": True}, {"window": (1, 1)}, {"causal": True, "key_lengths": None}):
        arguments = {"alignment": "bottom_right", **rules, **more}
        assert_close(attention(*x, **arguments), naive(*x, **arguments)[0])


@pytest.mark.parametrize("softcap", [5e-324, 1e-31, 1e31, 1.7e308])
def test_a_softcap_that_fp32_cannot_divide_by_is_refused(softcap):
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="softcap must lie between 1e-30 and 1e\\+30"):
        attention(q, q, q, softcap=softcap)
    for allowed in (1e-30, 1e30):
        assert attention(q, q, q, softcap=allowed).isfinite().all()


def test_ways_to_say_the_same():
    q, k, v = random(2, 2, 5, 4), random(2, 2, 7, 4), random(2, 2, 7, 4)
    assert torch.equal(attention(q, k, v, window=(None, 0)), attention(q, k, v, causal=True))
    assert torch.equal(attention(q, k, v, window=(7, 0)), attention(q, k, v, causal=True))
    assert torch.equal(attention(q, k, v, window=(2, 9), causal=True), attention(q, k, v, window=(2, 0)))
    # The checks turn each into one form, which the kernels rely on.
    rules = AttentionRules(causal=True, window=(2, 3), alignment="bottom_right", softcap=1)
    checked = check_attention(q, k, v, rules)
    assert (checked.window, checked.alignment, checked.softcap) == ((2, 0), "bottom_right", 1.0)
    assert check_attention(q, q, q, rules).alignment == "top_left"
    assert check_attention(q, k, v, AttentionRules(alignment="bottom_right", window=(7, 7))).alignment == "top_left"
    assert check_attention(q, k, v, AttentionRules(mask=torch.zeros(7))).mask.shape == (1, 7)
    # Lengths that have no sign, where a difference of lengths has one.
    lengths = {"query_lengths": torch.tensor([5, 3]), "key_lengths": torch.tensor([2, 7])}
    narrow = {name: x.to(torch.uint8) for name, x in lengths.items()}
    expected = attention(q, k, v, causal=True, alignment="bottom_right", **lengths)
    assert torch.equal(attention(q, k, v, causal=True, alignment="bottom_right", **narrow), expected)


@pytest.mark.parametrize("function", [attention, lambda *x, **y: attention_with_weights(*x, **y)[0]])
def test_compiles_without_a_break(function):
    arguments = {
        "mask": additive(1, T, S, dead=True).float(),
        "causal": True,
        "alignment": "bottom_right",
        "window": (3, 1),
        "query_lengths": torch.tensor([5, 4, 5]),
        "key_lengths": torch.tensor([7, 6, 3]),
        "key_mask": torch.rand(B, S) < 0.7,
    }
    inputs = [random(B, H, T, 8, dtype=torch.float32) for _ in range(1)]
    inputs += [random(B, 2, S, 8, dtype=torch.float32) for _ in range(2)]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for more in ({}, {"softcap": 1.5}):
        out, expected = compiled(*inputs, **arguments, **more), function(*inputs, **arguments, **more)
        assert_close(out, expected)
        for actual, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("more", ["nothing", "distance_bias", "sinks", "mask"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.9, 3e-10], ids=["NaN", "inf", "near the largest", "1e29"])
def test_whatever_lies_in_padding_reaches_nothing(dtype, more, value):
    """Nor numbers whose products have no value, of both signs, so that they add up to 0."""
    inputs = [random(2, 2, 4, 8).to(dtype) for _ in range(3)]
    lengths, value = torch.tensor([4, 2]), value * torch.finfo(dtype).max
    arguments = {
        "nothing": {},
        "distance_bias": {"distance_bias": random(2, 7).float().requires_grad_()},
        "sinks": {"sinks": random(2).float().requires_grad_()},
        "mask": {"mask": random(4, 4).to(dtype).requires_grad_()},
    }[more]
    found = []
    for filling in (0.0, value):
        signs = torch.tensor([1.0, -1.0] * 4).to(dtype)
        leaves = [x.clone() for x in inputs]
        for x in leaves:
            x[1, :, 2:] = filling * signs
        leaves = [*(x.requires_grad_() for x in leaves), *arguments.values()]
        out = attention(*leaves[:3], query_lengths=lengths, key_lengths=lengths, **arguments)
        found.append([out, *gradients(out, leaves)])
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


def test_dropout_of_the_weights():
    q, k, v = random(2, 4, 40, 8), random(2, 4, 50, 8), torch.eye(50, dtype=torch.float64).expand(2, 4, 50, 50)
    plain = attention(q, k, v)  # v is the identity, so the output is the weights
    p = 0.3
    torch.manual_seed(1)
    dropped = attention(q, k, v, dropout_p=p)
    n, zeros = dropped.numel(), int((dropped == 0).sum())
    assert abs(zeros - n * p) < 5 * math.sqrt(n * p * (1 - p))
    kept = dropped != 0
    assert_close((dropped / plain)[kept], torch.full_like(plain[kept], 1 / (1 - p)), roundings=1e12)  # 16 bits of p
    torch.manual_seed(1)
    again, weights = attention_with_weights(q, k, v, dropout_p=p)
    assert_close(again, dropped)
    assert_close(weights, dropped)  # the weights returned are those applied
    assert not attention(q, k, v, dropout_p=1.0).any()
    causal = attention(q, k, v, causal=True, dropout_p=p)
    assert not causal.triu(1).any()
    windowed = attention(q, k, v, window=(2, 1), softcap=1.0, dropout_p=p)
    assert not windowed.triu(2).any()
    assert not windowed.tril(-3).any()


def test_the_gradient_uses_the_mask_of_the_forward_pass():
    inputs = (random(1, 2, 3, 2), random(1, 2, 4, 2), random(1, 2, 4, 1))

    def seeded(*x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention(*x, dropout_p=0.4)

    assert gradcheck(seeded, inputs)


q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
BAD = [
    ({"q": q[0]}, ValueError, r"q must be of shape \[batch, heads, length, head size\], not \[4, 3, 8\]"),
    ({"k": k[:1]}, ValueError, "q, k and v must have the same batch: 2, 1, 2"),
    ({"v": k[:, :, :4]}, ValueError, "k and v must have the same length, not 5 and 4"),
    ({"v": k[:, :1]}, ValueError, "k and v must have the same number of heads, not 2 and 1"),
    ({"k": k[..., :4]}, ValueError, "q and k must have the same head size, not 8 and 4"),
    ({"q": q[:, :3]}, ValueError, r"the heads of q \(3\) must be a multiple of those of k \(2\)"),
    ({"k": k[:, :0], "v": k[:, :0]}, ValueError, r"must be a multiple of those of k \(0\)"),
    ({"mask": torch.zeros(5, 3)}, ValueError, r"mask must be broadcastable to \[2, 4, 3, 5\], not of shape \[5, 3\]"),
    ({"mask": torch.zeros(3, 5).int()}, TypeError, "mask must be bool or floating point, not torch.int32"),
    ({"mask": torch.zeros(1, 2, 4, 3, 5)}, ValueError, "mask must be broadcastable"),
    ({"key_mask": torch.zeros(2, 5)}, TypeError, "key_mask must be bool, not torch.float32"),
    ({"key_mask": torch.zeros(2, 3).bool()}, ValueError, r"key_mask must be of shape \[2, 5\], not \[2, 3\]"),
    ({"key_lengths": torch.tensor([6, 1])}, ValueError, "key_lengths must lie between 0 and the length of k, 5: 6"),
    ({"query_lengths": torch.tensor([-1, 1])}, ValueError, "query_lengths must lie between 0 and the length of q, 3"),
    ({"key_lengths": torch.tensor([1.0, 2.0])}, TypeError, "key_lengths must be integers, not torch.float32"),
    ({"key_lengths": [1, 2]}, TypeError, "key_lengths must be a Tensor, not list"),
    ({"query_lengths": (1, 2)}, TypeError, "query_lengths must be a Tensor, not tuple"),
    (
        {"key_lengths": torch.tensor([1, 2**63 + 5], dtype=torch.uint64)},
        ValueError,
        "key_lengths must lie between 0 and the length of k, 5: 9223372036854775813",
    ),
    ({"key_lengths": torch.tensor([1])}, ValueError, r"key_lengths must be of shape \[2\], not \[1\]"),
    ({"alignment": "left"}, ValueError, "alignment must be one of top_left, bottom_right, not 'left'"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, not 1.5"),
    ({"dropout_p": math.nan}, ValueError, "dropout_p must be between 0 and 1, not nan"),
    ({"window": 3}, TypeError, r"window must be a tuple \(left, right\), not int"),
    ({"window": (1, 2, 3)}, ValueError, r"window must be a tuple \(left, right\), not of 3 elements"),
    ({"window": (1.0, None)}, TypeError, "window must hold integers or None, not 1.0"),
    ({"window": (None, True)}, TypeError, "window must hold integers or None, not True"),
    ({"window": (0, -1)}, ValueError, "window must not hold negative numbers: -1"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive and finite, not 0.0"),
    ({"softcap": -2}, ValueError, "softcap must be positive and finite, not -2"),
    ({"softcap": INF}, ValueError, "softcap must be positive and finite, not inf"),
    ({"softcap": math.nan}, ValueError, "softcap must be positive and finite, not nan"),
    ({"softcap": True}, TypeError, "softcap must be a number, not bool"),
    ({"softcap": "1"}, TypeError, "softcap must be a number, not str"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=[message for *_, message in BAD])
@pytest.mark.parametrize("function", [attention, attention_with_weights])
def test_bad_arguments(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(**{"q": q, "k": k, "v": k, **arguments})


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"softcap": 3.0}, {"weights": True}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "lowest"),
    [(torch.bfloat16, torch.finfo(torch.float32).min), (torch.float16, -1e9), (torch.float32, -1e300)],
    ids=str,
)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_query_sees_is_decided_in_the_dtype_of_the_scores(dtype, lowest, options, autocast):
    if autocast and dtype == torch.float32:
        pytest.skip("autocast does not compute in float32")
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=torch.float32 if autocast else dtype) for _ in range(3))
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    mask = torch.zeros(4, 4, dtype=wide)
    mask[1] = lowest  # -inf in dtype
    inputs = [x.requires_grad_() for x in (q, k, v)]
    op = attention_with_weights if options.get("weights") else attention
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = op(*inputs, mask, **{name: x for name, x in options.items() if name != "weights"})
    out = out[0] if isinstance(out, tuple) else out
    assert not out[:, :, 1].any()
    grads = torch.autograd.grad(out.float().sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :, 1].any()


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-60])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_causal_call_takes_any_scale(scale, dtype):
    """On a CPU, SDPA multiplies the -inf of what lies ahead with the scale: NaN where that is not above 0."""
    q, k, v = (torch.randn(1, 2, length, 4, dtype=dtype, requires_grad=True) for length in (3, 5, 5))
    out = attention(q, k, v, causal=True, scale=scale)
    wanted = attention(q, k, v, torch.ones(3, 5, dtype=torch.bool).tril(), scale=scale)
    assert torch.equal(out, wanted)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(x).all() for x in gradients(out, [q, k, v]))


def test_the_hessian_is_that_of_the_plain_formula():
    q, k, v = (random(1, 1, 3, 2, grad=False) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # whose forward derivative torch knows
        actual = torch.func.hessian(lambda x: (attention(x, k, v, causal=True) ** 3).sum())(q)
    assert_close(actual, torch.func.hessian(lambda x: (attention_with_weights(x, k, v, causal=True)[0] ** 3).sum())(q))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own, of every linearize
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_derivatives_in_forward_mode_while_a_mode_looks_on(form):
    """A fault here is the end of the process; torch.func.linearize makes its program under such a mode."""
    layout = Layout.from_lengths([3, 2])

    def attend(x: Tensor) -> Tensor:
        if form == "padded":
            return attention_with_weights(x, x, x)[0]
        return packed_attention(x, x, x, layout, causal=True)

    x = random(2, 2, 3, 4) if form == "padded" else random(5, 2, 4)
    expected = torch.func.jvp(attend, (x,), (x,))[1]
    with FlopCounterMode(display=False), forward_ad.dual_level():
        found = forward_ad.unpack_dual(attend(forward_ad.make_dual(x, x))).tangent
    assert found is not None
    assert_close(found, expected)
    assert_close(torch.func.linearize(attend, x)[1](x), expected)
