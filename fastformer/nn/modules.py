"""Drop-in modules: torch.nn's classes with the ops of `fastformer.functional` inside.

Each subclasses its torch.nn original, overrides `forward` only and adds no state. So changing the class of a module
converts it, in both directions.

Letters: B batch, H heads, T queries, S keys, D model width, K head size, F feed-forward width, V vocabulary.
"""

from collections.abc import Callable, Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import functional
from fastformer.functional.choice import is_torchs
from fastformer.functional.feed_forward.op import ACTIVATIONS, GATED, Activation, activate
from fastformer.functional.linear_cross_entropy.op import REDUCTIONS, Reduction
from fastformer.host.devices import autocasts, check_probability
from fastformer.modes import needs_dispatcher
from fastformer.nn.activations import FUSED, geglu, gelu_tanh, reglu, swiglu
from fastformer.nn.inspection import TOKEN_WISE, is_unmodified, unmodified_children
from fastformer.nn.packed_input import Masks, causal_mask
from fastformer.settings import check_value

_FEW_TOKENS = 256
# Of a head in a batch. Beyond, SDPA is faster with a mask than torch's fused ops: for 5 x 48 tokens of width 64 1.2
# times, for 1 x 256 4 times (MultiheadAttention, one core); for 1 x 64 0.95 times.
_FEW_SCORES = 4096
_ATTENTION_MASK, _KEY_PADDING, _BOTH = 0, 1, 2  # `mask_type` of torch's fused ops
_FEED_FORWARD: dict[str, tuple[type[nn.Module], ...]] = {
    "linear1": (nn.Linear,), "dropout": (nn.Dropout,), "linear2": (nn.Linear,),
}  # fmt: skip

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound=Callable[..., Any])

DROP_INS: dict[type[nn.Module], type[nn.Module]] = {}  # torch.nn's class -> drop-in subclass


def drop_in(cls: type[M]) -> type[M]:
    """Register a class as the drop-in for the torch.nn class of the same name."""
    DROP_INS[getattr(nn, cls.__name__)] = cls
    return cls


def are_few_on_cpu(x: Tensor) -> bool:
    """Return whether x holds few tokens on a CPU, which run without kernels, autocast, or something that sees ops."""
    if not is_torchs(x, None) or x.is_nested:
        return False
    return 0 < x.numel() <= _FEW_TOKENS * x.shape[-1] and not (needs_dispatcher() or autocasts(x))


def runs_as_torch(x: Tensor) -> bool:
    """Return whether torch's own ops are faster: for few tokens in inference, on a CPU, without kernels.

    torch's fused ops for inference store all scores, so they are not used for many tokens.
    """
    return not torch.is_grad_enabled() and are_few_on_cpu(x)


def mask_of_fused_ops(x: Tensor, heads: int, masks: Masks) -> tuple[Tensor | None, int | None] | None:
    """Return the mask and the `mask_type` for torch's fused ops on x `[B, L, D]`; None if they do not take the masks.

    They take bool masks. With a mask `[L, L]`, they are faster only for few scores. Their output is NaN where a query
    sees no key, or a hidden value is NaN or overflows: fastformer's own ops must then compute it.
    """
    (B, L, _), (mask, padding, causal) = x.shape, masks
    if causal and mask is None:
        mask = causal_mask(L, L, x.device)
    for m, shape in ((mask, (L, L)), (padding, (B, L))):
        if m is not None and not (type(m) is Tensor and m.is_cpu and m.dtype == torch.bool and m.shape == shape):
            return None
    if mask is None:
        return padding, None if padding is None else _KEY_PADDING
    if B * L**2 > _FEW_SCORES:
        return None
    if padding is None:
        return mask, _ATTENTION_MASK
    return (mask | padding[:, None])[:, None].expand(B, heads, L, L), _BOTH


def take_over_children(module: nn.Module) -> None:
    """Change the classes of a module's children, and of their children, to the drop-in classes, in place.

    Only torch's own classes are changed, not subclasses, whose `forward` may differ.
    """
    for child in module.children():
        is_torchs_class = type(child) in DROP_INS
        if is_torchs_class:
            child.__class__ = DROP_INS[type(child)]
        if is_torchs_class or isinstance(child, nn.ModuleList):
            take_over_children(child)


def token_wise(part: T) -> T:
    """Declare that a module class (not its subclasses), or a hashable function, treats each token alone; return it.

    Stacks with such modules then run without padding and decode with a cache: the module gets `[T, D]` in place of
    `[B, L, D]`. A linear layer with an adapter is token-wise, a convolution over positions is not. The declaration is
    not checked. Usable as a decorator; raises TypeError for anything else.
    """
    is_function = callable(part) and isinstance(part, Hashable) and not isinstance(part, type | nn.Module)
    if not (is_function or (isinstance(part, type) and issubclass(part, nn.Module))):
        raise TypeError(f"token_wise takes a class of modules or a hashable function, not {part!r}")
    TOKEN_WISE.add(part)
    return part


def activation_name(activation: Callable[[Tensor], Tensor]) -> Activation | None:
    """Return the name of an activation in `functional.feed_forward`; None if it has none there."""
    if isinstance(activation, FunctionType | BuiltinFunctionType):
        return FUSED.get(activation)
    if not isinstance(activation, nn.Module) or not is_unmodified(activation, nn.ReLU, nn.GELU):
        return None
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    return "relu"


@drop_in
class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm on `fastformer.functional.layer_norm` (Ba et al. 2016).

    Also accepts weights of a narrower dtype than the input, unlike torch, because FSDP2 gathers them in 16 bits.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `[..., *normalized_shape]`."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


@drop_in
class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm on `fastformer.functional.rms_norm` (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., *normalized_shape]`."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


NORMS = (LayerNorm, nn.LayerNorm, RMSNorm, nn.RMSNorm)  # an op may compute these together with the sum before them
TOKEN_WISE.update((LayerNorm, RMSNorm, gelu_tanh, geglu, swiglu, reglu))


def make_norm(kind: str, width: int, eps: float, bias: bool, factory: dict[str, Any]) -> nn.Module:
    """Return a norm over `width` numbers, "layer" or "rms"; bias: whether a layer norm has one."""
    return RMSNorm(width, eps, **factory) if kind == "rms" else LayerNorm(width, eps, bias=bias, **factory)


class FeedForward(nn.Module):
    """dropout(activation(linear1(x))) -> linear2, with the parameter names of torch's Transformer layers.

    Args:
        d_model: D, width of input and output.
        dim_feedforward: F, width of the hidden activations.
        dropout: of the hidden activations.
        activation: "relu", "gelu", "gelu_tanh", or gated: "geglu", "swiglu", "reglu" (linear1 is then 2F wide).
        bias: whether both linear layers have one.
        recompute: whether only the input is stored for backward, which costs one more matrix product there.
    """

    def __init__(
        self,
        d_model: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        check_value("activation", activation, str, choices=ACTIVATIONS)
        width = 2 * dim_feedforward if activation in GATED else dim_feedforward
        self.activation: Activation = activation
        self.recompute = recompute
        self.linear1 = nn.Linear(d_model, width, bias, device, dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`; modules that were replaced or have hooks are called."""
        first, dropout, second = self.linear1, self.dropout, self.linear2
        if len(unmodified_children(self, _FEED_FORWARD)) < len(_FEED_FORWARD):
            return second(dropout(activate(first(x), self.activation)))  # type: ignore[no-any-return]
        weights = first.weight, first.bias, second.weight, second.bias
        options = {"dropout_p": dropout.p if dropout.training else 0.0, "recompute": self.recompute}
        return functional.feed_forward(x, *weights, activation=self.activation, **options)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Show the activation, and whether backward recomputes."""
        return f"activation={self.activation!r}" + (", recompute=True" if self.recompute else "")


class LinearCrossEntropy(nn.Module):
    """Output projection and cross entropy in one step, which need not store the logits.

    in_features (D), num_classes (V) and bias are those of nn.Linear, the other arguments those of nn.CrossEntropyLoss.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_value("reduction", reduction, str, choices=REDUCTIONS)
        check_probability("label_smoothing", label_smoothing)
        self.in_features, self.num_classes = in_features, num_classes
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.reduction: Reduction = reduction
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the values that `nn.Linear(in_features, num_classes, bias)` draws."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of `[..., D]` against int64 targets `[...]`."""
        settings: Any = {name: getattr(self, name) for name in ("ignore_index", "label_smoothing", "reduction")}
        return functional.linear_cross_entropy(input, self.weight, target, self.bias, **settings)

    def logits(self, input: Tensor) -> Tensor:
        """Project `[..., D]` to `[..., V]`."""
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Show the sizes and settings."""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}, "
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, reduction={self.reduction!r}"
        )
