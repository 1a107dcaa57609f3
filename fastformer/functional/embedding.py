"""What stands before the first layer.

Letters: D model width, P positions, V vocabulary.
"""

from torch import Tensor

from fastformer import fused, reference
from fastformer.arguments import check_embedding, check_probability
from fastformer.functional.choice import eager_formula, runs_fused
from fastformer.fused.embedding import embedding as fused_embedding
from fastformer.host.devices import check_tensors


def embedding(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    scale: float = 1.0,
    dropout_p: float = 0.0,
) -> Tensor:
    """dropout(scale * weight[ids] + table[positions]), what stands before the first layer of a Transformer.

    Args:
        ids: int64 `[...]`.
        weight: `[V, D]`.
        table: `[P, D]`, learned or fixed; None for no positions.
        positions: int64, of the shape of ids; given if and only if table is.
        scale: of the weight.
        dropout_p: dropout of the sum; applied whenever it is not 0.

    Returns:
        `[..., D]`, of the dtype to which those of weight and table promote.

    Raises:
        ValueError, TypeError: an argument does not fit.
        IndexError: an id or a position on the CPU is no row. On a GPU nothing waits to look: torch's kernel stops with
            an assertion, the fused one gives NaN.
    """
    check_tensors(("ids", "weight", "table", "positions"), ids, (weight,), (table, positions))
    check_embedding(ids, weight, table, positions)
    check_probability("dropout_p", dropout_p)

    def limit() -> str | None:
        if table is None or table.dtype in fused.DTYPES:
            return None
        return f"embedding takes a table of float32, float16 or bfloat16, not {table.dtype}"

    if runs_fused("embedding", weight, limit):
        return fused_embedding(
            ids,
            weight,
            table,
            positions,
            scale=scale,
            dropout_p=dropout_p,
            formula=eager_formula(lambda w, t: reference.embedding(ids, w, t, positions, scale=scale, dropout_p=0.0)),
        )
    return reference.embedding(ids, weight, table, positions, scale=scale, dropout_p=dropout_p)
