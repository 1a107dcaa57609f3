"""Models of torch's classes, or ours, that somebody has changed in ways that the package knows nothing of.

What is made depends on the plan's seed alone, so that the same model is built of torch's classes and of ours, and once
more for fp64. A change is drawn by a `Random` of its own and applied to whichever library's model it is given.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

from tests.nn.layer_cases import Twice, randomise
from tests.support.torch_recorders import (
    Attention,
    Calls,
    Recording,
    additive,
    ahead,
    collected,
    hooked,
    hooked_everywhere,
)

KINDS = ("EncoderLayer", "DecoderLayer", "Encoder", "Decoder", "Transformer", "MultiheadAttention", "Sequential")
DTYPES = (torch.float64,) * 6 + (torch.float32,) * 2 + (torch.bfloat16, torch.float16)
ACTIVATIONS: tuple[Callable[[], Any], ...] = (
    *(lambda: F.relu, lambda: F.gelu, nn.ReLU, nn.GELU, lambda: nn.GELU(approximate="tanh"), Twice),
    *(lambda: F.silu, lambda: torch.tanh, nn.Identity, lambda: lambda x: x.softmax(-1)),
)


@dataclass(frozen=True)
class Plan:
    """What a model is; its changes are named."""

    seed: int
    kind: str
    heads: int
    head_dim: int
    width: int  # of the feed-forward network
    dtype: torch.dtype
    batch_first: bool
    norm_first: bool
    bias: bool
    activation: int
    layers: int
    final_norm: bool
    dropout: float
    attention: dict[str, Any]
    changes: tuple[str, ...]
    watch: str
    direct: bool  # built of our classes, not converted
    places: tuple[float, ...] = field(repr=False, default=())

    @property
    def d_model(self) -> int:
        return self.heads * self.head_dim


def plan(random: Random, seed: int) -> Plan:
    """Draw what a model is."""
    kind = random.choice(KINDS)
    attention = {}
    if kind == "MultiheadAttention":
        attention = {name: random.random() < 0.25 for name in ("add_bias_kv", "add_zero_attn")}
        attention |= {name: random.choice((1, 7, 10)) for name in ("kdim", "vdim") if random.random() < 0.2}
    return Plan(
        seed,
        kind,
        random.choice((1, 1, 2, 3)),
        random.choice((1, 3, 5, 7, 8, 8)),
        random.choice((1, 9, 12, 13)),
        random.choice(DTYPES),
        random.random() < 0.6,
        random.random() < 0.5,
        random.random() < 0.8,
        random.randrange(len(ACTIVATIONS)) if random.random() < 0.5 else 0,
        random.choice((0, 1, 1, 2, 2, 2, 3)),
        random.random() < 0.5,
        random.choice((0.0, 0.0, 0.0, 1.0, 0.3)),
        attention,
        tuple(random.choice(list(CHANGES)) for _ in range(random.choice((0, 1, 1, 1, 2, 3)))),
        random.choice(WATCHES),
        random.random() < 0.3,
    )


def build(plan: Plan, library: Any) -> nn.Module:
    """Build a model of `torch.nn` or `fastformer`, the same parameters for both, with its changes."""
    torch.manual_seed(plan.seed)
    common: dict[str, Any] = {"bias": plan.bias, "batch_first": plan.batch_first, "dtype": plan.dtype}
    layer = common | {
        "d_model": plan.d_model,
        "nhead": plan.heads,
        "dim_feedforward": plan.width,
        "dropout": plan.dropout,
        "norm_first": plan.norm_first,
    }
    model: nn.Module
    if plan.kind == "Sequential":
        sizes = (plan.d_model, plan.width, plan.bias), (plan.width, plan.d_model, plan.bias)
        first, second = (nn.Linear(*size, dtype=plan.dtype) for size in sizes)
        model = nn.Sequential(first, ACTIVATIONS[plan.activation % 2 + 2](), nn.Dropout(plan.dropout), second)
    elif plan.kind == "MultiheadAttention":
        model = library.MultiheadAttention(plan.d_model, plan.heads, plan.dropout, **common, **plan.attention)
    elif plan.kind == "Transformer":
        model = library.Transformer(num_encoder_layers=plan.layers, num_decoder_layers=max(plan.layers - 1, 0), **layer)
    elif plan.kind.endswith("Layer"):
        model = getattr(library, f"Transformer{plan.kind}")(**layer)
    else:
        final = library.LayerNorm(plan.d_model, dtype=plan.dtype) if plan.final_norm else None
        single = getattr(library, f"Transformer{plan.kind}Layer")(**layer)
        model = getattr(library, f"Transformer{plan.kind}")(single, plan.layers, final)
    for part in layers(model):
        part.activation = ACTIVATIONS[plan.activation]()  # torch's copies of a decoder layer lose it
    randomise(model)
    random = Random(plan.seed)
    modes = [random.random() < 0.5 for _ in model.modules()]
    if plan.dropout == 0.3:
        model.eval()  # nobody else draws the same numbers
    elif random.random() < 0.5:
        for part, mode in zip(model.modules(), modes, strict=True):
            part.training = mode
    for change in plan.changes:
        CHANGES[change](model, Random(random.random()), plan)
    return model


def layers(model: nn.Module) -> list[Any]:
    """The layers of a model, in order."""
    return [x for x in model.modules() if isinstance(x, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)]


def _attentions(model: nn.Module) -> list[tuple[Any, str]]:
    """Who holds an attention, and under which name."""
    named = ("self_attn", "multihead_attn")
    return [
        (layer, name) for layer in layers(model) for name in named if isinstance(getattr(layer, name, None), nn.Module)
    ]


def _parts(model: nn.Module, *names: str) -> list[Any]:
    """Parts that are called, by the last word of their names; all of them if none is given."""
    found = [part for name, part in model.named_modules() if not names or name.rsplit(".", 1)[-1] in names]
    return [part for part in found if not isinstance(part, nn.ModuleList)] or [model]


class _Own:
    """A mark of what has been changed already."""


class _Rows:
    """Blocks of somebody's own; x is `[..., L, D]` in them."""

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        turned = x.dim() == 3 and not self.self_attn.batch_first  # type: ignore[attr-defined]
        x = x.transpose(0, 1) if turned else x
        scores = x @ x.mT if mask is None else x @ x.mT + mask
        out = scores.softmax(-1) @ x
        return out.transpose(0, 1) if turned else out


class OnlyTheHint(_Rows):
    """A mask of its own making, from the hint alone."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        length = x.shape[1 if self.self_attn.batch_first and x.dim() == 3 else 0]
        return self._attend(x, additive(ahead(length), x.dtype) if is_causal else None)


class AddsMasks(_Rows):
    """Masks added to scores as they come."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        if attn_mask is not None and attn_mask.dim() == 2:
            attn_mask = attn_mask.to(x.dtype).clamp(min=-1e4)
        else:
            attn_mask = None
        padding = 0.0 if key_padding_mask is None else key_padding_mask.to(x.dtype).clamp(min=-9.0).sum()
        return self._attend(x, attn_mask) + padding


class OwnFeedForward:
    """Another feed-forward network."""

    def _ff_block(self, x):
        return x.sin() * x.shape[-2]


class OwnForward:
    """A forward around torch's."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 1.5


class OwnAttention:
    """A forward around torch's attention, that counts on what it is given."""

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, **more):
        Attention.calls.add(query, key_padding_mask, attn_mask, need_weights, more)
        more = {} if attn_mask is None else more
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        out, weights = super().forward(query, key, value, need_weights=need_weights, **masks, **more)
        floats = [x for x in masks.values() if x is not None and x.is_floating_point()]
        return out * (1.0 + len(floats)), weights


class Mixes(nn.Module):
    """What BatchNorm does: a norm that looks at all rows at once."""

    def forward(self, x):
        return x - x.mean((0, 1), keepdim=True) if x.dim() == 3 else x - x.mean(0)


# out_proj of attention has neither adapters nor hooks here: torch passes by its module, ours calls it
# (tests/nn/test_wrappers.py).


class Adapter(nn.Module):
    """A linear map beside another, as low-rank adapters do; shows the other's parameters as its own."""

    def __init__(self, base: nn.Module, seed: int) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(base.weight.shape, generator=generator, dtype=torch.float64)
        self.extra = nn.Parameter(drawn.to(base.weight.dtype))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x):
        return self.base(x) + F.linear(x, self.extra)


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, x):
        return 0.5 * x


def _own_class(model: nn.Module, random: Random, plan: Plan) -> None:
    found = layers(model)
    if found:
        layer = random.choice(found)
        if isinstance(layer, _Own):
            return
        mixin = random.choice((Recording, OnlyTheHint, AddsMasks, OwnFeedForward, OwnForward))
        layer.__class__ = type(f"Own{mixin.__name__}", (_Own, mixin, type(layer)), {})


def _own_attention(model: nn.Module, random: Random, plan: Plan) -> None:
    found = _attentions(model)
    if found:
        layer, name = random.choice(found)
        setattr(layer, name, Attention(plan.heads, getattr(layer, name).batch_first).to(plan.dtype))


def _attention_subclass(model: nn.Module, random: Random, plan: Plan) -> None:
    found = _attentions(model)
    if found:
        attention = getattr(*random.choice(found))
        if isinstance(attention, nn.MultiheadAttention) and not isinstance(attention, OwnAttention):
            attention.__class__ = type("OwnAttention", (OwnAttention, type(attention)), {})


def _scaled(x: Any, by: float) -> Any:
    if isinstance(x, tuple):
        return tuple(_scaled(y, by) for y in x)
    return x * by if isinstance(x, Tensor) and x.is_floating_point() else x


def _hook(model: nn.Module, random: Random, plan: Plan) -> None:
    part = random.choice([x for x in _parts(model) if type(x) is not NonDynamicallyQuantizableLinear] or [model])
    match random.randrange(5):
        case 0:
            part.register_forward_hook(lambda module, args, out: _scaled(out, 0.5))
        case 1:
            part.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]) if args else None)
        case 2:
            part.register_forward_pre_hook(_without_padding, with_kwargs=True)
        case 3:
            part.register_forward_hook(
                lambda module, args, kwargs, out: _scaled(out, 1.0 + len(args)), with_kwargs=True
            )
        case _:
            part.register_full_backward_hook(lambda module, grads, of_output: _scaled(grads, 2.0))


def _without_padding(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook that opens what is hidden by a key padding mask."""
    return args, {k: None if "key_padding" in k else v for k, v in kwargs.items()}


def _forward_replaced(model: nn.Module, random: Random, plan: Plan) -> None:
    parts = _parts(model, "linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "self_attn", "0", "1")
    part = random.choice(parts)
    before = type(part).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _scaled(before(self, *args, **kwargs), 3.0)

    part.forward = types.MethodType(forward, part)


def _weights(model: nn.Module, random: Random, plan: Plan) -> None:
    linear = _parts(model, "linear1", "linear2", "out_proj", "0", "3")
    part = random.choice([x for x in linear if isinstance(x, nn.Linear)] or [model])
    if not isinstance(part, nn.Linear) or any(map(parametrize.is_parametrized, linear)):
        return
    match random.randrange(5):
        case 0:
            parametrize.register_parametrization(part, "weight", Halved())
        case 1:  # shared
            for other in linear:
                if isinstance(other, nn.Linear) and other.weight.shape == part.weight.shape:
                    other.weight = part.weight
        case 2:  # strides of another order
            part.weight = nn.Parameter(part.weight.detach().t().contiguous().t())
        case 3:
            part.weight = nn.Parameter(part.weight.detach()[:1].expand_as(part.weight))  # all rows in one place
        case _:
            part.requires_grad_(False)


def _frozen(model: nn.Module, random: Random, plan: Plan) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(random.random() < 0.3)


def _adapter(model: nn.Module, random: Random, plan: Plan) -> None:
    holders = [x for x in model.modules() if hasattr(x, "linear1")]
    if holders:
        holder, name = random.choice(holders), random.choice(("linear1", "linear2"))
        setattr(holder, name, Adapter(getattr(holder, name), random.getrandbits(30)))


def _norm(model: nn.Module, random: Random, plan: Plan) -> None:
    holders = [x for x in model.modules() if hasattr(x, "norm1")]
    if holders:
        norm = random.choice((Mixes(), nn.Identity(), nn.RMSNorm(plan.d_model, dtype=plan.dtype), nn.Tanh()))
        setattr(random.choice(holders), random.choice(("norm1", "norm2")), norm)


def _order(model: nn.Module, random: Random, plan: Plan) -> None:
    found = _attentions(model)
    if found:
        attention = getattr(*random.choice(found))
        attention.batch_first = not attention.batch_first


def _same_layer(model: nn.Module, random: Random, plan: Plan) -> None:
    lists = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) > 1]
    if lists:
        random.choice(lists)[1] = lists[0][0] if len(lists) == 1 else lists[-1][0]


CHANGES: dict[str, Callable[[nn.Module, Random, Plan], None]] = {
    "own class": _own_class,
    "own attention": _own_attention,
    "subclass of attention": _attention_subclass,
    "hook": _hook,
    "forward replaced": _forward_replaced,
    "weights": _weights,
    "frozen": _frozen,
    "adapter": _adapter,
    "norm": _norm,
    "order": _order,
    "same layer": _same_layer,
}
WATCHES = ("nobody", "nobody", "nobody", "one module", "all modules", "inputs of all")


@contextmanager
def watched(model: nn.Module, plan: Plan, calls: Calls) -> Iterator[None]:
    """Write down calls by what the plan says, and by the parts of a model that do so themselves."""
    with ExitStack() as stack:
        for cls in (Recording, Attention):
            stack.enter_context(collected(cls, calls))
        if plan.watch == "one module":
            silent = nn.ModuleList, NonDynamicallyQuantizableLinear
            names = [name for name, part in model.named_modules() if name and not isinstance(part, silent)]
            stack.enter_context(hooked(model, [Random(plan.seed).choice(names)] if names else [], calls))
        if plan.watch == "all modules":
            stack.enter_context(hooked_everywhere(model, calls))
        if plan.watch == "inputs of all":
            for handle in _global_hooks():
                stack.callback(handle.remove)
        yield


def _global_hooks() -> list[Any]:
    """Hooks on all modules that change what linear maps are given, and what dropouts return."""

    def before(module: nn.Module, args: Any) -> Any:
        return (args[0] + 0.25, *args[1:]) if isinstance(module, nn.Linear) and args else None

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        return _scaled(out, 0.75) if isinstance(module, nn.Dropout) else None

    return [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
