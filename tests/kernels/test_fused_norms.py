"""The fused layer norm and RMS norm: values, gradients, numerics, tiles, registered ops.

Compilation, checkpointing, second derivatives and refused dtypes are in `test_fused_contract.py`, of every op.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fastformer
from fastformer.functional import dropout_add_layer_norm, layer_norm, rms_norm
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

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("triton_backend"),
    # torch says that it has no fused kernel for mixed dtypes.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


class Norm(NamedTuple):
    """An op, torch's function, and the number of parameters."""

    name: str
    op: Callable[..., Tensor]
    of_torch: Callable[..., Tensor]
    parameters: int

    def inputs(self, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Return x and the parameters."""
        return [random(*shape, dtype=dtype), *(random(shape[-1], dtype=dtype) for _ in range(self.parameters))]

    def leaves(self, *shape: int) -> list[Tensor]:
        """Return x and the parameters in fp32, with gradients."""
        return [t.requires_grad_() for t in self.inputs(*shape, dtype=torch.float32)]

    def __call__(self, x: Tensor, *parameters: Tensor | None, N: int, eps: float = 1e-5) -> Tensor:
        return self.op(x, N, *parameters, eps=eps)

    def formula(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return self.of_torch(x, x.shape[-1:], *parameters, eps=1e-5)


NORMS = {
    "layer_norm": Norm("layer_norm", layer_norm, F.layer_norm, 2),
    "rms_norm": Norm("rms_norm", rms_norm, F.rms_norm, 1),
}


@pytest.fixture(params=NORMS)
def norm(request):
    return NORMS[request.param]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("norm", "affine"),
    [
        *(("layer_norm", affine) for affine in ("weight and bias", "weight", "bias", "none")),
        *(("rms_norm", affine) for affine in ("weight", "none")),
    ],
    indirect=["norm"],
)
def test_values_and_gradients(shape, norm, affine, dtype):
    N = shape[-1]
    names = ("weight", "bias")[: norm.parameters]
    parameters = [random(N) if name in affine else None for name in names]
    assert_as_accurate_as_reference(partial(norm, N=N, eps=1e-3), [random(*shape), *parameters], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_the_epsilon_of_rms_norm_is_fp32s_unless_given(affine, dtype):
    """Numbers so small that it counts; the exact result of None would have that of fp64."""
    assert_as_accurate_as_reference(
        lambda x, w: rms_norm(x, 7, w, None),
        [random(5, 3, 7) * 1e-3, random(7) if affine else None],
        dtype,
        reference=lambda x, w: rms_norm(x, 7, w, torch.finfo(torch.float32).eps),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_that_walk_over_many_tiles(monkeypatch, norm, dtype):
    use_one_multiprocessor(monkeypatch)
    # 2 programs of 32 rows a tile (N is no multiple of 16), 5 tiles, the last of 2 rows.
    assert_as_accurate_as_reference(partial(norm, N=50), norm.inputs(130, 50), dtype)


@pytest.mark.parametrize(("N", "dtype"), LONG_ROWS, ids=str)
def test_long_rows(norm, N, dtype):
    assert_as_accurate_as_reference(partial(norm, N=N), norm.inputs(2, N), dtype)


def test_very_long_rows(norm):
    N = 65552
    assert_as_accurate_as_reference(lambda x: norm(x, N=N), [random(1, N)], torch.float32)


def test_many_partial_sums():
    """More programs than the second kernel takes at a time, which is 64."""
    rows = pytest.importorskip("fastformer_kernels.norms.rows")
    partials = torch.randn(130, 37, device=DEVICE), torch.randn(130, 37, device=DEVICE)
    for total, partial_sums in zip(
        rows.sum_partials(partials[0], partials, *[torch.float32] * 2), partials, strict=True
    ):
        assert_close(total, partial_sums.sum(0))


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
    results = [y, *torch.autograd.grad(y, leaves, direction)]
    expected = [exact, *torch.autograd.grad(exact, wide, direction.double())]
    for a, b in zip(results[:2], expected[:2], strict=True):
        for row in range(4):
            assert_close(a[row], b[row].float())
    for a, b in zip(results[2:], expected[2:], strict=True):
        assert_close(a, b.float())


def test_several_normalized_dimensions_and_strides(norm):
    def op(x, y, z, *parameters):
        first, *rest = parameters
        flat = norm(x, first, *(b.T for b in rest), N=(3, 5))
        rows = norm(y[:, 1, 1:], N=5)  # rows with a stride
        parts = norm(z[:, :8], N=8)  # rows that begin between vectors of 16 bytes
        mixed = norm(y.transpose(0, 2), N=4)  # columns with a stride
        spread = norm(x[0, 0, 0].expand(2, 7, 5), first[0], *(b[:, 0] for b in rest), N=5)
        return flat, rows, parts, mixed, spread.transpose(0, 1)

    inputs = [random(2, 4, 3, 5), random(4, 2, 6), random(3, 10), random(3, 5), random(5, 3)]
    assert_as_accurate_as_reference(op, inputs[: 3 + norm.parameters], torch.float32)


def test_gradients_with_strides(norm):
    leaves = norm.leaves(3, 4, 6)
    # Columns with a stride, rows with a stride, one number, one row.
    for direction in (random(6, 4, 3).permute(2, 1, 0), random(3, 4, 8)[..., 1:7], random(1, 1, 1), random(1, 1, 6)):
        direction = direction.float().expand(3, 4, 6)
        found = torch.autograd.grad(norm(*leaves, N=6), leaves, direction)
        for a, b in zip(found, torch.autograd.grad(norm.formula(*leaves), leaves, direction), strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows(norm, shape):
    leaves = norm.leaves(*shape)
    out = norm(*leaves, N=4)
    dx, *others = gradients(out, leaves)
    assert out.shape == dx.shape == shape
    assert not any(grad.any() for grad in others)


def test_mixed_dtypes(norm):
    """Results have the dtype of x, gradients those of the inputs."""
    for one, two in [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]:
        x, *parameters = norm.inputs(5, 24)
        leaves = [t.requires_grad_() for t in (x.to(one), *(p.to(two) for p in parameters))]
        out = norm(*leaves, N=24)
        assert out.dtype == one
        wide = [t.detach().double().requires_grad_() for t in leaves]
        expected = norm.formula(*wide)
        assert_close(out, expected.to(one), roundings=4)
        direction = random(5, 24).to(one)
        grads = torch.autograd.grad(out, leaves, direction)
        for a, b, t in zip(grads, torch.autograd.grad(expected, wide, direction.double()), leaves, strict=True):
            assert_close(a, b.to(t.dtype), roundings=4)


def test_wrong_shapes_raise_torchs_errors(norm):
    x, weight = random(2, 3).float(), random(3).float()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(x, N=4)
    if norm.name == "layer_norm":
        with pytest.raises(RuntimeError, match="weight"):
            norm(x, weight[:2], N=3)


def test_only_wanted_gradients(monkeypatch, norm):
    """Nothing is allocated or computed for the others; rows may be added up in another order."""
    asked = record_partials(monkeypatch, norm.name)
    tensors = norm.inputs(5, 8, dtype=torch.float32)
    leaves = [t.clone().requires_grad_() for t in tensors]
    all_ = gradients(norm(*leaves, N=8), leaves)
    for wanted in ((0,), (1,), (2,), (0, 2)) if norm.parameters == 2 else ((0,), (1,)):
        given = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        found = gradients(norm(*given, N=8), [given[i] for i in wanted])
        for i, grad in zip(wanted, found, strict=True):
            assert_close(grad, all_[i])
        assert asked[-1] == tuple(torch.float32 if i in wanted else None for i in range(1, 1 + norm.parameters))


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
def test_autocast_on_a_gpu_is_torchs(norm, dtype):
    """fp32; of RMS norm from a release after 2.11 on, before that the dtype of x."""
    with cuda_autocast(), FakeTensorMode():
        x, weight = torch.empty(2, 8, dtype=dtype, device="cuda"), torch.empty(8, device="cuda")
        expected = norm.of_torch(x, (8,), weight)
        assert norm(x, weight, N=8).dtype == expected.dtype
        assert norm.name == "rms_norm" or expected.dtype == torch.float32


def test_autocast_on_a_cpu_leaves_it_alone():
    x, weight = random(2, 8).bfloat16().cpu(), random(8).float().cpu()
    with torch.autocast("cpu", torch.bfloat16):
        assert output_dtype("layer_norm", x) == F.layer_norm(x, (8,), weight).dtype == torch.bfloat16


def test_half_precision_in_and_fp32_out(norm):
    """The kernels under autocast: one rounding less than casting back."""
    x, *parameters = norm.inputs(5, 24)
    x, parameters = x.bfloat16(), [p.float() for p in parameters]
    forward, backward = getattr(fused, f"_{norm.name}"), getattr(fused, f"_{norm.name}_backward")
    y, *statistics = forward(x, *parameters, 1e-5, torch.float32)
    wide = [t.double().requires_grad_() for t in (x, *parameters)]
    expected = norm.formula(*wide)
    assert_close(y, expected.float())
    dy, dtypes = random(5, 24).float(), [torch.bfloat16, *[torch.float32] * norm.parameters]
    found = backward(dy, x, parameters[0], *statistics, *dtypes)
    for a, b in zip(found, torch.autograd.grad(expected, wide, dy.double()), strict=True):
        assert_close(a, b.to(a.dtype), roundings=4 if a.dtype == torch.bfloat16 else 100)


def test_the_ops_pass_opcheck(norm):
    x, weight, bias = random(3, 8).float(), random(8).half(), random(8).float()
    parameters, nothing = (weight, bias)[: norm.parameters], [None] * norm.parameters
    forward = getattr(torch.ops.fastformer, norm.name).default
    backward = getattr(torch.ops.fastformer, f"{norm.name}_backward").default
    torch.library.opcheck(forward, (x, *parameters, 1e-5, torch.float32))
    torch.library.opcheck(forward, (x.half(), *nothing, 1e-5, torch.float32))
    _, *statistics = forward(x, *nothing, 1e-5, x.dtype)
    dtypes = (torch.float16, torch.float32)[: norm.parameters]
    torch.library.opcheck(backward, (x, x, weight, *statistics, torch.float32, *dtypes))
    torch.library.opcheck(backward, (x, x, None, *statistics, torch.float32, *nothing))
    torch.library.opcheck(backward, (x, x, weight, *statistics, None, *nothing[1:], dtypes[-1]))
