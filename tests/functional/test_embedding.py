"""functional.embedding: dropout(scale * weight[ids] + table[positions])."""

import math

import pytest
import torch
from torch.nn.functional import one_hot

from fastformer.functional import embedding
from tests.support.closeness import assert_derivatives, assert_formula, random


# One number; a batch whose words and positions repeat; packed tokens; no tokens.
@pytest.mark.parametrize(
    ("shape", "V", "P", "D"), [((1,), 1, 1, 1), ((2, 3, 5), 4, 6, 7), ((9,), 20, 9, 3), ((0,), 2, 1, 4)]
)
@pytest.mark.parametrize("has_positions", [True, False])
def test_values_and_gradients_are_those_of_the_formula(shape, V, P, D, has_positions):
    ids, positions = torch.randint(V, shape), torch.randint(P, shape)

    def formula(weight, table=None):
        words = 2.5 * one_hot(ids, V).double() @ weight
        return words if table is None else words + one_hot(positions, P).double() @ table

    def op(weight, table=None):
        return embedding(ids, weight, table, None if table is None else positions, scale=2.5)

    assert_formula(formula, [random(V, D), random(P, D)][: 1 + has_positions], op)


def test_first_and_second_derivative():
    ids, positions = torch.tensor([[0, 2], [2, 1]]), torch.tensor([[0, 1], [0, 1]])

    def op(weight, table):
        return embedding(ids, weight, table, positions, scale=3.0).square()

    assert_derivatives(op, [random(3, 2), random(2, 2)])


def test_dtypes_promote_as_in_a_sum():
    ids = torch.tensor([0, 1])
    for one, two in [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float64"), ("float16", "float16")]:
        weight, table = torch.randn(2, 3).to(getattr(torch, one)), torch.randn(2, 3).to(getattr(torch, two))
        assert embedding(ids, weight, table, ids).dtype == (weight + table).dtype


def test_dropout_is_of_the_sum():
    ids = torch.zeros(300, dtype=torch.int64)
    weight, table = torch.ones(1, 64), torch.ones(1, 64)
    out = embedding(ids, weight, table, ids, scale=2.0, dropout_p=0.25)
    kept = int((out != 0).sum())
    assert abs(kept - out.numel() * 0.75) < 5 * math.sqrt(out.numel() * 0.25 * 0.75)
    assert out.unique().tolist() == [0, 4]
    assert not embedding(ids, weight, dropout_p=1.0).any()
