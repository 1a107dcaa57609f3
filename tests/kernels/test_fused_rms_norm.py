"""The fused RMS norm: values, gradients, tiles, and torch's machinery."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer.functional import rms_norm
from fastformer.functional.norms import fused
from tests.kernels.norm_cases import (
    DTYPES,
    LONG_ROWS,
    SHAPES,
    cuda_autocast,
    random,
    record_partials,
    use_one_multiprocessor,
)
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import assert_as_accurate_as_reference, needs_kernels

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("triton_backend"),
    # torch says that it has no fused kernel for mixed dtypes.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-3, None])
def test_values_and_gradients(shape, affine, eps, dtype):
    N = shape[-1]
    # So small that the epsilon counts. The one for None is fp32's, where the exact result would have that of fp64.
    x = random(*shape) * (1e-3 if eps is None else 1.0)
    given = torch.finfo(torch.float32).eps if eps is None else eps
    assert_as_accurate_as_reference(
        lambda x, w: rms_norm(x, N, w, eps),
        [x, random(N) if affine else None],
        dtype,
        reference=lambda x, w: rms_norm(x, N, w, given),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_that_walk_over_many_tiles(monkeypatch, dtype):
    use_one_multiprocessor(monkeypatch)
    # 2 programs of 32 rows a tile (N is no multiple of 16), 5 tiles, the last of 2 rows.
    assert_as_accurate_as_reference(lambda x, w: rms_norm(x, 50, w), [random(130, 50), random(50)], dtype)


@pytest.mark.parametrize(("N", "dtype"), LONG_ROWS, ids=str)
def test_long_rows(N, dtype):
    assert_as_accurate_as_reference(lambda x, w: rms_norm(x, N, w), [random(2, N), random(N)], dtype)


def test_very_long_rows():
    N = 65552
    assert_as_accurate_as_reference(lambda x: rms_norm(x, N), [random(1, N)], torch.float32)


def test_several_normalized_dimensions_and_strides():
    def op(x, y, w):
        flat = rms_norm(x, (3, 5), w)
        rows = rms_norm(y[:, 1, 1:], 5)  # rows with a stride
        mixed = rms_norm(y.transpose(0, 2), 4)  # columns with a stride
        spread = rms_norm(x[0, 0, 0].expand(2, 7, 5), 5, w[0])
        return flat, rows, mixed, spread.transpose(0, 1)

    assert_as_accurate_as_reference(op, [random(2, 4, 3, 5), random(4, 2, 6), random(5, 3).T], torch.float32)


def test_gradients_with_strides():
    x, weight = random(3, 4, 6, dtype=torch.float32).requires_grad_(), random(6, dtype=torch.float32).requires_grad_()
    # Columns with a stride, rows with a stride, one number, one row.
    for direction in (random(6, 4, 3).permute(2, 1, 0), random(3, 4, 8)[..., 1:7], random(1, 1, 1), random(1, 1, 6)):
        direction = direction.float().expand(3, 4, 6)
        found = torch.autograd.grad(rms_norm(x, 6, weight), (x, weight), direction)
        wanted = torch.autograd.grad(F.rms_norm(x, (6,), weight), (x, weight), direction)
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows(shape):
    x, weight = random(*shape).float().requires_grad_(), random(4).float().requires_grad_()
    out = rms_norm(x, 4, weight)
    assert out.shape == shape
    dx, dw = gradients(out, [x, weight])
    assert dx.shape == shape
    assert not dw.any()


def test_mixed_dtypes():
    """As in torch, the result has the dtype of x."""
    for one, two in [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]:
        x, weight = random(5, 24).to(one).requires_grad_(), random(24).to(two).requires_grad_()
        out = rms_norm(x, 24, weight, 1e-3)
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        expected = F.rms_norm(wide[0], (24,), wide[1], 1e-3)
        assert out.dtype == F.rms_norm(x, (24,), weight).dtype == one
        assert_close(out, expected.to(one), roundings=4)
        direction = random(5, 24).to(one)
        found = torch.autograd.grad(out, (x, weight), direction)
        wanted = torch.autograd.grad(expected, wide, direction.double())
        for a, b, t in zip(found, wanted, (x, weight), strict=True):
            assert_close(a, b.to(t.dtype), roundings=4)


def test_what_is_beyond_the_kernels():
    x, weight = random(2, 3).float(), random(3)
    with pytest.raises(RuntimeError, match=r"rms_norm takes float32, .* not float64"):
        rms_norm(x, 3, weight)
    with fastformer.backend("auto"):
        assert rms_norm(x, 3, weight).dtype == torch.float32
    with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's own words
        rms_norm(x, 4)


def test_only_wanted_gradients(monkeypatch):
    """Nothing is allocated or computed for the others; rows may be added up in another order."""
    asked = record_partials(monkeypatch, "rms_norm")
    tensors = [random(5, 8).float(), random(8).float()]
    leaves = [t.clone().requires_grad_() for t in tensors]
    both = gradients(rms_norm(leaves[0], 8, leaves[1]), leaves)
    for wanted in (0, 1):
        given = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
        (found,) = gradients(rms_norm(given[0], 8, given[1]), [given[wanted]])
        assert_close(found, both[wanted])
        assert asked[-1] == ((torch.float32,) if wanted == 1 else (None,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_on_a_gpu_is_torchs(dtype):
    """In fp32 from a release after 2.11 on; before, in x's dtype."""
    with cuda_autocast(), FakeTensorMode():
        x, weight = torch.empty(2, 8, dtype=dtype, device="cuda"), torch.empty(8, device="cuda")
        expected = F.rms_norm(x, (8,), weight)
        assert rms_norm(x, (8,), weight, None).dtype == expected.dtype


def test_half_precision_in_and_fp32_out():
    """What the kernels do under autocast: one rounding less than casting back."""
    x, weight = random(5, 24).bfloat16(), random(24).float()
    y, rstd = fused._rms_norm(x, weight, 1e-5, torch.float32)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    expected = F.rms_norm(wide[0], (24,), wide[1], 1e-5)
    assert_close(y, expected.float())
    dy = random(5, 24).float()
    found = fused._rms_norm_backward(dy, x, weight, rstd, torch.bfloat16, torch.float32)
    for a, b in zip(found, torch.autograd.grad(expected, wide, dy.double()), strict=True):
        assert_close(a, b.to(a.dtype), roundings=4 if a.dtype == torch.bfloat16 else 100)


def test_checkpointing():
    x, weight = random(4, 8).float().requires_grad_(), random(8).float().requires_grad_()
    op = lambda x, weight: rms_norm(x, 8, weight)  # noqa: E731
    expected = gradients(op(x, weight), [x, weight])
    for a, b in zip(gradients(checkpoint(op, x, weight, use_reentrant=False), [x, weight]), expected, strict=True):
        assert torch.equal(a, b)


def test_the_ops_pass_opcheck():
    x, weight = random(3, 8).float(), random(8).half()
    torch.library.opcheck(torch.ops.fastformer.rms_norm.default, (x, weight, 1e-5, torch.float32))
    torch.library.opcheck(torch.ops.fastformer.rms_norm.default, (x.half(), None, 1e-5, torch.float32))
    _, rstd = fused._rms_norm(x, None, 1e-5, x.dtype)
    torch.library.opcheck(
        torch.ops.fastformer.rms_norm_backward.default, (x, x, weight, rstd, torch.float32, torch.float16)
    )
    torch.library.opcheck(torch.ops.fastformer.rms_norm_backward.default, (x, x, None, rstd, torch.float32, None))
    torch.library.opcheck(torch.ops.fastformer.rms_norm_backward.default, (x, x, weight, rstd, None, torch.float16))


@pytest.mark.parametrize("affine", [True, False])
def test_compiled_is_eager(affine):
    leaves = [t.float().requires_grad_() for t in (random(2, 3, 8), random(8))][: 2 if affine else 1]

    def op(x, *affine):
        return rms_norm(x, 8, *affine) * 2

    torch._dynamo.reset()
    out, expected = torch.compile(op, fullgraph=True, backend="aot_eager")(*leaves), op(*leaves)
    assert_close(out, expected)
    for a, b in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        assert_close(a, b)
