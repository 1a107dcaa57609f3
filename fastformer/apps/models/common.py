"""Functions and the base class shared by the models: ids in packed form, losses, tied weights, attention maps.

Letters: B batch, H heads, T packed positions, S positions attended to, D model width, V vocabulary.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import functional
from fastformer.apps.models.embeddings import Embedding
from fastformer.apps.text import Tokenizer
from fastformer.functional.linear_cross_entropy.op import Reduction
from fastformer.host.devices import check_types
from fastformer.modes import exporting
from fastformer.nn.inspection import is_unmodified
from fastformer.packing import Layout, pack


def tie(model: Any, _keys: object = None) -> None:
    """Tie the weights of the modules that `model.tied()` pairs.

    The first module of a pair gets the second's weight, unless the weight of one of them is not a parameter, as with
    adapters, parametrisations and pruning. This is also a hook of `load_state_dict`, which passes incompatible keys,
    and whose `assign=True` unties weights.
    """
    for module, source in model.tied():
        weight, shared = (each._parameters.get("weight") for each in (module, source))
        if weight is not None and shared is not None and weight is not shared:
            module.weight = shared


def check_tokenizer(side: str, tokenizer: Tokenizer, size: int, config: Any = None) -> None:
    """Raise ValueError unless a tokenizer has `size` entries, and the special ids of `config` if that is given."""
    expected = {"size": size}
    if config is not None:
        expected |= {name: getattr(config, name) for name in ("pad_id", "bos_id", "eos_id")}
    for name, number in expected.items():
        if (value := getattr(tokenizer, name)) != number:
            what = f"{value} entries" if name == "size" else f"{name} {value}"
            raise ValueError(f"the {f'{side} tokenizer'.strip()} has {what}, the model {number}")


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


def exported_mask(name: str, ids: Tensor, lengths: Tensor | Layout) -> Tensor | None:
    """Return the mask of the real tokens of padded ids, bool `[B, length]`, if torch.export traces a model; else None.

    No layout can be made of lengths that are traced. The models then run padded, with equal results.
    """
    if not exporting() or isinstance(lengths, Layout):
        return None
    if ids.dim() != 2:
        raise ValueError(f"{name} must be padded [B, length] for torch.export, not {list(ids.shape)}")
    return torch.arange(ids.shape[1], device=ids.device) < lengths.to(ids.device)[:, None]


def output_cross_entropy(
    output: nn.Linear,
    hidden: Tensor,
    target: Tensor,
    lengths: Tensor | Layout,
    label_smoothing: float,
    reduction: Reduction = "sum",
) -> Tensor:
    """Compute the cross entropy of softmax(output(hidden)) against target at the real positions, fp32, in nats.

    Args:
        output: the projection to V classes. If it was replaced or has hooks, it is called, and all logits are stored.
        hidden: `[T, D]`.
        target: int64, packed `[T]` or padded `[B, length]`.
        lengths: int64 `[B]`, on the CPU, or the layout.
        label_smoothing: share of the probability spread over all classes.
        reduction: as in `F.cross_entropy`; "none" returns `[T]`.
    """
    if target.dim() == 2:
        target, _ = packed_ids("target", target, lengths)
    if not is_unmodified(output, nn.Linear):
        logits = output(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, target, label_smoothing=label_smoothing, reduction=reduction)
    return functional.linear_cross_entropy(
        hidden, output.weight, target, output.bias, label_smoothing=label_smoothing, reduction=reduction
    )


def check_sequences(**ids: Tensor) -> None:
    """Raise ValueError for ids that are not one sequence, `[T]`."""
    for name, each in ids.items():
        if each.dim() != 1:
            raise ValueError(f"{name} must be [T], one sequence, not {list(each.shape)}")


class SingleStack(nn.Module):
    """Base of models with one embedding and one stack, the attribute `stack_name`; a decoder is causal."""

    embedding: Embedding
    stack_name: ClassVar[str]
    causal: ClassVar[bool]

    def forward(self, ids: Tensor, lengths: Tensor | Layout, types: Tensor | None = None) -> Tensor:
        """Compute the hidden states of the real tokens, packed in order: `[T, D]`.

        Args:
            ids: int64, packed `[T]` or padded at the end `[B, length]`.
            lengths: int64 `[B]`, on the CPU, so that the host never waits for the device. Zero is allowed, and so is
                B = 0. Or a `Layout`, which torch.compile needs.
            types: int64, of the shape of ids: the type of each token, for embeddings with types; None: 0.

        Raises:
            ValueError: ids has another shape, or a length exceeds the number of learned positions.
        """
        real = exported_mask("ids", ids, lengths)
        return self.encode(ids, lengths, types)[0] if real is None else self.encode_padded(ids, real, types)[real]

    def encode(self, ids: Tensor, lengths: Tensor | Layout, types: Tensor | None = None) -> tuple[Tensor, Layout]:
        """Return the hidden states of the real tokens `[T, D]` and the layout; arguments as of `forward`."""
        ids, layout = packed_ids("ids", ids, lengths)
        types = None if types is None else packed_ids("types", types, layout)[0]
        x = self.embedding(ids, layout.positions, layout.max_length, types)  # [T, D]
        return getattr(self, self.stack_name).packed(x, layout, causal=self.causal), layout

    def encode_padded(self, ids: Tensor, real: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the hidden states `[B, length, D]` of padded ids, 0 where `real` `[B, length]` is False."""
        stack, x = getattr(self, self.stack_name), self.embedding.padded(ids, types)
        return stack(x, src_key_padding_mask=~real, is_causal=self.causal)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Project what `forward` returned, `[..., D]`, to logits over the vocabulary or the classes."""
        return self.output(hidden)  # type: ignore[no-any-return, operator]

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
