"""The fused rotary op: values and gradients against fp64, strides, positions, and torch's machinery."""

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.functional import rotary
from tests.support.fused_op import DEVICE, INTERPRETED, assert_as_accurate_as_reference, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("triton_backend")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CONVENTIONS = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
P = 50


def tables(R: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.arange(P, dtype=torch.float64)[:, None] * 10000.0 ** -(torch.arange(R // 2) * 2 / max(R, 1))
    return angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)


def positions(*shape: int) -> Tensor:
    return torch.randint(P, shape, device=DEVICE)


# One pair; several tiles of tokens and of heads; an odd number of heads, of no power of two numbers; a part of each
# head, of an odd size; four copied for each that is turned; more than 4 dimensions; dense, positions of all rows, of
# each row, of each text; one token without a dimension; nothing to turn; no tokens; no heads.
SHAPES = [
    ((1, 1, 2), (1,), 2),
    ((45, 12, 64), (45,), 64),
    ((20, 7, 40), (20,), 40),
    ((9, 6, 23), (9,), 12),
    ((3, 2, 100), (3,), 4),
    ((2, 3, 2, 2, 8), (3, 1), 8),
    ((3, 5, 4, 16), (5,), 16),
    ((3, 5, 4, 16), (3, 5), 16),
    ((3, 5, 4, 16), (3, 1), 16),
    ((4, 16), (), 16),
    ((5, 2, 8), (5,), 0),
    ((0, 2, 4), (0,), 4),
    ((3, 0, 4), (3,), 4),
]


NAMES = ("half", "interleaved")


@pytest.mark.parametrize(
    ("shape", "of_positions", "R", "interleaved", "dtype"),
    [
        pytest.param(*sizes, interleaved, dtype, id=f"{NAMES[interleaved]}-shape{i}-{dtype}")
        for i, sizes in enumerate(SHAPES)
        for interleaved, dtype in [(False, DTYPES[0]), (True, DTYPES[0]), (bool(i % 2), DTYPES[1 + i // 2 % 2])]
    ],
)
def test_values_and_gradients(shape, of_positions, R, interleaved, dtype):
    given, (cos, sin) = positions(*of_positions), tables(R)
    x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
    assert_as_accurate_as_reference(lambda x: rotary(x, given, cos, sin, interleaved=interleaved), [x], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@CONVENTIONS
def test_rounded_once(interleaved, dtype):
    """Not more than a rounding from the reference, whose fp32 may differ by a fused multiply-add."""
    given, x = positions(30), torch.randn(30, 4, 24, device=DEVICE).to(dtype)
    for of in (torch.float32, torch.float64):
        out = rotary(x, given, *tables(20, of), interleaved=interleaved)
        with fastformer.backend("reference"):
            exact = rotary(x.double(), given, *tables(20, torch.float64), interleaved=interleaved)
        assert out.dtype == dtype
        spacing = torch.finfo(dtype).eps * 2.0 ** exact.abs().clamp(min=1e-9).log2().floor()
        # Triton's interpreter truncates fp32 to bf16 where GPUs round to nearest.
        allowed = spacing * (1.0 if INTERPRETED and dtype == torch.bfloat16 else 0.5)
        in_fp32 = 4 * torch.finfo(torch.float32).eps * x.abs().max() + torch.finfo(dtype).smallest_normal
        assert bool(((out.double() - exact).abs() <= allowed + in_fp32).all())
        assert torch.equal(out[..., 20:], x[..., 20:])


@CONVENTIONS
def test_heads_of_a_joint_projection(interleaved):
    """Strides of every kind, of the gradient too, and no copy where numbers of a head are neighbours."""
    given, (cos, sin) = positions(3), tables(8)
    positions_of_columns = positions(3, 2).T

    def op(x):
        turned = lambda x, p=given: rotary(x, p, cos, sin, interleaved=interleaved)  # noqa: E731
        return (
            turned(x[:, :, :4]),  # the first heads
            turned(x[:, :, 1::2]),
            turned(x.transpose(1, 2)[:, :3]),  # heads before tokens
            turned(x[:, :1].expand(2, 3, 6, 10)),
            turned(x[:, 1:2], given[:1]),
            turned(x.transpose(0, 1), given[:, None]),
            turned(x, given[:2, None].expand(2, 3)),
            turned(x[..., 1:9], positions_of_columns),
            turned(x.mT.contiguous().mT),  # a copy
            turned(x).transpose(1, 3),  # whose gradient has other strides
            turned(x).sum(2),  # and none
        )

    x = torch.randn(2, 3, 6, 10, dtype=torch.float64, device=DEVICE)
    assert_as_accurate_as_reference(op, [x], torch.float32)


def test_the_first_heads_are_not_copied(monkeypatch):
    kernels = pytest.importorskip("fastformer_kernels.rotary.kernels")
    launched = []
    monkeypatch.setattr(kernels, "launch", lambda *a, **k: launched.append(a))
    x = torch.randn(4, 6, 16, device=DEVICE)
    for view in (x[:, :4], x[None, :, :4], x.transpose(0, 1), x[..., 4:12], x[:, :1].expand(4, 2, 16)):
        kernels.rotary(view, positions(view.shape[-3]), *tables(8), False, 1.0)
        assert launched[-1][2] is view


def test_positions_that_are_no_row_are_not_a_number():
    """What a GPU cannot refuse without waiting for it must show, and must not be read."""
    kernels = pytest.importorskip("fastformer_kernels.rotary.kernels")
    given = torch.tensor([0, P, -1, P - 1], device=DEVICE)
    for interleaved in (False, True):
        out = kernels.rotary(torch.ones(4, 2, 7, device=DEVICE), given, *tables(4), interleaved, 1.0)
        assert out[..., :4].isnan().all((1, 2)).tolist() == [False, True, True, False]
        assert not out[[0, 3]].isnan().any()
        assert bool((out[..., 4:] == 1).all())


def test_heads_beyond_the_kernel():
    x, (cos, sin) = torch.randn(1, 1, 1025, device=DEVICE), tables(2)
    with pytest.raises(RuntimeError, match="rotary takes heads of at most 1024 numbers, not 1025"):
        rotary(x, positions(1), cos, sin)
    with fastformer.backend("auto"):
        assert rotary(x, positions(1), cos, sin).shape == x.shape
    long = torch.randn(2, 1, 1024, dtype=torch.float64, device=DEVICE)
    for R in (1024, 2):
        given, both = positions(2), tables(R)
        assert_as_accurate_as_reference(
            lambda x, given=given, both=both: rotary(x, given, *both), [long], torch.float32
        )


def test_x_is_not_saved_for_backward():
    x = torch.randn(4, 2, 8, device=DEVICE).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotary(x * 1, positions(4), *tables(8))
    assert [t.shape for t in kept if t.dim() == 3] == []
    assert len(kept) == 3


@pytest.mark.parametrize("changed", range(3))
def test_backward_notices_a_change_of_what_it_keeps(changed):
    given = [positions(4), *tables(8)]
    out = rotary(torch.randn(4, 2, 8, device=DEVICE).requires_grad_(), *given)
    given[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
