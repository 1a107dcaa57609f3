"""Functions and the base class shared by the models: ids in packed form, losses, attention maps.

Letters: B batch, H heads, L layers, T packed positions, S positions attended to, D model width, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import functional
from fastformer.apps.models.embeddings import Embedding
from fastformer.apps.text import Tokenizer
from fastformer.host.devices import check_types
from fastformer.modes import exporting
from fastformer.nn.inspection import plain
from fastformer.packing import Layout, pack


def tie(model: Any, _keys: object = None) -> None:
    """Tie the weights of the modules that `model.tied()` pairs.

    The first module of a pair gets the second's weight, unless one of them is no parameter of its module, as in
    adapters, parametrised and pruned modules. This is also a hook of `load_state_dict`, which passes incompatible keys,
    and whose `assign=True` unties weights.
    """
    for module, source in model.tied():
        weight, shared = (each._parameters.get("weight") for each in (module, source))
        if weight is not None and shared is not None and weight is not shared:
            module.weight = shared


def check_tokenizer(side: str, tokenizer: Tokenizer, size: int, config: Any = None) -> None:
    """Raise ValueError unless a tokenizer has `size` entries, and the special ids of `config` if that is given."""
    name = f"the {side} tokenizer" if side else "the tokenizer"
    if tokenizer.size != size:
        raise ValueError(f"{name} has {tokenizer.size} entries, the model {size}")
    for each in ("pad_id", "bos_id", "eos_id") if config is not None else ():
        tokenizer_id, model_id = getattr(tokenizer, each), getattr(config, each)
        if tokenizer_id != model_id:
            raise ValueError(f"{name} has {each} {tokenizer_id}, the model {model_id}")


def packed_ids(name: str, ids: Tensor, lengths: Tensor | Layout) -> tuple[Tensor, Layout]:
    """Return the packed form `[T]` and the layout of ids that are packed `[T]` or padded `[B, length]`.

    lengths: int64 `[B]`, on the CPU; or an existing layout, which torch.compile needs. Raises ValueError, beginning
    with `name`, for ids of another shape.
    """
    check_types((name,), ids)
    layout = lengths if isinstance(lengths, Layout) else Layout.from_lengths(lengths, ids.device)
    if ids.dim() == 2:
        return pack(ids, layout), layout
    if ids.dim() != 1 or ids.shape[0] != layout.total:
        raise ValueError(
            f"{name} must be packed [{layout.total}] or padded [{layout.batch}, length], not {list(ids.shape)}"
        )
    return ids, layout


def exported(lengths: Tensor | Layout) -> TypeGuard[Tensor]:
    """Return whether torch.export traces a model with a tensor of lengths, from which no layout can be made.

    The models then run padded, with equal results.
    """
    return exporting() and not isinstance(lengths, Layout)


def real_of(name: str, ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the mask of the real tokens of padded ids, bool `[B, length]`; raise ValueError for another shape."""
    if ids.dim() != 2:
        raise ValueError(f"{name} must be padded [B, length] for torch.export, not {list(ids.shape)}")
    return torch.arange(ids.shape[1], device=ids.device) < lengths.to(ids.device)[:, None]


def layouts_of(batch: Any, *lengths: str) -> Sequence[Tensor | Layout]:
    """Return the layouts that a batch got when it moved to a device, or else its lengths, by the names of fields."""
    layouts: Sequence[Tensor | Layout] = getattr(batch, "layouts", ()) or [getattr(batch, name) for name in lengths]
    return layouts


def summed_cross_entropy(
    output: nn.Linear, hidden: Tensor, target: Tensor, lengths: Tensor | Layout, label_smoothing: float
) -> Tensor:
    """Sum the cross entropy of softmax(output(hidden)) against target over the real positions, fp32, in nats.

    Args:
        output: the projection to V classes. If it was replaced or has hooks, it is called, and all logits are stored.
        hidden: `[T, D]`.
        target: int64, packed `[T]` or padded `[B, length]`.
        lengths: int64 `[B]`, on the CPU, or the layout.
        label_smoothing: share of the probability spread over all classes.
    """
    if target.dim() == 2:
        target, _ = packed_ids("target", target, lengths)
    if not plain(output, nn.Linear):
        logits = output(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, target, label_smoothing=label_smoothing, reduction="sum")
    return functional.linear_cross_entropy(
        hidden, output.weight, target, output.bias, label_smoothing=label_smoothing, reduction="sum"
    )


def check_sequences(**ids: Tensor) -> None:
    """Raise ValueError for ids that are not one sequence, `[T]`."""
    for name, each in ids.items():
        if each.dim() != 1:
            raise ValueError(f"{name} must be [T], one sequence, not {list(each.shape)}")


class SingleStack(nn.Module):
    """Base of models that have one embedding and one stack.

    Attributes:
        embedding: embedding of the ids.
        stack_name: name of the attribute that holds the stack.
        causal: whether the stack is a decoder.
    """

    embedding: Embedding
    stack_name: ClassVar[str]
    causal: ClassVar[bool]

    @torch.no_grad()
    def attention_maps(self, ids: Tensor) -> Tensor:
        """Compute every attention weight for one text, int64 `[T]`; call `.eval()` first, or dropout sets some to 0.

        Returns:
            `[layers, H, T, T]`: row t is the distribution of position t over the positions it attends to.

        Raises:
            ValueError: T is beyond what learned positions hold, or ids are of another shape.
        """
        check_sequences(ids=ids)
        x, stack = self.embedding.padded(ids[None]), getattr(self, self.stack_name)
        weights: Tensor = stack(x, is_causal=self.causal, need_weights=True)[1]
        return weights[:, 0]
