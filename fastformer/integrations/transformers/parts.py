"""What a layer of a Hugging Face model is made of, and who else would see tokens in place of batches there."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import activations
from transformers.pytorch_utils import Conv1D

from fastformer.integrations.transformers.own_code import is_as_written, is_of_libraries, replaced
from fastformer.nn.hooks import HOOKS, has_global_hooks
from fastformer.nn.padding_free import TOKEN_WISE, mixes

_PARTS = (*TOKEN_WISE, nn.Embedding, Conv1D)  # Conv1D is GPT-2's linear map
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList)
# Who may register hooks within a layer: they look at no batch.
_LOOK_AT_NO_BATCH = ("transformers.", "torch.distributed.", "fastformer.", "accelerate.", "deepspeed.")
# Whose forwards treat each token alone, and modules around layers only do something around the call.
_OF_TOKENS = (*_LOOK_AT_NO_BATCH, "torch.", "liger_kernel.")


def class_of(module: nn.Module) -> type[nn.Module]:
    """A module's class, or that of which fully_shard made another, which adds hooks alone."""
    kind: Any = type(module)
    found: type[nn.Module] = _class_of(kind)
    return found


@lru_cache(maxsize=1000)
def _class_of(kind: Any) -> Any:
    return next(cls for cls in kind.__mro__ if not cls.__module__.startswith("torch.distributed."))


@lru_cache(maxsize=1000)
def _place(kind: Any, layer: Any) -> tuple[bool, bool]:
    """Of a class, in layers of another: whether it is looked into, and whether it was tested with the layer."""
    its, theirs = _class_of(kind).__module__, (_class_of(layer).__module__, "transformers.models.")
    into = issubclass(kind, _CONTAINERS) or its.startswith(theirs)
    return into, its.startswith((*theirs, activations.__name__))


def parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All that a layer is made of, but for what is in parts of other libraries."""
    its: Any = type(layer)
    around: list[tuple[str, nn.Module]] = [("", layer)]
    seen = {layer}
    for path, module in around:
        for name, part in module._modules.items():
            if part is None or part in seen:
                continue
            seen.add(part)
            kind: Any = type(part)
            if _place(kind, its)[0]:
                around.append((f"{path}{name}.", part))
            if not isinstance(part, _CONTAINERS):
                yield f"{path}{name}", part


def mixes_tokens(part: nn.Module, layer: nn.Module) -> str | None:
    """Why a part may not see tokens in place of batches; those of transformers' own were tested with their layer."""
    kind: Any = type(part)
    its: Any = type(layer)
    return None if _place(kind, its)[1] else mixes(part, _PARTS)


def chunks(layer: nn.Module) -> int:
    """In pieces of how many positions a layer, or a part of it, has its feed-forward; 0 if at once."""
    sizes: list[int] = [part.__dict__.get("chunk_size_feed_forward", 0) for part in layer.modules()]
    return max(sizes)


def sees_batches(layer: nn.Module) -> bool:
    """Whether a layer, or somebody within it, is not to see tokens in place of batches.

    Such are hooks and methods of one's own, parts that were put there since, and feed-forwards in pieces.
    """
    if has_global_hooks():
        return True
    kinds, within = set(), list(layer.modules())
    for part in within:
        kinds.add(type(part))
        state = part.__dict__
        for name in HOOKS:
            if state[name] and not all(map(is_known_hook, state[name].values())):
                return True
        its = replaced(part)
        if its and not (all(is_of_libraries(x, within) for x in its) and _is_accelerates(state.get("_hf_hook"))):
            return True
        if state.get("chunk_size_feed_forward"):
            return True
    if not is_as_written(kinds):
        return True
    return any(mixes_tokens(part, layer) is not None for _, part in parts(layer))


def _is_accelerates(hook: Any) -> bool:
    """Whether what accelerate does around a forward is its own: it moves parameters."""
    return all(map(_is_accelerates, getattr(hook, "hooks", ()))) and (hook is None or is_known_hook(type(hook)))


def is_known_hook(hook: Any) -> bool:
    """Whether a hook is of those who look at no batch."""
    return (getattr(hook, "__module__", None) or "").startswith(_LOOK_AT_NO_BATCH)


def looks_at_no_batch(kind: type[nn.Module]) -> bool:
    """Whether modules of a class, put around layers, only do something around the call."""
    return kind.__module__.startswith(_OF_TOKENS)
