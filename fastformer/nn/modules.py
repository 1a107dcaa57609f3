"""Drop-in modules: torch.nn's classes with the ops of `fastformer.functional` inside.

Each subclasses its torch.nn original and overrides `forward` only, so constructor, initial values, `state_dict` keys
and repr are torch's own, and checkpoints load both ways. They add no state, so a torch module becomes ours, and torch's
again, by a change of its class (`take_over`).

Letters: B batch, H heads, T queries, S keys, D model width, K head size, F feed-forward width, V vocabulary.
"""

from collections.abc import Callable, Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import init

from fastformer import functional
from fastformer.functional.choice import is_torchs
from fastformer.functional.feed_forward.op import ACTIVATIONS, GATED, Activation, activate
from fastformer.functional.linear_cross_entropy.op import REDUCTIONS, Reduction
from fastformer.host.devices import autocasts, check_choice, check_probability
from fastformer.modes import watched
from fastformer.nn.activations import FUSED, geglu, gelu_tanh, reglu, swiglu
from fastformer.nn.inspection import TOKEN_WISE, plain, plain_parts

_FEW_TOKENS = 256
_FEED_FORWARD: dict[str, tuple[type[nn.Module], ...]] = {
    "linear1": (nn.Linear,), "dropout": (nn.Dropout,), "linear2": (nn.Linear,),
}  # fmt: skip

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound=Callable[..., Any])

OURS: dict[type[nn.Module], type[nn.Module]] = {}  # torch's class -> our drop-in subclass


def drop_in(cls: type[M]) -> type[M]:
    """Register a class as ours for the class of torch.nn of the same name."""
    OURS[getattr(nn, cls.__name__)] = cls
    return cls


def runs_as_torch(x: Tensor) -> bool:
    """Return whether torch's own `forward` is faster: for few tokens in inference, on a CPU, without kernels.

    torch's fused ops for inference keep all scores, so they are not for many tokens.
    """
    if torch.is_grad_enabled() or not is_torchs(x, None) or x.is_nested:
        return False
    return 0 < x.numel() <= _FEW_TOKENS * x.shape[-1] and not (watched() or autocasts(x))


def take_over(module: nn.Module) -> None:
    """Make a module of torch.nn, and the layers and parts that it is made of, ours: the class changes, nothing else.

    Only torch's own classes are recognised, not subclasses, whose `forward` may differ.
    """
    if type(module) in OURS:
        module.__class__ = OURS[type(module)]
    if isinstance(module, (nn.ModuleList, *OURS)):
        for part in module.children():
            take_over(part)


def twin(module: nn.Module) -> nn.Module:
    """Return our version of a layer or a part of torch.nn around the same parameters; the original stays as it is."""
    if type(module) not in OURS:
        return module
    ours = _share(module)
    parts = {part: _share(part) for part in ours.children() if type(part) in OURS}
    for name, part in ours._modules.items():
        if part in parts:  # one part under two names stays one
            ours._modules[name] = parts[part]
    take_over(ours)
    return ours


def _share(module: nn.Module) -> nn.Module:
    """Return another module of the same class with the parameters, submodules and settings of `module` itself."""
    other = module.__class__.__new__(module.__class__)
    # The containers are copied, so that what is replaced in one stays in the other.
    other.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()})
    return other


def token_wise(part: T) -> T:
    """Declare that a class of modules, or a function, treats each token alone; usable as a decorator. Returns it.

    Stacks with such parts then run without padding and decode with a cache: a part gets `[T, D]` in place of
    `[B, L, D]`. A linear layer with an adapter is token-wise, a convolution over positions is not. Nothing checks it.

    Args:
        part: a subclass of nn.Module, itself and not its subclasses; or an activation function, hashable.

    Raises:
        TypeError: it is neither.
    """
    of_modules = isinstance(part, type) and issubclass(part, nn.Module)
    if not (of_modules or (callable(part) and not isinstance(part, type | nn.Module))):
        name = part.__name__ if isinstance(part, type) else type(part).__name__
        raise TypeError(f"token_wise takes a class of modules or a function, not {name}")
    if not isinstance(part, Hashable):
        raise TypeError(f"token_wise takes functions that are hashable, not a {type(part).__name__}")
    TOKEN_WISE.add(part)
    return part


def activation_name(activation: Callable[[Tensor], Tensor]) -> Activation | None:
    """Recognise the activations that `functional.feed_forward` knows."""
    if isinstance(activation, FunctionType | BuiltinFunctionType):
        return FUSED.get(activation)
    if not isinstance(activation, nn.Module) or not plain(activation, nn.ReLU, nn.GELU):
        return None
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    return "relu"


def cast_parameters(model: nn.Module) -> list[Tensor]:
    """Return the fp32 parameters that our modules cast to the dtype of autocast; none where a model has none of ours.

    What they do not cast of these, such as those of a linear layer that is called as torch calls it, torch casts too.
    """
    owners = [module for module in model.modules() if isinstance(module, nn.Linear | nn.MultiheadAttention)]
    if not any(isinstance(module, (*OURS.values(), FeedForward)) for module in model.modules()):
        return []
    found = {id(p): p for module in owners for p in module.parameters(recurse=False) if p.dtype == torch.float32}
    return list(found.values())


@drop_in
class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm on `fastformer.functional.layer_norm` (Ba et al. 2016).

    Also takes weights of a narrower dtype than the input, which torch refuses: FSDP2 gathers them in 16 bits.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `[..., *normalized_shape]`."""
        weight, bias = self.weight, self.bias
        if is_torchs(input, weight, bias):
            return torch.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


@drop_in
class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm on `fastformer.functional.rms_norm` (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., *normalized_shape]`."""
        weight = self.weight
        if is_torchs(x, weight):
            return torch.rms_norm(x, self.normalized_shape, weight, self.eps)
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)


TOKEN_WISE.update((LayerNorm, RMSNorm, gelu_tanh, geglu, swiglu, reglu))


def make_norm(kind: str, width: int, eps: float, bias: bool, factory: dict[str, Any]) -> nn.Module:
    """Return a norm over `width` numbers, "layer" or "rms"; bias: of a layer norm."""
    return RMSNorm(width, eps, **factory) if kind == "rms" else LayerNorm(width, eps, bias=bias, **factory)


class FeedForward(nn.Module):
    """dropout(activation(linear1(x))) -> linear2, with the parameter names of torch's Transformer layers.

    Args:
        d_model: D, width of input and output.
        dim_feedforward: F, width of the hidden activations.
        dropout: of the hidden activations.
        activation: "relu", "gelu", "gelu_tanh", or gated: "geglu", "swiglu", "reglu" (linear1 is then 2F wide).
        bias: whether both linear maps have one.
        recompute: keep the input alone for backward, which costs one matrix product more there.
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
        check_choice("activation", activation, ACTIVATIONS)
        width = 2 * dim_feedforward if activation in GATED else dim_feedforward
        self.activation: Activation = activation
        self.recompute = recompute
        self.linear1 = nn.Linear(d_model, width, bias, device, dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`; parts that were replaced, or have hooks, are called."""
        first, dropout, second = self.linear1, self.dropout, self.linear2
        if len(plain_parts(self, _FEED_FORWARD)) < len(_FEED_FORWARD):
            return second(dropout(activate(first(x), self.activation)))  # type: ignore[no-any-return]
        weights = first.weight, first.bias, second.weight, second.bias
        options = {"dropout_p": dropout.p if dropout.training else 0.0, "recompute": self.recompute}
        return functional.feed_forward(x, *weights, activation=self.activation, **options)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Show the activation, and whether anything is recomputed."""
        return f"activation={self.activation!r}" + (", recompute=True" if self.recompute else "")


SequentialFeedForward = nn.Sequential  # pickles of models that were converted before name it


class LinearCrossEntropy(nn.Module):
    """Output projection and cross entropy in one step; the logits need not be kept.

    Args:
        in_features: D.
        num_classes: V.
        bias: whether the projection has one.
        ignore_index: targets of this value count for nothing.
        label_smoothing: share of the probability spread over all classes.
        reduction: "mean", "sum" or "none".
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
        check_choice("reduction", reduction, REDUCTIONS)
        check_probability("label_smoothing", label_smoothing)
        self.in_features, self.num_classes = in_features, num_classes
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.reduction: Reduction = reduction
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the values that `nn.Linear(in_features, num_classes, bias)` draws."""
        init.kaiming_uniform_(self.weight, a=5**0.5)
        if self.bias is not None:
            bound = self.in_features**-0.5
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of `[..., D]` against int64 targets `[...]`."""
        return functional.linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )

    def logits(self, input: Tensor) -> Tensor:
        """Project `[..., D]` to `[..., V]`."""
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Show the sizes and settings."""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}, "
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, reduction={self.reduction!r}"
        )
