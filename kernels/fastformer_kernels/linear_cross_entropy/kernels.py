"""Output projection + cross entropy, a chunk of rows at a time: the logits of all rows never exist at once.

For each row, z = W x + b and loss = lse(z) - (1 - eps) z_y - eps mean(z) (label smoothing: Szegedy et al. 2016), thus
d loss / d z = softmax(z) - (1 - eps) onehot(y) - eps / V.

For each chunk: torch's matrix product writes the logits; one kernel reads them twice (the online softmax of Milakov and
Gimelshein 2018, then the gradient) and writes the gradient over them; torch's matrix products take that to dx, and to
dW, which accumulates in fp32 over the chunks (half inputs: `torch.addmm(out_dtype=float32)`, on CUDA only).

The buffer of a chunk has rows padded to a multiple of 16: for any V, loads and stores are whole vectors, and the matrix
products get the alignment that their fast kernels require.

fp16 rounds numbers below 3e-8 to zero: most of a softmax over many classes. So the gradient, at most 1 in size, is
stored times 2^15; the matrix products divide by that with their factor alpha, which is applied in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer_kernels.constants import LOG2E, LOWEST
from fastformer_kernels.host.launch import cdiv, guard, kernel, launch, power_of_two, recorded

CHUNK_ROWS = 4096  # enough for full matrix products
CHUNK_BYTES = 256 << 20
_ROWS_MULTIPLE = 128  # the height of the tiles of matrix products
_COLUMNS_MULTIPLE = 16
_FP16_SCALE = 2.0**15

_TOGETHER = tl.constexpr(8)  # neighbouring logits that a thread loads together


def chunk_rows(M: int, V: int, itemsize: int) -> int:
    """Choose how many rows have their logits in memory at once: at most CHUNK_ROWS, and CHUNK_BYTES of logits.

    M rows are divided evenly: 4,097 rows are chunks of 2,176 and 1,921. A chunk of one row would read all of W and add
    to all of dW. bf16: V = 32,768 gives 4,096 rows, V = 262,144 gives 512. Others were not timed.
    """
    limit = min(CHUNK_ROWS, max(1, CHUNK_BYTES // (V * itemsize)))
    if limit > _ROWS_MULTIPLE:
        limit = limit // _ROWS_MULTIPLE * _ROWS_MULTIPLE
    even = cdiv(M, max(1, cdiv(M, limit)))
    return max(1, min(M, limit, cdiv(even, _ROWS_MULTIPLE) * _ROWS_MULTIPLE))


def _config(V: int) -> dict[str, int]:
    """Choose the tile of one row: 16 logits a thread, two loads of 16 bytes of bf16.

    With 46 to 58 registers, four or five blocks of the kernel with gradients share a multiprocessor of sm_90: while one
    computes, others load. Prefetching (`num_stages=2`) took twice the registers and left two. Other tiles were not
    timed on a GPU.
    """
    BLOCK = min(power_of_two(V, 32), 4096)
    return {"BLOCK": BLOCK, "num_warps": max(1, BLOCK // 512), "num_stages": 1}


@triton.jit
def _load_logits(row_ptr, bias_ptr, columns, counts, V, stride, HAS_BIAS: tl.constexpr):
    # Loads up to the padded length, because a mask that ends at V could end inside a vector.
    z = tl.load(row_ptr + columns, mask=columns < tl.where(counts, stride, 0), other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=columns < stride, other=0.0).to(tl.float32)
    return tl.where(columns < V, z, float("-inf"))


@triton.jit
def _shrink(difference):
    """Return exp(x) for x <= 0. The bound, below which fp32 is 0, stops differences with LOWEST from overflowing."""
    return tl.exp2(tl.maximum(difference, -200.0) * LOG2E)


@triton.jit
def _log1p(x):
    """Return log(1 + x) for x >= -1, for small x by the series of 2 artanh(x / (2 + x)), as 1 + x loses digits of x."""
    ratio = x / (2.0 + x)
    square = ratio * ratio
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))))
    return tl.where(tl.abs(x) < 0.5, 2.0 * ratio * series, tl.log(1.0 + x))


@triton.jit
def _statistics(
    row_ptr, bias_ptr, label, z_label, counts, V, stride,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Read a row once.

    Returns:
        The largest logit; the sum of exp(z - largest) over all classes but the label; exp(z - largest) of the label;
        the mean of largest - z if SMOOTH. For an ignored row: inf, 1, 0 and an undefined value.
    """
    # A number of about the row's size, so that differences from it lose no digits.
    pivot = tl.where(tl.abs(z_label) < float("inf"), z_label, 0.0)
    # One running maximum for the logits that a thread loads together: their reduction stays within the thread.
    LANES: tl.constexpr = BLOCK // _TOGETHER
    top = tl.full((LANES,), LOWEST, tl.float32)
    exps = tl.zeros((LANES,), tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    for start in range(0, tl.where(counts, V, 0), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = _load_logits(row_ptr, bias_ptr, columns, counts, V, stride, HAS_BIAS)
        if SMOOTH:
            sums += tl.sum(tl.reshape(tl.where(columns < V, z - pivot, 0.0), (LANES, _TOGETHER)), 1)
        z = tl.where(columns == label, float("-inf"), z)
        z = tl.reshape(z, (LANES, _TOGETHER))
        new_top = tl.maximum(top, tl.max(z, 1))
        exps = exps * _shrink(top - new_top) + tl.sum(tl.exp2((z - new_top[:, None]) * LOG2E), 1)
        top = new_top
    largest = tl.maximum(tl.max(top, 0), z_label)  # if z_label is NaN (no such class), the other
    others = tl.where(counts, tl.sum(exps * _shrink(top - largest), 0), 1.0)
    of_label = tl.where(counts, tl.exp2((z_label - largest) * LOG2E), 0.0)
    mean = (largest - pivot) - tl.sum(sums, 0) / V
    return tl.where(counts, largest, float("inf")), others, of_label, mean


@triton.jit
def _loss(largest, others, of_label, mean, z_label, smoothing, SMOOTH: tl.constexpr):
    # No term is negative, so none cancels another. None is rounded at the size of the logits, nor at 1 if the label has
    # the largest logit.
    loss = _log1p(others + (of_label - 1.0)) + (1.0 - smoothing) * (largest - z_label)
    if SMOOTH:
        loss += smoothing * mean
    return loss


@triton.jit
def _label(row_ptr, bias_ptr, target_ptr, row, V, ignore_index, HAS_BIAS: tl.constexpr):
    """Return the class of a row, whether the row counts, whether the class exists, and its logit, else NaN."""
    label = tl.load(target_ptr + row)
    counts = label != ignore_index
    valid = (label >= 0) & (label < V)
    z = tl.load(row_ptr + label, mask=counts & valid, other=float("nan")).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + label, mask=counts & valid, other=0.0).to(tl.float32)
    return label.to(tl.int32), counts, valid, z


# Targets, losses and gradients of a chunk's rows have any alignment.
_kernel = kernel("V", "stride_logits_m", anywhere=["target_ptr", "grad_ptr", "loss_ptr"])


@_kernel
def cross_entropy_kernel(
    logits_ptr, bias_ptr, target_ptr, loss_ptr, V, stride_logits_m, ignore_index, smoothing,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_m
    label, counts, _, z_label = _label(row_ptr, bias_ptr, target_ptr, row, V, ignore_index, HAS_BIAS)
    largest, others, of_label, mean = _statistics(
        row_ptr, bias_ptr, label, z_label, counts, V, stride_logits_m, BLOCK, HAS_BIAS, SMOOTH
    )
    loss = _loss(largest, others, of_label, mean, z_label, smoothing, SMOOTH)
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))


@_kernel
def cross_entropy_gradients_kernel(
    logits_ptr, bias_ptr, target_ptr, grad_ptr, loss_ptr, V, stride_logits_m, ignore_index, smoothing, scale,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SMOOTH: tl.constexpr, HAS_GRAD: tl.constexpr,
):  # fmt: skip
    """Compute the loss of one row, and overwrite its logits with scale * grad * d loss / d z."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_m
    # All threads read the logit before any overwrites it, because the sums over the row in between are barriers.
    label, counts, valid, z_label = _label(row_ptr, bias_ptr, target_ptr, row, V, ignore_index, HAS_BIAS)
    largest, others, of_label, mean = _statistics(
        row_ptr, bias_ptr, label, z_label, counts, V, stride_logits_m, BLOCK, HAS_BIAS, SMOOTH
    )
    loss = _loss(largest, others, of_label, mean, z_label, smoothing, SMOOTH)
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))

    factor = tl.where(valid, scale, float("nan"))
    if HAS_GRAD:
        factor *= tl.load(grad_ptr + row)
    factor = tl.where(counts, factor, 0.0)
    inverse = factor / (others + of_label)
    at_label = smoothing * factor - others * inverse
    everywhere = smoothing / V * factor
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = _load_logits(row_ptr, bias_ptr, columns, counts, V, stride_logits_m, HAS_BIAS)
        dz = tl.exp2((z - largest) * LOG2E) * inverse
        dz = tl.where(columns == label, at_label, dz)
        if SMOOTH:
            dz -= everywhere
        tl.store(row_ptr + columns, dz.to(row_ptr.dtype.element_ty), mask=columns < stride_logits_m)


def _add_product(total: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> None:
    """Set total = beta * total + alpha * a b, for an fp32 total, with a and b of any dtype."""
    # Autocast does not cast inputs of these, as it would for `torch.mm` without `out`.
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta, alpha=alpha)
    elif a.is_cuda and not (a.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation):
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, alpha=alpha, out=total)
    else:
        # Only CUDA has such a product, and none of fp16 if sums may be fp16. Also of the interpreter and meta tensors.
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta, alpha=alpha)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    needs_grad: list[bool],
    grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss of each row, and the gradients of the sum of them, or of sum(grad * loss).

    Args:
        x: `[M, D]`; weight: `[V, D]`; bias: `[V]` or None; target: int64 `[M]`. A target that is neither a class nor
            ignore_index gives NaN.
        ignore_index: rows of this target have loss 0 and gradient 0.
        smoothing: eps.
        needs_grad: which of the gradients of x, weight and bias to compute; without any, one pass less.
        grad: fp32 `[M]`, at most 1 in size where x is fp16; ones if None.

    Returns:
        The losses, fp32 `[M]`; the gradients of x (of x's dtype), weight and bias (fp32), of size 0 if not needed.
    """
    M, V = x.shape[0], weight.shape[0]
    empty = x.new_empty if M else x.new_zeros
    loss = recorded(empty((M,), dtype=torch.float32))
    dx = empty(x.shape if needs_grad[0] else (0,))
    dweight = empty(weight.shape if needs_grad[1] else (0,), dtype=torch.float32)
    dbias = empty((V,) if needs_grad[2] else (0,), dtype=torch.float32)
    if M == 0:
        return loss, dx, dweight, dbias
    step = chunk_rows(M, V, x.element_size())
    stride = cdiv(V, _COLUMNS_MULTIPLE) * _COLUMNS_MULTIPLE
    buffer = x.new_empty((step, stride))
    if stride != V:
        buffer[:, V:].zero_()  # so that no undefined value is read
    padded = bias if bias is None or stride == V else torch.nn.functional.pad(bias, (0, stride - V))
    padded = None if padded is None else padded.contiguous()
    target = target.contiguous()
    scale = _FP16_SCALE if x.dtype == torch.float16 else 1.0
    scalars = (ignore_index, smoothing)
    constants = _config(V) | {"HAS_BIAS": bias is not None, "SMOOTH": smoothing > 0.0}
    if any(needs_grad):
        constants["HAS_GRAD"] = grad is not None
    with guard(x):
        for start in range(0, M, step):
            rows = slice(start, min(start + step, M))
            logits = buffer[: rows.stop - start, :V]
            torch.mm(x[rows], weight.t(), out=logits)
            grid, inputs = (len(logits),), (logits, padded, target[rows])
            if not any(needs_grad):
                launch(cross_entropy_kernel, grid, *inputs, loss[rows], V, stride, *scalars, **constants)
                continue
            tensors = (*inputs, None if grad is None else grad[rows], loss[rows])
            launch(cross_entropy_gradients_kernel, grid, *tensors, V, stride, *scalars, scale, **constants)
            if needs_grad[0] and x.dtype == torch.float16:
                # A product may be split, and its parts rounded to fp16 before they are multiplied with alpha: times
                # 2^15 they overflow from weights of 1 on. In fp32 they do not.
                product = dx.new_empty(dx[rows].shape, dtype=torch.float32)
                _add_product(product, logits, weight, beta=0.0, alpha=1.0 / scale)
                dx[rows] = product
            elif needs_grad[0]:
                dx[rows].addmm_(logits, weight, beta=0.0, alpha=1.0 / scale)
            if needs_grad[1]:
                _add_product(dweight, logits.t(), x[rows], beta=float(start > 0), alpha=1.0 / scale)
            if needs_grad[2]:
                sums = logits.sum(0, dtype=torch.float32)
                torch.mul(sums, 1.0 / scale, out=dbias) if start == 0 else dbias.add_(sums, alpha=1.0 / scale)
    return loss, dx, dweight, dbias


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    needs_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of sum(grad * loss), and the logits again.

    Args:
        grad: fp32 `[M]`. Divided by its largest value before and multiplied with it after the matrix products, so that
            no fp16 number overflows however large it is.

    Returns:
        The gradients of x, weight and bias in their dtypes, of size 0 if not needed.
    """
    largest = grad.abs().amax().clamp_min(torch.finfo(grad.dtype).tiny) if len(grad) else grad.new_ones(())
    _, dx, dweight, dbias = forward(
        x, weight, bias, target, ignore_index, smoothing, needs_grad, (grad / largest).contiguous()
    )
    return (
        (dx.float() * largest).to(x.dtype),
        (dweight * largest).to(weight.dtype),
        (dbias * largest).to(x.dtype if bias is None else bias.dtype),
    )
