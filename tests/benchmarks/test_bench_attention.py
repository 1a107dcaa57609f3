"""The attention benchmarks count, mask and draw lengths as they say; their glue for competitors loses no position."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.competitors import attention as rivals
from benchmarks.harness.attention_case import AttentionCase
from benchmarks.harness.race import DIRECTIONS
from fastformer import functional
from tests.support.closeness import assert_close

CPU = torch.device("cpu")
LENGTHS = np.array([5, 2, 0, 7])


def attention_case(causal, lengths=LENGTHS, **settings):
    return AttentionCase(lengths, 3, 8, CPU, causal, dtype=torch.float64, **settings)


def attended(p, inputs):
    ends = p.lengths_on_device
    return functional.attention(*inputs, causal=p.causal, query_lengths=ends, key_lengths=ends)


@pytest.mark.parametrize("causal", [True, False])
def test_useful_pairs_are_those_that_the_mask_allows_to_real_queries(causal):
    p = attention_case(causal)
    allowed = p.allowed().expand(-1, p.heads, p.length, -1) & p.real[:, None, :, None]
    assert p.pairs == int(allowed.sum())


@pytest.mark.parametrize(
    ("value_size", "operations", "tensors"),
    [
        (None, [4 * 9 * 8, 10 * 9 * 8, 14 * 9 * 8], 8 + 8),
        (5, [9 * (2 * 8 + 2 * 5), 9 * (6 * 8 + 4 * 5), 9 * (8 * 8 + 6 * 5)], 8 + 5),
    ],
)
def test_work_is_that_of_the_formula(value_size, operations, tensors):
    p = attention_case(True, np.array([2]), value_size=value_size)  # 3 pairs in each of 3 heads, of 8 channels
    work = [p.work(direction) for direction in DIRECTIONS]
    assert [each.operations for each in work] == operations
    size = 2 * 3 * tensors * 8  # bytes of fp64, of keys and values
    assert [each.bytes for each in work] == [2 * size, 4 * size, 6 * size]


@pytest.mark.parametrize("settings", [{}, {"value_size": 5}])
@pytest.mark.parametrize("causal", [True, False])
def test_fp64_results_are_those_of_sdpa_on_each_sequence(causal, settings):
    p = attention_case(causal, **settings)
    inputs, upstream = p.leaves(), p.random()
    out, *grads = p.expected(inputs, upstream)
    rows, heads = p.compared_heads
    for i, (b, h) in enumerate(zip(rows.tolist(), heads.tolist(), strict=True)):
        n = int(LENGTHS[b])
        wide = [x.detach()[b, h, :n].requires_grad_() for x in inputs]
        expected = F.scaled_dot_product_attention(*(x[None, None] for x in wide), is_causal=causal)[0, 0]
        assert_close(out[i, :n], expected)
        for grad, x in zip(grads, torch.autograd.grad(expected, wide, upstream[b, h, :n]), strict=True):
            assert_close(grad[i, :n], x)
            assert not grad[i, n:].any()


def test_long_sequences_are_compared_in_some_heads_of_the_first_and_the_last_row(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.attention_case._COMPARED_SCORES", 2 * 49)
    p = attention_case(True)
    rows, heads = p.compared_heads
    assert (rows.tolist(), heads.tolist()) == ([0, 3], [0, 2])
    inputs, upstream = p.leaves(), p.random()
    some = p.expected(inputs, upstream)
    monkeypatch.undo()
    whole = attention_case(True).expected(inputs, upstream)
    for a, b in zip(some, whole, strict=True):
        assert_close(a, b[[0, -1]])


def test_what_dropout_adds_is_its_mean_square():
    p = attention_case(False, np.array([6]), dropout=0.3)
    torch.manual_seed(0)
    inputs = [x.detach() for x in p.leaves()]
    exact = F.scaled_dot_product_attention(*inputs)
    added = [(F.scaled_dot_product_attention(*inputs, dropout_p=0.3) - exact).square() for _ in range(2000)]
    mean = torch.stack(added).mean(0)[0]
    assert float((mean - p.dropped(inputs)).norm() / mean.norm()) < 0.05


WAYS = [
    (True, rivals.MASK),
    (True, rivals.KEY_MASK),
    (True, rivals.ALONE),
    (False, rivals.MASK),
    (False, rivals.KEY_MASK),
]


@pytest.mark.parametrize("name", ["sdpa-math", "sdpa-flash"])
@pytest.mark.parametrize(("causal", "way"), WAYS)
def test_sdpa_gets_the_same_rules_in_each_form(name, way, causal):
    p = attention_case(causal, np.array([5, 2, 7]))
    inputs = p.leaves()
    run = rivals.rival(p, name, way)
    if name == "sdpa-math" and way == rivals.KEY_MASK and causal:
        with pytest.raises(RuntimeError, match="is_causal"):
            run(*inputs)
        return
    real = p.real[:, None, :, None]
    assert_close(run(*inputs) * real, attended(p, inputs))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["flex", "flex-per-batch"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gets_the_same_rules(name, causal):
    p = attention_case(causal, np.array([5, 2, 7]))
    with torch.no_grad():
        inputs = [x.detach().float() for x in p.leaves()]
        results = rivals.rival(p, name)(*inputs) * p.real[:, None, :, None]
        assert_close(results, attended(p, inputs))


def test_the_tutorials_attention_is_causal():
    p = attention_case(True, np.array([7, 7]))
    inputs = p.leaves()
    assert_close(rivals.rival(p, "tutorial")(*inputs), attended(p, inputs))


def test_unpadding_and_padding_again_loses_no_position():
    p = attention_case(True)
    inputs, upstream = p.leaves(), p.random()
    run = rivals.unpadded(p, lambda q, k, v: functional.packed_attention(q, k, v, p.layout, causal=True))
    ours, theirs = attended(p, inputs), run(*inputs)
    assert_close(theirs, ours)
    for a, b in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (theirs, ours)), strict=True):
        assert_close(a, b)


def test_varlen_gets_causality_in_either_signature():
    def older(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None): ...

    def later(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)): ...

    assert [rivals.causal_arguments(older, causal) for causal in (True, False)] == [
        {"is_causal": x} for x in (True, False)
    ]
    windows = [rivals.causal_arguments(later, causal)["window_size"] for causal in (True, False)]
    assert windows == [(-1, 0), (-1, -1)]
