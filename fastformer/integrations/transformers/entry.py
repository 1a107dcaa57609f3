"""Run a Hugging Face model on one row of the real tokens of a batch, whose sequences are kept apart.

`forward` wraps the forward of each model that has `attn_implementation="fastformer"` or that `padding_free` took, and
reads its arguments first:
- A padded batch `[B, L]` becomes one row of its N real tokens if `padding_free` took the model; outputs are padded.
- A flattened batch holds several sequences in a row, whose position ids begin again with each, as
  `DataCollatorWithFlattening` makes them. It becomes one row of B L tokens, or raises.
"""

from dataclasses import dataclass
from functools import partial, update_wrapper
from inspect import signature
from typing import Any, NoReturn

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, masking_utils
from transformers.cache_utils import DynamicLayer
from transformers.utils.output_capturing import CompileableContextVar, _active_collector

from fastformer.integrations.transformers import eligibility
from fastformer.modes import compiling, has_values
from fastformer.packing import Layout, pack, unpack

NAME = "fastformer"  # of the attention
PACKS = "_runs_on_real_tokens_with"  # attribute of a model that `padding_free` took: the name of its attention
# Arguments with a value for each token, and others that may hold tensors; position ids have one or four for each.
BY_TOKEN = {
    "input_ids", "inputs_embeds", "token_type_ids", "bbox", "per_layer_inputs", "xpath_tags_seq", "xpath_subs_seq",
    "input_shape_ids", "input_pronunciation_ids",
}  # fmt: skip
KNOWN = {
    "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "cache_position", "num_items_in_batch",
    "position_ids", "labels", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
}  # fmt: skip


class NotPacked(TypeError):
    """Raised inside a packed call that cannot go on as one row."""


@dataclass(eq=False)
class Packed:
    """A batch that runs as one row; in a flattened batch, the sequences are other ones than the rows."""

    arguments: dict[str, Any]  # of the model, before they are packed
    rows: Layout  # of the tokens in `[B, L]`
    sequences: Layout  # in the row of tokens
    memory: Layout | None = None  # of an encoder's states, to which the model attends


# The packed call that runs in this thread; while torch.compile traces, the number of each token's sequence `[B, L]`.
_running = CompileableContextVar("fastformer_batch")


def current(variable: CompileableContextVar) -> Any:
    """Return the value of a context variable; torch.compile cannot trace one that was set outside of it."""
    return None if compiling() and not variable.compiling else variable.get()


def running() -> Packed | Tensor | None:
    """Return the batch of the packed call that runs, or the sequences of a call that torch.compile traces, or None."""
    batch: Packed | Tensor | None = current(_running)
    return batch


def install(module: Any, wrapper: Any, method: str = "forward") -> None:
    """Have a wrapper of this package run around a module's method; harmless to repeat."""
    if not is_installed(module, method):
        inner = getattr(module, method)
        module.__dict__[method] = update_wrapper(partial(wrapper, module, inner, parameters(module)), inner)


def is_installed(module: nn.Module, method: str = "forward") -> bool:
    """Return whether a wrapper of this package runs around a module's method, and no other one around it."""
    wrapper = getattr(module.__dict__.get(method), "func", None)
    return (getattr(wrapper, "__module__", None) or "").startswith("fastformer.integrations.")


def parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of what the forward of a module's class takes by position or name."""
    taken = list(signature(type(module).forward).parameters.values())[1:]
    return tuple(p.name for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD)


def forward(model: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run a model's own forward as one row, if it may."""
    attention = model.config._attn_implementation
    if attention not in (NAME, model.__dict__.get(PACKS, NAME)) or isinstance(running(), Packed):
        return inner(*args, **kwargs)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if compiling():  # padded; the masks keep sequences apart
        ids = arguments.get("position_ids")
        several = isinstance(ids, Tensor) and ids.dim() == 2 and arguments.get("attention_mask") is None
        return _inside(masking_utils.find_packed_sequence_indices(ids) if several else None, inner, *args, **kwargs)
    batch = _read_padding(model, arguments) if PACKS in model.__dict__ else None
    batch = _read_positions(model, arguments) if batch is None else batch
    if batch is None:
        return inner(*args, **kwargs)
    try:
        return _run(model, inner, names, batch)
    except NotPacked as error:
        if batch.sequences is not batch.rows:
            _refuse(model, str(error))
    return inner(*args, **kwargs)


def _inside(batch: Packed | Tensor | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    token = _running.set(batch)
    try:
        return function(*args, **kwargs)
    finally:
        _running.reset(token)


def _read_positions(model: Any, arguments: dict[str, Any]) -> Packed | None:
    """Return a flattened batch, or None. Waits for the device if there are position ids and no padding mask.

    Raises:
        ValueError: the model cannot keep its sequences apart.
    """
    ids, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.shape[-1] < 2 or not has_values(ids):
        return None
    if not eligibility.is_tested(model) and not model.config.is_encoder_decoder:
        if any(isinstance(part, PreTrainedModel) and eligibility.is_tested(part) for part in model.modules()):
            return None  # the model inside gets the same position ids
    ids = ids[0] if ids.dim() == 3 and len(ids) == 4 else ids  # of text, time, height and width
    padded = mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask != 0).all()))
    if padded or ids.dim() != 2 or bool((ids.diff() == 1).all()):
        return None
    states = next((x for x in map(arguments.get, ("input_ids", "inputs_embeds")) if isinstance(x, Tensor)), ids)
    B, L = len(states), ids.shape[1]
    starts = F.pad(ids.diff() != 1, (1, 0), value=True).expand(B, -1).flatten().nonzero()[:, 0]
    sequences = Layout.from_lengths(starts.diff(append=starts.new_tensor([B * L])).cpu(), ids.device)
    if not eligibility.is_tested(model):
        reason = "no test has shown that its class does"
    elif arguments.get("encoder_hidden_states") is not None:
        reason = "it attends to an encoder's states too"
    elif not _is_empty(arguments.get("past_key_values")):
        reason = "its cache holds tokens or has a fixed length; pass use_cache=False and no past_key_values"
    else:
        reason = _needs_batch(model, arguments) or ("" if B == 1 else eligibility.reason_for_batches(model)) or ""
    if reason:
        _refuse(model, reason)
    return Packed(arguments, Layout.from_lengths([L] * B, ids.device, L), sequences)


def _refuse(model: nn.Module, reason: str) -> NoReturn:
    raise ValueError(
        "position_ids begin again within a row, which makes it a flattened batch of several sequences, and "
        f"{type(model).__name__} cannot keep them apart: {reason}. Or pass one sequence a row with an attention_mask"
    )


def _needs_batch(model: Any, arguments: dict[str, Any]) -> str | None:
    """Return which argument or output one row does not have, or None."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() and name not in KNOWN and name not in BY_TOKEN:
            return f"it is given {name}"
    names = ("output_attentions", "output_router_logits")
    if _active_collector.get() or any(arguments.get(name) or getattr(model.config, name, False) for name in names):
        return "attention weights, router logits or another model's hidden states are asked for"
    return None


def _read_padding(model: Any, arguments: dict[str, Any]) -> Packed | None:
    """Return a padded batch that can run as one row, or None. Waits for the device."""
    mask, ids = arguments.get("attention_mask"), arguments.get("input_ids")
    states = arguments.get("inputs_embeds") if ids is None else ids
    if not isinstance(mask, Tensor) or not isinstance(states, Tensor) or not (has_values(mask) and has_values(states)):
        return None
    if mask.dim() != 2 or states.shape[:2] != mask.shape:
        return None
    cache = arguments.get("past_key_values")
    if not _is_empty(cache) or _needs_batch(model, arguments) or eligibility.reason_for_batches(model):
        return None
    rows = Layout.from_mask(mask == 0).to(states.device)
    if rows.total in (0, mask.numel()):
        return None
    memory, memory_mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask")
    if memory is None:
        return Packed(arguments, rows, rows)
    real = memory.new_ones(memory.shape[:2]) != 0 if memory_mask is None else memory_mask != 0
    if real.shape != memory.shape[:2] or len(real) != len(mask) or not bool(real.any()):
        return None
    return Packed(arguments, rows, rows, Layout.from_mask(~real).to(memory.device))


def _run(model: Any, inner: Any, names: tuple[str, ...], batch: Packed) -> Any:
    """Run a model's own forward on one row, and pad its outputs."""
    arguments, rows = batch.arguments, batch.rows
    row = {name: to_tokens(x, rows) if name in BY_TOKEN else x for name, x in arguments.items()}
    row["attention_mask"] = rows.origin.new_ones(1, rows.total)
    if arguments.get("position_ids") is not None:
        row["position_ids"] = to_tokens(arguments["position_ids"], rows, (-2, -1))  # [4, B, L] in Qwen-VL
    elif "position_ids" in names:
        row["position_ids"] = _default_positions(model, batch)
    if batch.memory is not None:
        row["encoder_hidden_states"] = to_tokens(arguments["encoder_hidden_states"], batch.memory)
        row["encoder_attention_mask"] = rows.origin.new_ones(1, batch.memory.total)
    cache = _cache_to_fill(model, arguments, names)
    if cache is not None:
        both = isinstance(cache, EncoderDecoderCache)
        row["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache()) if both else DynamicCache()
    as_tuple = arguments.get("return_dict", getattr(model.config, "return_dict", True)) is False
    output = _inside(batch, inner, **row, **({"return_dict": True} if as_tuple else {}))
    for name, x in output.items():
        if name == "pooler_output" and x is not None:
            output[name] = _pooled(model, output[0])
        elif name == "past_key_values" and x is not None:
            output[name] = _fill(cache, x, rows, batch.memory)
        else:
            output[name] = _padded(x, rows)
    return output.to_tuple() if as_tuple else output


def _padded(x: Any, rows: Layout) -> Any:
    """Pad an output: a tensor, or hidden states of all layers."""
    if isinstance(x, tuple):
        return tuple(_padded(each, rows) for each in x)
    return to_batch(x, rows) if isinstance(x, Tensor) and x.shape[:2] == (1, rows.total) else x


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
    rows, ids = batch.rows, batch.arguments.get("input_ids")
    rule = eligibility.tested_classes().get(eligibility.identity(model))
    columns: Tensor = (rows.origin % rows.columns)[None]
    if rule == "words":  # RoBERTa counts ids other than the padding token's, from that number on
        padding = getattr(model._modules.get("embeddings"), "padding_idx", model.config.pad_token_id)
        words = None if ids is None else (ids != padding).cumsum(1) * (ids != padding) + padding
        return columns + padding + 1 if words is None else to_tokens(words, rows)
    return rows.positions[None] if rule == "tokens" else columns


def _pooled(model: Any, hidden: Tensor) -> Tensor:
    """Return what a model's pooler makes of padded hidden states."""
    pooler = model._modules.get("pooler")
    if pooler is None:
        raise NotPacked("its pooler is not a module")
    is_linear = isinstance(pooler, nn.Linear)  # ALBERT's
    pooled: Tensor = model.pooler_activation(pooler(hidden[:, 0])) if is_linear else pooler(hidden)
    return pooled


def _is_empty(cache: Any) -> bool:
    """Return whether a cache is none, or one of `DynamicCache`'s that holds nothing."""
    if type(cache) is EncoderDecoderCache:
        return _is_empty(cache.self_attention_cache) and _is_empty(cache.cross_attention_cache)
    if cache is None:
        return True
    return type(cache) is DynamicCache and cache.get_seq_length() == 0


def _cache_to_fill(model: Any, arguments: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the cache that is to get the keys and values, or None if the model may make its own."""
    cache, use_cache = arguments.get("past_key_values"), arguments.get("use_cache")
    use_cache = getattr(model.config, "use_cache", False) if use_cache is None else use_cache
    if cache is None and use_cache and "past_key_values" in names:
        new = DynamicCache(config=model.config)
        if any(type(layer) is not DynamicLayer for layer in new.layers):  # which keep a window only
            return new if arguments.get("encoder_hidden_states") is None else EncoderDecoderCache(new, DynamicCache())
    return cache


def _fill(cache: Any, row: Any, rows: Layout, memory: Layout | None) -> Any:
    """Return the cache of a padded batch with the keys and values in the cache of one row; a new one for None."""
    if isinstance(row, EncoderDecoderCache):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if cache is None else cache
        cache.is_updated.update(row.is_updated)
        _fill(cache.self_attention_cache, row.self_attention_cache, rows, None)
        _fill(cache.cross_attention_cache, row.cross_attention_cache, rows if memory is None else memory, None)
        return cache
    cache = DynamicCache() if cache is None else cache
    for index, layer in enumerate(row.layers):
        if layer.is_initialized:
            cache.update(to_batch(layer.keys, rows, (0, 2)), to_batch(layer.values, rows, (0, 2)), index)
    return cache


def embed_positions(module: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run an embedding of positions in the padded batch, inside a packed call too."""
    batch = running()
    if not isinstance(batch, Packed):
        return inner(*args, **kwargs)
    if "position_ids" in names:  # BART counts columns
        return inner(*args, **{**kwargs, "position_ids": batch.rows.origin % batch.rows.columns})
    embedded = inner(*map(batch.arguments.get, ("input_ids", "inputs_embeds")))  # M2M-100 counts ids but the padding's
    return to_tokens(embedded, batch.rows)
