"""distance_bias and sinks of attention, on the reference: values, all gradients, and who else must know of them."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.functional.attention import packed_reference
from fastformer.packing import Layout
from tests.functional.attention_forms import FORMS, INF, B, H, S, T, by_distance, cast, naive, sinks
from tests.support.closeness import assert_close, gradients, random

OURS = [name for name in FORMS if "distance" in name or "sinks" in name]


def leaves(arguments: dict, dtype: torch.dtype = torch.float64) -> tuple[dict, list[Tensor]]:
    """The arguments, and those of them that have a gradient."""
    typed = cast(arguments, dtype)
    found = [typed[name].requires_grad_() for name in ("distance_bias", "sinks") if name in typed]
    return typed, found


@pytest.mark.parametrize("form", OURS)
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_gradients_of_bias_and_sinks(form, kv_heads):
    arguments = FORMS[form]()
    inputs = [random(B, H, T, 3), random(B, kv_heads, S, 3), random(B, kv_heads, S, 2)]
    given, wanted = leaves({name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()})
    expected = gradients(naive(*inputs, **given)[0], [*inputs, *wanted])
    for dtype in (torch.float64, torch.float32):
        typed, ours = leaves({name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}, dtype)
        x = [t.detach().to(dtype).requires_grad_() for t in inputs]
        for function in (attention, lambda *x, **y: attention_with_weights(*x, **y)[0]):
            for actual, reference in zip(gradients(function(*x, **typed), [*x, *ours]), expected, strict=True):
                assert_close(actual, reference.to(dtype))


SMALL = {
    "bias": {},
    "causal, to the last key": {"causal": True, "alignment": "bottom_right", "key_lengths": torch.tensor([2])},
    "window, softcap": {"window": (1, 1), "softcap": 0.7, "key_lengths": torch.tensor([3])},
    "no keys": {"key_lengths": torch.tensor([0])},
    "dead row": {"mask": torch.tensor([[True] * 4, [False] * 4, [True] * 4])},
}


@pytest.mark.parametrize("form", SMALL)
@pytest.mark.parametrize("given", [(True, False), (False, True), (True, True)], ids=["bias", "sinks", "both"])
def test_first_and_second_derivative(form, given):
    inputs = [random(1, 2, 3, 2), random(1, 2, 4, 2), random(1, 2, 4, 1)]
    names = [name for name, wanted in zip(("distance_bias", "sinks"), given, strict=True) if wanted]
    inputs += [{"distance_bias": random(2, 9), "sinks": random(2)}[name] for name in names]
    for function in (attention, lambda *x, **y: attention_with_weights(*x, **y)[0]):

        def call(*x, function=function):
            return function(*x[:3], **SMALL[form], **dict(zip(names, x[3:], strict=True)))

        assert gradcheck(call, inputs)
        assert gradgradcheck(call, inputs)


def test_alibi_is_its_formula():
    """Press et al. 2022, figure 3: -slope * (t - s) is added; the slopes of 8 heads are 1/2 ... 1/256."""
    q, k, v = random(1, 8, 6, 4), random(1, 8, 6, 4), random(1, 8, 6, 4)
    slopes = 2.0 ** -torch.arange(1, 9, dtype=torch.float64)
    distances = torch.arange(-9, 10, dtype=torch.float64)
    bias = slopes[:, None] * torch.where(distances > 0, -INF, distances)  # the future is hidden by it, too
    written = torch.tensor([[s - t if s <= t else -INF for s in range(6)] for t in range(6)], dtype=torch.float64)
    expected = attention(q, k, v, slopes[:, None, None] * written)
    assert_close(attention(q, k, v, distance_bias=bias), expected)
    assert_close(attention(q, k, v, distance_bias=bias.clamp(min=-99), causal=True), expected)


def test_a_step_of_decoding_is_the_last_row():
    q, k, v = random(2, 2, 6, 4), random(2, 2, 6, 4), random(2, 2, 6, 4)
    given = {"distance_bias": by_distance(9, 2), "sinks": sinks(2), "causal": True}
    whole = attention(q, k, v, **given)
    assert_close(attention(q[:, :, 4:], k, v, alignment="bottom_right", **given), whole[:, :, 4:])
    lengths = {"key_lengths": torch.tensor([3, 6])}
    step = attention(torch.stack([q[0, :, 2:3], q[1, :, 5:]]), k, v, alignment="bottom_right", **given, **lengths)
    assert_close(step, torch.stack([whole[0, :, 2:3], whole[1, :, 5:]]))


def test_weights_and_sinks_add_up_to_one():
    q, k, v = random(2, 3, 5, 4), random(2, 3, 7, 4), random(2, 3, 7, 4)
    plain, weights = attention_with_weights(q, k, v)
    logits = torch.matmul(q, k.transpose(-1, -2)) / 2
    sink = torch.tensor([-INF, 0.5, 60.0], dtype=torch.float64)
    out, sunk = attention_with_weights(q, k, v, sinks=sink)
    share = torch.sigmoid(logits.logsumexp(-1, keepdim=True) - sink[:, None, None])
    assert_close(sunk, weights * share)
    assert_close(out, plain * share)
    assert_close(out[:, 0], plain[:, 0])


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 2, 0, 0)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_empty_sizes_give_empty_or_zero(sizes, alignment):
    B, H, T, S = sizes
    inputs = [random(B, H, T, 3), random(B, H, S, 3), random(B, H, S, 2), random(H, 9), random(H)]
    for function in (attention, lambda *x, **y: attention_with_weights(*x, **y)[0]):
        out = function(*inputs[:3], distance_bias=inputs[3], sinks=inputs[4], alignment=alignment)
        assert out.shape == (B, H, T, 2)
        assert not out.any() or S > 0
        assert not any(g.any() for g in gradients(out, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_bias_and_sinks_of_either(dtype):
    """What is finite in the bias hides nothing, whatever the dtype of the scores."""
    inputs = [random(B, H, T, 8, dtype=dtype), random(B, H, S, 8, dtype=dtype), random(B, H, S, 8, dtype=dtype)]
    # Of so few bits that all dtypes have them.
    given = {"distance_bias": (by_distance() * 8).round() / 8, "sinks": (sinks() * 8).round() / 8}
    expected, _ = naive(*(x.double() for x in inputs), **given)
    for typed in (given, cast(given, torch.float32), cast(given, dtype)):
        assert_close(attention(*inputs, **typed), expected.to(dtype), roundings=8)
    low = torch.full((H, 2 * S - 1), torch.finfo(torch.float32).min)
    ones = torch.ones_like(inputs[2])
    assert_close(attention(*inputs[:2], ones, distance_bias=low), ones[:, :, :T], roundings=8)


def test_the_gradient_of_the_bias_is_added_up_in_fp32():
    """In bf16, 1,024 addends of 1 add up to 256."""
    n = 1024
    q, k = torch.zeros(1, 1, n, 1, dtype=torch.bfloat16), torch.zeros(1, 1, n, 1, dtype=torch.bfloat16)
    v = torch.full((1, 1, n, 1), n / 2, dtype=torch.bfloat16)
    v[:, :, 0] = -n / 2
    bias = torch.zeros(1, 2 * n - 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.full((n, n), -INF)
    hidden[:, 0] = hidden.diagonal()[:] = 0  # each query sees itself and the first key, half each
    (found,) = torch.autograd.grad(attention(q, k, v, hidden.bfloat16(), distance_bias=bias).sum(), bias)
    assert found[0, n - 1] == n / 4 * (n - 1)  # 1/4 of the difference of the two values, of all but the first query


PACKED = [
    {"distance_bias": True},
    {"distance_bias": True, "alignment": "bottom_right", "causal": True},
    {"sinks": True},
    {"distance_bias": True, "sinks": True, "window": (2, 1), "softcap": 0.9, "alignment": "bottom_right"},
]


@pytest.mark.parametrize(
    "lengths", [([3, 1, 5], [2, 6, 1]), ([0, 4, 0], [2, 0, 1]), ([70, 2], [5, 66]), ([4, 4], [4, 4])]
)
@pytest.mark.parametrize("rules", PACKED, ids=str)
@pytest.mark.parametrize(("graph", "kv_heads"), [(False, 4), (False, 2), (True, 2)])
def test_packed_equals_each_sequence_alone(lengths, rules, graph, kv_heads, monkeypatch):
    monkeypatch.setattr(packed_reference, "_WORTH", 0)
    if graph:
        monkeypatch.setattr(packed_reference, "compiling", lambda: True)
    layouts = [Layout.from_lengths(x) for x in lengths]
    inputs = [
        random(layouts[0].total, 4, 3),
        random(layouts[1].total, kv_heads, 3),
        random(layouts[1].total, kv_heads, 2),
    ]
    own = {"distance_bias": random(4, 2 * 71 - 1), "sinks": random(4)}
    given = {name: own.get(name, x) for name, x in rules.items()}
    inputs += [x for name, x in own.items() if name in rules]
    parts = []
    for rows, keys in zip(*(list(zip(x.offsets, x.offsets[1:], strict=False)) for x in layouts), strict=True):
        q, k, v = (x[slice(*at)].transpose(0, 1)[None] for x, at in zip(inputs[:3], (rows, keys, keys), strict=True))
        parts.append(attention(q, k, v, **given)[0].transpose(0, 1))
    expected = torch.cat(parts)
    out = packed_attention(*inputs[:3], *layouts, **given)
    assert_close(out, expected)
    for actual, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_break(packed):
    inputs = [random(2, 4, 5, 8, dtype=torch.float32), random(2, 2, 7, 8, dtype=torch.float32)]
    inputs += [random(4, 15, dtype=torch.float32), random(4, dtype=torch.float32)]
    layouts = [Layout.from_lengths(x) for x in ([3, 2], [3, 4])]

    def call(q, k, bias, sink):
        given = {"causal": True, "alignment": "bottom_right", "distance_bias": bias, "sinks": sink}
        if packed:
            return packed_attention(q[0].transpose(0, 1), k[0].transpose(0, 1), k[0].transpose(0, 1), *layouts, **given)
        return attention(q, k, k, key_lengths=torch.tensor([7, 2]), **given)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*inputs), call(*inputs)
    assert_close(out, expected)
    for actual, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(actual, wanted)


def test_functorch_sees_both():
    q, k = random(1, 2, 3, 2, grad=False), random(1, 2, 4, 2, grad=False)
    bias, sink = random(5, 2, 9, grad=False), random(5, 2, grad=False)
    both = torch.func.vmap(lambda b, s: attention(q, k, k, distance_bias=b, sinks=s))(bias, sink)
    singly = [attention(q, k, k, distance_bias=b, sinks=s) for b, s in zip(bias, sink, strict=True)]
    assert_close(both, torch.stack(singly))
    loss = lambda b, s: attention(q, k, k, distance_bias=b, sinks=s).square().sum()  # noqa: E731
    found = torch.func.grad(loss, (0, 1))(bias[0], sink[0])
    leaf = [x[0].clone().requires_grad_() for x in (bias, sink)]
    for actual, wanted in zip(found, torch.autograd.grad(loss(*leaf), leaf), strict=True):
        assert_close(actual, wanted)


q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
BAD = [
    ({"distance_bias": torch.zeros(4, 9).int()}, TypeError, "distance_bias must be floating point, not torch.int32"),
    ({"distance_bias": torch.zeros(2, 9)}, ValueError, "distance_bias must be of shape [4, 2 * P - 1], not [2, 9]"),
    ({"distance_bias": torch.zeros(4, 10)}, ValueError, "distance_bias must be of shape [4, 2 * P - 1], not [4, 10]"),
    ({"distance_bias": torch.zeros(9)}, ValueError, "distance_bias must be of shape [4, 2 * P - 1], not [9]"),
    (
        {"distance_bias": torch.zeros(4, 7)},
        ValueError,
        "distance_bias must be of at least 5 positions, the longest of queries and keys, not 4",
    ),
    ({"distance_bias": torch.zeros(4, 9).tolist()}, TypeError, "distance_bias must be a Tensor, not list"),
    ({"distance_bias": torch.zeros(4, 9, device="meta")}, ValueError, "distance_bias is on meta, q on cpu"),
    ({"sinks": torch.zeros(4).bool()}, TypeError, "sinks must be floating point, not torch.bool"),
    ({"sinks": torch.zeros(2)}, ValueError, "sinks must be of shape [4], not [2]"),
    ({"sinks": torch.zeros(4, 1)}, ValueError, "sinks must be of shape [4], not [4, 1]"),
    ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks is on meta, q on cpu"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=[message for *_, message in BAD])
@pytest.mark.parametrize("name", ["dense", "weights", "packed"])
def test_bad_arguments(name, arguments, error, message):
    layouts = [Layout.from_lengths([n, 0]) for n in (3, 5)]
    packed = q[0].transpose(0, 1), k[0].transpose(0, 1), k[0].transpose(0, 1), *layouts
    dense = attention if name == "dense" else attention_with_weights
    with pytest.raises(error, match=re.escape(message)):
        packed_attention(*packed, **arguments) if name == "packed" else dense(q, k, k, **arguments)


def test_dropout_leaves_sinks_alone():
    """The weights that stay are those of attention with sinks, times their scale."""
    q, k = random(2, 2, 40, 8, grad=False), random(2, 2, 50, 8, grad=False)
    given = {"sinks": sinks(2), "distance_bias": by_distance(50, 2)}
    _, whole = attention_with_weights(q, k, k, **given)
    _, dropped = attention_with_weights(q, k, k, dropout_p=0.25, **given)
    kept = dropped != 0
    assert abs(float(kept.double().mean()) - 0.75) < 5 * math.sqrt(0.75 * 0.25 / kept.numel())
    assert_close(dropped[kept], whole[kept] / 0.75)
