"""An existing model on our modules, in place and back: `convert` and `revert`.

Our drop-in classes add no state, so a module becomes ours by a change of its class: parameters, hooks, ties, the
optimiser's references and the names in the state dict stay what they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parametrize

import fastformer.stacks as stacks  # all classes of OURS are defined from here on
from fastformer.modules import OURS, SequentialFeedForward

_MARK = "_converted_from"  # in a converted module: the class that it had


@dataclass(frozen=True)
class Entry:
    """One module of a model: its name there, its class before, and its class after or why it was left alone."""

    name: str
    before: str
    outcome: str


@dataclass
class Conversion:
    """What `convert` or `revert` did; printed, one line a module.

    Attributes:
        changed: modules that have another class now.
        left: modules that look like ours to change, or to change back, and were not, with the reason.
        padded: stacks that are ours and still work on padding, with the reason.
    """

    changed: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    padded: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.changed)} modules changed, {len(self.left)} left as they were"]
        groups = (("changed", self.changed, "->"), ("left", self.left, ":"), ("works on padding", self.padded, ":"))
        for title, entries, sign in groups:
            lines += [f"  {title}  {x.name or '(the model)'}  {x.before} {sign} {x.outcome}" for x in entries]
        return "\n".join(lines)


def convert(model: nn.Module, *, padding_free: bool = True) -> Conversion:
    """Let every torch.nn module in a model that we have a version of run as ours, in place.

    Changed are LayerNorm, RMSNorm, MultiheadAttention, TransformerEncoderLayer, TransformerDecoderLayer,
    TransformerEncoder, TransformerDecoder, Transformer, and nn.Sequential(Linear, ReLU or GELU, [Dropout], Linear,
    [Dropout]). Left alone, with the reason in the report, is what may do something else: subclasses, parametrised,
    quantised and scripted modules, and instances whose `forward` was replaced. Hooks and ties stay as they are.

    Args:
        model: any module; itself included.
        padding_free: whether stacks run batches with key padding masks without their padding. Their outputs are then
            0 at padding.

    Returns:
        The report. Nothing is left to do with it: the model has changed.
    """
    report = Conversion()
    for name, module in model.named_modules():
        ours = SequentialFeedForward if _is_feed_forward(module) else OURS.get(type(module))
        reason = _reason(module)
        if ours is not None and reason is None:
            before = type(module)
            module.__class__ = ours
            module.__dict__[_MARK] = before
            report.changed.append(Entry(name, _name(before), _name(ours)))
        elif reason is not None:
            report.left.append(Entry(name, _name(type(module)), reason))
    for name, stack in _stacks(model):
        if _MARK in stack.__dict__ and not padding_free:
            stack.padding_free = False
        obstacle = stack.obstacle() if stack.padding_free else "padding_free is False"
        if obstacle is not None:
            report.padded.append(Entry(name, _name(type(stack)), obstacle))
    return report


def revert(model: nn.Module) -> Conversion:
    """Give every module that `convert` changed its class back, in place; return what was changed.

    Left alone is what has got another class since, by a parametrisation or by FSDP2, until that is undone.
    """
    report = Conversion()
    for name, module in model.named_modules():
        before = module.__dict__.get(_MARK)
        if before is None:
            continue
        if type(module) is not OURS.get(before, SequentialFeedForward):
            report.left.append(Entry(name, _name(type(module)), "its class has changed since it was converted"))
            continue
        del module.__dict__[_MARK]
        report.changed.append(Entry(name, _name(type(module)), _name(before)))
        module.__dict__.pop("padding_free", None)
        module.__class__ = before
    return report


def _stacks(model: nn.Module) -> Iterator[tuple[str, stacks.TransformerEncoder | stacks.TransformerDecoder]]:
    for name, module in model.named_modules():
        if isinstance(module, stacks.TransformerEncoder | stacks.TransformerDecoder):
            yield name, module


def _is_feed_forward(module: nn.Module) -> bool:
    return type(module) is nn.Sequential and SequentialFeedForward.recognises(module)


def _reason(module: nn.Module) -> str | None:
    """Return why a module that resembles one of torch's must stay as it is; None if it may change or resembles none."""
    if type(module) in OURS or _is_feed_forward(module):
        return "its forward was replaced in the instance" if "forward" in module.__dict__ else None
    if isinstance(module, tuple(OURS.values())):
        return None
    if isinstance(module, torch.jit.ScriptModule):
        original = getattr(module, "original_name", None)
        return "scripted" if original in {torchs.__name__ for torchs in OURS} else None
    kind = type(module)
    if not any(name in kind.__name__ for name in ("LayerNorm", "RMSNorm")) and not isinstance(module, tuple(OURS)):
        return None
    if parametrize.is_parametrized(module):
        return "parametrised"
    if ".quantized" in kind.__module__ or ".quantizable" in kind.__module__:
        return "quantised"
    if isinstance(module, tuple(OURS)):
        return "a subclass, which may do something else"
    return "not torch.nn's class, and may do something else"


def _name(cls: type) -> str:
    package = cls.__module__.split(".")[0]
    return f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.") else f"{package}.{cls.__name__}"
