"""functional.dropout, functional.embedding and functional.rotary.

Embedding is dropout(scale * weight[ids] + table[positions]). Rotary turns pairs of numbers by the position; the formula
here is that of complex numbers.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fastformer.functional import embedding, rotary
from fastformer.functional.dropout import drop as dropout
from tests.support.closeness import assert_close, assert_dropout_rate, assert_formula, random

CONVENTIONS = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


@pytest.mark.parametrize(
    ("p", "dtype"),
    [(p, torch.float32) for p in (0.001, 0.1, 0.5, 0.9, 0.999)] + [(0.1, torch.float64), (0.1, torch.bfloat16)],
)
def test_the_rate_of_dropout_is_binomial_and_the_scale_unbiased(p, dtype):
    n = 200_003  # no multiple of the four decisions in one random number
    out = dropout(torch.ones(n, dtype=dtype), p)
    assert_dropout_rate(out == 0, p)
    assert out.unique().numel() == 2
    # p is quantised to 2^-16.
    assert out.max().item() == pytest.approx(1 / (1 - p), rel=max(2**-16 / (1 - p), torch.finfo(dtype).eps))


def test_decisions_of_dropout_are_independent():
    """Of neighbours, of elements one random number apart, and of the same element in the next call."""
    n = 1 << 17
    keep, following = ((dropout(torch.ones(n), 0.5) != 0).double() - 0.5 for _ in range(2))
    for other in (*(keep.roll(shift) for shift in (1, 2, 3, 4)), following):
        assert abs((keep * other).mean().item()) < 5 * 0.25 / math.sqrt(n)


def test_dropout_repeats_under_a_seed_and_takes_0_and_1():
    x = random(7, 5)
    torch.manual_seed(1)
    first = dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(dropout(x, 0.5), first)
    assert torch.equal(dropout(x, 0.0), x)
    assert not dropout(x, 1.0).any()
    assert dropout(x[:0], 0.5).shape == (0, 5)
    assert dropout(x.mT, 0.5).shape == (5, 7)


# One number; a batch whose words and positions repeat; packed tokens; no tokens.
@pytest.mark.parametrize(
    ("shape", "V", "P", "D"), [((1,), 1, 1, 1), ((2, 3, 5), 4, 6, 7), ((9,), 20, 9, 3), ((0,), 2, 1, 4)]
)
@pytest.mark.parametrize("has_positions", [True, False])
def test_embeddings_and_gradients_are_those_of_the_formula(shape, V, P, D, has_positions):
    ids, positions = torch.randint(V, shape), torch.randint(P, shape)

    def formula(weight, table=None):
        words = 2.5 * one_hot(ids, V).double() @ weight
        return words if table is None else words + one_hot(positions, P).double() @ table

    def op(weight, table=None):
        return embedding(ids, weight, table, None if table is None else positions, scale=2.5)

    assert_formula(formula, [random(V, D), random(P, D)][: 1 + has_positions], op)


def test_dropout_of_an_embedding_is_of_the_sum():
    ids = torch.zeros(300, dtype=torch.int64)
    weight, table = torch.ones(1, 64), torch.ones(1, 64)
    out = embedding(ids, weight, table, ids, scale=2.0, dropout_p=0.25)
    assert_dropout_rate(out == 0, 0.25)
    assert out.unique().tolist() == [0, 4]
    assert not embedding(ids, weight, dropout_p=1.0).any()


def frequencies(R: int) -> Tensor:
    return 10000.0 ** -(torch.arange(R // 2, dtype=torch.float64) * 2 / max(R, 1))


def tables(P: int, R: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angles = torch.arange(P, dtype=torch.float64)[:, None] * frequencies(R)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def by_complex_numbers(x: Tensor, positions: Tensor, R: int, interleaved: bool) -> Tensor:
    """x e^(i p f), pair by pair, in fp64."""
    first, second = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
    turned = torch.complex(x[..., first], x[..., second])
    turned = turned * torch.exp(1j * positions[..., None, None] * frequencies(R))
    out = x.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


# One pair; packed; dense with positions of all rows, of each row, of each text; beside them two more dimensions; a part
# of each head, of an odd size; no pairs; one token without a dimension; no tokens; no heads.
SHAPES = [
    ((1, 1, 2), (1,), 2),
    ((5, 3, 8), (5,), 8),
    ((2, 3, 4, 6), (3,), 6),
    ((2, 3, 4, 6), (2, 3), 6),
    ((2, 3, 4, 6), (2, 1), 6),
    ((2, 2, 3, 2, 4), (2, 1, 3), 4),
    ((4, 2, 7), (4,), 4),
    ((4, 2, 3), (4,), 0),
    ((3, 4), (), 4),
    ((0, 2, 4), (0,), 4),
    ((3, 0, 4), (3,), 2),
]


@pytest.mark.parametrize(("shape", "of_positions", "R"), SHAPES)
@CONVENTIONS
def test_rotary_and_its_gradients_are_those_of_the_formula(shape, of_positions, R, interleaved):
    positions = torch.randint(9, of_positions)
    for table in (torch.float64, torch.float32):

        def op(x, table=table):
            dtype = torch.float64 if x.dtype == torch.float64 else table  # fp64 needs tables of fp64
            out = rotary(x, positions, *tables(9, R, dtype), interleaved=interleaved)
            assert out.is_contiguous()
            return out

        assert_formula(lambda x: by_complex_numbers(x, positions, R, interleaved), [random(*shape)], op)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@CONVENTIONS
def test_rotary_in_half_precision_is_rounded_once(dtype, interleaved):
    """Half a spacing from the exact result of the rounded input, and what four operations in fp32 add to that."""
    positions = torch.randint(50, (40,))
    x = random(40, 3, 16).to(dtype)
    exact = by_complex_numbers(x.detach().double(), positions, 12, interleaved)
    out = rotary(x, positions, *tables(50, 12), interleaved=interleaved)
    assert out.dtype == dtype
    spacing = torch.finfo(dtype).eps * 2.0 ** exact.abs().clamp(min=1e-9).log2().floor()
    in_fp32 = 4 * torch.finfo(torch.float32).eps * x.detach().double().abs().amax()
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert bool(((out.double() - exact).abs() <= spacing / 2 + in_fp32 + tiny).all())
    assert torch.equal(out[..., 12:], x[..., 12:])


@CONVENTIONS
def test_rotary_takes_heads_of_a_joint_projection(interleaved):
    """Strides of any kind; what is not turned stays as it is, be it no number."""
    projection, positions, (cos, sin) = random(5, 6, 8, grad=False), torch.arange(5), tables(5, 4)
    projection[2, 1, 6] = torch.nan
    projection[1, 0, 7] = torch.inf
    views = [
        projection[:, :4],
        projection[:, 1::2],
        projection.transpose(0, 1)[:5],
        projection[:, :1].expand(5, 4, 8),
        projection[..., ::2],
    ]
    for view in views:
        actual = rotary(view, positions, cos, sin, interleaved=interleaved)
        expected = rotary(view.contiguous(), positions, cos, sin, interleaved=interleaved)
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert actual.is_contiguous()
        assert torch.equal(actual[..., 4:].nan_to_num(7.0), view[..., 4:].nan_to_num(7.0))


def test_each_text_has_its_own_positions_under_vmap():
    x, positions, (cos, sin) = random(3, 4, 2, 6, grad=False), torch.randint(9, (3, 4)), tables(9, 6)
    mapped = torch.func.vmap(lambda x, positions: rotary(x, positions, cos, sin))(x, positions)
    assert_close(mapped, rotary(x, positions, cos, sin))
