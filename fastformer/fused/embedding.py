"""The fused embedding: dropout(scale * weight[ids] + table[positions]) in one pass.

Backward puts the gradient through the same mask and the scale, in one pass, and adds up the rows of each word with
torch's own `embedding_dense_backward`, which is deterministic. Ids, positions and the seed are all that is kept.
"""

from typing import Any

import torch
from torch import Tensor

from fastformer.autograd_function import call
from fastformer.fused.differentiation import Formula, distinct, plain_gradients, twice
from fastformer.fused.registration import define, dropout_seed


def _embedding_fake(
    ids: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    table: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    dtype = weight.dtype if table is None else torch.promote_types(weight.dtype, table.dtype)
    return weight.new_empty((*ids.shape, weight.shape[1]), dtype=dtype)


def _scaled_gradient_fake(dout: Tensor, seed: Tensor | None, scale: float, dropout_p: float) -> Tensor:
    return dout.new_empty(dout.shape)


_embedding = define(
    "embedding(Tensor ids, Tensor weight, Tensor? positions, Tensor? table, Tensor? seed, float scale, "
    "float dropout_p) -> Tensor",
    "embedding.kernels.embedding",
    _embedding_fake,
)
_scaled_gradient = define(
    "embedding_scaled_gradient(Tensor dout, Tensor? seed, float scale, float dropout_p) -> Tensor",
    "embedding.kernels.scaled_gradient",
    _scaled_gradient_fake,
)


def _dense(dout: Tensor, ids: Tensor, matrix: Tensor, seed: Tensor | None, scale: float, dropout_p: float) -> Tensor:
    """The gradient of a matrix from that of dropout(scale * matrix[ids])."""
    if seed is not None or scale != 1.0:
        dout = _scaled_gradient(dout, seed, scale, dropout_p)
    # -1: no row is padding, False: rows count as often as they occur.
    gradient = torch.ops.aten.embedding_dense_backward(dout, ids, matrix.shape[0], -1, False)
    return gradient.to(matrix.dtype)  # type: ignore[no-any-return]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        weight: Tensor,
        table: Tensor | None,
        ids: Tensor,
        positions: Tensor | None,
        seed: Tensor | None,
        scale: float,
        dropout_p: float,
        formula: Formula | None,
    ) -> Tensor:
        return _embedding(ids, weight, positions, table, seed, scale, dropout_p)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale, ctx.dropout_p, ctx.formula = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, table, ids, positions, seed = ctx.saved_tensors
        if twice(ctx.formula):
            if seed is not None:
                raise RuntimeError("a second derivative of embedding with dropout needs backend 'reference'")
            return *plain_gradients(ctx.formula, (weight, table), ctx.needs_input_grad[:2], (dout,)), *(None,) * 6
        needs_weight, needs_table = ctx.needs_input_grad[:2]
        return (
            _dense(dout, ids, weight, seed, ctx.scale, ctx.dropout_p) if needs_weight else None,
            _dense(dout, positions, table, seed, 1.0, ctx.dropout_p) if needs_table else None,
            *(None,) * 6,
        )


def embedding(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None,
    positions: Tensor | None,
    *,
    scale: float,
    dropout_p: float,
    formula: Formula | None,
) -> Tensor:
    """Run `functional.embedding` with the kernels.

    Args:
        ids, weight, table, positions, scale, dropout_p: as in `functional.embedding`.
        formula: the op without dropout in plain PyTorch, a function of weight and table, for second derivatives.
    """
    seed = dropout_seed(weight) if dropout_p > 0.0 else None
    return call(_Embedding, *distinct(weight, table, ids, positions), seed, scale, dropout_p, formula)  # type: ignore[no-any-return]
