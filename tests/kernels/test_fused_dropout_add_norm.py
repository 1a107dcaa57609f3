"""The fused steps between sublayers: values, gradients of both results, dropout, and torch's machinery."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fastformer
from fastformer.functional import dropout_add_layer_norm, dropout_add_rms_norm
from fastformer.functional.norms import fused
from tests.kernels.norm_cases import DTYPES, LONG_ROWS, SHAPES, cuda_autocast, random, use_one_multiprocessor
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels, poisoned

pytestmark = [needs_kernels, pytest.mark.usefixtures("triton_backend")]


class Norm(NamedTuple):
    """An op, and the norm in it."""

    op: Callable[..., tuple[Tensor, Tensor]]
    of: Callable[..., Tensor]
    parameters: tuple[str, ...]

    def __call__(self, *inputs: Tensor | None, N: int | tuple[int, ...], eps: float = 1e-5, **options: float):
        """The op on x, residual and the parameters."""
        return self.op(*inputs[:2], N, *inputs[2:], eps=eps, **options)

    def formula(self, x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """It in torch, without dropout."""
        return self.of(residual + x, x.shape[-1:], *parameters, eps=1e-5), residual + x

    def inputs(self, *shape: int, affine: str = "weight and bias", dtype: torch.dtype = torch.float64):
        """x, residual and the parameters."""
        rows = [random(*shape, dtype=dtype) for _ in range(2)]
        return [*rows, *(random(shape[-1], dtype=dtype) if name in affine else None for name in self.parameters)]

    def leaves(self, *shape: int) -> list[Tensor]:
        """Those in fp32, which want gradients."""
        return [t.requires_grad_() for t in self.inputs(*shape, dtype=torch.float32)]


NORMS = {
    "layer norm": Norm(dropout_add_layer_norm, F.layer_norm, ("weight", "bias")),
    "RMS norm": Norm(dropout_add_rms_norm, F.rms_norm, ("weight",)),
}


@pytest.fixture(params=NORMS)
def norm(request):
    return NORMS[request.param]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("norm", "results", "affine"),
    [
        *(("layer norm", "both", affine) for affine in ("weight and bias", "weight", "bias", "none")),
        ("layer norm", "norm", "weight"),
        ("layer norm", "sum", "bias"),
        *(("RMS norm", "both", affine) for affine in ("weight", "none")),
        *(("RMS norm", results, "weight") for results in ("norm", "sum")),
    ],
    indirect=["norm"],
)
def test_values_and_gradients(shape, norm, results, affine, dtype):
    """Pre-norm layers use both results, post-norm layers the first."""

    def op(*inputs):
        both = norm(*inputs, N=shape[-1], eps=1e-3)
        return {"both": both, "norm": both[:1], "sum": both[1:]}[results]

    assert_as_accurate_as_reference(op, norm.inputs(*shape, affine=affine), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_epsilon_of_rms_norm_is_fp32s_unless_given(dtype):
    """Numbers so small that it counts; the exact result of None would have that of fp64."""
    x, residual, weight = random(5, 7) * 1e-4, random(5, 7) * 1e-4, random(7)
    added = torch.finfo(torch.float32).eps
    assert_as_accurate_as_reference(
        lambda x, residual, w: dropout_add_rms_norm(x, residual, 7, w),
        [x, residual, weight],
        dtype,
        reference=lambda x, residual, w: dropout_add_rms_norm(x, residual, 7, w, eps=added),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_that_walk_over_many_tiles(monkeypatch, norm, dtype):
    use_one_multiprocessor(monkeypatch)
    # 2 programs of 16 rows a tile (N is no multiple of 16), 5 tiles, the last of 2 rows.
    assert_as_accurate_as_reference(partial(norm, N=50), norm.inputs(66, 50), dtype)


@pytest.mark.parametrize(("N", "dtype"), LONG_ROWS, ids=str)
def test_long_rows(norm, N, dtype):
    assert_as_accurate_as_reference(partial(norm, N=N), norm.inputs(2, N), dtype)


def test_several_normalized_dimensions_and_strides(norm):
    def op(x, y, w):
        flat = norm(x, y, w, N=(3, 5))
        mixed = norm(x.transpose(1, 3), y[:1].expand(2, 4, 3, 5).transpose(1, 3), N=4)
        rows = norm(x[:, 1, :, 1:], y[:, 2, :, :4], N=4)
        return *flat, *mixed, *rows

    assert_as_accurate_as_reference(op, [random(2, 4, 3, 5), random(2, 4, 3, 5), random(5, 3).T], torch.float32)


def test_gradients_with_strides(norm):
    """Columns with a stride, one number, rows with a stride."""
    leaves = norm.leaves(3, 4, 6)
    directions = [random(6, 4, 3).permute(2, 1, 0), random(1, 1, 1), random(3, 4, 8)[..., 1:7]]
    directions = [t.float().expand(3, 4, 6) for t in directions]

    def run():
        return norm(*leaves, N=6)

    for dy, ds in zip(directions, directions[1:] + directions[:1], strict=True):
        found = torch.autograd.grad(run(), leaves, (dy, ds))
        with fastformer.backend("reference"):
            wanted = torch.autograd.grad(run(), leaves, (dy, ds))
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_no_rows(norm, p):
    leaves = norm.leaves(0, 4)
    y, s = norm(*leaves, N=4, dropout_p=p)
    assert y.shape == s.shape == (0, 4)
    dx, dresidual, *others = gradients((y, s), leaves)
    assert dx.shape == dresidual.shape == (0, 4)
    assert others
    assert not any(grad.any() for grad in others)


# From 4096 on, gradients of two dtypes are written by other kernels.
@pytest.mark.parametrize(("M", "N"), [(5, 24), (2, 4112)])
def test_mixed_dtypes(norm, M, N):
    """Under autocast x is in half precision and the residual in fp32: s has the dtype to which they promote."""
    pairs = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]
    for one, two in pairs if N < 4096 else pairs[:1]:
        x, residual, *parameters = norm.inputs(M, N, dtype=torch.float32)
        leaves = [t.requires_grad_() for t in (x.to(one), residual.to(two), *parameters)]
        y, s = norm(*leaves, N=N)
        wide = [t.detach().double().requires_grad_() for t in leaves]
        expected = norm.formula(*wide)
        assert y.dtype == s.dtype == torch.float32
        assert_close(y, expected[0].float())
        assert_close(s, expected[1].float())
        for a, b, t in zip(gradients((y, s), leaves), gradients(expected, wide), leaves, strict=True):
            assert_close(a, b.to(t.dtype), roundings=100 if t.dtype == torch.float32 else 4)


def test_what_is_beyond_the_kernels(norm):
    x, residual = random(2, 3).float(), random(2, 3)
    with pytest.raises(RuntimeError, match=rf"{norm.op.__name__} takes float32, .* not float64"):
        norm(x, residual, N=3)
    with fastformer.backend("auto"):
        assert norm(x, residual, N=3)[1].dtype == torch.float64
    with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's own words
        norm(x, x, N=4)


# Rows of one tile, and wide ones, which other kernels write; several tiles of rows in several programs.
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
        for a, b in zip(gradients((y, s)[used], leaves), gradients(expected[used], leaves), strict=True):
            assert_close(a, b)


def test_dropout_of_everything(norm):
    leaves = norm.leaves(5, 24)
    y, s = norm(*leaves, N=24, dropout_p=1.0)
    assert torch.equal(s, leaves[1])
    dx, dresidual, *_ = gradients((y, s), leaves)
    assert not dx.any()
    assert dresidual.all()


def test_without_dropout_both_gradients_are_one_tensor(norm):
    x, residual = norm.leaves(5, 24)[:2]
    y, s = norm(x, residual, N=24)
    dx, dresidual = torch.autograd.grad(y.square().sum() + s.sum(), (x, residual))
    assert dx.data_ptr() == dresidual.data_ptr()


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


def test_only_wanted_gradients(monkeypatch, norm):
    """Nothing is allocated or computed for the others; rows may be added up in another order."""
    asked, backward = [], fused._dropout_add_norm_backward
    monkeypatch.setattr(
        fused, "_dropout_add_norm_backward", lambda *x: asked.append([t is not None for t in x[-4:]]) or backward(*x)
    )
    tensors = norm.inputs(5, 24, dtype=torch.float32)
    each = range(len(tensors))
    for p in (0.0, 0.5):
        results = []
        for wanted in (tuple(each), *((i,) for i in each)):
            torch.manual_seed(5)
            given = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
            found = gradients(norm(*given, N=24, dropout_p=p)[0], [given[i] for i in wanted])
            results.append(dict(zip(wanted, found, strict=True)))
            residual, x = (0 in wanted or 1 in wanted, False) if p == 0 else (1 in wanted, 0 in wanted)
            assert asked[-1] == [residual, x, 2 in wanted, 3 in wanted]
        for one in results[1:]:
            for i, grad in one.items():
                assert_close(grad, results[0][i])
        asked.clear()
        given = [tensors[0], tensors[1], *(t.clone().requires_grad_() for t in tensors[2:])]
        norm(*given, N=24, dropout_p=p)[0].sum().backward()
        assert asked == [[False, False, True, len(tensors) == 4]]


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
    with cuda_autocast(), FakeTensorMode():
        x, residual = torch.empty(2, 8, dtype=one, device="cuda"), torch.empty(2, 8, dtype=two, device="cuda")
        found = norm(x, residual, N=8, dropout_p=0.5)
        assert [t.dtype for t in found] == [t.dtype for t in norm.formula(x, residual)]


@pytest.mark.parametrize("centred", [True, False])
def test_the_ops_pass_opcheck(centred):
    x, residual, weight, bias = NORMS["layer norm"].inputs(3, 8)
    x, residual, weight, bias = x.half(), residual.float(), weight.half(), bias.float() if centred else None
    seed = torch.tensor([5], device=DEVICE)
    forward, backward = torch.ops.fastformer.dropout_add_norm, torch.ops.fastformer.dropout_add_norm_backward
    given = (x, residual, weight, bias, seed, 1e-5, 0.5, centred, torch.float32)
    torch.library.opcheck(forward.default, given)
    torch.library.opcheck(forward.default, (x, x, None, None, None, 1e-5, 0.0, centred, torch.float16))
    y, s, mean, rstd = fused._dropout_add_norm(*given)
    assert mean.shape == ((2, 3) if centred else (0,))
    mean = mean if centred else None
    dtypes = (torch.float32, torch.float16, torch.float16, torch.float32 if centred else None)
    torch.library.opcheck(backward.default, (y, s, s, weight, mean, rstd, seed, 0.5, *dtypes))
    wanted = (torch.float32, None, None, None)
    torch.library.opcheck(backward.default, (y, None, s, None, mean, rstd, None, 0.0, *wanted))
    torch.library.opcheck(backward.default, (None, s, s, weight, mean, rstd, seed, 0.5, *dtypes[:2], None, None))
