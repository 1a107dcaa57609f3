"""The norms over the last dimensions, and the step between two sublayers that ends in one."""

from collections.abc import Sequence

from torch import Tensor

from fastformer import reference
from fastformer.arguments import check_probability
from fastformer.functional.choice import eager_formula, runs_fused
from fastformer.fused.dropout_add_layer_norm import dropout_add_layer_norm as fused_dropout_add_layer_norm
from fastformer.fused.layer_norm import layer_norm as fused_layer_norm
from fastformer.fused.layer_norm import norm_limit
from fastformer.fused.rms_norm import rms_norm as fused_rms_norm
from fastformer.host.devices import check_tensors


def _normalized_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _fits(x: Tensor, shape: tuple[int, ...], *parameters: Tensor | None) -> bool:
    """Whether x `[..., *shape]` and the parameters have the shapes that a norm takes."""
    for parameter in parameters:
        if parameter is not None and parameter.shape != shape:
            return False
    return shape != () and x.shape[-len(shape) :] == shape


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation over the last dimensions (Ba et al. 2016), as `torch.nn.functional.layer_norm`.

    Args:
        x: `[..., *normalized_shape]`, floating point.
        normalized_shape: the trailing dimensions; a number stands for one.
        weight: `normalized_shape`, or None for ones.
        bias: `normalized_shape`, or None for zeros.
        eps: added to the variance.

    Raises:
        fastformer.host.devices.DeviceError: a tensor is on another device than x; every op refuses that.
        TypeError: one is no tensor.
    """
    check_tensors(("x", "weight", "bias"), x, (), (weight, bias))
    shape = _normalized_shape(normalized_shape)
    takes_kernel = runs_fused("layer_norm", x, lambda: norm_limit("layer_norm", x, weight, bias))
    if takes_kernel and _fits(x, shape, weight, bias):  # what does not fit raises in torch
        formula = eager_formula(lambda x, weight, bias: reference.layer_norm(x, x.shape[-1:], weight, bias, eps))
        return fused_layer_norm(x, shape, weight, bias, eps, formula=formula)
    return reference.layer_norm(x, shape, weight, bias, eps)


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Root-mean-square normalisation (Zhang and Sennrich 2019), as `torch.nn.functional.rms_norm`.

    Args:
        x: `[..., *normalized_shape]`, floating point.
        normalized_shape: the trailing dimensions; a number stands for one.
        weight: `normalized_shape`, or None for ones.
        eps: added to the mean square; the machine epsilon if None, of fp32 for half precision too.
    """
    check_tensors(("x", "weight"), x, (), (weight,))
    shape = _normalized_shape(normalized_shape)
    takes_kernel = runs_fused("rms_norm", x, lambda: norm_limit("rms_norm", x, weight))
    if takes_kernel and _fits(x, shape, weight):
        formula = eager_formula(lambda x, weight: reference.rms_norm(x, x.shape[-1:], weight, eps))
        return fused_rms_norm(x, shape, weight, eps, formula=formula)
    return reference.rms_norm(x, shape, weight, eps)


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The step between two sublayers: s = residual + dropout(x), and its layer norm.

    Args:
        x: `[..., *normalized_shape]`, the output of a sublayer.
        residual: of x's shape.
        normalized_shape, weight, bias, eps: as in `layer_norm`.
        dropout_p: applied to x whenever it is not 0.

    Returns:
        (norm(s), s). Pre-norm layers carry on with both, post-norm layers with the first.
    """
    check_tensors(("x", "residual", "weight", "bias"), x, (residual,), (weight, bias))
    if x.shape != residual.shape:
        raise ValueError(f"x and residual must have the same shape, not {list(x.shape)} and {list(residual.shape)}")
    check_probability("dropout_p", dropout_p)
    shape = _normalized_shape(normalized_shape)
    takes_kernel = runs_fused(
        "dropout_add_layer_norm", x, lambda: norm_limit("dropout_add_layer_norm", x, residual, weight, bias)
    )
    if takes_kernel and _fits(x, shape, weight, bias):
        formula = eager_formula(lambda s, weight, bias: reference.layer_norm(s, s.shape[-1:], weight, bias, eps))
        return fused_dropout_add_layer_norm(
            x, residual, shape, weight, bias, eps=eps, dropout_p=dropout_p, formula=formula
        )
    return reference.dropout_add_layer_norm(x, residual, shape, weight, bias, eps=eps, dropout_p=dropout_p)
