"""The entry of a Hugging Face model: a batch becomes one row of its real tokens, whose sequences are kept apart.

The forward of each model with `attn_implementation="fastformer"` reads its arguments before anything else does:
- A padded batch `[B, L]` runs as one row of its N real tokens if `padding_free` took the model, and the outputs are
  padded again.
- A flattened batch holds several sequences in a row, whose position ids begin again with each, as
  `DataCollatorWithFlattening` makes them. It runs as one row of B L tokens, or raises.
Inside the forward, `mask_rules` asks `packed` for the layout of the sequences.

Letters: B batch, L length of a row, N tokens of the one row, D model width.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial, update_wrapper
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, masking_utils
from transformers.cache_utils import DynamicLayer
from transformers.utils.output_capturing import _active_collector

from fastformer.integrations.transformers.eligibility import flattens, position_rule, reason_for_batches
from fastformer.modes import compiling, has_values, recorded
from fastformer.packing import Layout, pack, unpack

PACKS = "_runs_on_real_tokens"  # in a model that `padding_free` took
# Arguments with a value for each token.
BY_TOKEN = {"input_ids", "inputs_embeds", "token_type_ids", "position_ids", "bbox", "per_layer_inputs"}
BY_TOKEN |= {"xpath_tags_seq", "xpath_subs_seq", "input_shape_ids", "input_pronunciation_ids"}
# Other arguments that may hold tensors.
KNOWN = {"attention_mask", "encoder_hidden_states", "encoder_attention_mask", "cache_position", "num_items_in_batch"}
KNOWN |= {"labels", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


class NotPacked(TypeError):
    """Raised inside a packed call that cannot go on as one row."""


@dataclass(eq=False)
class Packed:
    """A batch that runs as one row.

    Attributes:
        given: the arguments of the model.
        rows: where the tokens lie in `[B, L]`.
        sequences: where the sequences lie in the row of tokens.
        memory: where the states of the encoder lie, to which the model attends; None if there is none.
    """

    given: dict[str, Any]
    rows: Layout
    sequences: Layout
    memory: Layout | None = None


@dataclass(eq=False)
class Positions:
    """Position ids that a model was given and hands on to the models inside it.

    Attributes:
        tensor: the position ids.
        sequences: of a flattened batch; else None.
        kept_apart: whether a model inside has kept them apart.
    """

    tensor: Tensor
    sequences: Layout | None
    kept_apart: bool = False


# What the forward runs that is the innermost in this thread; and the sequences while torch.compile traces, which knows
# no ContextVar.
_running: ContextVar[Packed | Positions | None] = ContextVar("fastformer_batch", default=None)
_traced: list[Tensor | None] = []


def packed() -> Packed | None:
    """Return the batch of the packed call that runs, or None."""
    batch = None if compiling() else _running.get()
    return batch if isinstance(batch, Packed) else None


def traced_sequences() -> Tensor | None:
    """Return numbers of the sequences `[B, L]` of a call that is compiled, or None."""
    return _traced[-1] if compiling() and _traced else None


def install(module: Any, function: Any) -> None:
    """Have `forward` or `embed_positions` run around a module's forward; harmless to repeat."""
    if getattr(module.__dict__.get("forward"), "func", None) is not function:
        bound = partial(function, module, module.forward, parameters(module))
        module.__dict__["forward"] = update_wrapper(bound, module.forward)


def uninstall(module: nn.Module, function: Any) -> None:
    """Undo `install`, unless another library has wrapped the forward since."""
    if getattr(module.__dict__.get("forward"), "func", None) is function:
        del module.__dict__["forward"]


def parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of what a module's forward takes by position or name."""
    cls: Any = type(module)
    return _parameters(cls)


@lru_cache(maxsize=1000)
def _parameters(cls: Any) -> tuple[str, ...]:
    its = list(signature(cls.forward).parameters.values())[1:]
    return tuple(p.name for p in its if p.kind is p.POSITIONAL_OR_KEYWORD)


def forward(model: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run a model's own forward as one row, if it may."""
    if model.config._attn_implementation != "fastformer":
        return inner(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    if compiling():
        return _trace(inner, given, args, kwargs)
    batch = _read_padding(model, given) if PACKS in model.__dict__ else None
    if batch is not None:
        try:
            return _run(model, inner, names, batch)
        except NotPacked:
            pass
    outer, positions = _running.get(), _read_positions(given)
    if positions is not None and positions.sequences is not None and flattens(model):
        output = _run_flattened(model, inner, names, given, positions.sequences)
        positions.kept_apart = True
    else:
        output = _inside(positions, inner, *args, **kwargs)
        if positions is not None and positions.sequences is not None and not positions.kept_apart:
            _refuse(model, "no test has shown that its class does")
    if isinstance(outer, Positions) and positions is not None:
        outer.kept_apart |= positions.kept_apart
    return output


def _inside(batch: Packed | Positions | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    token = _running.set(batch)
    try:
        return function(*args, **kwargs)
    finally:
        _running.reset(token)


def _trace(inner: Any, given: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """Run a forward that torch.compile traces: it stays padded, its masks keep sequences apart."""
    ids, numbers = given.get("position_ids"), None
    if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > 1 and given.get("attention_mask") is None:
        numbers = masking_utils.find_packed_sequence_indices(ids)
    _traced.append(numbers)
    try:
        return inner(*args, **kwargs)
    finally:
        _traced.pop()


def _read_positions(given: dict[str, Any]) -> Positions | None:
    """Read position ids; waits for the device if there are some and no padding mask."""
    tensor, mask, outer = given.get("position_ids"), given.get("attention_mask"), _running.get()
    if not isinstance(tensor, Tensor) or tensor.shape[-1] < 2 or recorded() or not has_values(tensor):
        return None
    if isinstance(outer, Positions) and outer.tensor is tensor:  # of a model with a head, say
        return Positions(tensor, outer.sequences)
    ids = tensor[0] if tensor.dim() == 3 and tensor.shape[0] == 4 else tensor  # of text, time, height and width
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask != 0).all())):
        return None
    if ids.dim() != 2 or bool((ids.diff() == 1).all()):
        return Positions(tensor, None)
    begins = torch.nn.functional.pad(ids.diff() != 1, (1, 0), value=True)
    states = next((x for x in (given.get("input_ids"), given.get("inputs_embeds")) if isinstance(x, Tensor)), ids)
    starts = begins.expand(states.shape[0], -1).flatten().nonzero().squeeze(1)
    ends = torch.cat([starts[1:], starts.new_tensor([states.shape[0] * ids.shape[1]])])
    return Positions(tensor, Layout.from_lengths((ends - starts).cpu(), ids.device))


def _run_flattened(model: Any, inner: Any, names: tuple[str, ...], given: dict[str, Any], sequences: Layout) -> Any:
    L = given["position_ids"].shape[-1]
    B, device = sequences.total // L, sequences.offsets.device
    reason = None if B == 1 else reason_for_batches(model)
    if given.get("encoder_hidden_states") is not None:
        reason = "it attends to an encoder's states too"
    elif not _is_empty(given.get("past_key_values")):
        reason = "its cache holds tokens or has a fixed length; pass use_cache=False and no past_key_values"
    elif reason is None:
        reason = _unknown(given) or _wanted(model, given)
    if reason is not None:
        _refuse(model, reason)
    try:
        return _run(model, inner, names, Packed(given, Layout.from_lengths([L] * B, device, L), sequences))
    except NotPacked as error:
        _refuse(model, str(error))


def _refuse(model: nn.Module, reason: str) -> None:
    raise ValueError(
        "position_ids begin again within a row, which makes it a flattened batch of several sequences, and "
        f"{type(model).__name__} cannot keep them apart: {reason}. Or pass one sequence a row with an attention_mask"
    )


def _unknown(given: dict[str, Any]) -> str | None:
    """Return why arguments cannot be those of one row, or None."""
    for name, value in given.items():
        if isinstance(value, Tensor) and value.dim() and name not in KNOWN and name not in BY_TOKEN:
            return f"it is given {name}"
    return None


def _wanted(model: Any, given: dict[str, Any]) -> str | None:
    """Return which outputs are asked for that one row does not have, or None."""
    names = ("output_attentions", "output_router_logits")
    if _active_collector.get() or any(given.get(name) or getattr(model.config, name, False) for name in names):
        return "attention weights, router logits or another model's hidden states are asked for"
    return None


def _read_padding(model: Any, given: dict[str, Any]) -> Packed | None:
    """Read where the tokens of a padded batch are; None if it has to run padded. Waits for the device."""
    mask = given.get("attention_mask")
    states = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if recorded() or not isinstance(mask, Tensor) or not isinstance(states, Tensor) or mask.dim() != 2:
        return None
    if states.shape[:2] != mask.shape or not (has_values(mask) and has_values(states)):
        return None
    if not _is_empty(given.get("past_key_values")) or getattr(model.config, "chunk_size_feed_forward", False):
        return None
    if _unknown(given) or _wanted(model, given) or reason_for_batches(model):
        return None
    rows = Layout.from_mask(mask == 0).to(states.device)
    if rows.total in (0, mask.numel()):
        return None
    memory, its = given.get("encoder_hidden_states"), given.get("encoder_attention_mask")
    if memory is None:
        return Packed(given, rows, rows)
    its = memory.new_ones(memory.shape[:2]) if its is None else its
    if its.shape != memory.shape[:2] or len(its) != len(mask) or not (has_values(its) and bool(its.any())):
        return None
    return Packed(given, rows, rows, Layout.from_mask(its == 0).to(memory.device))


def _run(model: Any, inner: Any, names: tuple[str, ...], batch: Packed) -> Any:
    """Run a model's own forward on one row, and pad its outputs."""
    given, rows = batch.given, batch.rows
    new = {name: to_tokens(x, rows, _axes(name)) if name in BY_TOKEN else x for name, x in given.items()}
    new["attention_mask"] = rows.origin.new_ones(1, rows.total)
    if "position_ids" in names and given.get("position_ids") is None:
        new["position_ids"] = _default_positions(model, batch)
    if batch.memory is not None:
        new["encoder_hidden_states"] = to_tokens(given["encoder_hidden_states"], batch.memory)
        new["encoder_attention_mask"] = rows.origin.new_ones(1, batch.memory.total)
    cache = _cache_to_fill(model, given, names)
    if cache is not None:
        both = isinstance(cache, EncoderDecoderCache)
        new["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache()) if both else DynamicCache()
    as_tuple = given.get("return_dict", getattr(model.config, "return_dict", True)) is False
    output = _inside(batch, inner, **new, **({"return_dict": True} if as_tuple else {}))
    for name, x in output.items():
        if name == "pooler_output" and x is not None:
            output[name] = _pooled(model, output[0])
        elif name == "past_key_values" and x is not None:
            output[name] = _fill(cache, x, batch)
        else:
            output[name] = _padded(x, rows)
    return output.to_tuple() if as_tuple else output


def _padded(x: Any, rows: Layout) -> Any:
    """Pad an output: a tensor, or hidden states of all layers."""
    if isinstance(x, tuple):
        return tuple(_padded(each, rows) for each in x)
    return to_batch(x, rows) if isinstance(x, Tensor) and x.shape[:2] == (1, rows.total) else x


def _axes(name: str) -> tuple[int, int]:
    """Return the axes of the batch and the positions of an argument."""
    return (-2, -1) if name == "position_ids" else (0, 1)


def to_tokens(x: Tensor | None, rows: Layout, axes: tuple[int, int] = (0, 1)) -> Tensor | None:
    """Turn `[…, B, L, …]`, or a row for all, `[…, 1, L, …]`, into `[…, 1, N, …]`."""
    if x is None:
        return None
    rows_first = (x[None] if x.dim() == 1 else x).movedim(axes, (0, 1))
    if len(rows_first) == rows.batch:
        tokens = pack(rows_first, rows)
    else:
        tokens = rows_first[0].index_select(0, rows.origin % rows.columns)
    return tokens[None].movedim((0, 1), axes).contiguous()


def to_batch(x: Tensor, rows: Layout, axes: tuple[int, int] = (0, 1)) -> Tensor:
    """Turn `[…, 1, N, …]` into `[…, B, L, …]`, zeros in place of padding."""
    return unpack(x.movedim(axes, (0, 1))[0], rows).movedim((0, 1), axes)


def _default_positions(model: Any, batch: Packed) -> Tensor | None:
    """Return the position ids `[1, N]` that a model takes for a padded batch without any."""
    rows, rule, ids = batch.rows, position_rule(model), batch.given.get("input_ids")
    columns = (rows.origin % rows.columns)[None]
    if rule == "tokens":
        return rows.positions[None]
    if rule == "words":  # RoBERTa counts what is not the padding token, from the number of that on
        first = model.config.pad_token_id
        return (
            columns + first + 1 if ids is None else to_tokens((ids != first).cumsum(1) * (ids != first) + first, rows)
        )
    return columns


def _pooled(model: Any, hidden: Tensor) -> Tensor:
    """Return what a model's pooler makes of padded hidden states."""
    pooler = model._modules.get("pooler")
    if pooler is None:
        raise NotPacked("its pooler is not a module")
    if isinstance(pooler, nn.Linear):  # ALBERT
        return model.pooler_activation(pooler(hidden[:, 0]))  # type: ignore[no-any-return]
    return pooler(hidden)  # type: ignore[no-any-return]


def _is_empty(cache: Any) -> bool:
    """Whether a cache is none, or one of `DynamicCache`'s that holds nothing."""
    if type(cache) is EncoderDecoderCache:
        return _is_empty(cache.self_attention_cache) and _is_empty(cache.cross_attention_cache)
    if cache is None:
        return True
    known = all(type(layer).__module__ == DynamicLayer.__module__ for layer in getattr(cache, "layers", ()))
    return type(cache) is DynamicCache and known and cache.get_seq_length() == 0


def _cache_to_fill(model: Any, given: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the cache that is to get the keys and values, or None if the model may make its own."""
    cache, use_cache = given.get("past_key_values"), given.get("use_cache")
    use_cache = getattr(model.config, "use_cache", False) if use_cache is None else use_cache
    if cache is None and use_cache and "past_key_values" in names:
        made = DynamicCache(config=model.config)
        if any(type(layer) is not DynamicLayer for layer in made.layers):  # which keep a window only
            return made if given.get("encoder_hidden_states") is None else EncoderDecoderCache(made, DynamicCache())
    return cache


def _fill(cache: Any, row: Any, batch: Packed) -> Any:
    """Return the cache of a padded batch that holds what the cache of one row has got."""
    if not isinstance(row, EncoderDecoderCache):
        return _fill_one(DynamicCache() if cache is None else cache, row, batch.rows)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if cache is None else cache
    cache.is_updated.update(row.is_updated)
    _fill_one(cache.self_attention_cache, row.self_attention_cache, batch.rows)
    _fill_one(cache.cross_attention_cache, row.cross_attention_cache, batch.memory)
    return cache


def _fill_one(cache: DynamicCache, row: DynamicCache, rows: Layout | None) -> DynamicCache:
    for index, layer in enumerate(row.layers):
        if layer.is_initialized and rows is not None:
            cache.update(*(to_batch(x, rows, (0, 2)) for x in (layer.keys, layer.values)), index)
    return cache


def embed_positions(module: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run an embedding of positions that counts columns on the padded batch, inside a packed call too (BART)."""
    batch = packed()
    if batch is None:
        return inner(*args, **kwargs)
    rows, ids, shape = batch.rows, batch.given.get("input_ids"), (batch.rows.batch, batch.rows.columns)

    def padded(x: Any) -> Any:
        if isinstance(x, Tensor) and x.shape == (rows.total,):
            return torch.arange(shape[1], device=x.device)
        if isinstance(x, Tensor) and x.shape[:2] == (1, rows.total):
            return ids if ids is not None and x.dtype == ids.dtype else to_batch(x, rows)
        return torch.Size(shape) if isinstance(x, tuple) and x == (1, rows.total) else x

    embedded = inner(*map(padded, args), **{name: padded(x) for name, x in kwargs.items()})
    return to_tokens(embedded if embedded.dim() == 3 else embedded[None], rows)
