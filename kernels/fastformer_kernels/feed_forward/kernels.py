"""The activation between the two matrix products of a feed-forward layer, a = dropout(f(h)), and its backward.

Plain: h is `[M, F]`. Gated (Shazeer 2020): h is `[M, 2F]` = (gate, value) and a = dropout(f(gate) * value). The caller
computes the matrix products, which add the first bias before h is rounded. Added here, to a rounded h, it could change
the sign of an element, and so ReLU's gradient. Forward and backward are one pass over the hidden activations each.

- `activate` computes a.
- `activate_backward` computes dh from da and h. It also computes a, which the gradient of the second weight needs,
  so that h alone has to be saved.
- `relu_backward` computes dh from da and a, if the activation is ReLU. A zero in a means that ReLU or dropout zeroed
  the element, so that neither h, nor the mask, nor its random numbers are needed.
- `hidden_again` computes h in backward if it was not saved: torch's product, as an op that compilers do not merge with
  that of forward.

The gradient of the bias is computed with dh: each program adds up its rows in fp32, and a second kernel adds up the
programs in a fixed order, without atomics. So the result is deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer_kernels.host.launch import (
    cdiv,
    device_of,
    guard,
    kernel,
    launch,
    power_of_two,
    recorded,
    threshold_and_scale,
)
from fastformer_kernels.random import keep_tile
from fastformer_kernels.sums import sum_rows

# The function f of each activation, and whether it is gated.
FORMS = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "geglu": ("gelu", True),
    "swiglu": ("silu", True),
    "reglu": ("relu", True),
}


@triton.jit
def normal_cdf(x, ERF: tl.constexpr):
    """Return the cumulative probability of the standard normal distribution at x, and its density.

    Without `erf`: Abramowitz and Stegun 7.1.26, with an error below 0.75e-7; the density uses the same exponential.
    """
    bell = tl.exp2(-0.72134752 * x * x)
    if ERF:
        cdf = 0.5 + 0.5 * tl.erf(x * 0.70710678118654752)
    else:
        t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
        p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        tail = 0.5 * p * bell
        cdf = tl.where(x < 0, tail, 1.0 - tail)
    return cdf, bell * 0.39894228040143268


@triton.jit
def value_and_slope(x, FUNCTION: tl.constexpr, ERF: tl.constexpr):
    """Return f(x) and f'(x), fp32."""
    if FUNCTION == "relu":
        # In this form NaN stays NaN.
        value = tl.where(x <= 0, 0.0, x)
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif FUNCTION == "gelu":
        cdf, density = normal_cdf(x, ERF)
        value = x * cdf
        slope = cdf + x * density
    elif FUNCTION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
        s = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        value = x * s
        slope = s + value * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        tl.static_assert(FUNCTION == "silu")
        s = tl.sigmoid(x)
        value = x * s
        slope = s + value * (1.0 - s)
    return value, slope


@kernel("F", anywhere=["seed_ptr"])
def activate_kernel(
    h_ptr,
    seed_ptr,
    a_ptr,
    M,
    F,
    threshold,
    dropout_scale,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ERF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Compute one tile of a = dropout(f(h)), or with GATED of dropout(f(gate) * value)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_F
    columns = first_column + tl.arange(0, BLOCK_F)
    inside = (rows < M)[:, None] & (columns < F)[None, :]
    wide = F * 2 if GATED else F
    at = rows.to(tl.int64)[:, None] * wide + columns[None, :]
    x = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
    a, _ = value_and_slope(x, FUNCTION, ERF)
    if GATED:
        a *= tl.load(h_ptr + F + at, mask=inside, other=0.0).to(tl.float32)
    if seed_ptr is not None:
        keep = keep_tile(tl.load(seed_ptr), rows, first_column, 0, threshold, BLOCK_M, BLOCK_F)
        a = tl.where(keep, a * dropout_scale, 0.0)
    tl.store(a_ptr + rows.to(tl.int64)[:, None] * F + columns[None, :], a, mask=inside)


@kernel("F", anywhere=["seed_ptr"])
def activate_backward_kernel(
    da_ptr,
    h_ptr,
    seed_ptr,
    dh_ptr,
    partials_ptr,
    M,
    F,
    threshold,
    dropout_scale,
    WRITES_A: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ERF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Compute dh = da * f'(h) with the dropout mask, and this program's part of the bias's gradient.

    With WRITES_A, da is replaced by a.
    """
    first_column = tl.program_id(1) * BLOCK_F
    columns = first_column + tl.arange(0, BLOCK_F)
    real = columns < F
    wide = F * 2 if GATED else F
    total = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    value_total = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for first_row in range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & real[None, :]
        at = rows.to(tl.int64)[:, None] * F + columns[None, :]
        wide_at = rows.to(tl.int64)[:, None] * wide + columns[None, :]
        g = tl.load(da_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(h_ptr + wide_at, mask=inside, other=0.0).to(tl.float32)
        a, slope = value_and_slope(x, FUNCTION, ERF)
        factor = 1.0
        if seed_ptr is not None:
            keep = keep_tile(tl.load(seed_ptr), rows, first_column, 0, threshold, BLOCK_M, BLOCK_F)
            factor = tl.where(keep, dropout_scale, 0.0)
        g *= factor
        if GATED:
            value = tl.load(h_ptr + F + wide_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(dh_ptr + F + wide_at, g * a, mask=inside)
            value_total += g * a
            g *= value
            a *= value
        tl.store(dh_ptr + wide_at, g * slope, mask=inside)
        total += g * slope
        if WRITES_A:
            tl.store(da_ptr + at, a * factor, mask=inside)
    if partials_ptr is not None:
        here = partials_ptr + tl.program_id(0).to(tl.int64) * wide + columns
        tl.store(here, sum_rows(total, da_ptr.dtype.element_ty), mask=real)
        if GATED:
            tl.store(here + F, sum_rows(value_total, da_ptr.dtype.element_ty), mask=real)


@kernel("F")
def relu_backward_kernel(
    da_ptr, a_ptr, partials_ptr, M, F, dropout_scale, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Replace da by dh = da * dropout_scale where a is not 0; compute this program's part of the bias's gradient."""
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    real = columns < F
    total = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for first_row in range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & real[None, :]
        at = rows.to(tl.int64)[:, None] * F + columns[None, :]
        g = tl.load(da_ptr + at, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + at, mask=inside, other=0.0)
        g = tl.where(a == 0, 0.0, g * dropout_scale)
        tl.store(da_ptr + at, g, mask=inside)
        total += g
    if partials_ptr is not None:
        here = partials_ptr + tl.program_id(0).to(tl.int64) * F + columns
        tl.store(here, sum_rows(total, da_ptr.dtype.element_ty), mask=real)


@kernel("N")
def add_partials_kernel(partials_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum over the P rows of `[P, N]`, in a fixed order."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for first in range(0, P, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        inside = (rows < P)[:, None] & (columns < N)[None, :]
        total += tl.load(partials_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, sum_rows(total, tl.float32), mask=columns < N)


def tile(F: int) -> dict[str, int]:
    """Choose the tile: 16 elements a thread in rows of up to 256 elements.

    With wide rows each access is whole cache lines; with 16 elements both sums of a gated backward stay in registers.
    Other tiles were not timed on a GPU.
    """
    width = min(power_of_two(F, 8), 256)
    return {"BLOCK_M": 2048 // width, "BLOCK_F": width, "num_warps": 4}


def _row_programs(x: Tensor, M: int, F: int, gated: bool, block: dict[str, int]) -> int:
    """Choose how many programs share the rows in backward, each with its own partial sum of the bias's gradient.

    As many as are on the GPU at once: compiled for sm_90 in 16 bits, F a multiple of 16, a thread takes 48 to 87
    registers, gated 101 to 158, which is at least five and three blocks a multiprocessor. No GPU has timed others.
    """
    column_programs = cdiv(F, block["BLOCK_F"])
    most = cdiv((3 if gated else 5) * device_of(x).multiprocessors, column_programs)
    return min(cdiv(M, block["BLOCK_M"]), most)


def _add_partials(partials: Tensor | None, like: Tensor) -> Tensor:
    """Sum the programs' partial gradients of the bias, in the dtype of `like`; empty if partials is None."""
    if partials is None:
        return recorded(like.new_empty(0))
    P, N = partials.shape
    out = recorded(like.new_empty(N))
    with guard(like):
        launch(add_partials_kernel, (cdiv(N, 32),), partials, out, P, N, BLOCK_P=64, BLOCK_N=32, num_warps=4)
    return out


def activate(h: Tensor, seed: Tensor | None, activation: str, dropout_p: float) -> Tensor:
    """Compute a = dropout(activation(h)).

    Args:
        h: `[M, F]`, or `[M, 2F]` = (gate, value).
        seed: of dropout, int64 `[1]`; None: no dropout.
        activation: a key of FORMS.
        dropout_p: the probability to drop.

    Returns:
        `[M, F]`, of h's dtype.
    """
    function, gated = FORMS[activation]
    h = h.contiguous()
    M, F = h.shape[0], h.shape[1] // 2 if gated else h.shape[1]
    a = recorded(h.new_empty(M, F))
    if a.numel() == 0:
        return a
    dropout = threshold_and_scale(dropout_p)
    block = tile(F)
    grid = (cdiv(M, block["BLOCK_M"]), cdiv(F, block["BLOCK_F"]))
    constants = (function, gated, h.dtype == torch.float32)
    with guard(h):
        launch(activate_kernel, grid, h, seed, a, M, F, *dropout, *constants, **block)
    return a


def hidden_again(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> Tensor:
    """Compute h = x weight^T + bias in backward, if it was not saved.

    A separate op that depends on dy: a compiler would merge the product with that of forward, and save its result.

    Args:
        x: `[M, D]`.
        weight: `[F, D]`, or `[2F, D]`.
        bias: `[F]`, or `[2F]`; None: none.
        dy: the gradient of the op's output; its values are not read.

    Returns:
        `[M, F]`, or `[M, 2F]`.
    """
    return torch.nn.functional.linear(x, weight, bias)


def activate_backward(
    da: Tensor,
    h: Tensor,
    seed: Tensor | None,
    activation: str,
    dropout_p: float,
    wants_a: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor]:
    """Differentiate `activate`.

    Args:
        da: `[M, F]`, contiguous; with `wants_a`, a is written there.
        h, seed, activation, dropout_p: as given to `activate`.
        wants_a: whether to compute a again, in place of da, which saves a tensor of its size.
        wants_bias: whether to compute the gradient of the bias that is in h.

    Returns:
        dh, of h's shape, and the gradient of the bias, of h's row length, empty if not requested; both of h's dtype.
    """
    function, gated = FORMS[activation]
    assert da.is_contiguous(), "da is written to"
    h = h.contiguous()
    (M, F), wide = da.shape, h.shape[1]
    dh = recorded(h.new_empty(M, wide))
    if dh.numel() == 0:
        return dh, h.new_zeros(wide if wants_bias else 0)
    dropout = threshold_and_scale(dropout_p)
    block = tile(F)
    grid = (_row_programs(h, M, F, gated, block), cdiv(F, block["BLOCK_F"]))
    partials = recorded(h.new_empty(grid[0], wide, dtype=torch.float32)) if wants_bias else None
    tensors = (da, h, seed, dh, partials)
    constants = (wants_a, function, gated, h.dtype == torch.float32)
    with guard(h):
        launch(activate_backward_kernel, grid, *tensors, M, F, *dropout, *constants, **block)
    return dh, _add_partials(partials, h)


def relu_backward(da: Tensor, a: Tensor, dropout_p: float, wants_bias: bool) -> Tensor:
    """Differentiate `activate` with ReLU: dh takes the place of da.

    Args:
        da: `[M, F]`, contiguous.
        a: the output of `activate`.
        dropout_p: as given to `activate`.
        wants_bias: whether to compute the gradient of the bias that is in h.

    Returns:
        The gradient of the bias, of a's row length, empty if not requested; of a's dtype.
    """
    assert da.is_contiguous(), "da is written to"
    a = a.contiguous()
    M, F = a.shape
    if a.numel() == 0:
        return a.new_zeros(F if wants_bias else 0)
    _, scale = threshold_and_scale(dropout_p)
    block = tile(F)
    grid = (_row_programs(a, M, F, False, block), cdiv(F, block["BLOCK_F"]))
    partials = recorded(a.new_empty(grid[0], F, dtype=torch.float32)) if wants_bias else None
    with guard(a):
        launch(relu_backward_kernel, grid, da, a, partials, M, F, scale, **block)
    return _add_partials(partials, a)
