"""The fused step between sublayers: values, gradients of both results, dropout, and torch's machinery."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer.functional import dropout_add_layer_norm
from fastformer.functional.norms import dropout_add_layer_norm as fused
from tests.kernels.norm_cases import DTYPES, LONG_ROWS, SHAPES, cuda_autocast, random, use_one_multiprocessor
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels, poisoned

pytestmark = [needs_kernels, pytest.mark.usefixtures("triton_backend")]


def inputs(*shape, affine="weight and bias"):
    N = shape[-1]
    weight = random(N) if "weight" in affine else None
    bias = random(N) if "bias" in affine else None
    return [random(*shape), random(*shape), weight, bias]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("results", "affine"),
    [
        *(("both", affine) for affine in ("weight and bias", "weight", "bias", "none")),
        ("norm", "weight"),
        ("sum", "bias"),
    ],
)
def test_values_and_gradients(shape, results, affine, dtype):
    """Pre-norm layers use both results, post-norm layers the first."""

    def op(x, residual, w, b):
        both = dropout_add_layer_norm(x, residual, shape[-1], w, b, eps=1e-3)
        return {"both": both, "norm": both[:1], "sum": both[1:]}[results]

    assert_as_accurate_as_reference(op, inputs(*shape, affine=affine), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_that_walk_over_many_tiles(monkeypatch, dtype):
    use_one_multiprocessor(monkeypatch)
    # 2 programs of 16 rows a tile (N is no multiple of 16), 5 tiles, the last of 2 rows.
    assert_as_accurate_as_reference(lambda *x: dropout_add_layer_norm(*x[:2], 50, *x[2:]), inputs(66, 50), dtype)


@pytest.mark.parametrize(("N", "dtype"), LONG_ROWS, ids=str)
def test_long_rows(N, dtype):
    assert_as_accurate_as_reference(lambda *x: dropout_add_layer_norm(*x[:2], N, *x[2:]), inputs(2, N), dtype)


def test_several_normalized_dimensions_and_strides():
    def op(x, y, w):
        flat = dropout_add_layer_norm(x, y, (3, 5), w)
        mixed = dropout_add_layer_norm(x.transpose(1, 3), y[:1].expand(2, 4, 3, 5).transpose(1, 3), 4)
        rows = dropout_add_layer_norm(x[:, 1, :, 1:], y[:, 2, :, :4], 4)
        return *flat, *mixed, *rows

    assert_as_accurate_as_reference(op, [random(2, 4, 3, 5), random(2, 4, 3, 5), random(5, 3).T], torch.float32)


def test_gradients_with_strides():
    """Columns with a stride, one number, rows with a stride."""
    leaves = [t.float().requires_grad_() for t in inputs(3, 4, 6)]
    directions = [random(6, 4, 3).permute(2, 1, 0), random(1, 1, 1), random(3, 4, 8)[..., 1:7]]
    directions = [t.float().expand(3, 4, 6) for t in directions]

    def run():
        return dropout_add_layer_norm(*leaves[:2], 6, *leaves[2:])

    for dy, ds in zip(directions, directions[1:] + directions[:1], strict=True):
        found = torch.autograd.grad(run(), leaves, (dy, ds))
        with fastformer.backend("reference"):
            wanted = torch.autograd.grad(run(), leaves, (dy, ds))
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_no_rows(p):
    leaves = [t.float().requires_grad_() for t in (random(0, 4), random(0, 4), random(4), random(4))]
    y, s = dropout_add_layer_norm(*leaves[:2], 4, *leaves[2:], dropout_p=p)
    assert y.shape == s.shape == (0, 4)
    dx, dresidual, dw, db = gradients((y, s), leaves)
    assert dx.shape == dresidual.shape == (0, 4)
    assert not dw.any()
    assert not db.any()


# From 4096 on, gradients of two dtypes are written by other kernels.
@pytest.mark.parametrize(("M", "N"), [(5, 24), (2, 4112)])
def test_mixed_dtypes(M, N):
    """Under autocast x is in half precision and the residual in fp32: s has the dtype to which they promote."""
    pairs = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]
    for one, two in pairs if N < 4096 else pairs[:1]:
        x, residual, weight, bias = inputs(M, N)
        leaves = [t.requires_grad_() for t in (x.to(one), residual.to(two), weight.float(), bias.float())]
        y, s = dropout_add_layer_norm(*leaves[:2], N, *leaves[2:])
        wide = [t.detach().double().requires_grad_() for t in leaves]
        expected = (F.layer_norm(wide[0] + wide[1], (N,), *wide[2:]), wide[0] + wide[1])
        assert y.dtype == s.dtype == torch.float32
        assert_close(y, expected[0].float())
        assert_close(s, expected[1].float())
        for a, b, t in zip(gradients((y, s), leaves), gradients(expected, wide), leaves, strict=True):
            assert_close(a, b.to(t.dtype), roundings=100 if t.dtype == torch.float32 else 4)


def test_what_is_beyond_the_kernels():
    x, residual = random(2, 3).float(), random(2, 3)
    with pytest.raises(RuntimeError, match=r"dropout_add_layer_norm takes float32, .* not float64"):
        dropout_add_layer_norm(x, residual, 3)
    with fastformer.backend("auto"):
        assert dropout_add_layer_norm(x, residual, 3)[1].dtype == torch.float64
    with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's own words
        dropout_add_layer_norm(x, x, 4)


# Rows of one tile, and wide ones, which other kernels write; several tiles of rows in several programs.
@pytest.mark.parametrize(("M", "N", "p"), [(131, 40, 0.25), (3, 4104, 0.6), (70, 50, 0.001)])
@pytest.mark.parametrize("results", ["both", "norm", "sum"])
def test_forward_and_backward_have_one_mask(monkeypatch, M, N, p, results):
    use_one_multiprocessor(monkeypatch)
    x = torch.ones(M, N, device=DEVICE)
    leaves = [x, random(M, N).float(), random(N).float(), random(N).float()]
    leaves = [t.requires_grad_() for t in leaves]
    with poisoned():
        y, s = dropout_add_layer_norm(*leaves[:2], N, *leaves[2:], dropout_p=p)
        kept = (s - leaves[1]).detach().abs() > 0.5
        n = M * N
        assert abs(int(kept.sum()) - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))
        assert p < 0.1 or len(kept.unique(dim=0)) == M
        assert N <= 4096 or not torch.equal(kept[:, :2048], kept[:, 2048:4096])
        # p is quantised to 2^-16.
        scale = 1 / (1 - round(p * 65536) / 65536)
        again = leaves[1] + kept * scale * leaves[0]
        expected = (F.layer_norm(again, (N,), *leaves[2:]), again)
        assert_close(s, again)
        assert_close(y, expected[0])
        used = {"both": slice(None), "norm": slice(0, 1), "sum": slice(1, 2)}[results]
        for a, b in zip(gradients((y, s)[used], leaves), gradients(expected[used], leaves), strict=True):
            assert_close(a, b)


def test_dropout_follows_the_generator():
    x, residual = torch.ones(4, 300, device=DEVICE).requires_grad_(), torch.zeros(4, 300, device=DEVICE)

    def run(x):
        return dropout_add_layer_norm(x, residual, 300, dropout_p=0.5)[1]

    torch.manual_seed(3)
    one, two = run(x), run(x)
    torch.manual_seed(3)
    assert torch.equal(run(x), one)
    assert not torch.equal(one, two)
    assert len(one.unique(dim=0)) == 4
    torch.manual_seed(3)
    again = checkpoint(run, x, use_reentrant=False)
    assert torch.equal(again, one)
    assert torch.equal(gradients(again, [x])[0], gradients(one, [x])[0])


def test_dropout_of_everything():
    leaves = [t.float().requires_grad_() for t in inputs(5, 24)]
    y, s = dropout_add_layer_norm(*leaves[:2], 24, *leaves[2:], dropout_p=1.0)
    assert torch.equal(s, leaves[1])
    dx, dresidual, *_ = gradients((y, s), leaves)
    assert not dx.any()
    assert dresidual.all()


def test_without_dropout_both_gradients_are_one_tensor():
    x, residual = (random(5, 24).float().requires_grad_() for _ in range(2))
    y, s = dropout_add_layer_norm(x, residual, 24)
    dx, dresidual = torch.autograd.grad(y.square().sum() + s.sum(), (x, residual))
    assert dx.data_ptr() == dresidual.data_ptr()


def test_what_is_saved():
    """s, the statistics, the seed and the parameters; no mask, neither x nor the residual."""
    leaves = [t.float().requires_grad_() for t in inputs(64, 24)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, s = dropout_add_layer_norm(*leaves[:2], 24, *leaves[2:], dropout_p=0.5)
    assert sum(t.numel() * t.element_size() for t in saved) == 4 * (64 * 24 + 64 + 64 + 24 + 24) + 8
    assert y.shape == s.shape


def test_only_wanted_gradients(monkeypatch):
    """Nothing is allocated or computed for the others; rows may be added up in another order."""
    asked, backward = [], fused._backward
    monkeypatch.setattr(fused, "_backward", lambda *x: asked.append([t is not None for t in x[-4:]]) or backward(*x))
    tensors = [t.float() for t in inputs(5, 24)]
    for p in (0.0, 0.5):
        results = []
        for wanted in ((0, 1, 2, 3), (0,), (1,), (2,), (3,)):
            torch.manual_seed(5)
            given = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
            found = gradients(
                dropout_add_layer_norm(*given[:2], 24, *given[2:], dropout_p=p)[0], [given[i] for i in wanted]
            )
            results.append(dict(zip(wanted, found, strict=True)))
            residual, x = (0 in wanted or 1 in wanted, False) if p == 0 else (1 in wanted, 0 in wanted)
            assert asked[-1] == [residual, x, 2 in wanted, 3 in wanted]
        for one in results[1:]:
            for i, grad in one.items():
                assert_close(grad, results[0][i])
        asked.clear()
        given = [tensors[0], tensors[1], *(t.clone().requires_grad_() for t in tensors[2:])]
        dropout_add_layer_norm(*given[:2], 24, *given[2:], dropout_p=p)[0].sum().backward()
        assert asked == [[False, False, True, True]]


def test_second_derivative():
    leaves = [t.float().requires_grad_() for t in inputs(3, 5)]

    def second(*used):
        results = dropout_add_layer_norm(*leaves[:2], 5, *leaves[2:])
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
def test_autocast_on_a_gpu_is_torchs(one, two):
    with cuda_autocast(), FakeTensorMode():
        x, residual = torch.empty(2, 8, dtype=one, device="cuda"), torch.empty(2, 8, dtype=two, device="cuda")
        y, s = fused.dropout_add_layer_norm(x, residual, (8,), None, None, eps=1e-5, dropout_p=0.5)
        expected = residual + x
        assert s.dtype == expected.dtype
        assert y.dtype == F.layer_norm(expected, (8,)).dtype


def test_the_ops_pass_opcheck():
    x, residual, weight, bias = inputs(3, 8)
    x, residual, weight, bias = x.half(), residual.float(), weight.half(), bias.float()
    seed = torch.tensor([5], device=DEVICE)
    torch.library.opcheck(
        torch.ops.fastformer.dropout_add_layer_norm.default, (x, residual, weight, bias, seed, 1e-5, 0.5, torch.float32)
    )
    torch.library.opcheck(
        torch.ops.fastformer.dropout_add_layer_norm.default, (x, x, None, None, None, 1e-5, 0.0, torch.float16)
    )
    y, s, mean, rstd = fused._forward(x, residual, weight, bias, seed, 1e-5, 0.5, torch.float32)
    dtypes = (torch.float32, torch.float16, torch.float16, torch.float32)
    torch.library.opcheck(
        torch.ops.fastformer.dropout_add_layer_norm_backward.default, (y, s, s, weight, mean, rstd, seed, 0.5, *dtypes)
    )
    torch.library.opcheck(
        torch.ops.fastformer.dropout_add_layer_norm_backward.default,
        (y, None, s, None, mean, rstd, None, 0.0, torch.float32, None, None, None),
    )
    torch.library.opcheck(
        torch.ops.fastformer.dropout_add_layer_norm_backward.default,
        (None, s, s, weight, mean, rstd, seed, 0.5, *dtypes[:2], None, None),
    )


@pytest.mark.parametrize("results", [slice(None), slice(0, 1), slice(1, 2)])
def test_compiled_is_eager(results):
    leaves = [t.float().requires_grad_() for t in inputs(2, 3, 8)]

    def op(x, residual, *affine):
        return [out * 2 for out in dropout_add_layer_norm(x, residual, 8, *affine)[results]]

    torch._dynamo.reset()
    out, expected = torch.compile(op, fullgraph=True, backend="aot_eager")(*leaves), op(*leaves)
    for a, b in zip([*out, *gradients(out, leaves)], [*expected, *gradients(expected, leaves)], strict=True):
        assert_close(a, b)


def test_compiled_with_dropout():
    x, residual = torch.ones(4, 300, device=DEVICE).requires_grad_(), torch.zeros(4, 300, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: dropout_add_layer_norm(x, residual, 300, dropout_p=0.5)[1], fullgraph=True, backend="aot_eager"
    )
    s = compiled(x)
    assert abs(int((s != 0).sum()) - 600) < 5 * math.sqrt(300)
    assert torch.equal(torch.autograd.grad(s.sum(), x)[0], s)
