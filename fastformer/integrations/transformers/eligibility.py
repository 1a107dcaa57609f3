"""Decide whether a Hugging Face model may see tokens in place of padded batches, and why not.

Two things decide: whether the survey found the model's class right (`tested.json`, which `tests/integrations/survey.py`
writes), and which hooks, forwards and modules are inside this very model.
"""

import json
from functools import lru_cache
from importlib import resources
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fastformer.nn.inspection import HOOKS, has_global_hooks, mixing_reason

_TOKEN_WISE = (nn.Embedding, Conv1D)  # beside the classes that `mixing_reason` knows; Conv1D is GPT-2's linear map
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
# Libraries whose hooks and forwards inside a model do not look at the batch.
_LIBRARIES = ("transformers.", "torch.distributed.", "fastformer.", "accelerate.", "deepspeed.", "peft.")


@lru_cache(maxsize=1)
def tested_classes() -> dict[str, str]:
    """Return the base models that run packed, by `identity`, with what a token's default position counts.

    "columns" of the padded batch, "tokens" of the sequence, or "words": ids other than the padding token's.
    """
    text = resources.files("fastformer.integrations.transformers").joinpath("tested.json").read_text(encoding="utf-8")
    return {
        name: rule for found in json.loads(text)["types"].values() for name, rule in found.get("packed", {}).items()
    }


def _class_of(cls: Any) -> Any:
    """Return the class of a module itself, of which FSDP2's `fully_shard` makes a subclass."""
    return next(c for c in cls.__mro__ if not c.__module__.startswith("torch.distributed."))


def identity(model: nn.Module) -> str:
    """Return the name of a model's class in `tested.json`."""
    cls = _class_of(type(model))
    return f"{cls.__module__.removeprefix('transformers.models.')}.{cls.__name__}"


def is_tested(model: nn.Module) -> bool:
    """Return whether the survey found a model's class right with packed batches."""
    return identity(model) in tested_classes()


def calls_the_interface(model: PreTrainedModel) -> bool:
    """Return whether a model's attention goes through transformers' interface, as transformers reads from its source.

    Classes outside of transformers count as those that do.
    """
    cls: Any = next((cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models.")), None)
    return cls is None or bool(cls._can_set_attn_implementation())


def has_mpnet_encoder(model: nn.Module) -> bool:
    """Return whether a model's own attention is MPNet's, which `padding_free` wraps."""
    return any(hasattr(part, "compute_position_bias") for part in model.modules())


def obstacle(model: PreTrainedModel, also: frozenset[type[nn.Module]]) -> str | None:
    """Return why a base model cannot run packed, or None; the caller vouches for the classes in `also`."""
    if not calls_the_interface(model) and not has_mpnet_encoder(model):
        return "computes its attention outside of transformers' attention interface"
    if type(model) not in also and not is_tested(model):
        return f"{type(model).__name__} is not among the classes that were tested"
    if getattr(model.config, "chunk_size_feed_forward", 0):
        return f"chunk_size_feed_forward is {model.config.chunk_size_feed_forward}"
    return reason_for_batches(model, check_hooks=False)


def reason_for_batches(model: nn.Module, check_hooks: bool = True) -> str | None:
    """Return which hook, forward or module inside a model may look at the whole batch, or None."""
    if check_hooks and has_global_hooks():
        return "hooks of all modules"
    for name, module in model.named_modules():
        if module is model:
            continue
        state = module.__dict__
        if check_hooks:
            if not all(_is_known(hook) for kind in HOOKS for hook in state[kind].values()):
                return f"{name} has hooks"
            own = state.get("forward")
            if own is not None and not (_is_known(getattr(own, "func", own)) or _is_known(state.get("_hf_hook"))):
                return f"{name} has a forward of its own"
        if getattr(module, "expert_capacity", None) is not None:
            return f"{name}: experts drop what exceeds their capacity, padding included"
        cls: Any = type(module)
        if not _was_tested_inside(cls) and (mixing := mixing_reason(module, _TOKEN_WISE)) is not None:
            return f"{name}{mixing}"
    return None


def _is_known(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_LIBRARIES)


@lru_cache(maxsize=10_000)
def _was_tested_inside(cls: Any) -> bool:
    """Return whether a class was in the model when that was tested, or only holds other modules."""
    cls = _class_of(cls)
    return issubclass(cls, _CONTAINERS) or cls.__module__.startswith(("transformers.", "liger_kernel."))
