"""The fused layer norm: values, gradients, numerics, tiles, and torch's machinery."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer.functional import dropout_add_layer_norm, layer_norm
from fastformer.functional.norms import fused
from fastformer.functional.norms.op import output_dtype
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
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("triton_backend")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "bias", "none"])
def test_values_and_gradients(shape, affine, dtype):
    N = shape[-1]
    weight = random(N) if "weight" in affine else None
    bias = random(N) if "bias" in affine else None
    assert_as_accurate_as_reference(lambda x, w, b: layer_norm(x, N, w, b, 1e-3), [random(*shape), weight, bias], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_that_walk_over_many_tiles(monkeypatch, dtype):
    use_one_multiprocessor(monkeypatch)
    # 2 programs of 32 rows a tile (N is no multiple of 16), 5 tiles, the last of 2 rows.
    assert_as_accurate_as_reference(
        lambda x, w, b: layer_norm(x, 50, w, b), [random(130, 50), random(50), random(50)], dtype
    )


@pytest.mark.parametrize(("N", "dtype"), LONG_ROWS, ids=str)
def test_long_rows(N, dtype):
    assert_as_accurate_as_reference(lambda x, w, b: layer_norm(x, N, w, b), [random(2, N), random(N), random(N)], dtype)


def test_very_long_rows():
    N = 65552
    assert_as_accurate_as_reference(lambda x: layer_norm(x, N), [random(1, N)], torch.float32)


def test_many_partial_sums():
    """More programs than the second kernel takes at a time, which is 64."""
    norm = pytest.importorskip("fastformer_kernels.norms.rows")
    partials = torch.randn(130, 37, device=DEVICE), torch.randn(130, 37, device=DEVICE)
    for total, partial in zip(norm.sum_partials(partials[0], partials, *[torch.float32] * 2), partials, strict=True):
        assert_close(total, partial.sum(0))


@pytest.mark.parametrize("N", [20, 4100])
def test_rows_with_a_large_mean(N):
    """Variance as mean(x^2) - mean(x)^2 would lose it: 1e4^2 has no digit left for 1."""
    x = random(3, N, dtype=torch.float32) + torch.tensor([[1e4], [-3e3], [0.0]], device=DEVICE)
    exact = F.layer_norm(x.double(), (N,))
    # x itself is rounded to 1e4 * eps; the mean has an error of the same kind.
    assert (layer_norm(x, N).double() - exact).abs().max() < 1e4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("N", [20, 512, 4100, 8208])  # the last two have long rows
@pytest.mark.parametrize("spread", [0, 2, 1 << 16], ids=["equal", "nearly equal", "large mean"])
@pytest.mark.parametrize("op", ["layer_norm", "dropout_add_layer_norm"])
def test_rows_whose_mean_is_large_beside_their_deviations(op, spread, N):
    """Nothing is rounded at the size of the mean: neither the output nor a gradient."""
    means = torch.tensor([[12345.678], [-1e6], [3e-3], [7.0]])
    # The spread in units of the numbers' own rounding.
    rounding = torch.finfo(torch.float32).eps * means.abs().log2().floor().exp2()
    x = (means + rounding * torch.randint(-spread, spread + 1, (4, N))).to(DEVICE).requires_grad_()
    weight, bias, direction = (random(*shape, dtype=torch.float32) for shape in ((N,), (N,), (4, N)))
    leaves = [x, weight.requires_grad_(), bias.requires_grad_()]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = layer_norm(x, N, weight, bias) if op == "layer_norm" else dropout_add_layer_norm(x, 0 * x, N, weight, bias)[0]
    exact = F.layer_norm(wide[0], (N,), *wide[1:])
    found = [y, *torch.autograd.grad(y, leaves, direction)]
    wanted = [exact, *torch.autograd.grad(exact, wide, direction.double())]
    for a, b in zip(found[:2], wanted[:2], strict=True):
        for row in range(4):
            assert_close(a[row], b[row].float())
    for a, b in zip(found[2:], wanted[2:], strict=True):
        assert_close(a, b.float())


def test_several_normalized_dimensions_and_strides():
    weight, bias = random(3, 5), random(5, 3)

    def op(x, y, z, w, b):
        flat = layer_norm(x, (3, 5), w, b.T)
        rows = layer_norm(y[:, 1, 1:], 5)  # rows with a stride
        parts = layer_norm(z[:, :8], 8)  # rows that begin between vectors of 16 bytes
        mixed = layer_norm(y.transpose(0, 2), 4)  # columns with a stride
        spread = layer_norm(x[0, 0, 0].expand(2, 7, 5), 5, w[0], b[:, 0])
        return flat, rows, parts, mixed, spread.transpose(0, 1)

    inputs = [random(2, 4, 3, 5), random(4, 2, 6), random(3, 10), weight, bias]
    assert_as_accurate_as_reference(op, inputs, torch.float32)


def test_gradients_with_strides():
    x, weight = random(3, 4, 6, dtype=torch.float32).requires_grad_(), random(6, dtype=torch.float32).requires_grad_()
    # Columns with a stride, rows with a stride, one number, one row.
    for direction in (random(6, 4, 3).permute(2, 1, 0), random(3, 4, 8)[..., 1:7], random(1, 1, 1), random(1, 1, 6)):
        direction = direction.float().expand(3, 4, 6)
        found = torch.autograd.grad(layer_norm(x, 6, weight), (x, weight), direction)
        wanted = torch.autograd.grad(F.layer_norm(x, (6,), weight), (x, weight), direction)
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows(shape):
    x, weight, bias = random(*shape).float(), random(4).float(), random(4).float()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    out = layer_norm(*leaves[:1], 4, *leaves[1:])
    assert out.shape == shape
    dx, dw, db = gradients(out, leaves)
    assert dx.shape == shape
    assert not dw.any()
    assert not db.any()


def test_mixed_dtypes():
    """Weights in fp32, as in torch on a CPU, and any other: results have the dtype of x, gradients of inputs."""
    for one, two in [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]:
        x, weight, bias = (t.requires_grad_() for t in (random(5, 24).to(one), random(24).to(two), random(24).to(two)))
        out = layer_norm(x, 24, weight, bias)
        assert out.dtype == one
        wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
        expected = F.layer_norm(wide[0], (24,), *wide[1:])
        assert_close(out, expected.to(one), roundings=4)
        direction = random(5, 24).to(one)
        found = torch.autograd.grad(out, (x, weight, bias), direction)
        wanted = torch.autograd.grad(expected, wide, direction.double())
        for a, b, t in zip(found, wanted, (x, weight, bias), strict=True):
            assert_close(a, b.to(t.dtype), roundings=4)


def test_what_is_beyond_the_kernels():
    x, weight = random(2, 3).float(), random(3)
    with pytest.raises(RuntimeError, match=r"layer_norm takes float32, .* not float64"):
        layer_norm(x, 3, weight)
    with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's own words
        layer_norm(x, 4)
    with pytest.raises(RuntimeError, match="weight"):
        layer_norm(x, 3, weight[:2].float())


def test_only_wanted_gradients(monkeypatch):
    """Nothing is allocated or computed for the others; rows may be added up in another order."""
    asked = record_partials(monkeypatch, "layer_norm")
    tensors = [random(5, 8).float(), random(8).float(), random(8).float()]
    leaves = [t.clone().requires_grad_() for t in tensors]
    all_ = gradients(layer_norm(leaves[0], 8, *leaves[1:]), leaves)
    for wanted in ((0,), (1,), (2,), (0, 2)):
        given = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        found = gradients(layer_norm(given[0], 8, *given[1:]), [given[i] for i in wanted])
        for i, grad in zip(wanted, found, strict=True):
            assert_close(grad, all_[i])
        assert asked[-1] == tuple(torch.float32 if i in wanted else None for i in (1, 2))


def test_statistics_are_fp32():
    """In bf16 they would be wrong by one part in 256, and so would the gradients."""
    x, weight, bias = random(6, 40).bfloat16() + 4, random(40).bfloat16(), random(40).bfloat16()
    _, mean, rstd = fused._layer_norm(x, weight, bias, 1e-5, torch.bfloat16)
    assert_close(mean.sum(0), x.double().mean(1).float())
    assert_close(rstd, (x.double().var(1, correction=0) + 1e-5).rsqrt().float())


def test_second_derivative_of_an_input_in_16_bits():
    leaves = [t.float().requires_grad_() for t in (random(3, 5), random(5), random(5))]

    def second(x, weight, bias):
        out = layer_norm(x, 5, weight, bias)
        first = torch.autograd.grad(out.pow(3).sum(), (x, weight, bias), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    with fastformer.backend("reference"):
        expected = second(*leaves)
    leaves[0] = leaves[0].detach().bfloat16().requires_grad_()  # torch on a GPU takes one dtype
    for a, b in zip(second(*leaves), expected, strict=True):
        assert (a - b).abs().max() < 0.05 * b.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_on_a_gpu_gives_fp32_as_in_torch(dtype):
    with cuda_autocast(), FakeTensorMode():
        x, weight = torch.empty(2, 8, dtype=dtype, device="cuda"), torch.empty(8, device="cuda")
        expected = F.layer_norm(x, (8,), weight)
        assert layer_norm(x, (8,), weight, None, 1e-5).dtype == expected.dtype == torch.float32


def test_autocast_on_a_cpu_leaves_it_alone():
    x, weight = random(2, 8).bfloat16().cpu(), random(8).float().cpu()
    with torch.autocast("cpu", torch.bfloat16):
        assert output_dtype("layer_norm", x) == F.layer_norm(x, (8,), weight).dtype == torch.bfloat16


def test_half_precision_in_and_fp32_out():
    """What the kernels do under autocast: one rounding less than casting back."""
    x, weight, bias = random(5, 24).bfloat16(), random(24).float(), random(24).float()
    y, mean, rstd = fused._layer_norm(x, weight, bias, 1e-5, torch.float32)
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = F.layer_norm(wide[0], (24,), *wide[1:])
    assert_close(y, expected.float())
    dy = random(5, 24).float()
    found = fused._layer_norm_backward(dy, x, weight, mean, rstd, torch.bfloat16, torch.float32, torch.float32)
    for a, b in zip(found, torch.autograd.grad(expected, wide, dy.double()), strict=True):
        assert_close(a, b.to(a.dtype), roundings=4 if a.dtype == torch.bfloat16 else 100)


def test_checkpointing_and_repeated_backward():
    x, weight = random(4, 8).float().requires_grad_(), random(8).float().requires_grad_()
    op = lambda x, weight: layer_norm(x, 8, weight)  # noqa: E731
    expected = gradients(op(x, weight), [x, weight])
    for a, b in zip(gradients(checkpoint(op, x, weight, use_reentrant=False), [x, weight]), expected, strict=True):
        assert torch.equal(a, b)
    out = op(x, weight)
    once = torch.autograd.grad(out.sum(), (x, weight), retain_graph=True)
    for a, b in zip(torch.autograd.grad(out.sum(), (x, weight)), once, strict=True):
        assert torch.equal(a, b)


def test_the_ops_pass_opcheck():
    x, weight, bias = random(3, 8).float(), random(8).half(), random(8).float()
    torch.library.opcheck(torch.ops.fastformer.layer_norm.default, (x, weight, bias, 1e-5, torch.float32))
    torch.library.opcheck(torch.ops.fastformer.layer_norm.default, (x.half(), None, None, 1e-5, torch.float32))
    _, mean, rstd = fused._layer_norm(x, None, None, 1e-5, x.dtype)
    dtypes = (torch.float32, torch.float16, torch.float32)
    torch.library.opcheck(torch.ops.fastformer.layer_norm_backward.default, (x, x, weight, mean, rstd, *dtypes))
    torch.library.opcheck(
        torch.ops.fastformer.layer_norm_backward.default, (x, x, None, mean, rstd, torch.float32, None, None)
    )
    torch.library.opcheck(
        torch.ops.fastformer.layer_norm_backward.default, (x, x, weight, mean, rstd, None, None, torch.float32)
    )


@pytest.mark.parametrize("affine", [True, False])
def test_compiled_is_eager(affine):
    leaves = [t.float().requires_grad_() for t in (random(2, 3, 8), random(8), random(8))][: 3 if affine else 1]

    def op(x, *affine):
        return layer_norm(x, 8, *affine) * 2

    torch._dynamo.reset()
    out, expected = torch.compile(op, fullgraph=True, backend="aot_eager")(*leaves), op(*leaves)
    assert_close(out, expected)
    for a, b in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        assert_close(a, b)
