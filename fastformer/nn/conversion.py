"""`convert` and `revert`: change the classes of the torch.nn modules of a model, in place.

The drop-in classes add no state, so only the class of a module changes. Parameters, hooks, tied weights, references of
optimisers and the names in the state dict stay.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parametrize

from fastformer.nn.modules import DROP_INS
from fastformer.nn.sdpa_calls import calls_sdpa, subclass_calling_sdpa
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder

ZEROED = (
    "with a key padding mask, padded rows of its output are now 0, in training too, where torch.nn computes values; "
    "this changes, for example, a mean over all positions; padding_free=False keeps torch.nn's values"
)
_MARK = "_converted_from"  # attribute of a converted module: its original class


@dataclass(frozen=True)
class Entry:
    """One module in a report: its name in the model, its class before, and its new class or a reason."""

    name: str
    before: str
    outcome: str


@dataclass
class Conversion:
    """The report of `convert` or `revert`; prints one line a module.

    Attributes:
        changed: modules whose class has changed.
        left: modules of torch.nn's classes, or of subclasses, whose class has not changed, with the reason.
        zeroed: changed stacks whose outputs are now 0 at padding, where torch.nn computes values.
        padded: fastformer's stacks that still compute padding, with the reason.
    """

    changed: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    zeroed: list[Entry] = field(default_factory=list)
    padded: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{len(self.changed)} modules changed, {len(self.left)} left as they were"
        others = {"left": self.left, "zeros at padding": self.zeroed, "works on padding": self.padded}
        return "\n".join(
            [head, *lines_of("changed", self.changed, "->"), *(x for o in others.items() for x in lines_of(*o))]
        )


def lines_of(title: str, entries: list[Entry], sign: str = ":") -> list[str]:
    """Return a line of a report for each entry."""
    return [f"  {title}  {x.name or '(the model)'}  {x.before} {sign} {x.outcome}" for x in entries]


def convert(model: nn.Module, *, padding_free: bool = True, sdpa: bool = False) -> Conversion:
    """Change the torch.nn modules of a model to fastformer's drop-in classes, in place; return the report.

    Converts LayerNorm, RMSNorm, MultiheadAttention, TransformerEncoderLayer, TransformerDecoderLayer,
    TransformerEncoder, TransformerDecoder and Transformer. Leaves modules that may compute something else: subclasses,
    parametrised, quantised and scripted modules, and instances whose `forward` was replaced. The report gives the
    reason for each. Hooks and tied weights stay as they are.

    Args:
        model: any module; it is changed too if it is of such a class.
        padding_free: whether stacks run batches with key padding masks without their padding. Outputs of padding are
            then 0, in training too; the report lists these stacks (`zeroed`). False keeps torch.nn's values there.
        sdpa: whether hand-written modules call `fastformer.sdpa` in place of `F.scaled_dot_product_attention`. These
            are the modules whose class names the latter in a method.
    """
    report = Conversion()
    for name, module in model.named_modules():
        kind = type(module)
        new = DROP_INS.get(kind)
        outcome = "" if new is None else name_of(new)
        reason = _reason(module)
        if reason is None and new is None and sdpa and _MARK not in module.__dict__ and calls_sdpa(kind):
            new, outcome, reason = subclass_calling_sdpa(kind), "calls fastformer.sdpa", _reason_of_instance(module)
        if reason is not None:
            report.left.append(Entry(name, name_of(kind), reason))
        elif new is not None:
            module.__class__ = new
            module.__dict__[_MARK] = kind
            report.changed.append(Entry(name, name_of(kind), outcome))
    for name, stack in model.named_modules():
        if not isinstance(stack, TransformerEncoder | TransformerDecoder):
            continue
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
    """Change every module that `convert` changed back to its original class, in place; return the report.

    Leaves modules that a parametrisation or FSDP2 has given another class since, or whose `forward` was replaced in
    the instance: undo that first. Also leaves attention with options that torch.nn lacks, such as a window.
    """
    report = Conversion()
    for name, module in model.named_modules():
        before = module.__dict__.get(_MARK)
        if before is None:
            continue
        if type(module) not in (*DROP_INS.values(), subclass_calling_sdpa(before)):
            reason = "its class has changed since it was converted"
        elif "forward" in module.__dict__:
            reason = "its forward was replaced in the instance"
        elif getattr(module, "has_extra_options", False):
            reason = "it has options that torch.nn's class lacks"
        else:
            del module.__dict__[_MARK]
            report.changed.append(Entry(name, name_of(type(module)), name_of(before)))
            module.__dict__.pop("padding_free", None)
            module.__class__ = before
            continue
        report.left.append(Entry(name, name_of(type(module)), reason))
    return report


def name_of(cls: type) -> str:
    """Return the name of a class in reports: `torch.nn.LayerNorm`; outside torch.nn, package and class name."""
    package = cls.__module__.split(".")[0]
    return f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.") else f"{package}.{cls.__name__}"


def _reason_of_instance(module: nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return "its forward was replaced in the instance"
    return "parametrised" if parametrize.is_parametrized(module) else None


def _reason(module: nn.Module) -> str | None:
    """Return why a module of torch.nn's classes, or of a subclass, must keep its class; None for other modules."""
    if isinstance(module, torch.jit.ScriptModule):
        original = getattr(module, "original_name", None)
        return "scripted" if original in {cls.__name__ for cls in DROP_INS} else None
    if isinstance(module, tuple(DROP_INS.values())) or not isinstance(module, tuple(DROP_INS)):
        return None
    reason = _reason_of_instance(module)
    if reason is not None or type(module) in DROP_INS:
        return reason
    if ".quantized" in type(module).__module__ or ".quantizable" in type(module).__module__:
        return "quantised"
    return "a subclass, which may do something else"
