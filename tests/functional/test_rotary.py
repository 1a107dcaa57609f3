"""functional.rotary: pairs of numbers turned by the position; the formula here is that of complex numbers."""

import pytest
import torch
from torch import Tensor

from fastformer.functional import rotary
from tests.support.closeness import assert_close, assert_derivatives, assert_formula, random

CONVENTIONS = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


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
CASES = [
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


@pytest.mark.parametrize(("shape", "of_positions", "R"), CASES)
@CONVENTIONS
def test_values_and_gradients_are_those_of_the_formula(shape, of_positions, R, interleaved):
    positions = torch.randint(9, of_positions)
    for table in (torch.float64, torch.float32):

        def op(x, table=table):
            dtype = torch.float64 if x.dtype == torch.float64 else table  # fp64 needs tables of fp64
            out = rotary(x, positions, *tables(9, R, dtype), interleaved=interleaved)
            assert out.is_contiguous()
            return out

        assert_formula(lambda x: by_complex_numbers(x, positions, R, interleaved), [random(*shape)], op)


@CONVENTIONS
def test_first_and_second_derivative(interleaved):
    positions, (cos, sin) = torch.tensor([3, 0]), tables(4, 4)

    def op(x):
        return rotary(x, positions, cos, sin, interleaved=interleaved).square()

    assert_derivatives(op, [random(2, 2, 5)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@CONVENTIONS
def test_half_precision_is_rounded_once(dtype, interleaved):
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
def test_heads_of_a_joint_projection(interleaved):
    """Strides of any kind; what is not turned stays as it is, be it no number."""
    projection, positions, (cos, sin) = random(5, 6, 8), torch.arange(5), tables(5, 4)
    with torch.no_grad():
        projection[2, 1, 6] = torch.nan
        projection[1, 0, 7] = torch.inf
    views = [
        projection[:, :4],
        projection[:, 1::2],
        projection.transpose(0, 1)[:5],
        projection.flip(-1).flip(-1),
        projection[:, :1].expand(5, 4, 8),
        projection[..., ::2],
    ]
    for view in views:
        with torch.no_grad():
            found = rotary(view, positions, cos, sin, interleaved=interleaved)
            expected = rotary(view.contiguous(), positions, cos, sin, interleaved=interleaved)
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert found.is_contiguous()
        assert torch.equal(found[..., 4:].nan_to_num(7.0), view[..., 4:].nan_to_num(7.0))


def test_each_text_has_its_own_positions_under_vmap():
    x, positions, (cos, sin) = random(3, 4, 2, 6, grad=False), torch.randint(9, (3, 4)), tables(9, 6)
    mapped = torch.func.vmap(lambda x, positions: rotary(x, positions, cos, sin))(x, positions)
    assert_close(mapped, rotary(x, positions, cos, sin))
