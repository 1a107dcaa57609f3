"""Hugging Face models without padding, in place: `padding_free`, and `padded`, which undoes it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from fastformer.integrations.transformers import entry
from fastformer.integrations.transformers.attention import mpnet_attention, mpnet_bias, t5_attention
from fastformer.nn.conversion import Entry, lines_of, name_of


@dataclass
class PaddingFree:
    """The report of `padding_free` or `padded`; prints a line per model. An encoder and its decoder are two models."""

    packed: list[Entry] = field(default_factory=list)  # models that run on real tokens
    padded: list[Entry] = field(default_factory=list)  # models that compute padding, with the reason

    def __str__(self) -> str:
        head = f"{len(self.packed)} models packed, {len(self.padded)} padded"
        return "\n".join([head, *lines_of("packed", self.packed), *lines_of("padded", self.padded)])


def _obstacle(model: PreTrainedModel) -> str | None:
    """Return why a base model cannot run packed, or None."""
    if entry.identity(model) not in entry.tested_classes():
        if not entry.calls_the_interface(model):
            return "computes its attention outside of transformers' attention interface"
        return f"{type(model).__name__} is not among the classes that were tested"
    if getattr(model.config, "chunk_size_feed_forward", 0):
        return f"chunk_size_feed_forward is {model.config.chunk_size_feed_forward}"
    return entry.reason_for_batches(model)


def padding_free(model: nn.Module) -> PaddingFree:
    """Make a Hugging Face model run on the real tokens of a batch alone, in place.

    Each base model inside it packs its arguments, runs on one row of real tokens, and pads its outputs with zeros.
    Its attention becomes `attn_implementation="fastformer"`; MPNet's attention, which cannot, is wrapped. Parameters,
    the state dict and outputs at real positions do not change. Outputs at padding do: they matter if the first column
    is read under padding on the left, or if a loss has labels other than -100 there. `docs/hugging-face.md` lists the
    batches that run padded.

    model is a transformers model, or a module that holds some, such as a SentenceTransformer. The report has the reason
    for each model that did not change.
    """
    padded(model)
    report = PaddingFree()
    for name, base in list(_base_models(model)):
        reason = _obstacle(base)
        if reason is not None:
            report.padded.append(Entry(name, name_of(type(base)), reason))
            continue
        base.__dict__[entry.ATTENTION_BEFORE] = base.config._attn_implementation
        base.config._attn_implementation_internal = entry.NAME
        entry.install(base, entry.forward)
        for module in base.modules():
            if hasattr(module, "compute_bias") and "position_bias" in entry.parameters(module):
                entry.install(module, t5_attention)
            if hasattr(module, "compute_position_bias"):
                entry.install(module, mpnet_bias, "compute_position_bias")
                for layer in module.layer:
                    entry.install(layer.attention.attn, mpnet_attention)
        report.packed.append(Entry(name, name_of(type(base)), "runs on real tokens"))
    return report


def padded(model: nn.Module) -> PaddingFree:
    """Undo `padding_free`, in place; report the models that it changes back."""
    report = PaddingFree()
    for name, base in list(_base_models(model)):
        before = base.__dict__.pop(entry.ATTENTION_BEFORE, None)
        if before is not None:
            report.padded.append(Entry(name, name_of(type(base)), "as before padding_free"))
        if before not in (None, entry.NAME):  # an encoder and its decoder can share a configuration
            base.config._attn_implementation_internal = before
    for module in model.modules():
        has_name = isinstance(module, PreTrainedModel) and module.config._attn_implementation == entry.NAME
        for method in ("forward", "compute_position_bias"):
            if entry.is_installed(module, method) and not has_name:
                del module.__dict__[method]
    return report


def _base_models(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield every transformers model that takes a padding mask and holds no other transformers model, with its name."""
    for name, base in model.named_modules():
        if isinstance(base, PreTrainedModel) and "attention_mask" in entry.parameters(base):
            if not any(isinstance(module, PreTrainedModel) for module in base.modules() if module is not base):
                yield name, base
