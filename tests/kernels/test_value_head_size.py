"""Values of a head size of their own, as in multi-head latent attention: kernels against fp64 of the same inputs."""

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.backend import BackendError
from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.functional.attention import fused as fused_attention
from fastformer.packing import Layout
from fastformer_kernels.attention.arguments import Arguments
from tests.support.closeness import gradients
from tests.support.fused_op import DEVICE, INTERPRETED, assert_as_accurate_as_reference, needs_kernels, poisoned

pytestmark = needs_kernels

DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
# Smaller and larger than that of keys, of as wide a tile and of another; (192, 128) is that of DeepSeek-V2 (2024).
SIZES = [(16, 1), (64, 32), (64, 128), (40, 72), (40, 56), (192, 128), (24, 200)]


def heads(K: int, V: int, T: int = 37, S: int = 70, H: int = 2, kv_heads: int = 1, B: int = 1) -> list[Tensor]:
    shapes = (B, H, T, K), (B, kv_heads, S, K), (B, kv_heads, S, V)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def run(backend, function, *inputs, **arguments):
    with fastformer.backend(backend), poisoned():
        return function(*inputs, **arguments)


def leaves(*sizes: int) -> list[Tensor]:
    return [x.to(DEVICE, torch.float32).requires_grad_() for x in heads(*sizes)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "V"), SIZES)
def test_values_and_gradients(K, V, dtype):
    """Two query heads of one key head, more than one tile of keys, causal to the last of them."""
    rules = {"causal": True, "alignment": "bottom_right"}
    assert_as_accurate_as_reference(lambda *x: attention(*x, **rules), heads(K, V), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "V"), [(40, 16), (40, 56)])
def test_every_option_with_weights_and_the_gradient_of_the_mask(K, V, dtype):
    """All that is no dropout, and dW: each loop with masks, and every kernel that reads values."""
    mask = torch.randn(2, 1, 37, 70, dtype=torch.float64)
    gaps = torch.rand(2, 70, device=DEVICE) < 0.8
    lengths = torch.tensor([70, 66], device=DEVICE)
    rules = {"causal": True, "alignment": "bottom_right", "window": (40, None), "softcap": 3.0, "scale": 0.7}
    rules |= {"key_mask": gaps, "key_lengths": lengths, "query_lengths": torch.tensor([37, 30], device=DEVICE)}
    inputs = [*heads(K, V, H=4, kv_heads=2, B=2), mask]
    assert_as_accurate_as_reference(lambda *x: attention_with_weights(*x, **rules), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "V"), [(16, 40), (40, 16)])
def test_packed_sequences(K, V, dtype):
    layout, key_layout = (Layout.from_lengths(n, DEVICE) for n in ([5, 0, 34, 1], [5, 4, 66, 0]))
    shapes = (40, 2, K), (75, 1, K), (75, 1, V)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    assert_as_accurate_as_reference(
        lambda *x: packed_attention(*x, layout, key_layout, causal=True, window=(40, 0)), inputs, dtype
    )


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("K", "V"), [(16, 40), (40, 16), (64, 200)])
def test_dropout_and_the_fast_way(K, V, fast, monkeypatch):
    """The mask of dropout is read off the weights. Atomics where both head sizes are at most 128."""
    if fast:
        backward = fused_attention._backward
        monkeypatch.setattr(fused_attention, "_backward", lambda *x: backward(*x[:10], True, *x[11:]))
    q, k, v = leaves(K, V)
    out, dropped = run("triton", attention_with_weights, q, k, v, dropout_p=0.4)
    found = gradients(out, [q, k, v])
    _, weights = run("reference", attention_with_weights, q, k, v)
    expected = gradients(torch.matmul(weights * (dropped != 0) / 0.6, v), [q, k, v])
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "V"), [(40, 72), (192, 128), (16, 1)])
def test_decoding(K, V, dtype):
    inputs = heads(K, V, T=1, S=139, H=4, kv_heads=2, B=3)
    rules = {"key_lengths": torch.tensor([139, 0, 5], device=DEVICE)}
    with torch.no_grad():
        q, k, v = (x.to(DEVICE, dtype) for x in inputs)
        assert fused_attention.decodes(q, k, v)
        found = run("triton", attention, q, k, v, **rules)
        exact = run("reference", attention, *(x.double() for x in (q, k, v)), **rules)
    assert found.shape == (3, 4, 1, V)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_the_second_derivative():
    x = [*leaves(16, 24, 5, 7), torch.randn(5, 7, device=DEVICE, requires_grad=True)]
    found = []
    for backend in ("triton", "reference"):
        first = torch.autograd.grad(run(backend, attention, *x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), x))
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(0, 4), (3, 0), (0, 0)])
def test_nothing_to_ask_or_to_attend_to(sizes):
    q, k, v = leaves(16, 24, *sizes)
    out = run("triton", attention, q, k, v)
    assert out.shape == (1, 2, sizes[0], 24)
    assert not out.any()
    assert not any(g.any() for g in gradients(out, [q, k, v]))


@pytest.mark.parametrize("V", [0, 257])
def test_values_that_the_kernels_cannot_take(V):
    inputs = [x.to(DEVICE, torch.float32) for x in heads(16, V, 2, 3)]
    with pytest.raises(BackendError, match=f"attention takes head sizes from 1 to 256, not {V}"):
        run("triton", attention, *inputs)
    assert attention(*inputs).shape == (1, 2, 2, V)  # backend "auto" falls back


@pytest.mark.parametrize("packed", [False, True])
def test_registered_ops_pass_opcheck(packed):
    bounds = torch.tensor([[0, 5, 0, 0, 5, 0, 0, 0], [5, 3, 5, 0, 3, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    shapes = [(8, 2, 16), (8, 1, 16), (8, 1, 24)] if packed else [(2, 2, 5, 16), (2, 1, 7, 16), (2, 1, 7, 24)]
    q, k, v = (torch.randn(shape, device=DEVICE) for shape in shapes)
    mask = None if packed else torch.randn(5, 7, device=DEVICE)
    arguments = Arguments(queries=5, keys=5 if packed else 7, scale=0.25, bounds=bounds if packed else None, mask=mask)
    ops = torch.ops.fastformer
    out, lse = ops.attention_forward(q, k, v, *arguments)
    given = (out, q, k, v, out, lse, None, None)
    wanted = ((True, True), (False, True))  # the gradients of q, and of k and v
    calls = [(ops.attention_backward, (*given, *each, False, *arguments)) for each in wanted]
    calls.append((ops.attention_forward, (q, k, v, *arguments)))
    if not packed:
        delta = ops.attention_backward(*given, False, False, False, *arguments)[-1]
        calls.append((ops.attention_mask_gradient, (out, q, k, v, lse, delta, None, *arguments)))
        calls.append((ops.attention_decode, (q[:, :, :1], k, v, *arguments._replace(queries=1, mask=None))))
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
