"""Every fused op on a GPU at real sizes: accuracy, memory, dropout."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastformer
from fastformer import functional
from fastformer.backend import allow_nondeterminism
from tests.functional.test_sdpa import SKIPPED
from tests.gpu.gpu_cases import CASES, B, H, K, T
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference
from tests.support.gpu import MARKS, peak_memory

pytestmark = MARKS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIB = 1 << 20
# Those whose formula takes up to 11 GB in fp64 are run one after another, where workers share a GPU.
LARGE = pytest.mark.xdist_group("large")
GROUPED = [pytest.param(name, marks=LARGE) if name.startswith("linear_cross_entropy") else name for name in CASES]


def leaves(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(DEVICE, dtype).requires_grad_() for x in inputs]


def test_every_op_has_a_case():
    assert {name.split(",")[0] for name in CASES} == set(functional.OPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GROUPED)
def test_as_accurate_as_the_reference(name, dtype):
    op, inputs = CASES[name](DEVICE, 0.0)
    assert_as_accurate_as_reference(op, inputs, dtype)


# Without the few wide rows, for which partial sums of the weights' gradients are as large as the input.
@pytest.mark.parametrize("name", [name for name in CASES if "wide" not in name])
def test_memory(name):
    """Of forward and backward with dropout, in bf16: no more than the reference takes, which keeps at least as much."""
    op, inputs = CASES[name](DEVICE, 0.1)
    given = leaves(inputs, torch.bfloat16)
    outputs = op(*given)
    directions = [torch.randn_like(x) for x in ([outputs] if isinstance(outputs, Tensor) else outputs)]
    del outputs

    def step() -> None:
        outputs = op(*given)
        torch.autograd.grad([outputs] if isinstance(outputs, Tensor) else list(outputs), given, directions)

    taken = {}
    for backend in ("reference", "triton"):
        with fastformer.backend(backend):
            taken[backend] = peak_memory(step)
    assert taken["triton"] <= 1.1 * taken["reference"] + MIB, taken


def test_memory_of_the_loss_is_not_that_of_the_logits():
    op, inputs = CASES["linear_cross_entropy"](DEVICE, 0.0)
    x, w, b = given = leaves(inputs, torch.bfloat16)
    target = torch.randint(w.shape[0], x.shape[:1], device=DEVICE)
    eager = peak_memory(lambda: torch.autograd.grad(F.cross_entropy(F.linear(x, w, b).float(), target), given))
    with fastformer.backend("triton"):
        ours = peak_memory(lambda: torch.autograd.grad(op(*given), given))
    assert ours <= 0.25 * eager, (ours, eager)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["attention", "attention, grouped", "packed_attention"])
def test_gradients_by_atomic_addition(name, dtype):
    op, inputs = CASES[name](DEVICE, 0.0)
    given = leaves(inputs, dtype)
    with fastformer.backend("triton"):
        expected = gradients(op(*given), given)
        allow_nondeterminism()
        try:
            found = gradients(op(*given), given)
        finally:
            allow_nondeterminism(False)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, roundings=100 if dtype == torch.float32 else 4)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_its_rate(p):
    """Queries of zeros attend to all keys alike, and values of ones add up what was kept of each row, scaled."""
    q, k, v = (
        torch.zeros(B, H, T, K, device=DEVICE),
        torch.randn(B, H, T, K, device=DEVICE),
        torch.ones(1, device=DEVICE),
    )
    with fastformer.backend("triton"):
        torch.manual_seed(3)
        out = functional.attention(q, k, v.expand(B, H, T, K), dropout_p=p)
        torch.manual_seed(3)
        assert torch.equal(functional.attention(q, k, v.expand(B, H, T, K), dropout_p=p), out)
    kept = out[..., 0].double()
    deviation = (p / (1 - p) / T) ** 0.5  # of a row: the mean of T values, 1 / (1 - p) or 0
    assert abs(kept.mean().item() - 1) < 5 * deviation / kept.numel() ** 0.5
    assert kept.std().item() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("name", SKIPPED)
def test_sdpa_skips_what_a_mask_hides(name):
    mask = SKIPPED[name].to(DEVICE)
    qkv = [torch.randn(3, 2, 260, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out, expected = (attention(*qkv, mask) for attention in (fastformer.sdpa, F.scaled_dot_product_attention))
    direction = torch.randn_like(out)
    assert_close(out, expected, roundings=4)
    found = (torch.autograd.grad(x, qkv, direction) for x in (out, expected))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, roundings=8)
