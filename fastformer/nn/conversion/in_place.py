"""The change of classes itself, both ways."""

from collections.abc import Iterator, Mapping

from torch import nn

from fastformer.nn.conversion.reasons import hugging_face, is_feed_forward, reason, tell_of_others
from fastformer.nn.conversion.report import FROM_OUTSIDE, ZEROED, Conversion, Entry, name_of
from fastformer.nn.conversion.trial import difference
from fastformer.nn.modules import OURS, SequentialFeedForward
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder
from fastformer.nn.transformer import Transformer  # noqa: F401  all classes of OURS are defined from here on

_MARK = "_converted_from"  # in a converted module: the class that it had

Also = Mapping[type[nn.Module], type[nn.Module]]


def convert(model: nn.Module, *, padding_free: bool = True, also: Also | None = None) -> Conversion:
    """Let every torch.nn module in a model that we have a version of run as ours, in place.

    Changed are LayerNorm, RMSNorm, MultiheadAttention, TransformerEncoderLayer, TransformerDecoderLayer,
    TransformerEncoder, TransformerDecoder, Transformer, and nn.Sequential(Linear, ReLU or GELU, [Dropout], Linear,
    [Dropout]). Left alone, with the reason in the report, is what may do something else: subclasses, parametrised,
    quantised and scripted modules, instances whose `forward` was replaced, and what looks like an attention or a
    feed-forward network written by hand. Hooks and ties stay as they are.

    Args:
        model: any module; itself included.
        padding_free: whether stacks run batches with key padding masks without their padding. Their outputs are then
            0 at padding, in training too; the report says so of each (`zeroed`). False keeps what torch computes there.
        also: subclasses of torch's classes that compute just what these do, and ours for them, as in
            `{timm.layers.LayerNorm: fastformer.LayerNorm}`. Each module is tried first, on samples in its dtype and
            under the autocast that is on; one whose outputs or gradients differ is left, and the report says in what.

    Returns:
        The report. Nothing is left to do with it: the model has changed.

    Raises:
        TypeError, ValueError: also maps what is no class, to what is not ours, or no subclass of that of torch's.
    """
    also = {} if also is None else also
    _check(also)
    report = Conversion()
    left: dict[str, str] = {}
    for name, module in reversed(list(model.named_modules())):  # parts first: a layer is tried with the parts it keeps
        ours = SequentialFeedForward if is_feed_forward(module) else OURS.get(type(module))
        why = reason(module)
        if type(module) in also and type(module) not in OURS.values():
            ours = also[type(module)]
            why = difference(module, _torchs(ours), ours)
            why = None if why is None else f"not {name_of(ours)}, as also says: {why}"
        if ours is not None and why is None:
            before = type(module)
            module.__class__ = ours
            module.__dict__[_MARK] = before
            report.changed.append(Entry(name, name_of(before), name_of(ours)))
        elif why is not None:
            left[name] = why
    report.changed.reverse()
    left = tell_of_others(model) | left
    report.left = [Entry(n, name_of(type(module)), left[n]) for n, module in model.named_modules() if n in left]
    for name, stack in _stacks(model):
        converted = _MARK in stack.__dict__
        if converted and not padding_free:
            stack.padding_free = False
        if converted and stack.padding_free:
            report.zeroed.append(Entry(name, name_of(type(stack)), ZEROED))
        obstacle = stack.obstacle() if stack.padding_free else "padding_free is False"
        if obstacle is not None:
            report.padded.append(Entry(name, name_of(type(stack)), obstacle))
    report.padded += [Entry(name, name_of(type(its)), FROM_OUTSIDE) for name, its in hugging_face(model)]
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
        if type(module) is not _ours(before):
            report.left.append(Entry(name, name_of(type(module)), "its class has changed since it was converted"))
            continue
        if "forward" in module.__dict__:  # around ours, most likely
            report.left.append(Entry(name, name_of(type(module)), "its forward was replaced in the instance"))
            continue
        if getattr(module, "differs", False):
            report.left.append(Entry(name, name_of(type(module)), "it has been given options that torch's has not"))
            continue
        del module.__dict__[_MARK]
        report.changed.append(Entry(name, name_of(type(module)), name_of(before)))
        module.__dict__.pop("padding_free", None)
        module.__class__ = before
    return report


def _check(also: Also) -> None:
    for theirs, ours in also.items():
        for cls in (theirs, ours):
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise TypeError(f"also must map classes of modules to ours, not {cls!r}")
        if ours not in OURS.values():
            names = ", ".join(cls.__name__ for cls in OURS.values())
            raise ValueError(f"also maps {name_of(theirs)} to {name_of(ours)}, which is none of fastformer's {names}")
        if not issubclass(theirs, _torchs(ours)):
            raise ValueError(f"also maps {name_of(theirs)} to {name_of(ours)}: no subclass of {name_of(_torchs(ours))}")


def _torchs(ours: type[nn.Module]) -> type[nn.Module]:
    """The class of torch's that one of ours stands for."""
    return next(torchs for torchs, cls in OURS.items() if cls is ours)


def _ours(before: type[nn.Module]) -> type[nn.Module]:
    """What a class became."""
    return next((OURS[cls] for cls in before.__mro__ if cls in OURS), SequentialFeedForward)


def _stacks(model: nn.Module) -> Iterator[tuple[str, TransformerEncoder | TransformerDecoder]]:
    for name, module in model.named_modules():
        if isinstance(module, TransformerEncoder | TransformerDecoder):
            yield name, module
