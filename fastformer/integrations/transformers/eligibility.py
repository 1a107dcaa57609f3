"""Decide whether a Hugging Face model may see tokens in place of padded batches, and why not.

Two things decide: what the survey found for the model's class (`tested.json`, which `tests/integrations/survey.py`
writes), and what is inside this very model: hooks, forwards and modules that the class did not have when it was tested.
"""

import inspect
import json
import re
import sys
from functools import lru_cache
from importlib import resources
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fastformer.nn.hooks import HOOKS, has_global_hooks
from fastformer.nn.padding_free import mixes

_PARTS = (nn.Embedding, Conv1D)  # beside those that `mixes` knows; Conv1D is GPT-2's linear map
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_MIXING = {"conv", "linear_attention", "mamba", "recurrent"}  # kinds of layers
# Libraries whose hooks and forwards inside a model do not look at the batch.
_LIBRARIES = ("transformers.", "torch.distributed.", "fastformer.", "accelerate.", "deepspeed.", "peft.")


@lru_cache(maxsize=1)
def survey() -> dict[str, Any]:
    """Return what was found for each type of model."""
    text = resources.files("fastformer.integrations.transformers").joinpath("tested.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@lru_cache(maxsize=1)
def _packed() -> dict[str, str]:
    return {name: rule for its in survey()["types"].values() for name, rule in its.get("packed", {}).items()}


@lru_cache(maxsize=1)
def _kept_apart() -> frozenset[str]:
    return frozenset(name for its in survey()["types"].values() for name in its.get("kept_apart", ()))


def identity(model: nn.Module) -> str:
    """Return the name of a model's class as `tested.json` has it; `fully_shard` makes another class of it."""
    cls = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.distributed."))
    return f"{cls.__module__.removeprefix('transformers.models.')}.{cls.__name__}"


def position_rule(model: nn.Module) -> str:
    """Return what the default position of a token counts: "columns", "tokens" or "words" (ids but the padding's)."""
    return _packed().get(identity(model), "columns")


def flattens(model: nn.Module) -> bool:
    """Whether only attention mixes tokens in a model: as recorded, or if it is none of transformers'."""
    if _mixes_by_configuration(model) is not None:
        return False
    return not type(model).__module__.startswith("transformers.") or identity(model) in _kept_apart()


def _mixes_by_configuration(model: Any) -> str | None:
    """Return which layers of a model mix tokens, which a model of the same class need not have, or None."""
    kinds = _MIXING & set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if kinds:
        return f"has layers of kind {', '.join(sorted(kinds))}"
    parts = (name for name, part in model.named_modules() if getattr(part, "expert_capacity", None) is not None)
    return next((f"{name}: experts drop what exceeds their capacity, padding included" for name in parts), None)


def calls_the_interface(model: PreTrainedModel) -> bool:
    """Whether a model's attention goes through transformers' interface: by its source, as transformers itself tells.

    Classes outside of transformers count as those that do.
    """
    cls: Any = next((cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models.")), None)
    if cls is None:
        return True
    if re.search(r"\w+_CLASSES\[\w*config\._attn_implementation\]", inspect.getsource(sys.modules[cls.__module__])):
        return False  # a table of its own, by the names that it knows
    return bool(cls._can_set_attn_implementation())


def obstacle(model: PreTrainedModel, also: frozenset[type[nn.Module]]) -> str | None:
    """Return why a model cannot run packed, or None.

    Args:
        model: without models inside it.
        also: classes that the caller knows.
    """
    if not calls_the_interface(model):
        return "computes its attention outside of transformers' attention interface"
    if type(model) not in also and identity(model) not in _packed():
        return f"{type(model).__name__} is not among the classes that were tested"
    if getattr(model.config, "chunk_size_feed_forward", 0):
        return f"chunk_size_feed_forward is {model.config.chunk_size_feed_forward}"
    return _mixes_by_configuration(model) or reason_for_batches(model, check_hooks=False)


def reason_for_batches(model: nn.Module, check_hooks: bool = True) -> str | None:
    """Return what inside a model may look at the whole batch, or None."""
    if check_hooks and has_global_hooks():
        return "hooks of all modules"
    for name, module in model.named_modules():
        if module is model:
            continue
        state = module.__dict__
        if check_hooks:
            for kind in HOOKS:
                if state[kind] and not all(map(_is_known, state[kind].values())):
                    return f"{name} has hooks"
            own = state.get("forward")
            if own is not None and not (_is_known(getattr(own, "func", own)) or _is_known(state.get("_hf_hook"))):
                return f"{name} has a forward of its own"
        cls: Any = type(module)
        if not _is_token_wise(cls) and (mixing := mixes(module, _PARTS)) is not None:
            return f"{name}{mixing}"
    return None


def _is_known(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_LIBRARIES)


@lru_cache(maxsize=10_000)
def _is_token_wise(cls: Any) -> bool:
    """Whether a class was in the model when that was tested, or only holds modules that are asked by themselves."""
    own = next(c for c in cls.__mro__ if not c.__module__.startswith("torch.distributed."))
    return issubclass(own, _CONTAINERS) or own.__module__.startswith(("transformers.", "liger_kernel."))
