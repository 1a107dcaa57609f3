"""What the models share: the rules of their settings, ids in packed form, losses, attention maps.

Letters: B batch, H heads, L layers, T packed positions, S positions attended to, D model width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastformer import functional
from fastformer.apps.models.sizes import LARGEST, MOST_LAYERS
from fastformer.host.devices import check_types
from fastformer.packing import Layout, pack


def choice(help_: str, choices: tuple[str, ...]) -> dict[str, object]:
    """Metadata of a setting that is one of a few names; `check_settings` enforces it."""
    return {"help": help_, "choices": choices}


def check_settings(
    settings: Any, sizes: Sequence[str], vocabulary: str | None = None, rates: Sequence[str] = ("dropout",)
) -> None:
    """Check a model's configuration.

    Args:
        settings: `InitialisationSettings` with at least d_model and heads.
        sizes: the fields that count something and must be at least 1, and not beyond what can be built.
        vocabulary: the field that pad_id, bos_id and eos_id must be below; None for a model without them.
        rates: the fields that are rates of dropout; None, for one that follows another, is allowed.

    Raises:
        ValueError: a setting is out of range, or none of its choices.
    """
    for name in sizes:
        size, most = getattr(settings, name), MOST_LAYERS if name.endswith("layers") else LARGEST
        if not 1 <= size <= most:
            raise ValueError(
                f"{name} must be at least 1, not {size}" if size < 1 else f"{name} must be at most {most}, not {size}"
            )
    if vocabulary is not None:
        size = getattr(settings, vocabulary)
        for name in ("pad_id", "bos_id", "eos_id"):
            if not 0 <= getattr(settings, name) < size:
                raise ValueError(f"{name} must be below {vocabulary} ({size}), not {getattr(settings, name)}")
    if settings.d_model % settings.heads:
        raise ValueError(f"heads ({settings.heads}) must divide d_model ({settings.d_model})")
    if not settings.norm_eps > 0.0:
        raise ValueError(f"norm_eps must be above 0, not {settings.norm_eps}")
    for name in rates:
        rate = getattr(settings, name)
        if rate is not None and not 0.0 <= rate < 1.0:
            raise ValueError(f"{name} must be at least 0 and below 1, not {rate}")
    for item in settings.__dataclass_fields__.values():
        choices = item.metadata.get("choices")
        value = getattr(settings, item.name)
        if choices and value not in choices and value != item.default:  # a default of None leaves a choice open
            raise ValueError(f"{item.name} must be one of {', '.join(choices)}, not {value!r}")
    settings.check_ranges()


def tie(model: Any, _keys: object = None) -> None:
    """Have modules share the weights that `model.tied()` pairs; a hook, too: `load_state_dict(assign=True)` parts them.

    Args:
        model: whose `tied()` returns pairs of modules, of which the first takes the second's weight.
        _keys: what load_state_dict hands to its hooks.
    """
    for module, owner in model.tied():
        if module.weight is not owner.weight:
            module.weight = owner.weight


def packed_ids(name: str, ids: Tensor, lengths: Tensor | Layout) -> tuple[Tensor, Layout]:
    """Ids packed `[T]`, of ids that are packed `[T]` or padded `[B, length]`, and their layout.

    Args:
        name: of the ids, for messages.
        ids: int64.
        lengths: int64 `[B]`, on the CPU; or a layout that was made before, which torch.compile needs.

    Raises:
        ValueError: ids are of another shape.
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


def layouts_of(batch: Any, *lengths: str) -> Sequence[Tensor | Layout]:
    """The layouts that a batch brought along when it moved to its device, or else its lengths, by name."""
    found: Sequence[Tensor | Layout] = getattr(batch, "layouts", ()) or [getattr(batch, name) for name in lengths]
    return found


def summed_cross_entropy(
    output: nn.Linear, hidden: Tensor, target: Tensor, lengths: Tensor | Layout, label_smoothing: float
) -> Tensor:
    """Sum over the real positions of the cross entropy of softmax(output(hidden)) against target, fp32, in nats.

    Args:
        output: the projection to V classes.
        hidden: `[T, D]`.
        target: int64, packed `[T]` or padded `[B, length]`.
        lengths: int64 `[B]`, on the CPU, or the layout.
        label_smoothing: share of the probability spread over all classes.
    """
    if target.dim() == 2:
        target, _ = packed_ids("target", target, lengths)
    return functional.linear_cross_entropy(
        hidden, output.weight, target, output.bias, label_smoothing=label_smoothing, reduction="sum"
    )


def sequences_of(name: str, ids: Tensor, lengths: Tensor | Layout | None) -> tuple[Tensor, Layout]:
    """As `packed_ids`; without lengths, the ids are one sequence `[T]`.

    Raises:
        ValueError: ids are of another shape.
    """
    if lengths is None and ids.dim() != 1:
        raise ValueError(f"{name} must be [T], one sequence, where no lengths are given, not {list(ids.shape)}")
    return packed_ids(name, ids, torch.tensor([len(ids)]) if lengths is None else lengths)


def watched(
    attention: nn.Module,
    weights: list[list[Tensor]],
    layout: Layout,
    memory: Tensor | None = None,
    memory_layout: Layout | None = None,
    causal: bool = False,
) -> Callable[[Tensor], Tensor]:
    """What a layer's `compose` asks for: attend within each sequence, and add the weights of each, `[H, T, S]`.

    Args:
        attention: a `MultiheadAttention`.
        weights: gets one list, of as many weights as there are sequences.
        layout: of the queries.
        memory: `[S, D]`, what is attended to; None: the sequences themselves.
        memory_layout: of the memory.
        causal: no position sees later ones.
    """

    def attend(x: Tensor) -> Tensor:
        queries = _sequences(x, layout)
        keys = queries if memory is None or memory_layout is None else _sequences(memory, memory_layout)
        found = [_attend(attention, q, kv, causal) for q, kv in zip(queries, keys, strict=True)]
        weights.append([each for _, each in found])
        return torch.cat([x[:0], *(out for out, _ in found)])

    return attend


def _sequences(x: Tensor, layout: Layout) -> Sequence[Tensor]:
    return x.split(layout.lengths.tolist())  # type: ignore[no-untyped-call, no-any-return]


def _attend(attention: nn.Module, x: Tensor, kv: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    mask = torch.ones(len(x), len(kv), dtype=torch.bool, device=x.device).triu(1) if causal else None
    return attention(x, kv, kv, attn_mask=mask, average_attn_weights=False)  # type: ignore[no-any-return]


def maps_of_each(weights: list[list[Tensor]]) -> list[Tensor]:
    """Weights by layer and sequence `[H, T, S]` -> of each sequence `[L, H, T, S]`."""
    return [torch.stack(layers) for layers in zip(*weights, strict=True)]


def self_attention_maps(
    layers: Iterable[nn.Module], x: Tensor, layout: Layout, causal: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Run encoder layers on packed `[T, D]`: what comes out, and of each sequence every weight `[L, H, T, T]`."""
    weights: list[list[Tensor]] = []
    for layer in layers:
        own = watched(layer.self_attn, weights, layout, causal=causal)  # type: ignore[arg-type]
        x = layer.compose(x, own)  # type: ignore[operator]
    return x, maps_of_each(weights)
