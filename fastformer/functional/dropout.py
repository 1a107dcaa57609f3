"""Dropout by itself, which has no kernel of its own: where the work is, the other ops have it inside."""

from torch import Tensor

from fastformer import reference
from fastformer.arguments import check_probability
from fastformer.host.devices import check_tensors


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p); no change where p is 0.

    Args:
        x: any shape, floating point.
        p: quantised to 1/65536 where that is faster, and the quantised value is used in the scale.
    """
    check_tensors(("x",), x)
    check_probability("p", p)
    return reference.dropout(x, p)
