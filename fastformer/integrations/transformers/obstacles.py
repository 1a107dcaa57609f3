"""Why a stack of a Hugging Face model's layers must see padded batches.

A layer that treats each token alone, but for attention, may see tokens in place of batches. That is told twice: by the
structure of this very stack (what its layers take, what they are made of), and by a list of the classes for which it
was tested, `tested.json`. A convolution is found by the first, a recurrence written out in a layer's own forward by the
second, which holds no class that gave other numbers.
"""

import inspect
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fastformer.integrations.transformers.arguments import parameters
from fastformer.integrations.transformers.entry import survey
from fastformer.integrations.transformers.layer_hooks import MASK
from fastformer.integrations.transformers.parts import chunks, class_of, mixes_tokens, parts
from fastformer.integrations.transformers.registration import calls_the_interface


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
        for name, part in parts(layer):
            if getattr(part, "expert_capacity", None) is not None:
                return f"layer {index}, {name}: experts drop what exceeds their capacity, padding included"
            if (mixed := mixes_tokens(part, layer)) is not None:
                return f"layer {index}, {name}{mixed}"
            if getattr(part, "layer_type", None) == "linear_attention":
                return f"layer {index}, {name} is a {type(part).__name__}, a recurrence"
        if chunks(layer):
            return f"chunk_size_feed_forward is {chunks(layer)}"
    return None


def is_layer(module: nn.Module) -> bool:
    """Whether a module is what a stack is made of; most are made to be checkpointed, and few others take a mask."""
    theirs = class_of(module).__module__.startswith("transformers.models.")
    return isinstance(module, GradientCheckpointingLayer) or (theirs and MASK in parameters(module))


def identity(owner: nn.Module, layer: nn.Module) -> str:
    """A stack as the list of tested ones has it."""
    its, kind = class_of(owner), class_of(layer)
    return f"{its.__module__.removeprefix('transformers.models.')}.{its.__name__}/{kind.__name__}"


@lru_cache(maxsize=1)
def tested() -> frozenset[str]:
    """The stacks that gave eager's numbers, packed."""
    return frozenset(stack for its in survey()["types"].values() for stack in its.get("packed", ()))
