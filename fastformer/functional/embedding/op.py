"""Embedding, dropout(scale * weight[ids] + table[positions]): op, checks, reference, registration, autograd Function.

Backward applies the dropout mask and the scale to the gradient, and adds up the rows of each id, always in the same
order.

Letters: D model width, P positions, V vocabulary.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.choice import DTYPES, runs_fused
from fastformer.functional.dropout import drop
from fastformer.host.autograd_function import (
    call,
    define,
    dropout_seed,
    eager_formula,
    needs_double_backward,
    plain_gradients,
)
from fastformer.host.devices import check_probability, check_range, check_tensors


def embedding(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    scale: float = 1.0,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute dropout(scale * weight[ids] + table[positions]), the input of a Transformer's first layer.

    Args:
        ids: int64 `[...]`.
        weight: `[V, D]`.
        table: `[P, D]`, learned or fixed; None for no positions.
        positions: int64, of the shape of ids; None if and only if table is None.
        scale: of the weight.
        dropout_p: dropout of the sum; applied whenever it is not 0.

    Returns:
        `[..., D]`, of the dtype to which those of weight and table promote. An id or a position out of range raises
        IndexError on the CPU. On a GPU a check would wait for the device: the fused kernel gives NaN.
    """
    check_tensors(("ids", "weight", "table", "positions"), ids, (weight,), (table, positions))
    _check(ids, weight, table, positions)
    check_probability("dropout_p", dropout_p)
    plain = partial(_plain, ids, positions, scale)

    def limit() -> str | None:
        if table is None or table.dtype in DTYPES:
            return None
        return f"embedding takes a table of float32, float16 or bfloat16, not {table.dtype}"

    if not runs_fused("embedding", weight, limit):
        try:
            return drop(plain(weight, table), dropout_p)
        except IndexError:  # torch checks each index as it reads it: a check beforehand took 4 us a call
            _check_ranges(ids, weight, table, positions)
            raise
    _check_ranges(ids, weight, table, positions)
    seed = dropout_seed(weight) if dropout_p > 0.0 else None
    return call(_Embedding, weight, table, ids, positions, seed, scale, dropout_p, eager_formula(plain))  # type: ignore[no-any-return]


def _check_ranges(ids: Tensor, weight: Tensor, table: Tensor | None, positions: Tensor | None) -> None:
    """Raise unless ids and positions are rows of the matrices; checked on the CPU only, where no check waits."""
    check_range("ids", ids, weight.shape[0] - 1, ", the last row of weight", IndexError)
    if table is not None and positions is not None:
        check_range("positions", positions, table.shape[0] - 1, ", the last row of table", IndexError)


def _check(ids: Tensor, weight: Tensor, table: Tensor | None, positions: Tensor | None) -> None:
    if (table is None) != (positions is None):
        raise ValueError(f"{'table' if table is None else 'positions'} is None: pass table and positions, or neither")
    for name, indices, matrix_name, matrix in (
        ("ids", ids, "weight", weight),
        ("positions", positions, "table", table),
    ):
        if indices is not None and indices.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, not {indices.dtype}")
        if matrix is not None and matrix.dim() != 2:
            raise ValueError(f"{matrix_name} must have two dimensions, not shape {list(matrix.shape)}")
    if positions is not None and positions.shape != ids.shape:
        raise ValueError(f"positions must be of the shape of ids, {list(ids.shape)}, not {list(positions.shape)}")
    if table is not None and table.shape[1] != weight.shape[1]:
        raise ValueError(f"table must be of shape [P, {weight.shape[1]}], not {list(table.shape)}")


def _plain(ids: Tensor, positions: Tensor | None, scale: float, weight: Tensor, table: Tensor | None) -> Tensor:
    """Compute the reference without dropout: scale * weight[ids] + table[positions]."""
    x = F.embedding(ids, weight)
    if table is None or positions is None:
        return x if scale == 1.0 else x * scale
    return torch.add(F.embedding(positions, table), x, alpha=scale)  # one pass


def _embedding_fake(ids: Tensor, weight: Tensor, table: Tensor | None) -> Tensor:
    dtype = weight.dtype if table is None else torch.promote_types(weight.dtype, table.dtype)
    return weight.new_empty((*ids.shape, weight.shape[1]), dtype=dtype)


_embedding = define(
    "embedding(Tensor ids, Tensor weight, Tensor? positions, Tensor? table, Tensor? seed, float scale, "
    "float dropout_p) -> Tensor",
    "embedding.kernels.embedding",
    _embedding_fake,
)
_embedding_backward = define(
    "embedding_backward(Tensor dout, Tensor ids, Tensor? seed, int rows, float scale, float dropout_p, "
    "ScalarType dtype) -> Tensor",
    "embedding.kernels.backward",
    lambda dout, rows, dtype: dout.new_empty((rows, dout.shape[-1]), dtype=dtype),
)


class _Embedding(torch.autograd.Function):
    """weight, table, ids, positions, seed, scale, dropout_p, formula -> the result of `embedding`."""

    @staticmethod
    def forward(weight: Tensor, table: Tensor | None, ids: Tensor, positions: Tensor | None, *rest: Any) -> Tensor:
        return _embedding(ids, weight, positions, table, *rest[:-1])  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale, ctx.dropout_p, ctx.formula = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, table, ids, positions, seed = ctx.saved_tensors
        if needs_double_backward("embedding", ctx.formula, seed):
            return *plain_gradients(ctx.formula, (weight, table), ctx.needs_input_grad[:2], (dout,)), *(None,) * 6
        needs_weight, needs_table = ctx.needs_input_grad[:2]
        dweight = dtable = None
        if needs_weight:
            matrix = weight.shape[0], ctx.scale, ctx.dropout_p, weight.dtype
            dweight = _embedding_backward(dout, ids, seed, *matrix)
        if needs_table:
            dtable = _embedding_backward(dout, positions, seed, table.shape[0], 1.0, ctx.dropout_p, table.dtype)
        return dweight, dtable, *(None,) * 6
