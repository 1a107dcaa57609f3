"""Why a stack of a Hugging Face model's layers must see padded batches.

A layer that treats each token alone, but for attention, may see tokens in place of batches. That is told twice: by the
structure of this very stack (what its layers take, what they are made of), and by a list of the classes for which it
was tested, `tested.json`. A convolution is found by the first, a recurrence written out in a layer's own forward by the
second, which holds no class that gave other numbers.
"""

import inspect
import json
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from typing import Any

from torch import nn
from transformers import PreTrainedModel, activations
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from fastformer.integrations.transformers.arguments import parameters
from fastformer.integrations.transformers.layer_hooks import MASK, chunks
from fastformer.integrations.transformers.registration import calls_the_interface
from fastformer.nn.padding_free import TOKEN_WISE, mixes

_PARTS = (*TOKEN_WISE, nn.Embedding, Conv1D)  # Conv1D is GPT-2's linear map
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList)


def obstacle(
    owner: nn.Module,
    stack: nn.ModuleList,
    home: PreTrainedModel | None,
    also: frozenset[type[nn.Module]] = frozenset(),
) -> str | None:
    """Return why a stack cannot run packed, or None.

    Args:
        owner: whose forward calls the layers.
        stack: the layers.
        home: the model of transformers that holds them.
        also: classes of layers that the caller knows.
    """
    if home is None:
        return "no model of transformers holds it"
    if not calls_the_interface(home):
        return "computes its attention outside of transformers' attention interface"
    reason = structure(owner, stack)
    if reason is not None:
        return reason
    for layer in stack:
        if type(layer) not in also and identity(owner, layer) not in tested():
            return f"{type(owner).__name__} and {type(layer).__name__} are not among the classes that were tested"
    return None


def structure(owner: Any, stack: nn.ModuleList) -> str | None:
    """The same, as far as the stack itself shows it."""
    if getattr(owner, "layerdrop", 0):
        return f"layerdrop is {owner.layerdrop}: layers are left out at random"
    if "all_hidden_states" in inspect.unwrap(type(owner).forward).__code__.co_varnames:
        return f"{type(owner).__name__} collects hidden states between the layers"
    for index, layer in enumerate(stack):
        if not is_layer(layer):
            return f"layer {index} is a {type(layer).__name__}"
        if MASK not in parameters(layer):
            return "its layers take no attention_mask"
        for name, part in _parts(layer):
            if getattr(part, "expert_capacity", None) is not None:
                return f"layer {index}, {name}: experts drop what exceeds their capacity, padding included"
            if (mixed := _mixes(part, layer)) is not None:
                return f"layer {index}, {name}{mixed}"
            if getattr(part, "layer_type", None) == "linear_attention":
                return f"layer {index}, {name} is a {type(part).__name__}, a recurrence"
        if chunks(layer):
            return f"chunk_size_feed_forward is {chunks(layer)}"
    return None


def is_layer(module: nn.Module) -> bool:
    """Whether a module is what a stack is made of; most are made to be checkpointed, and few others take a mask."""
    theirs = _class(module).__module__.startswith("transformers.models.")
    return isinstance(module, GradientCheckpointingLayer) or (theirs and MASK in parameters(module))


def identity(owner: nn.Module, layer: nn.Module) -> str:
    """A stack as the list of tested ones has it."""
    its, kind = _class(owner), _class(layer)
    return f"{its.__module__.removeprefix('transformers.models.')}.{its.__name__}/{kind.__name__}"


def _class(module: nn.Module) -> type[nn.Module]:
    """A module's class, or that of which fully_shard made another, which adds hooks alone."""
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.distributed."))


@lru_cache(maxsize=1)
def survey() -> dict[str, Any]:
    """What was found for each type of model: see `tests/integrations/survey.py`, which writes it."""
    text = resources.files("fastformer.integrations.transformers").joinpath("tested.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@lru_cache(maxsize=1)
def tested() -> frozenset[str]:
    """The stacks that gave eager's numbers, packed."""
    return frozenset(stack for its in survey()["types"].values() for stack in its.get("packed", ()))


def _parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All that a layer is made of, but for what is in parts of other libraries."""
    theirs = (type(layer).__module__, "transformers.models.")

    def within(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for child, part in module.named_children():
            if isinstance(part, _CONTAINERS) or type(part).__module__.startswith(theirs):
                yield from within(part, f"{path}{child}.")
            yield f"{path}{child}", part

    return ((name, part) for name, part in within(layer, "") if not isinstance(part, _CONTAINERS))


def _mixes(part: nn.Module, layer: nn.Module) -> str | None:
    """Why a part may not see tokens in place of batches; those of transformers' own were tested with their layer."""
    theirs = (type(layer).__module__, "transformers.models.", activations.__name__)
    return None if type(part).__module__.startswith(theirs) else mixes(part, _PARTS)
