"""What a layer of a Hugging Face model is made of, and who else would see tokens in place of batches there."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import activations
from transformers.pytorch_utils import Conv1D

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


@cache
def _class_of(kind: Any) -> Any:
    return next(cls for cls in kind.__mro__ if not cls.__module__.startswith("torch.distributed."))


def parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All that a layer is made of, but for what is in parts of other libraries."""
    theirs = (class_of(layer).__module__, "transformers.models.")

    def within(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for child, part in module.named_children():
            if isinstance(part, _CONTAINERS) or class_of(part).__module__.startswith(theirs):
                yield from within(part, f"{path}{child}.")
            yield f"{path}{child}", part

    return ((name, part) for name, part in within(layer, "") if not isinstance(part, _CONTAINERS))


def mixes_tokens(part: nn.Module, layer: nn.Module) -> str | None:
    """Why a part may not see tokens in place of batches; those of transformers' own were tested with their layer."""
    theirs = (class_of(layer).__module__, "transformers.models.", activations.__name__)
    return None if class_of(part).__module__.startswith(theirs) else mixes(part, _PARTS)


def chunks(layer: nn.Module) -> int:
    """In pieces of how many positions a layer, or a part of it, has its feed-forward; 0 if at once."""
    sizes: list[int] = [part.__dict__.get("chunk_size_feed_forward", 0) for part in layer.modules()]
    return max(sizes)


def sees_batches(layer: nn.Module) -> bool:
    """Whether somebody has hooks or a forward of his own in a layer, or has put another part there since."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    for part in layer.modules():
        state = part.__dict__
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            for hook in state[name].values():
                if not is_known_hook(hook):
                    return True
        if "forward" in state and not _is_of_tokens(state["forward"]):
            return True
        kind: Any = type(part)
        if kind.__module__.startswith("transformers.") and not _methods_are_of_tokens(kind.forward):
            return True
    return any(mixes_tokens(part, layer) is not None for _, part in parts(layer))


def is_known_hook(hook: Any) -> bool:
    """Whether a hook is of those who look at no batch."""
    return (getattr(hook, "__module__", None) or "").startswith(_LOOK_AT_NO_BATCH)


def looks_at_no_batch(kind: type[nn.Module]) -> bool:
    """Whether modules of a class, put around layers, only do something around the call."""
    return kind.__module__.startswith(_OF_TOKENS)


def _is_of_tokens(forward: Any) -> bool:
    """Whether a forward, and all that it was wrapped in, is of those that treat each token alone."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        inner = getattr(forward, "func", None) or getattr(forward, "__wrapped__", None)
        names = getattr(forward, "__globals__", None)
        where = names["__name__"] if names is not None else type(forward).__module__
        if not where.startswith((*_OF_TOKENS, "functools")):
            return False
        forward = inner
    return True


_methods_are_of_tokens = cache(_is_of_tokens)  # those of classes, which live on
