"""The fused output loss: what it rounds where memory is saved, and that the logits are never all there."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastformer.functional import linear_cross_entropy
from tests.kernels.test_fused_linear_cross_entropy import IGNORED, leaves, targets
from tests.support.closeness import assert_close
from tests.support.fused_op import DEVICE, needs_kernels

pytestmark = needs_kernels


@pytest.fixture
def kernels():
    return pytest.importorskip("fastformer_kernels.linear_cross_entropy.kernels")


def test_fp16_keeps_gradients_that_fp16_cannot_hold(triton_backend):
    """Probabilities of 1e-8 are zero in fp16; what they add to the weight's gradient is not."""
    V = 64
    x, weight = torch.ones(1, 1, dtype=torch.half, device=DEVICE), torch.zeros(V, 1, dtype=torch.half, device=DEVICE)
    weight[0] = 18.0  # the others have probability 1.5e-8
    weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.zeros(1, dtype=torch.int64, device=DEVICE), reduction="sum")
    found = torch.autograd.grad(loss, weight, torch.tensor(2.0**12, device=DEVICE))[0]  # as GradScaler does
    assert_close(found[1:].float(), torch.full((V - 1, 1), 2.0**12 * math.exp(-18.0), device=DEVICE), roundings=5e3)
    # Of single losses too; and factors beyond what fp16 holds do not overflow.
    factors = torch.tensor([2.0**17], device=DEVICE)
    loss = linear_cross_entropy(x, weight, torch.zeros(1, dtype=torch.int64, device=DEVICE), reduction="none")
    found = torch.autograd.grad(loss, weight, factors)[0]
    assert_close(found[1:].float(), torch.full((V - 1, 1), 2.0**17 * math.exp(-18.0), device=DEVICE), roundings=5e3)


class ScaledProducts(TorchDispatchMode):
    """Notes the dtypes of what matrix products with a factor return."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if "addmm" in func.name() and (kwargs or {}).get("alpha", 1) != 1:
            self.dtypes.append(found.dtype)
        return found


def test_fp16_scales_back_in_fp32(kernels):
    """A product that a library splits is rounded before its factor is applied: 2^15 times a weight of 4 is no fp16."""
    x, weight, bias = (y.detach() for y in leaves(5, 3, 7, torch.float16))
    weight *= 4
    with ScaledProducts() as products:
        _, dx, _, _ = kernels.forward(x, weight, bias, targets(5, 7), IGNORED, 0.0, [True] * 3)
    assert products.dtypes == [torch.float32] * 2  # dx and dW
    assert dx.dtype == torch.float16
    assert dx.isfinite().all()


def test_half_precision_accumulates_in_fp32(kernels, monkeypatch, triton_backend):
    """1 + 48 / 256 in chunks of a row: bf16 would round each sum back to 1."""
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 1)
    M, V = 49, 256
    x = torch.full((M, 1), 2.0**-8, dtype=torch.bfloat16, device=DEVICE)
    x[0] = 1.0
    weight = torch.zeros(V, 1, dtype=torch.bfloat16, device=DEVICE)
    target = torch.zeros(M, dtype=torch.int64, device=DEVICE)
    _, _, dweight, dbias = kernels.forward(x, weight, None, target, IGNORED, 0.0, [False, True, True])
    assert_close(dweight[1:] * V, torch.full((V - 1, 1), 1 + 48 / 256, device=DEVICE))
    assert_close(dbias[1:] * V, torch.full((V - 1,), float(M), device=DEVICE))


def test_chunks_hold_what_they_may(kernels):
    for M in (1, 127, 128, 4096, 4097, 10**6):
        for V, itemsize in ((1, 2), (1000, 4), (32768, 2), (50257, 2), (262144, 2), (262144, 4), (10**9, 4)):
            rows = kernels.chunk_rows(M, V, itemsize)
            assert 1 <= rows <= min(M, kernels.CHUNK_ROWS)
            assert rows == 1 or rows * V * itemsize <= kernels.CHUNK_BYTES
            chunks = -(-M // rows)
            assert rows == M or M - (chunks - 1) * rows > 0
    assert kernels.chunk_rows(10**6, 32768, 2) == 4096
    assert kernels.chunk_rows(10**6, 262144, 2) == 512
    assert kernels.chunk_rows(4097, 32768, 2) == 2176  # two alike, not 4096 and 1


class Largest(TorchDispatchMode):
    """The largest memory, in bytes, of a tensor that an op returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.numel() * x.itemsize)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_never_all_there(dtype, kernels, monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 4)
    M, D, V = 20, 3, 64
    chunk = 4 * V * 4  # the CPU's products of half precision cast to fp32
    x, weight, bias = (y.detach() for y in leaves(M, D, V, dtype))
    target = targets(M, V)
    for wanted in ([True] * 3, [False] * 3):
        with Largest() as seen:
            kernels.forward(x, weight, bias, target, IGNORED, 0.1, wanted)
        assert seen.bytes <= chunk
    with Largest() as seen:
        kernels.backward(torch.randn(M, device=DEVICE), x, weight, bias, target, IGNORED, 0.1, [True] * 3)
    assert seen.bytes <= chunk


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_of_the_size_of_the_logits_is_saved(reduction, triton_backend):
    M, D, V = 40, 3, 64
    inputs = leaves(M, D, V)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_cross_entropy(inputs[0], inputs[1], targets(M, V), inputs[2], reduction=reduction)
    assert max(saved) <= max(M, V) * D
