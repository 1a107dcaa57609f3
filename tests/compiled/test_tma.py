"""Triton kernels with tensor descriptors, which sm_90 loads and stores by TMA, behind mbarriers; right and wrong ones.
On sm_80 Triton makes ordinary loads and stores of them.

None of our kernels has them. They are those of Triton's tutorials, in small: a copy, a matrix product whose loop loads
ahead, and attention. What is left out of their PTX is missed, one line at a time.
"""

import pytest
import torch

triton = pytest.importorskip("triton")
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.compiled.faults import missed
from tests.compiled.ptx.driver import session
from tests.compiled.ptx.text import PtxError
from tests.support.fused_op import needs_compiled

pytestmark = needs_compiled
on_sm_90 = pytest.mark.skipif(session.arch != 90, reason="TMA is of sm_90")


@triton.jit
def add_one(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    y = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    y.store(at, x.load(at) + 1)


@triton.jit
def multiply(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK, BLOCK_K])
    b = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK, BLOCK])
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        sums = tl.dot(a.load([row, k]), b.load([k, column]), sums)
    c.store([row, column], sums.to(c_ptr.dtype.element_ty))


@triton.jit
def attend(q_ptr, k_ptr, v_ptr, out_ptr, T, S, HEAD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    q = tl.make_tensor_descriptor(q_ptr, [T, HEAD], [HEAD, 1], [BLOCK, HEAD])
    k = tl.make_tensor_descriptor(k_ptr, [S, HEAD], [HEAD, 1], [BLOCK, HEAD])
    v = tl.make_tensor_descriptor(v_ptr, [S, HEAD], [HEAD, 1], [BLOCK, HEAD])
    out = tl.make_tensor_descriptor(out_ptr, [T, HEAD], [HEAD, 1], [BLOCK, HEAD])
    row = tl.program_id(0) * BLOCK
    queries = q.load([row, 0])
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, HEAD), tl.float32)
    for first in tl.range(0, S, BLOCK, num_stages=STAGES):
        scores = tl.dot(queries, k.load([first, 0]).T)
        scores = tl.where(first + tl.arange(0, BLOCK) < S, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrunk = tl.exp(highest - higher)
        total = total * shrunk + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v_ptr.dtype.element_ty), v.load([first, 0]), sums * shrunk[:, None])
        highest = higher
    out.store([row, 0], (sums / total[:, None]).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("columns", [16, 32, 128])
def test_boxes_of_a_matrix(columns, dtype):
    """Rows of a box of 16 to 512 bytes: every swizzle, more boxes than one, and what is outside."""
    x = (10 * torch.randn(50, 80)).to(dtype)
    y = torch.zeros_like(x)
    add_one[2, -(-80 // columns)](x, y, 50, 80, 32, columns)
    assert torch.equal(y, x + 1)


@triton.jit
def double(x, y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    y.store(at, x.load(at) * 2)


@pytest.mark.parametrize(("columns", "dtype"), [(16, torch.float32), (64, torch.bfloat16)])
def test_descriptors_that_the_host_makes(columns, dtype):
    x = torch.randn(50, 96, dtype=dtype)[:, 8:88]
    y = torch.zeros(50, 80, dtype=dtype)
    double[2, -(-80 // columns)](*(TensorDescriptor.from_tensor(each, [32, columns]) for each in (x, y)), 32, columns)
    assert torch.equal(y, 2 * x)


@on_sm_90
def test_what_the_host_asks_for_and_is_not_known():
    x = TensorDescriptor.from_tensor(torch.randn(32, 32), [32, 32], padding="nan")
    with pytest.raises(PtxError, match=r"double line \d+: .*NaNs outside"):
        double[1, 1](x, x, 32, 32)


def product(dtype: torch.dtype = torch.bfloat16, stages: int = 3, K: int = 136) -> None:
    """Within the rounding of the result, and of sums of K products of fp32."""
    a, b, c = torch.randn(100, K).to(dtype), torch.randn(K, 72).to(dtype), torch.zeros(100, 72, dtype=dtype)
    multiply[2, 2](a, b, c, 100, 72, K, 64, 32, stages)
    exact, largest = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    allowed = torch.finfo(dtype).eps / 2 * exact.abs() + K * torch.finfo(torch.float32).eps * largest
    assert ((c.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("stages", "dtype"), [(1, torch.float16), (2, torch.bfloat16), (3, torch.float16), (4, torch.bfloat16)]
)
def test_a_product(stages, dtype):
    product(dtype, stages)


@pytest.mark.parametrize("stages", [1, 2])
def test_attention(stages):
    """Weights are at most 1 and rounded to bf16, as is the result; the values are at most `largest`."""
    q, k, v = (torch.randn(rows, 64).bfloat16() for rows in (100, 150, 150))
    out = torch.zeros_like(q)
    attend[2,](q, k, v, out, 100, 150, 64, 64, stages)
    exact = (q.double() @ k.double().T).softmax(1) @ v.double()
    largest = (q.double() @ k.double().T).softmax(1) @ v.double().abs()
    assert ((out.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps * (largest + exact.abs())).all()


LEFT_OUT = {
    r"\bmbarrier\.init\b": "no mbarrier",
    r"@!complete bra": "under way|not waited",
    r"\bmbarrier\.arrive\.expect_tx\b": "phase never ends",
    r"\bfence\.proxy\.tensormap\b": "no fence.proxy.tensormap",
    r"\bfence\.proxy\.async\b": "no fence.proxy.async since shared memory was written",
    r"\bcp\.async\.bulk\.wait_group\b": "ends with a bulk store that nobody waited for",
    r"\bwgmma\.wait_group\b": "register in flight|under way",
    r"\bbar\.sync\b": "race of warps|no fence|not waited|under way",
}


@on_sm_90
@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_what_is_left_out_is_missed(pattern):
    found = missed(product, "multiply", pattern, LEFT_OUT[pattern])
    assert "test_tma.py:" in found
