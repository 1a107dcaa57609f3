"""Linear + cross entropy in plain PyTorch, a chunk of rows at a time: the logits never exist all at once.

For a scalar loss the gradients of a chunk are computed right after its logits, while they are in the cache; measured in
docs/kernels/linear-cross-entropy.md. Double backward goes through the plain formula.

Letters: M rows, D width, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.host.autograd_function import NAMESPACE, plain_gradients
from fastformer.host.devices import autocasts, to_autocast
from fastformer.modes import compiling, forward_ad, in_torch_func, readable

CPU_CHUNK_BYTES = 4 << 20  # of fp32 logits; 0.5, 1, 2, 4, 8, 16, 64 MiB took 204, 201, 180, 166, 176, 159, 244 ms
# With fewer rows, passes over the weight and its gradient take most time: for 700 rows, D 200, V 33,280, chunks of
# 32, 128, 192, 256, 350, 512 rows took 887, 524, 508, 618, 645, 608 ms, F.cross_entropy 742.
CPU_CHUNK_ROWS = 192
# The softmax works on one block at a time, which stays in the cache: with blocks, loss and gradients took as long as
# the three matrix products alone (635 and 631 ms, on a busy core), without blocks 763.
CPU_BLOCK_BYTES = 1 << 20
# Rows of logits begin at multiples of 64 bytes. WikiText-2's 33,278 words, 700 rows, D 200: 545 ms; without gaps
# between rows 649, F.cross_entropy 877 (three products of such logits alone 596); for 33,280 words no difference.
ALIGNMENT = 16
GPU_CHUNK_BYTES = 256 << 20  # enough rows for full matrix products; not measured on a GPU


def plain_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Compute the loss of each row, `[M]`: lse(z) - (1 - eps) z_y - eps mean(z) (Szegedy et al. 2016), 0 if ignored."""
    logits = F.linear(x, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    counts = target != ignore_index  # [M]
    label = torch.where(counts, target, 0)[:, None]
    # The loss does not depend on the subtracted number: no derivative goes through the largest logit.
    logits = logits - logits.detach().amax(1, keepdim=True)
    of_label = logits.gather(1, label)
    mean = logits.mean(1, keepdim=True) if label_smoothing > 0.0 else None
    other_exps = logits.exp().scatter(1, label, 0.0).sum(1, keepdim=True)
    return _losses(of_label, other_exps, mean, label_smoothing).squeeze(1).masked_fill(~counts, 0.0)


def _losses(of_label: Tensor, other_exps: Tensor, mean: Tensor | None, label_smoothing: float) -> Tensor:
    """Compute the loss of each row from the differences of its logits to the largest one.

    No term is negative, so none cancels another. No term is rounded at the size of the logits, and where the label has
    the largest logit, none at 1: log(1 + other_exps) would be 0 for all losses below 6e-8.

    other_exps: sum of exp(difference) over all classes except the label; mean: of all differences.
    """
    loss = torch.log1p(other_exps + of_label.expm1()).sub(of_label, alpha=1.0 - label_smoothing)
    return loss if mean is None else loss - label_smoothing * mean


def _losses_(
    logits: Tensor, label: Tensor, counts: Tensor | None, label_smoothing: float, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the loss of each row, `[m]`, of logits `[m, V]`.

    counts: which rows count; loss and gradient of the others are 0. None: all.

    Returns:
        The losses; and if `wants_gradient`, numbers `[m, 1]` that give d loss / d z = softmax(z) - (1 - eps) onehot(y)
        - eps / V if they multiply what is then in the logits.
    """
    label = label[:, None]
    logits -= logits.amax(1, keepdim=True)
    of_label = logits.gather(1, label)  # [m, 1]
    mean = logits.mean(1, keepdim=True) if label_smoothing > 0.0 else None
    other_exps = logits.exp_().scatter_(1, label, 0.0).sum(1, keepdim=True)
    factor = None
    if wants_gradient:
        exps, of_target = other_exps + of_label.exp(), -other_exps
        if label_smoothing > 0.0:
            share = exps * (label_smoothing / logits.shape[1])
            logits.sub_(share)
            of_target += label_smoothing * exps - share
        logits.scatter_(1, label, of_target)
        factor = exps.reciprocal() if counts is None else counts.to(logits.dtype)[:, None] / exps
    losses = _losses(of_label, other_exps, mean, label_smoothing).squeeze(1)
    return (losses if counts is None else losses.masked_fill_(~counts, 0.0)), factor


def zero_gradients(
    x: Tensor, weight: Tensor, needs_grad: Sequence[bool], weight_dtype: torch.dtype, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors for the gradients of x, weight and bias, empty unless `needs_grad`."""
    return (
        x.new_empty(x.shape if needs_grad[0] else (0,)),
        weight.new_zeros(weight.shape if needs_grad[1] else (0,), dtype=weight_dtype),
        weight.new_zeros(weight.shape[:1] if needs_grad[2] else (0,), dtype=bias_dtype),
    )


def _rows_at_once(x: Tensor, V: int) -> tuple[int, int]:
    """Return the number of rows of a chunk, and of a block of it that the softmax works on."""
    on_cpu = x.device.type == "cpu"
    least, size = (CPU_CHUNK_ROWS, CPU_CHUNK_BYTES) if on_cpu else (1, GPU_CHUNK_BYTES)
    block = CPU_BLOCK_BYTES if on_cpu else GPU_CHUNK_BYTES
    return max(1, min(x.shape[0], max(least, size // (4 * V)))), max(1, block // (4 * V))


def _aligned(rows: int, V: int, wide: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(rows, -(-V // ALIGNMENT) * ALIGNMENT, dtype=wide, device=device)[:, :V]


def _chunk_(
    logits: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    wants_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Fill logits `[m, V]` for a chunk of rows, and return `_losses_`."""
    counts: Tensor | None = target != ignore_index  # [m]
    if readable(counts) and bool(counts.all()):  # type: ignore[arg-type, union-attr]
        counts = None
    label = target if counts is None else torch.where(counts, target, 0)
    # Autocast computes the logits in its own dtype, like any linear layer.
    if not x.dtype == weight.dtype == logits.dtype or autocasts(x):
        logits.copy_(F.linear(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=logits)
    else:
        torch.addmm(bias, x, weight.t(), out=logits)
    _, rows = _rows_at_once(x, weight.shape[0])
    if rows >= len(label):
        return _losses_(logits, label, counts, label_smoothing, wants_gradient)
    parts = []
    for start in range(0, len(label), rows):
        block = slice(start, start + rows)
        of_block = None if counts is None else counts[block]
        parts.append(_losses_(logits[block], label[block], of_block, label_smoothing, wants_gradient))
    losses, factors = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(factors) if wants_gradient else None


def _in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    needs_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return all losses `[M]`, and the gradients of their sum for x, weight and bias, empty unless `needs_grad`."""
    M, V = x.shape[0], weight.shape[0]
    # Sums over rows accumulate in fp32 at least.
    wide = torch.promote_types(weight.dtype, torch.float32)
    dx, dweight, dbias = zero_gradients(x, weight, needs_grad, wide, wide)
    losses = [torch.zeros(0, dtype=wide, device=x.device)]
    step, _ = _rows_at_once(x, V)
    buffer = _aligned(step, V, wide, x.device)
    for start in range(0, M, step):
        rows = slice(start, start + step)
        dlogits = buffer[: min(step, M - start)]  # at first the logits, [m, V]
        inputs = x[rows], weight, bias, target[rows]
        of_chunk, factor = _chunk_(dlogits, *inputs, ignore_index, label_smoothing, any(needs_grad))
        losses.append(of_chunk)
        if factor is None:
            continue
        dlogits *= factor
        if needs_grad[2]:
            dbias += dlogits.sum(0)
        dlogits = dlogits.to(x.dtype)
        if needs_grad[0]:
            torch.mm(dlogits, weight.to(x.dtype), out=dx[rows])
        if needs_grad[1]:
            if dweight.dtype == dlogits.dtype:
                dweight.addmm_(dlogits.t(), x[rows])
            else:
                dweight += torch.mm(dlogits.t(), x[rows])
    return torch.cat(losses), dx, dweight, dbias


# One op in a graph of torch.compile, which would unroll the loop, and cannot take `out=`.
_in_chunks_op = torch.library.custom_op(f"{NAMESPACE}::chunked_cross_entropy", _in_chunks, mutates_args=())


@_in_chunks_op.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.new_empty(x.shape[0], dtype=wide), *zero_gradients(x, weight, rest[-1], wide, wide)


def _one_chunk(
    x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any, wants_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return the losses, and what gives d loss / d z (`_losses_`); None unless all rows are one chunk in fp32 or fp64.

    Scaling then loses no accuracy, and no gradient `[V, D]` is computed only to be scaled. For 14, 64 and 180 rows,
    D 256, V 5,900, loss and gradients were 1.17, 1.08 and 1.03 times as fast as in the other form; for 20 rows, D 200,
    V 33,278, 1.21 times (one core).
    """
    (M, _), V, dtype = x.shape, weight.shape[0], weight.dtype
    wide = dtype in (torch.float32, torch.float64) and x.dtype == dtype
    if compiling() or not wide or not 0 < M <= _rows_at_once(x, V)[0]:
        return None
    logits = _aligned(M, V, dtype, x.device)
    losses, factor = _chunk_(logits, x, weight, bias, *settings, wants_gradient=wants_gradient)  # type: ignore[misc]
    return losses, logits, factor


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the losses of all rows; forward computes gradients, or for a single chunk d loss / d z `[M, V]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *settings: Any) -> Tensor:
        needs_grad = list(ctx.needs_input_grad[:3])
        ctx.settings = settings
        one_chunk = _one_chunk(x, weight, bias, target, *settings, wants_gradient=True)
        ctx.one_chunk = one_chunk is not None
        if one_chunk is not None:
            losses, *saved = one_chunk
            ctx.save_for_backward(x, weight, bias, target, *saved)
            return losses.sum()
        run: Any = _in_chunks_op if compiling() else _in_chunks
        losses, *gradients = run(x, weight, bias, target, *settings, needs_grad)
        ctx.save_for_backward(x, weight, bias, target, *gradients)
        return losses.sum()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target, *saved = ctx.saved_tensors
        (grad,) = grads
        needs_grad = ctx.needs_input_grad[:3]
        # The gradient is to be differentiated; in torch.compile there are no second derivatives.
        if torch.is_grad_enabled() and not compiling():

            def formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return plain_loss(x, weight, bias, target, *ctx.settings).sum()

            return *plain_gradients(formula, (x, weight, bias), needs_grad, (grad,)), None, None, None
        if ctx.one_chunk:
            dlogits, factor = saved[0], saved[1] * grad
            return (
                (dlogits @ weight).mul_(factor) if needs_grad[0] else None,
                dlogits.t() @ (x * factor) if needs_grad[1] else None,
                dlogits.t() @ factor[:, 0] if needs_grad[2] else None,
                None, None, None,
            )  # fmt: skip
        # In fp32 at least: beside an fp16 matrix on a GPU, torch casts a factor without dimensions to fp16.
        triples = zip(saved, (x, weight, bias), needs_grad, strict=True)
        scaled = [(d.to(grad.dtype) * grad).to(t.dtype) if needed else None for d, t, needed in triples]
        return *scaled, None, None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any, rows: bool) -> Tensor:
    """Return the cross entropy of each row, or the sum; settings: target `[M]`, ignore_index and label smoothing."""
    if autocasts(x):
        # Autocast does not cast inputs of custom Functions; it does cast those of F.linear inside.
        x, weight, bias = to_autocast(x, weight, bias)  # type: ignore[assignment]
    inputs = (x, weight) if bias is None else (x, weight, bias)
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    # torch.func, forward mode and subclasses of Tensor need the plain formula.
    plain = in_torch_func() or forward_ad._current_level >= 0 or torch.overrides.has_torch_function(inputs)
    if plain or (rows and trained):
        losses = plain_loss(x, weight, bias, *settings)
    elif trained:
        return ChunkedCrossEntropy.apply(x, weight, bias, *settings)  # type: ignore[no-any-return, no-untyped-call]
    elif (one_chunk := _one_chunk(x, weight, bias, *settings, wants_gradient=False)) is not None:
        losses = one_chunk[0]
    else:
        run: Any = _in_chunks_op if compiling() else _in_chunks
        losses = run(x, weight, bias, *settings, [False] * 3)[0]
    return losses if rows else losses.sum()
