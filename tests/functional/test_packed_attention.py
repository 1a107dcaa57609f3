"""functional.packed_attention against the padded op, sequence by sequence."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from fastformer.functional import attention, packed_attention
from fastformer.functional.attention import packed_reference
from fastformer.packing import Layout
from tests.support.all_pairs import all_pairs
from tests.support.closeness import assert_close, assert_dropout_rate, assert_formula, assert_same, random

# Ragged; with empty sequences; all equal; beyond the length that is computed without SDPA; none.
LENGTHS = {
    "ragged": ([3, 1, 5], [2, 6, 1]),
    "empty queries": ([0, 4, 0], [2, 3, 1]),
    "empty keys": ([2, 3, 1], [0, 4, 0]),
    "no key at all": ([2, 1], [0, 0]),
    "equal": ([4, 4], [3, 3]),
    "equal keys": ([4, 2], [3, 3]),
    "one": ([5], [3]),
    "equal and long": ([70, 70], [66, 66]),
    "short queries": ([1, 2], [3, 5]),
    "long": ([70, 2], [5, 66]),
    "no sequence": ([], []),
}


RULES = [
    {},
    {"causal": True},
    {"causal": True, "alignment": "bottom_right"},
    {"window": (1, 2)},
    {"window": (2, None), "causal": True},
    {"window": (None, 1), "alignment": "bottom_right", "softcap": 0.9},
    {"softcap": 0.9, "causal": True},
    {"distance_bias": True, "alignment": "bottom_right", "causal": True},
    {"distance_bias": "hides the key itself and those before"},
    {"distance_bias": True, "sinks": True, "window": (2, 1), "softcap": 0.9, "alignment": "bottom_right"},
    {"sinks": True},
]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, layout: Layout, key_layout: Layout, **settings: object) -> Tensor:
    out = []
    for b in range(layout.batch):
        rows = slice(*layout.offsets[b : b + 2].tolist())
        keys = slice(*key_layout.offsets[b : b + 2].tolist())
        x = [part.transpose(0, 1)[None] for part in (q[rows], k[keys], v[keys])]
        out.append(attention(*x, **settings)[0].transpose(0, 1))
    return torch.cat([*out, q[:0].sum(2, keepdim=True).expand(0, -1, v.shape[2])])


@pytest.fixture
def groups(request, monkeypatch):
    """Sequences as short as these are not worth more than one group; that must not matter."""
    if request.param == "one by one":
        monkeypatch.setattr(packed_reference, "_SHORT", 0)
        monkeypatch.setattr(packed_reference, "_LONG_MEAN", 0)
    if request.param == "many groups":
        monkeypatch.setattr(packed_reference, "_WORTH", 0)
        monkeypatch.setattr(packed_reference, "_SHRINK", 0.9)


GROUPS = ["one group", "many groups", "one by one"]


@pytest.mark.parametrize(
    ("name", "rules", "kv_heads", "kind", "groups"),
    all_pairs(LENGTHS, RULES, [4, 2], ["self", "cross"], GROUPS),
    indirect=["groups"],
    ids=str,
)
@pytest.mark.usefixtures("groups")
def test_packed_attention_equals_each_sequence_alone(name, rules, kv_heads, kind):
    layouts = [Layout.from_lengths(LENGTHS[name][side]) for side in (0, 0 if kind == "self" else 1)]
    inputs = [random(layouts[0].total, 4, 3), *(random(layouts[1].total, kv_heads, width) for width in (3, 2))]
    learnt = {name: shape for name, shape in {"distance_bias": (4, 2 * 71 - 1), "sinks": (4,)}.items() if name in rules}
    inputs += [random(*shape) for shape in learnt.values()]
    if "hides" in str(rules):
        inputs[3].data[:, :71] = -math.inf

    def called(op, *x):
        return op(*x[:3], *layouts, **{**rules, "scale": 0.6, **dict(zip(learnt, x[3:], strict=True))})

    assert_formula(partial(called, one_by_one), inputs, partial(called, packed_attention))


def test_a_graph_attends_in_one_group():
    layouts = [Layout.from_lengths(x) for x in ([3, 1, 5], [2, 6, 1])]
    inputs = [random(layout.total, 2, 3) for layout in (layouts[0], layouts[1], layouts[1])]

    def call(*x: Tensor) -> Tensor:
        return packed_attention(*x, *layouts, causal=True, alignment="bottom_right")

    assert_same(torch.compile(call, fullgraph=True, backend="eager")(*inputs), call(*inputs), inputs)


@pytest.mark.parametrize("longest", [60, 70])  # either side, again
def test_dropout_is_of_the_weights_at_its_rate_and_scale(longest):
    layout = Layout.from_lengths([40, longest])
    q, k = random(layout.total, 4, 8), random(layout.total, 4, 8)
    v = torch.cat([torch.eye(longest, dtype=torch.float64)[:40], torch.eye(longest, dtype=torch.float64)])
    v = v[:, None].expand(layout.total, 4, longest)  # the output is the weights
    plain, p = packed_attention(q, k, v, layout), 0.25
    torch.manual_seed(3)
    dropped = packed_attention(q, k, v, layout, dropout_p=p)
    assert_dropout_rate(dropped[plain != 0] == 0, p)
    remaining = dropped != 0
    assert_close((dropped / plain)[remaining], torch.full_like(plain[remaining], 1 / (1 - p)))
    torch.manual_seed(3)
    assert torch.equal(packed_attention(q, k, v, layout, dropout_p=p), dropped)


@pytest.mark.parametrize("lengths", [[2, 2], [2, 1], [70, 70]], ids=str)
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (3, 3)], ids=str)
def test_the_output_is_contiguous_and_writable(lengths, sizes):
    layout = Layout.from_lengths(lengths)
    q, k, v = (random(layout.total, 2, size) for size in (sizes[0], sizes[0], sizes[1]))
    out = packed_attention(q, k, v, layout, scale=0.6)
    assert out.is_contiguous()  # whoever puts the heads together may view
    expected = one_by_one(q, k, v, layout, layout, scale=0.6)
    assert_close(out, expected)
    assert_close(out.mul_(2), 2 * expected)


def test_scores_of_scale_zero_are_zero():
    """torch's product of bf16 leaves memory as it found it where both its factors are 0."""
    layout = Layout.from_lengths([64, 64])
    q, k, v = (random(128, 2, 8, dtype=torch.bfloat16, grad=False) for _ in range(3))
    freed = torch.full((4, 64, 64), math.nan, dtype=torch.bfloat16)
    del freed
    out = packed_attention(q, k, v, layout, scale=0.0)
    means = [x.double().mean(0, keepdim=True).expand(64, -1, -1) for x in v.split(64)]
    assert_close(out, torch.cat(means).bfloat16())
