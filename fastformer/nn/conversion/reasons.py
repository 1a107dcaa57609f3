"""What a module that is none of torch's looks like: a norm, an attention, a feed-forward network, by name or shape.

Nobody can say what a forward of somebody's own computes, so these are never changed, and the report says what to do. A
module that only holds others which are told of, or were changed, is not told of itself.
"""

import re
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from fastformer.host.autograd_function import NAMESPACE
from fastformer.nn.hooks import torchs_own
from fastformer.nn.layers import BLOCKS
from fastformer.nn.modules import OURS, FeedForward, SequentialFeedForward

Kind = Literal["norm", "attention", "feed-forward"]

_NAMES: dict[Kind, re.Pattern[str]] = {
    "norm": re.compile("LayerNorm|RMSNorm"),
    "attention": re.compile("Attention|Attn|MHA"),
    "feed-forward": re.compile("Feed_?[Ff]orward|FFN|Ffn|MLP|Mlp"),
}
_PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
_AFFIXES = re.compile(r"proj|linear|lin|layer|fc|to|c_|w|_|\d")  # q_proj, to_q, q_lin, Wq: all q
_QUERIES_KEYS_VALUES = ({"q", "k", "v"}, {"query", "key", "value"}, {"qkv"}, {"querykeyvalue"}, {"attn"}, {"inqkv"})
_MOST_LINEAR = 3  # of a gated feed-forward network
_WAYS = {
    "norm": "not torch.nn's class, and may do something else",
    "attention": "an attention with a forward of its own; fastformer.MultiheadAttention or fastformer.functional."
    "attention in its place would run as ours",
    "feed-forward": "a feed-forward network with a forward of its own; fastformer.FeedForward, nn.Sequential(Linear, "
    "ReLU or GELU, [Dropout,] Linear) or fastformer.functional.feed_forward in its place would run as ours",
}


def reason(module: nn.Module) -> str | None:
    """Why a module that is of torch's classes, or of a subclass, must stay as it is; None if it may change."""
    if type(module) in OURS or is_feed_forward(module):
        if "forward" in module.__dict__:
            return "its forward was replaced in the instance"
        return "a method of its class was replaced" if _is_changed(type(module)) else None
    if isinstance(module, torch.jit.ScriptModule):
        original = getattr(module, "original_name", None)
        return "scripted" if original in {torchs.__name__ for torchs in OURS} else None
    if isinstance(module, tuple(OURS.values())) or not isinstance(module, tuple(OURS)):
        return None
    if parametrize.is_parametrized(module):
        return "parametrised"
    if ".quantized" in type(module).__module__ or ".quantizable" in type(module).__module__:
        return "quantised"
    return "a subclass, which may do something else"


def _is_changed(kind: type[nn.Module]) -> bool:
    """Whether somebody has put a method of his own into a class of torch's, for all its instances."""
    return any(torchs_own(kind, name) is None for name in ("forward", *BLOCKS) if hasattr(kind, name))


def is_feed_forward(module: nn.Module) -> bool:
    """Whether it is an nn.Sequential that is a feed-forward network."""
    return type(module) is nn.Sequential and SequentialFeedForward.recognises(module)


def hugging_face(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The models of transformers in a model, outermost ones, whose layers are not packed; needs no transformers."""
    names: list[str] = []
    for name, module in model.named_modules():
        theirs = any(f"{cls.__module__}.{cls.__name__}" == _PRETRAINED for cls in type(module).__mro__)
        if not theirs or any(other == "" or name.startswith(f"{other}.") for other in names):
            continue
        names.append(name)
        hooks = [hook for part in module.modules() for hook in part._forward_pre_hooks.values()]
        if not any((getattr(hook, "__module__", None) or "").startswith("fastformer.integrations.") for hook in hooks):
            yield name, module


def tell_of_others(model: nn.Module) -> dict[str, str]:
    """The modules that resemble what we have, and are no class of torch's or ours: their names, and what to do."""
    found: dict[str, set[Kind]] = {}
    told: dict[str, str] = {}
    for name, module in reversed(list(model.named_modules())):  # what a module holds, before it
        kinds = _known(module)
        for child, _ in module.named_children():
            kinds |= found.get(f"{name}.{child}".lstrip("."), set())
        own = [] if _known(module) else [kind for kind in _kinds(module) if kind not in kinds]
        if own:
            told[name] = _WAYS[own[0]]
        found[name] = kinds | set(own)
    return told


def _known(module: nn.Module) -> set[Kind]:
    """What a module is that is a class of torch's or of ours, or a subclass."""
    if isinstance(module, FeedForward | SequentialFeedForward):
        return {"feed-forward"}
    if isinstance(module, nn.MultiheadAttention):
        return {"attention"}
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return {"norm"}
    return {"norm", "attention", "feed-forward"} if isinstance(module, tuple(OURS)) else set()


def _kinds(module: nn.Module) -> list[Kind]:
    """What the name of its class says, or else its linear maps."""
    if type(module).__module__.startswith(f"{NAMESPACE}."):
        return []
    by_name: list[Kind] = [kind for kind, pattern in _NAMES.items() if pattern.search(type(module).__name__)]
    return by_name or [*(["attention"] if _projects(module) else []), *(["feed-forward"] if _expands(module) else [])]  # type: ignore[list-item]


def _projects(module: nn.Module) -> bool:
    """Whether there are linear maps to queries, keys and values, by their names."""
    roles = {_AFFIXES.sub("", name.lower()) for name, part in module.named_children() if _has_weight(part)}
    return any(names <= roles for names in _QUERIES_KEYS_VALUES)


def _has_weight(part: nn.Module) -> bool:
    """Whether there is a weight, without a look at it: with each one, a spectral norm takes a step in training."""
    stored = {*dict(part.named_parameters(recurse=False)), *vars(part)}
    return "weight" in stored or hasattr(type(part), "weight")


def _expands(module: nn.Module) -> bool:
    """Whether linear maps lead from D to a larger F, or 2F, and back to D; the activation may be a function."""
    linear = [part for part in module.children() if isinstance(part, nn.Linear)]
    if not 1 < len(linear) <= _MOST_LINEAR:
        return False
    *up, down = linear
    widths = {part.out_features for part in up}
    same = len(widths) == 1 and all(part.in_features == down.out_features for part in up)
    return same and down.in_features > down.out_features and widths <= {down.in_features, 2 * down.in_features}
