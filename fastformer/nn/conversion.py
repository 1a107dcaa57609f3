"""`convert` and `revert`: change the classes of the torch.nn modules of a model, in place.

The drop-in classes add no state, so that a module changes with its class alone: parameters, hooks, tied weights, the
optimiser's references and the names in the state dict stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parametrize

from fastformer.nn.modules import OURS
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder

ZEROED = (
    "where a key padding mask is given, the padded rows of its output are 0 now, in training too, where torch computes "
    "them; what reads them, such as a mean over all positions, changes: padding_free=False keeps torch's"
)
_MARK = "_converted_from"  # in a converted module: its class before


@dataclass(frozen=True)
class Entry:
    """One module of a model: its name there, its class before, and its class after or what is to be known of it."""

    name: str
    before: str
    outcome: str


@dataclass
class Conversion:
    """What `convert` or `revert` did; printed, one line a module.

    Attributes:
        changed: modules that have another class now.
        left: modules of torch's classes, or of subclasses, that keep their class, with the reason.
        zeroed: changed stacks whose outputs are 0 at padding now, where torch computes something.
        padded: stacks of fastformer that still work on padding, with the reason.
    """

    changed: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    zeroed: list[Entry] = field(default_factory=list)
    padded: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.changed)} modules changed, {len(self.left)} left as they were"]
        groups = (
            ("changed", self.changed, "->"),
            ("left", self.left, ":"),
            ("zeros at padding", self.zeroed, ":"),
            ("works on padding", self.padded, ":"),
        )
        for title, entries, sign in groups:
            lines += [f"  {title}  {x.name or '(the model)'}  {x.before} {sign} {x.outcome}" for x in entries]
        return "\n".join(lines)


def convert(model: nn.Module, *, padding_free: bool = True) -> Conversion:
    """Let every torch.nn module in a model that fastformer has a version of run as that, in place.

    Changed are LayerNorm, RMSNorm, MultiheadAttention, TransformerEncoderLayer, TransformerDecoderLayer,
    TransformerEncoder, TransformerDecoder and Transformer. Left alone, with the reason in the report, is what may do
    something else: subclasses, parametrised, quantised and scripted modules, and instances whose `forward` was
    replaced. Hooks and tied weights stay as they are.

    Args:
        model: any module; itself included.
        padding_free: whether stacks run batches with key padding masks without their padding. Their outputs are then
            0 at padding, in training too; the report says so of each (`zeroed`). False keeps what torch computes there.

    Returns:
        The report. Nothing is left to do with it: the model has changed.
    """
    report = Conversion()
    for name, module in model.named_modules():
        kind = type(module)
        new = OURS.get(kind)
        reason = _reason(module) if new is None or "forward" in module.__dict__ else None
        if reason is not None:
            report.left.append(Entry(name, name_of(kind), reason))
        elif new is not None:
            module.__class__ = new
            module.__dict__[_MARK] = kind
            report.changed.append(Entry(name, name_of(kind), name_of(new)))
    for name, stack in _stacks(model):
        converted = _MARK in stack.__dict__
        if converted and not padding_free:
            stack.padding_free = False
        if converted and stack.padding_free:
            report.zeroed.append(Entry(name, name_of(type(stack)), ZEROED))
        obstacle = stack.obstacle() if stack.padding_free else "padding_free is False"
        if obstacle is not None:
            report.padded.append(Entry(name, name_of(type(stack)), obstacle))
    return report


def revert(model: nn.Module) -> Conversion:
    """Give every module that `convert` changed its class back, in place; return what was changed.

    Left alone is what has got another class since, by a parametrisation or by FSDP2, or another forward in the
    instance, until that is undone; and attention that was given what torch's has not, such as a window.
    """
    report = Conversion()
    for name, module in model.named_modules():
        before = module.__dict__.get(_MARK)
        if before is None:
            continue
        if type(module) not in OURS.values():
            reason = "its class has changed since it was converted"
        elif "forward" in module.__dict__:
            reason = "its forward was replaced in the instance"
        elif getattr(module, "differs", False):
            reason = "it has been given options that torch's has not"
        else:
            del module.__dict__[_MARK]
            report.changed.append(Entry(name, name_of(type(module)), name_of(before)))
            module.__dict__.pop("padding_free", None)
            module.__class__ = before
            continue
        report.left.append(Entry(name, name_of(type(module)), reason))
    return report


def name_of(cls: type) -> str:
    """Return the name of a class in reports: `torch.nn.LayerNorm`, and others by their package."""
    package = cls.__module__.split(".")[0]
    return f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.") else f"{package}.{cls.__name__}"


def _reason(module: nn.Module) -> str | None:
    """Return why a module of torch's classes, or of a subclass, must keep its class; None of other modules."""
    if isinstance(module, torch.jit.ScriptModule):
        original = getattr(module, "original_name", None)
        return "scripted" if original in {cls.__name__ for cls in OURS} else None
    if isinstance(module, tuple(OURS.values())) or not isinstance(module, tuple(OURS)):
        return None
    if "forward" in module.__dict__:
        return "its forward was replaced in the instance"
    if parametrize.is_parametrized(module):
        return "parametrised"
    if ".quantized" in type(module).__module__ or ".quantizable" in type(module).__module__:
        return "quantised"
    return "a subclass, which may do something else"


def _stacks(model: nn.Module) -> Iterator[tuple[str, TransformerEncoder | TransformerDecoder]]:
    for name, module in model.named_modules():
        if isinstance(module, TransformerEncoder | TransformerDecoder):
            yield name, module
