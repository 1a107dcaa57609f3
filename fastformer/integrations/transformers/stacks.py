"""All layers of a Hugging Face model without padding, from outside: `padding_free`, and `padded`, which undoes it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fastformer.integrations.transformers import biases
from fastformer.integrations.transformers.entry import uninstall
from fastformer.integrations.transformers.layer_hooks import begin, check_left, enter, leave, packs
from fastformer.integrations.transformers.obstacles import is_layer, obstacle
from fastformer.integrations.transformers.parts import is_known_hook
from fastformer.integrations.transformers.registration import NAME
from fastformer.nn.conversion import Entry, name_of

_AFTER = leave, biases.leave, check_left
_BEFORE = "_attention_before_padding_free"  # in a model: the name of its attention


@dataclass
class PaddingFree:
    """What `padding_free` or `padded` did; printed, a line a stack of layers.

    Attributes:
        packed: stacks whose layers run without padding now; or did, before `padded`.
        padded: stacks that work on padding, with the reason.
    """

    packed: list[Entry] = field(default_factory=list)
    padded: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.packed)} stacks packed, {len(self.padded)} padded"]
        for title, entries in (("packed", self.packed), ("padded", self.padded)):
            lines += [f"  {title}  {x.name}  {x.before} : {x.outcome}" for x in entries]
        return "\n".join(lines)


def padding_free(model: nn.Module, *, also: Collection[type[nn.Module]] = ()) -> PaddingFree:
    """Have the layers of a Hugging Face model run on the real tokens of a batch alone, in place.

    Each stack of layers that can takes its tokens out of the padding before its first layer, and puts them back, zeros
    in place of padding, after its last; the model's attention becomes `attn_implementation="fastformer"`. Parameters,
    the state dict and outputs at real positions stay what they are. What reads positions of padding sees other values:
    the first column under padding on the left, or a loss whose labels there are not -100.

    A batch runs padded where nothing says what is padding, or hidden states, attention weights or router logits are
    asked for; where a cache holds something already or is none of DynamicCache's; under torch.compile and in traces;
    where hooks, forwards or parts of yours within a layer would see tokens for batches; and where padding lies between
    tokens, in layers that count positions (windows, T5's bias). Training, checkpointed activations, generation (the
    prompt), pickle and copies work.

    Args:
        model: a transformers model, or a module that holds some.
        also: classes of layers of your own that treat each token alone but for attention through transformers'
            interface. Those of transformers are known by what was tested.

    Returns:
        The report, with the reason for each stack that stays as it was.

    Raises:
        TypeError: also holds what is no class of modules.
    """
    for cls in also:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"also must hold classes of modules, not {cls!r}")
    padded(model)
    report = PaddingFree()
    for name, owner, stack, home in list(_stacks(model)):
        its = name_of(type(stack[0]))
        reason = obstacle(owner, stack, home, frozenset(also))
        if reason is not None or home is None:
            report.padded.append(Entry(name, its, reason or ""))
            continue
        if home.config._attn_implementation != NAME:
            home.__dict__[_BEFORE] = home.config._attn_implementation
            home.set_attn_implementation(NAME)
        for layer in stack:
            layer.register_forward_pre_hook(enter, with_kwargs=True)
            hooks: Any = layer._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if not is_known_hook(hook)]:
                hooks.move_to_end(key)  # to see batches; what gathers parameters stays before
            for part in layer.modules():
                if biases.makes_biases(part):
                    part.register_forward_pre_hook(biases.enter, with_kwargs=True)
                    part.register_forward_hook(biases.leave, always_call=True)
        for layer in _ends(stack):
            layer.register_forward_hook(leave, with_kwargs=True)
        owner.register_forward_pre_hook(begin)
        owner.register_forward_hook(check_left, with_kwargs=True)
        report.packed.append(Entry(name, its, f"{len(stack)} layers"))
    return report


def padded(model: nn.Module) -> PaddingFree:
    """Undo `padding_free`, in place; return the stacks that were packed."""
    report = PaddingFree()
    for name, _, stack, _ in _stacks(model):
        if any(map(packs, stack)):
            report.packed.append(Entry(name, name_of(type(stack[0])), f"{len(stack)} layers"))
    for module in model.modules():  # layers may have got others around them
        for kind, hooks in (("_forward_pre_hooks", (begin, enter, biases.enter)), ("_forward_hooks", _AFTER)):
            for hook in hooks:
                _without(module, kind, hook)
        biases.clear(module)
        before = module.__dict__.pop(_BEFORE, None)
        if before is not None and isinstance(module, PreTrainedModel):
            module.set_attn_implementation(before)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation != NAME:
            uninstall(module)
    return report


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.ModuleList, PreTrainedModel | None]]:
    """Every stack of layers: its name, whose it is, its layers, and the model of transformers that holds them."""
    homes: dict[str, PreTrainedModel] = {}
    seen: list[str] = []
    for name, owner in model.named_modules():
        if isinstance(owner, PreTrainedModel):
            homes[name] = owner
        within = [path for path in homes if path == "" or name == path or name.startswith(f"{path}.")]
        if any(name.startswith(f"{path}.") for path in seen):
            continue  # of layers, what they are made of
        for child, stack in owner.named_children():
            if isinstance(stack, nn.ModuleList) and len(stack) and is_layer(stack[0]):
                seen.append(f"{name}.{child}".lstrip("."))
                yield seen[-1], owner, stack, homes[max(within, key=len)] if within else None


def _ends(stack: nn.ModuleList) -> list[nn.Module]:
    """The layers after which tokens go back: the last, and that before Gemma's first with others' keys and values.

    From there on a model may ask for the last queries alone.
    """
    shares = (any(getattr(part, "is_kv_shared_layer", False) for part in layer.modules()) for layer in stack)
    first = next((index for index, its in enumerate(shares) if its), 0)
    return [stack[-1]] if first == 0 else [stack[first - 1], stack[-1]]


def _without(module: nn.Module, kind: str, hook: Any) -> None:
    """Remove a hook by what it is; handles of hooks do not survive pickling."""
    hooks = module.__dict__[kind]
    found = [key for key, each in hooks.items() if each is hook]
    for key in found:
        for name in (kind, f"{kind}_with_kwargs", f"{kind}_always_called"):
            module.__dict__.get(name, {}).pop(key, None)
