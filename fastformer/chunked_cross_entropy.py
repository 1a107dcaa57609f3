"""Linear + cross entropy in plain PyTorch, a chunk of rows at a time: the logits are never all there.

For a scalar loss the gradients of a chunk are computed right after its logits, while they are in the cache: 166 ms
against F.cross_entropy's 205 for 2,038 rows, D 192, V 4,000 on one core, where the three matrix products alone take
150. Double backward goes through the plain formula.

Letters: M rows, D width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_CHUNK_BYTES = 4 << 20  # of fp32 logits; 0.5, 1, 2, 4, 8, 16, 64 MiB took 204, 201, 180, 166, 176, 159, 244 ms there
# Below that, passes over the weight and its gradient are what takes the time: for 700 rows, D 200, V 33,280, chunks of
# 32, 128, 192, 256, 350, 512 rows took 887, 524, 508, 618, 645, 608 ms, F.cross_entropy 742.
CPU_CHUNK_ROWS = 192
# What the softmax works on at a time, so that its passes stay in the cache: with it, loss and gradients took
# as long as the three matrix products alone (635 and 631 ms there, on a busy core), without it 763.
CPU_BLOCK_BYTES = 1 << 20
# Rows of logits begin at multiples of 64 bytes. WikiText-2's 33,278 words, 700 rows, D 200: 545 ms, one behind the
# other 649, F.cross_entropy 877 (three products of such logits alone 596); for 33,280 words it makes no difference.
ALIGNMENT = 16
GPU_CHUNK_BYTES = 256 << 20  # enough rows for full matrix products; not measured on a GPU


def plain_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Compute the loss of each row, `[M]`: lse(z) - (1 - eps) z_y - eps mean(z) (Szegedy et al. 2016), 0 if ignored."""
    logits = F.linear(x, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")


def _losses_(
    logits: Tensor, bias: Tensor | None, label: Tensor, counts: Tensor, label_smoothing: float, wanted: bool
) -> Tensor:
    """The loss of each row, `[m]`, of logits `[m, V]` still without `bias`; they become d loss / d z where `wanted`.

    d loss / d z = softmax(z) - (1 - eps) onehot(y) - eps / V; loss and gradient are 0 where `counts` is False.
    """
    if bias is not None:
        logits += bias
    label = label[:, None]
    loss = logits.gather(1, label).mul_(label_smoothing - 1.0)  # [m, 1]
    if label_smoothing > 0.0:
        loss -= label_smoothing * logits.mean(1, keepdim=True)
    peak = logits.amax(1, keepdim=True)
    total = logits.sub_(peak).exp_().sum(1, keepdim=True)
    loss += peak + total.log()
    if wanted:
        shares = counts.to(logits.dtype)[:, None]  # [m, 1]
        logits.mul_(shares / total)
        if label_smoothing > 0.0:
            logits.sub_(shares * (label_smoothing / logits.shape[1]))
        logits.scatter_add_(1, label, shares * (label_smoothing - 1.0))
    return loss.squeeze(1).masked_fill_(~counts, 0.0)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the losses of all rows; gradients are computed in forward, where any is needed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> Tensor:
        M, V = x.shape[0], weight.shape[0]
        wanted = ctx.needs_input_grad[:3]
        dx = torch.empty_like(x) if wanted[0] else None
        # Sums over rows accumulate in fp32 at least.
        wide = torch.promote_types(weight.dtype, torch.float32)
        dweight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        dbias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
        total = torch.zeros((), dtype=wide, device=x.device)
        on_cpu = x.device.type == "cpu"
        least, size = (CPU_CHUNK_ROWS, CPU_CHUNK_BYTES) if on_cpu else (1, GPU_CHUNK_BYTES)
        block = CPU_BLOCK_BYTES if on_cpu else GPU_CHUNK_BYTES
        step = max(1, min(M, max(least, size // (4 * V))))
        lines = max(1, block // (4 * V))
        # Autocast computes the logits in its own dtype, like any linear layer.
        plain = x.dtype == weight.dtype == wide and not torch.is_autocast_enabled(x.device.type)
        place = torch.empty(step, -(-V // ALIGNMENT) * ALIGNMENT, dtype=wide, device=x.device)[:, :V]
        for start in range(0, M, step):
            rows = slice(start, start + step)
            counts = target[rows] != ignore_index  # [m]
            label = torch.where(counts, target[rows], 0)
            dlogits = place[: len(counts)]  # at first the logits, [m, V]
            if plain:
                torch.mm(x[rows], weight.t(), out=dlogits)
            else:
                dlogits.copy_(F.linear(x[rows], weight, bias))
            for at in range(0, len(counts), lines):
                part = slice(at, at + lines)
                added = bias if plain else None
                total += _losses_(dlogits[part], added, label[part], counts[part], label_smoothing, any(wanted)).sum()
            if not any(wanted):
                continue
            if dbias is not None:
                dbias += dlogits.sum(0)
            dlogits = dlogits.to(x.dtype)
            if dx is not None:
                torch.mm(dlogits, weight.to(x.dtype), out=dx[rows])
            if dweight is not None:
                if dweight.dtype == dlogits.dtype:
                    dweight.addmm_(dlogits.t(), x[rows])
                else:
                    dweight += torch.mm(dlogits.t(), x[rows])
        ctx.settings = ignore_index, label_smoothing
        ctx.save_for_backward(x, weight, bias, target, dx, dweight, dbias)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target, dx, dweight, dbias = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # the gradient is to be differentiated
            # Views: a tied weight has a gradient here, apart from the one that it has through x.
            places: list[Any] = [None if t is None else t.view_as(t) for t in (x, weight, bias)]
            inputs = [t for t, wanted in zip(places, ctx.needs_input_grad, strict=False) if wanted]
            loss = plain_loss(places[0], places[1], places[2], target, *ctx.settings).sum()
            found = iter(torch.autograd.grad(loss, inputs, grad, create_graph=True))
            return *(next(found) if wanted else None for wanted in ctx.needs_input_grad[:3]), None, None, None
        # In fp32 at least: next to an fp16 matrix on a GPU, torch reads a factor without dimensions as fp16 too.
        pairs = (dx, x), (dweight, weight), (dbias, bias)
        scaled = [None if d is None else (d.to(grad.dtype) * grad).to(t.dtype) for d, t in pairs]
        return *scaled, None, None, None
