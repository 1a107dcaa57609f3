"""Layer norm and RMS norm, alone and after dropout and a sum: values, gradients, numerics, tiles, registered ops.

Compilation, checkpointing, second derivatives and refused dtypes are in `test_fused_contract.py`, of every op.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import fastformer
from fastformer.functional import dropout_add_layer_norm, layer_norm
from fastformer.functional.norms import fused
from tests.kernels.norm_cases import (
    DTYPES,
    NORMS,
    combinations,
    cuda_autocast,
    of_adding,
    of_alone,
    random,
    use_one_multiprocessor,
)
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels, poisoned

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("triton_backend"),
    # torch says that it has no fused kernel for mixed dtypes.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


@pytest.fixture(params=NORMS)
def norm(request):
    return NORMS[request.param]


@pytest.mark.parametrize(("norm", "affine", "results", "shape", "dtype"), combinations(), indirect=["norm"])
def test_values_and_gradients(shape, norm, affine, results, dtype):
    """Pre-norm layers use both results of what adds, post-norm layers the first."""
    used = {"both": slice(None), "norm": slice(0, 1), "sum": slice(1, 2)}[results]
    inputs = norm.inputs(*shape, affine=affine)
    assert_as_accurate_as_reference(lambda *x: norm(*x, N=shape[-1], eps=1e-3)[used], inputs, dtype)


@pytest.mark.parametrize(
    ("norm", "affine", "dtype"),
    [
        ("rms_norm", "weight", torch.float32),
        ("rms_norm", "none", torch.float16),
        ("rms_norm", "weight", torch.bfloat16),
        *(("dropout_add_rms_norm", "weight", dtype) for dtype in DTYPES),
    ],
    indirect=["norm"],
    ids=str,
)
def test_the_epsilon_of_rms_norm_is_fp32s_unless_given(norm, affine, dtype):
    """Numbers so small that it counts; the exact result of None would have that of fp64."""
    *rows, weight = norm.inputs(15, 7, affine=affine)
    inputs = [*(1e-4 * x for x in rows), weight]
    reference = partial(norm, N=7, eps=torch.finfo(torch.float32).eps)
    assert_as_accurate_as_reference(partial(norm, N=7, eps=None), inputs, dtype, reference=reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_that_walk_over_many_tiles(monkeypatch, norm, dtype):
    use_one_multiprocessor(monkeypatch)
    # 2 programs of 32 or 16 rows a tile (N is no multiple of 16), 5 tiles, the last of 2 rows.
    assert_as_accurate_as_reference(partial(norm, N=50), norm.inputs(66 if norm.adds else 130, 50), dtype)


# Rows that fill the widest tile, and 16 numbers more; not a multiple of 16, where the limit is 4096.
@pytest.mark.parametrize(
    ("N", "dtype"), [(8192, torch.float32), (8208, torch.bfloat16), (4100, torch.float32)], ids=str
)
def test_long_rows(norm, N, dtype):
    assert_as_accurate_as_reference(partial(norm, N=N), norm.inputs(2, N), dtype)


@of_alone
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


EQUAL, NEARLY_EQUAL, LARGE_MEAN = 0, 2, 1 << 16  # units of the numbers' own rounding


@pytest.mark.parametrize(
    ("op", "spread", "N"),
    [
        pytest.param(op, spread, N, id=f"{op}-{name}-{N}")
        for op, spread, name, sizes in [  # of rows of 4100 and 8208, which are long ones
            ("layer_norm", EQUAL, "equal", (20, 4100)),
            ("layer_norm", NEARLY_EQUAL, "nearly equal", (20, 512, 4100, 8208)),
            ("layer_norm", LARGE_MEAN, "large mean", (512, 8208)),
            ("dropout_add_layer_norm", EQUAL, "equal", (512, 8208)),
            ("dropout_add_layer_norm", NEARLY_EQUAL, "nearly equal", (512, 4100)),
            ("dropout_add_layer_norm", LARGE_MEAN, "large mean", (20, 4100)),
        ]
        for N in sizes
    ],
)
def test_rows_whose_mean_is_large_beside_their_deviations(op, spread, N):
    """Nothing is rounded at the size of the mean: neither the output nor a gradient."""
    means = torch.tensor([[12345.678], [-1e6], [3e-3], [7.0]])
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


@of_alone
def test_several_normalized_dimensions_and_strides(norm):
    def op(x, y, z, *parameters):
        first, *rest = parameters
        flat = norm(x, first, *(b.T for b in rest), N=(3, 5))
        rows = norm(y[:, 1, 1:], N=5)  # rows with a stride
        parts = norm(z[:, :8], N=8)  # rows that begin between vectors of 16 bytes
        mixed = norm(y.transpose(0, 2), N=4)  # columns with a stride
        spread = norm(x[0, 0, 0].expand(2, 7, 5), first[0], *(b[:, 0] for b in rest), N=5)
        return *flat, *rows, *parts, *mixed, spread[0].transpose(0, 1)

    inputs = [random(2, 4, 3, 5), random(4, 2, 6), random(3, 10), random(3, 5), random(5, 3)]
    assert_as_accurate_as_reference(op, inputs[: 3 + len(norm.parameters)], torch.float32)


@of_adding
def test_several_normalized_dimensions_and_strides_of_a_sum(norm):
    def op(x, y, w):
        flat = norm(x, y, w, N=(3, 5))
        mixed = norm(x.transpose(1, 3), y[:1].expand(2, 4, 3, 5).transpose(1, 3), N=4)
        rows = norm(x[:, 1, :, 1:], y[:, 2, :, :4], N=4)
        return *flat, *mixed, *rows

    assert_as_accurate_as_reference(op, [random(2, 4, 3, 5), random(2, 4, 3, 5), random(5, 3).T], torch.float32)


def test_gradients_with_strides(norm):
    """Columns with a stride, rows with a stride, one number, one row."""
    leaves = norm.leaves(3, 4, 6)
    directions = [random(6, 4, 3).permute(2, 1, 0), random(3, 4, 8)[..., 1:7], random(1, 1, 1), random(1, 1, 6)]
    directions = [t.float().expand(3, 4, 6) for t in directions]
    for i in range(4):
        of_results = [directions[i], directions[i - 1]][: 1 + norm.adds]
        actual = torch.autograd.grad(norm(*leaves, N=6), leaves, of_results)
        assert_close(actual, torch.autograd.grad(norm.formula(*leaves), leaves, of_results))


@pytest.mark.parametrize(("shape", "p"), [((0, 4), 0.0), ((2, 0, 4), 0.5)])
def test_no_rows(norm, shape, p):
    leaves = norm.leaves(*shape)
    outputs = norm(*leaves, N=4, **({"dropout_p": p} if norm.adds else {}))
    actual = gradients(outputs, leaves)
    assert all(out.shape == shape for out in outputs)
    assert [grad.shape for grad in actual] == [x.shape for x in leaves]
    assert not any(grad.any() for grad in actual)


# Under autocast x is in half precision and the residual in fp32. From 4096 on, gradients of two dtypes are written by
# other kernels.
@pytest.mark.parametrize(("M", "N"), [(5, 24), (2, 4112)])
def test_mixed_dtypes(norm, M, N):
    """A norm has the dtype of x, a sum that to which x and the residual promote, and gradients those of the inputs."""
    pairs = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]
    for one, two in pairs if N < 4096 else pairs[:1]:
        x, *others = norm.inputs(M, N, dtype=torch.float32)
        leaves = [x.to(one).requires_grad_()]
        # The second dtype is that of the residual, or where there is none of the parameters.
        leaves += [
            t.to(two).requires_grad_() if i == 0 or not norm.adds else t.requires_grad_() for i, t in enumerate(others)
        ]
        outputs = norm(*leaves, N=N)
        wide = [t.detach().double().requires_grad_() for t in leaves]
        expected = norm.formula(*wide)
        for a, b in zip(outputs, expected, strict=True):
            assert a.dtype == (torch.float32 if norm.adds else one)
            assert_close(a, b.to(a.dtype), roundings=100 if norm.adds else 4)
        directions = [random(M, N).to(y.dtype) for y in outputs]
        actual = torch.autograd.grad(outputs, leaves, directions)
        exact = torch.autograd.grad(expected, wide, [x.double() for x in directions])
        for a, b, t in zip(actual, exact, leaves, strict=True):
            assert_close(a, b.to(t.dtype), roundings=100 if norm.adds and t.dtype == torch.float32 else 4)


def test_what_is_refused(norm):
    """Wrong shapes, with torch's own errors; a residual that kernels cannot take."""
    x, weight = random(2, 3).float(), random(3).float()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(*[x] * (1 + norm.adds), N=4)
    if norm.op is layer_norm:
        with pytest.raises(RuntimeError, match="weight"):
            norm(x, weight[:2], N=3)
    if norm.adds:
        with pytest.raises(RuntimeError, match=rf"{norm.op.__name__} takes float32, .* not float64"):
            norm(x, x.double(), N=3)
        with fastformer.backend("auto"):
            assert norm(x, x.double(), N=3)[1].dtype == torch.float64


def test_only_wanted_gradients(monkeypatch, norm):
    """Nothing is allocated or computed for the others; rows may be added up in another order."""
    asked, name = [], "_dropout_add_norm_backward" if norm.adds else "_norm_backward"
    backward, results = getattr(fused, name), 4 if norm.adds else 3
    monkeypatch.setattr(fused, name, lambda *x: asked.append([t is not None for t in x[-results:]]) or backward(*x))
    tensors = norm.inputs(5, 24, dtype=torch.float32)
    each = range(len(tensors))
    subsets = [tuple(each), *((i,) for i in each), tuple(each[1:]), tuple(each[::2]), tuple(each[1 + norm.adds :])]
    for p in (0.0, 0.5) if norm.adds else (0.0,):
        actual = []
        for expected in subsets:
            torch.manual_seed(5)
            given = [t.clone().requires_grad_(i in expected) for i, t in enumerate(tensors)]
            output = norm(*given, N=24, **({"dropout_p": p} if norm.adds else {}))[0]
            actual.append(dict(zip(expected, gradients(output, [given[i] for i in expected]), strict=True)))
            rows = [0 in expected]
            if norm.adds:  # without dropout both gradients are one tensor
                rows = [0 in expected or 1 in expected, False] if p == 0 else [1 in expected, 0 in expected]
            parameters = [i in expected for i in each[1 + norm.adds :]]
            assert asked[-1] == [*rows, *parameters, *[False] * (results - len(rows) - len(parameters))]
            for i, gradient in actual[-1].items():
                assert_close(gradient, actual[0][i])


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


@of_adding
def test_second_derivative(norm):
    leaves = norm.leaves(3, 5)

    def second(*used):
        results = norm(*leaves, N=5)
        first = torch.autograd.grad(
            sum(results[i].pow(3).sum() for i in used), leaves, create_graph=True, allow_unused=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in first if g is not None), leaves, allow_unused=True)

    for used in ((0, 1), (0,), (1,)):
        ours = second(*used)
        with fastformer.backend("reference"):
            expected = second(*used)
        for a, b in zip(ours, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(a, b)


@pytest.mark.parametrize("one", DTYPES, ids=str)
@pytest.mark.parametrize("two", DTYPES, ids=str)
def test_autocast_on_a_gpu_is_torchs(norm, one, two):
    """fp32; of RMS norm from a release after 2.11 on, before that the dtype of x."""
    with cuda_autocast(), FakeTensorMode():
        rows = [torch.empty(2, 8, dtype=dtype, device="cuda") for dtype in (one, two)[: 1 + norm.adds]]
        expected = [t.dtype for t in norm.formula(*rows)]
        assert [t.dtype for t in norm(*rows, N=8)] == expected
        assert norm.of_torch is F.rms_norm or expected[0] == torch.float32


@of_alone
def test_half_precision_in_and_fp32_out(norm):
    """The kernels under autocast: one rounding less than casting back."""
    x, *parameters = norm.inputs(5, 24)
    x, parameters = x.bfloat16(), [p.float() for p in parameters]
    y, *mean, rstd = getattr(fused, f"_{norm.op.__name__}")(x, *parameters, 1e-5, torch.float32)
    wide = [t.double().requires_grad_() for t in (x, *parameters)]
    (expected,) = norm.formula(*wide)
    assert_close(y, expected.float())
    dy, dtypes = random(5, 24).float(), [torch.bfloat16, torch.float32, torch.float32 if mean else None]
    actual = fused._norm_backward(dy, x, parameters[0], *(mean or [None]), rstd, *dtypes)
    for a, b in zip(actual[: len(wide)], torch.autograd.grad(expected, wide, dy.double()), strict=True):
        assert_close(a, b.to(a.dtype), roundings=4 if a.dtype == torch.bfloat16 else 100)


# ---- dropout, and what is kept


# Rows of one tile, and wide ones, which other kernels write; several tiles of rows in several programs.
@of_adding
@pytest.mark.parametrize(("M", "N", "p"), [(131, 40, 0.25), (3, 4104, 0.6), (70, 50, 0.001)])
@pytest.mark.parametrize("results", ["both", "norm", "sum"])
def test_forward_and_backward_have_one_mask(monkeypatch, norm, M, N, p, results):
    use_one_multiprocessor(monkeypatch)
    leaves = [torch.ones(M, N, device=DEVICE).requires_grad_(), *norm.leaves(M, N)[1:]]
    with poisoned():
        y, s = norm(*leaves, N=N, dropout_p=p)
        kept = (s - leaves[1]).detach().abs() > 0.5
        n = M * N
        assert abs(int(kept.sum()) - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))
        assert p < 0.1 or len(kept.unique(dim=0)) == M
        assert N <= 4096 or not torch.equal(kept[:, :2048], kept[:, 2048:4096])
        # p is quantised to 2^-16.
        scale = 1 / (1 - round(p * 65536) / 65536)
        expected = norm.formula(kept * scale * leaves[0], *leaves[1:])
        assert_close(s, expected[1])
        assert_close(y, expected[0])
        used = {"both": slice(None), "norm": slice(0, 1), "sum": slice(1, 2)}[results]
        assert_close(gradients((y, s)[used], leaves), gradients(expected[used], leaves))


@of_adding
def test_dropout_of_everything(norm):
    leaves = norm.leaves(5, 24)
    y, s = norm(*leaves, N=24, dropout_p=1.0)
    assert torch.equal(s, leaves[1])
    dx, dresidual, *_ = gradients((y, s), leaves)
    assert not dx.any()
    assert dresidual.all()


@of_adding
def test_what_is_saved(norm):
    """s, statistics, the seed and the parameters; no mask, neither x nor the residual.

    The statistics of a row are 1 / sqrt(var + eps), and of layer norm the mean as the sum of two numbers.
    """
    statistics = {1: 1, 2: 3}[len(norm.parameters)]
    leaves = norm.leaves(64, 24)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, s = norm(*leaves, N=24, dropout_p=0.5)
    assert (
        sum(t.numel() * t.element_size() for t in saved) == 4 * (64 * (24 + statistics) + 24 * len(norm.parameters)) + 8
    )
    assert y.shape == s.shape
