"""The fused embedding: values, gradients, dropout, and torch's machinery."""

import math

import pytest
import torch

import fastformer
from fastformer.functional import embedding
from fastformer.functional.embedding import op as fused
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("triton_backend")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def indices(shape, V, P):
    return torch.randint(V, shape, device=DEVICE), torch.randint(P, shape, device=DEVICE)


def matrices_of(V, P, D, dtype=torch.float64):
    return torch.randn(V, D, device=DEVICE).to(dtype), torch.randn(P, D, device=DEVICE).to(dtype)


# One number; ragged, words and positions repeat; more rows and columns than a tile has; no tokens.
SHAPES = [((1,), 1, 1, 1), ((2, 3, 7), 5, 4, 11), ((5,), 9, 7, 1030), ((0, 2), 3, 2, 4)]


OPTIONS = [(True, 22.6), (True, 1.0), (False, 22.6)]


@pytest.mark.parametrize(
    ("shape", "V", "P", "D", "has_positions", "scale", "dtype"),
    [
        pytest.param(*sizes, *options, DTYPES[(i + j + 2) % 3], id=f"shape{i}-{options}-{DTYPES[(i + j + 2) % 3]}")
        for i, sizes in enumerate(SHAPES)
        for j, options in enumerate(OPTIONS)
    ],
)
def test_values_and_gradients(shape, V, P, D, has_positions, scale, dtype):
    ids, positions = indices(shape, V, P)
    weight, table = matrices_of(V, P, D)
    if has_positions:
        assert_as_accurate_as_reference(
            lambda w, t: embedding(ids, w, t, positions, scale=scale), [weight, table], dtype
        )
    else:
        assert_as_accurate_as_reference(lambda w: embedding(ids, w, scale=scale), [weight], dtype)


def test_matrices_of_two_dtypes():
    ids, positions = indices((4, 5), 6, 7)
    for one, two in [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]:
        weight, table = matrices_of(6, 7, 12)
        weight, table = weight.to(one).requires_grad_(), table.to(two).requires_grad_()
        out = embedding(ids, weight, table, positions, scale=3.0)
        expected = (3.0 * weight.double()[ids] + table.double()[positions]).float()
        assert out.dtype == torch.float32
        assert_close(out, expected)
        with fastformer.backend("reference"):
            plain = gradients(embedding(ids, weight, table, positions, scale=3.0), [weight, table])
        for a, b in zip(gradients(out, [weight, table]), plain, strict=True):
            assert a.dtype == b.dtype
            # The reference multiplies and adds up in the matrix's own dtype, the kernel in that of the sum.
            assert (a.double() - b.double()).abs().max() <= 8 * torch.finfo(a.dtype).eps * b.abs().max()


def test_a_table_beyond_the_kernel():
    ids = torch.tensor([0, 1], device=DEVICE)
    weight, table = torch.randn(2, 3, device=DEVICE), torch.randn(2, 3, dtype=torch.float64, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"embedding takes a table of float32, .* not torch\.float64"):
        embedding(ids, weight, table, ids)
    with fastformer.backend("auto"):
        assert embedding(ids, weight, table, ids).dtype == torch.float64


def test_strided_and_broadcast_inputs():
    ids, positions = indices((3, 8), 6, 8)
    weight, table = matrices_of(12, 8, 10)

    def op(weight, table):
        # Every second row; transposed; a broadcast id; a transposed result.
        spread = embedding(ids.T, weight[::2], table.T.contiguous().T, positions.T, scale=2.0)
        row = embedding(ids[:, :1].expand(3, 8), weight[::2], table, positions)
        return spread.transpose(0, 1), row.sum(0).expand(2, 8, 10)

    assert_as_accurate_as_reference(op, [weight, table], torch.float32)


def test_no_such_row_is_not_a_number():
    """What a GPU cannot refuse without waiting for it must show, and must not be read."""
    kernels = pytest.importorskip("fastformer_kernels.embedding.kernels")
    ids = torch.tensor([0, 3, -1, 2], device=DEVICE)
    weight = torch.ones(3, 5, device=DEVICE)
    out = kernels.embedding(ids, weight, None, None, None, 1.0, 0.0)
    assert out.isnan().all(1).tolist() == [False, True, True, False]
    zero = ids * 0
    out = kernels.embedding(zero, weight, ids, weight, None, 1.0, 0.0)
    assert out.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize(("tokens", "V"), [(3, 2), (8, 1), (9, 1), (41, 1), (40, 7), (64, 3)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_words_that_span_pieces(tokens, V, dropout_p, monkeypatch):
    """Of 4 tokens: words within one, across two and many, and from the first place to the last; one of them common."""
    kernels = pytest.importorskip("fastformer_kernels.embedding.kernels")
    monkeypatch.setattr(kernels, "PIECE", 4)
    ids = torch.randint(V, (tokens,), device=DEVICE)
    ids[torch.rand(tokens, device=DEVICE) < 0.5] = V // 2
    weight = torch.ones(V, 11, device=DEVICE, requires_grad=True)
    out = embedding(ids, weight, scale=3.0, dropout_p=dropout_p)
    dout = torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, weight, dout)
    expected = torch.zeros(V, 11, dtype=torch.float64, device=DEVICE).index_add_(0, ids, (dout * out.detach()).double())
    # Sums of up to 64 products, each of two roundings.
    assert_close(actual, expected.float(), roundings=tokens + 2)


def test_gradients_of_no_such_row_are_ignored():
    kernels = pytest.importorskip("fastformer_kernels.embedding.kernels")
    ids = torch.tensor([0, 3, -1, 2, 2, 2**32 + 1], device=DEVICE)
    dout = torch.ones(6, 6, device=DEVICE)
    weight = kernels.backward(dout, ids, None, 3, 1.0, 0.0, torch.float32)
    assert weight.tolist() == [[1.0] * 6, [0.0] * 6, [2.0] * 6]


def test_dropout_forward_and_backward_agree():
    # Two tiles of rows and two of columns.
    p, scale = 0.25, 3.0
    ids, positions = indices((12,), 7, 12)
    weight, table = (torch.ones_like(m).requires_grad_() for m in matrices_of(7, 12, 1030, torch.float32))
    out = embedding(ids, weight, table, positions, scale=scale, dropout_p=p)
    kept = out != 0
    n = out.numel()
    assert abs(int(kept.sum()) - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))
    assert_close(out, kept * ((scale + 1) / (1 - p)))
    direction = torch.randn_like(out)
    dweight, dtable = torch.autograd.grad(out, (weight, table), direction)
    g = (direction * kept / (1 - p)).double()
    assert_close(
        dweight, torch.zeros(7, 1030, dtype=torch.float64, device=DEVICE).index_add_(0, ids, g * scale).float()
    )
    assert_close(dtable, torch.zeros(12, 1030, dtype=torch.float64, device=DEVICE).index_add_(0, positions, g).float())


def test_only_wanted_gradients(monkeypatch):
    ids, positions = indices((6,), 3, 4)
    weight, table = matrices_of(3, 4, 5, torch.float32)
    for index in (0, 1):
        given = [weight.detach(), table.detach()]
        given[index].requires_grad_()
        calls = []
        summed = fused._embedding_backward
        monkeypatch.setattr(
            fused, "_embedding_backward", lambda *x, calls=calls, summed=summed: calls.append(x) or summed(*x)
        )
        embedding(ids, given[0], given[1], positions, dropout_p=0.5).sum().backward()
        monkeypatch.undo()
        assert [x[3] for x in calls] == [given[index].shape[0]]


def test_rows_share_no_dropout_mask():
    ids, _ = indices((40,), 1, 1)
    weight = torch.ones(1, 300, device=DEVICE)
    assert len(embedding(ids, weight, dropout_p=0.5).unique(dim=0)) == 40
    assert not embedding(ids, weight, dropout_p=1.0).any()
