"""Run a Hugging Face model on one row of the real tokens of a batch, whose sequences are kept apart.

`forward` wraps the forward of each model that has `attn_implementation="fastformer"` or that `padding_free` changed:
- A padded batch `[B, L]` becomes one row of its N real tokens if `padding_free` changed the model; outputs are padded.
- The attention of a flattened batch, whose position ids begin again within a row, keeps its sequences apart, or raises.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial, update_wrapper, wraps
from importlib import resources
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, masking_utils
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils.output_capturing import CompileableContextVar, _active_collector

from fastformer.modes import compiling, has_values
from fastformer.nn.inspection import HOOKS, has_global_hooks, has_own_hooks, mixing_reason
from fastformer.nn.packed_input import zero_padding
from fastformer.packing import Layout, pack, unpack

NAME = "fastformer"  # of the attention implementation
ATTENTION_BEFORE = "_attention_before_padding_free"  # attribute that `padding_free` adds to a model
BY_TOKEN = {"input_ids", "inputs_embeds", "token_type_ids", "per_layer_inputs"}  # arguments `[B, L, ...]`
# Other arguments that may be tensors where a padded batch becomes one row.
KNOWN = {
    "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "cache_position", "num_items_in_batch",
    "position_ids", "labels",
}  # fmt: skip
CACHE_NAMES = ("cache", "past_key_values")  # the argument and the output; the second before transformers 5.24
_MOST_WASTED = 1 << 22  # padded tokens * D^2 whose products take as long as packing, measured on a CPU
_TOKEN_WISE = (nn.Embedding, Conv1D)  # beside the classes that `mixing_reason` knows; Conv1D is GPT-2's linear map
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
# Libraries whose hooks and forwards inside a model do not depend on the whole batch.
_LIBRARIES = ("transformers.", "torch.distributed.", "fastformer.", "accelerate.", "deepspeed.", "peft.")


class NotPacked(TypeError):
    """Raised inside a packed call that needs the padded batch."""


@dataclass(eq=False)
class Packed:
    """The sequences of a packed call, one after another."""

    sequences: Layout
    memory: Layout | None = None  # of an encoder's states, to which the model attends
    arguments: dict[str, Any] = field(default_factory=dict)  # of a padded batch, before they became one row


# The packed call that runs in this thread; while torch.compile traces, the number of each token's sequence `[B, L]`.
_running = CompileableContextVar("fastformer_batch")


def current(variable: CompileableContextVar = _running) -> Any:
    """Return the value of a context variable; torch.compile cannot trace one that was set outside of it."""
    return None if compiling() and not variable.compiling else variable.get()


def install(module: Any, wrapper: Any, method: str = "forward") -> None:
    """Wrap a module's method by a wrapper of this package, unless one already wraps it."""
    if not is_installed(module, method):
        inner = getattr(module, method)
        module.__dict__[method] = update_wrapper(partial(wrapper, module, inner, parameters(module)), inner)


def is_installed(module: nn.Module, method: str = "forward") -> bool:
    """Return whether the outermost wrapper of a module's method is one of this package."""
    wrapper = getattr(module.__dict__.get(method), "func", None)
    return (getattr(wrapper, "__module__", None) or "").startswith("fastformer.integrations.")


def parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional-or-keyword parameters of a module class's forward."""
    without_self = list(signature(type(module).forward).parameters.values())[1:]
    return tuple(p.name for p in without_self if p.kind is p.POSITIONAL_OR_KEYWORD)


@lru_cache(maxsize=1)
def tested_classes() -> dict[str, str]:
    """Return the base models that the survey (`tests/integrations/survey.py`) confirmed when packed, by `identity`.

    Values name what a token's default position counts: "columns", "tokens", or "words": ids that are not padding.
    """
    text = resources.files("fastformer.integrations.transformers").joinpath("tested.json").read_text(encoding="utf-8")
    return {
        name: rule for record in json.loads(text)["types"].values() for name, rule in record.get("packed", {}).items()
    }


@lru_cache(maxsize=10_000)
def _class_of(cls: Any) -> Any:
    """Return the original class of a module, of which FSDP2's `fully_shard` makes a subclass."""
    return next(c for c in cls.__mro__ if not c.__module__.startswith("torch.distributed."))


def identity(model: nn.Module) -> str:
    """Return the name of a model's class in `tested.json`."""
    cls = _class_of(type(model))  # type: ignore[arg-type]
    return f"{cls.__module__.removeprefix('transformers.models.')}.{cls.__name__}"


def calls_the_interface(model: PreTrainedModel) -> bool:
    """Return whether a model's attention goes through transformers' interface; True for classes of other packages."""
    cls: Any = next((cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models.")), None)
    return cls is None or bool(cls._can_set_attn_implementation())


def reason_for_batches(model: nn.Module) -> str | None:
    """Return which hook, replaced forward or module inside a model may depend on the whole batch, or None."""
    if has_global_hooks():
        return "hooks of all modules"
    modules = [model]  # `named_modules` takes four times as long: 0.16 ms of a BERT of 12 layers, in each call
    for module in modules:
        modules += [child for child in module._modules.values() if child is not None]
        if module is not model and (reason := _reason_of_module(module)) is not None:
            name = next(name for name, each in model.named_modules() if each is module)
            return f"{name}{reason}"
    return None


def _reason_of_module(module: nn.Module) -> str | None:
    """Return how one module may depend on the whole batch, as words behind its name, or None."""
    state = module.__dict__
    if has_own_hooks(module):
        if not all(_is_known(hook) for kind in HOOKS for hook in state[kind].values()):
            return " has hooks"
        replaced = state.get("forward")
        is_known = _is_known(getattr(replaced, "func", replaced)) or _is_known(state.get("_hf_hook"))
        if replaced is not None and not is_known:
            return " has a forward of its own"
    if state.get("expert_capacity") is not None:
        return ": experts drop what exceeds their capacity, padding included"
    return None if _was_tested(type(module)) else mixing_reason(module, _TOKEN_WISE)  # type: ignore[arg-type]


@lru_cache(maxsize=10_000)
def _was_tested(cls: Any) -> bool:
    """Return whether the survey covers a module's class: it is a container, or of a library of models."""
    cls = _class_of(cls)
    return issubclass(cls, _CONTAINERS) or cls.__module__.startswith(("transformers.", "liger_kernel."))


def _is_known(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_LIBRARIES)


def forward(model: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run a model's own forward with its sequences kept apart: as one row if the batch has padding."""
    if model.config._attn_implementation != NAME or isinstance(current(), Packed):
        return inner(*args, **kwargs)
    if "position_ids" not in names and "embed_positions" in model._modules and not compiling():
        install(model.embed_positions, embed_positions)  # in each call: users may replace it
    arguments = dict(zip(names, args, strict=False)) | kwargs
    sequences = _read_positions(model, arguments)
    if sequences is not None or compiling():
        try:
            return _inside(sequences, inner, **arguments)
        except NotPacked as error:
            _refuse(model, str(error))
    batch = _read_padding(model, arguments) if ATTENTION_BEFORE in model.__dict__ else None
    with suppress(NotPacked):
        if batch is not None:
            return _run(model, inner, names, batch)
    return inner(*args, **kwargs)


def _inside(batch: Packed | Tensor | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    token = _running.set(batch)
    try:
        return function(*args, **kwargs)
    finally:
        _running.reset(token)


def _read_positions(model: Any, arguments: dict[str, Any]) -> Packed | Tensor | None:
    """Return the sequences of a flattened batch, or None; raise ValueError if the model cannot keep them apart.

    Adds an attention mask to a flattened batch: without one, transformers would make masks of all pairs.
    """
    ids, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    ids = ids[0] if isinstance(ids, Tensor) and ids.dim() == 3 and len(ids) == 4 else ids  # text, time, height, width
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 2:
        return None
    if compiling():
        return masking_utils.find_packed_sequence_indices(ids) if mask is None else None
    if not has_values(ids):
        return None
    if identity(model) not in tested_classes() and not model.config.is_encoder_decoder:
        if any(isinstance(each, PreTrainedModel) and identity(each) in tested_classes() for each in model.modules()):
            return None  # the model inside gets the same position ids
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask != 0).all())):
        return None
    numbers = masking_utils.find_packed_sequence_indices(ids)
    if numbers is None:
        return None
    if identity(model) not in tested_classes():
        _refuse(model, "its class was not tested for that")
    if arguments.get("encoder_hidden_states") is not None:
        _refuse(model, "it attends to an encoder's states too")
    if not _is_empty(_cache_in(arguments)):
        _refuse(model, "its cache holds tokens or has a fixed length; pass use_cache=False and no cache")
    states = next((x for x in map(arguments.get, ("input_ids", "inputs_embeds")) if isinstance(x, Tensor)), ids)
    arguments["attention_mask"] = ids.new_ones(len(states), ids.shape[1])
    numbers = numbers + ids.shape[1] * torch.arange(len(states), device=ids.device)[:, None]
    lengths = numbers.flatten().unique_consecutive(return_counts=True)[1]
    return Packed(Layout.from_lengths(lengths.cpu(), ids.device))


def _refuse(model: nn.Module, reason: str) -> NoReturn:
    raise ValueError(
        "position_ids begin again within a row, which makes it a flattened batch of several sequences, and "
        f"{type(model).__name__} cannot keep them apart: {reason}. Or pass one sequence a row with an attention_mask"
    )


def _read_padding(model: Any, arguments: dict[str, Any]) -> Packed | None:
    """Return a padded batch that can run as one row, or None. Waits for the device."""
    mask, ids = arguments.get("attention_mask"), arguments.get("input_ids")
    states = arguments.get("inputs_embeds") if ids is None else ids
    if not isinstance(mask, Tensor) or not isinstance(states, Tensor) or not (has_values(mask) and has_values(states)):
        return None
    if mask.dim() != 2 or states.shape[:2] != mask.shape or not _is_empty(_cache_in(arguments)):
        return None
    tensors = {name for name, x in arguments.items() if isinstance(x, Tensor) and x.dim()}
    outputs = "output_attentions", "output_router_logits"
    needs_batch = any(arguments.get(name) or getattr(model.config, name, False) for name in outputs)
    if tensors - BY_TOKEN - KNOWN or needs_batch or _active_collector.get():
        return None
    rows = Layout.from_mask(mask == 0).to(states.device)
    if rows.total in (0, mask.numel()) or reason_for_batches(model):
        return None
    memory, memory_mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask")
    if memory is None:
        return Packed(rows, None, arguments)
    real = memory.new_ones(memory.shape[:2]) != 0 if memory_mask is None else memory_mask != 0
    if real.shape != memory.shape[:2] or len(real) != len(mask) or not bool(real.any()):
        return None
    return Packed(rows, Layout.from_mask(~real).to(memory.device), arguments)


def _run(model: Any, inner: Any, names: tuple[str, ...], batch: Packed) -> Any:
    """Run a model's own forward on one row, and pad its outputs."""
    arguments, rows = batch.arguments, batch.sequences
    as_tuple = arguments.get("return_dict", getattr(model.config, "return_dict", True)) is False
    arguments = {**arguments, "return_dict": True} if as_tuple else arguments
    if _costs_less_padded(model, rows):
        output = inner(**arguments)
        hidden = ~rows.mask()
        for name in output.keys() & {"last_hidden_state", "hidden_states"}:
            output[name] = tree_map(lambda x: zero_padding(x, hidden, True), output[name])
        return output.to_tuple() if as_tuple else output
    row = {name: to_tokens(x, rows) if name in BY_TOKEN and x is not None else x for name, x in arguments.items()}
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
        has_memory = isinstance(cache, EncoderDecoderCache)
        name = next(name for name in (*arguments, *names) if name in CACHE_NAMES)
        row[name] = EncoderDecoderCache(DynamicCache(), DynamicCache()) if has_memory else DynamicCache()
    output = _inside(batch, inner, **row)
    for name, x in output.items():
        if name == "pooler_output" and x is not None:
            output[name] = _pooled(model, output[0])
        elif name in CACHE_NAMES and x is not None:
            output[name] = _fill(cache, x, rows, batch.memory)
        else:
            output[name] = _padded(x, rows)
    return output.to_tuple() if as_tuple else output


def _costs_less_padded(model: Any, rows: Layout) -> bool:
    """Return whether few tokens take less time with their padding, in inference on a CPU."""
    width = getattr(model.config, "hidden_size", None)
    if torch.is_grad_enabled() or model.training or not rows.offsets.is_cpu or not isinstance(width, int):
        return False
    return (rows.batch * rows.columns - rows.total) * width**2 <= _MOST_WASTED


def _padded(x: Any, rows: Layout) -> Any:
    """Pad an output: a tensor, or a tuple of tensors."""
    if isinstance(x, tuple):
        return tuple(_padded(each, rows) for each in x)
    return to_batch(x, rows) if isinstance(x, Tensor) and x.shape[:2] == (1, rows.total) else x


def to_tokens(x: Tensor, rows: Layout, axes: tuple[int, int] = (0, 1)) -> Tensor:
    """Turn `[…, B, L, …]`, or a row for all, `[…, 1, L, …]`, into `[…, 1, N, …]`."""
    x = (x[None] if x.dim() == 1 else x).movedim(axes, (0, 1))
    tokens = pack(x.expand(rows.batch, *x.shape[1:]), rows)
    return tokens[None].movedim((0, 1), axes).contiguous()


def to_batch(x: Tensor, rows: Layout, axes: tuple[int, int] = (0, 1)) -> Tensor:
    """Turn `[…, 1, N, …]` into `[…, B, L, …]`, zeros in place of padding."""
    return unpack(x.movedim(axes, (0, 1))[0], rows).movedim((0, 1), axes)


def _default_positions(model: Any, batch: Packed) -> Tensor | None:
    """Return the position ids `[1, N]` that a model takes for a padded batch without any."""
    rows, ids = batch.sequences, batch.arguments.get("input_ids")
    rule = tested_classes().get(identity(model))
    columns: Tensor = (rows.origin % rows.columns)[None]
    if rule == "words":  # RoBERTa counts ids other than the padding token's, from that number on
        padding = getattr(model._modules.get("embeddings"), "padding_idx", model.config.pad_token_id)
        words = None if ids is None else (ids != padding).cumsum(1) * (ids != padding) + padding
        return columns + padding + 1 if words is None else to_tokens(words, rows)
    return rows.positions[None] if rule == "tokens" else columns


def embed_positions(module: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Embed the positions that tokens have in the padded batch, inside a packed call too."""
    batch = current()
    if not isinstance(batch, Packed):
        return inner(*args, **kwargs)
    rows = batch.sequences
    if "position_ids" in names:  # BART counts columns
        return inner(*args, **{**kwargs, "position_ids": rows.origin % rows.columns})
    embedded = inner(*map(batch.arguments.get, ("input_ids", "inputs_embeds")))  # M2M-100 counts ids, not padding
    return to_tokens(embedded, rows)


def _pooled(model: Any, hidden: Tensor) -> Tensor:
    """Return the output of a model's pooler for padded hidden states."""
    pooler = model._modules.get("pooler")
    if pooler is None:
        raise NotPacked("its pooler is not a module")
    is_linear = isinstance(pooler, nn.Linear)  # ALBERT's
    return model.pooler_activation(pooler(hidden[:, 0])) if is_linear else pooler(hidden)  # type: ignore[no-any-return]


def _cache_in(arguments: dict[str, Any]) -> Any:
    """Return the cache in the arguments of a forward, or None."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def _is_empty(cache: Any) -> bool:
    """Return whether a cache is None or an empty `DynamicCache`."""
    if type(cache) is EncoderDecoderCache:
        return _is_empty(cache.self_attention_cache) and _is_empty(cache.cross_attention_cache)
    return cache is None or (type(cache) is DynamicCache and cache.get_seq_length() == 0)


def _cache_to_fill(model: Any, arguments: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the cache that gets the keys and values, or None if the model may make one."""
    cache, use_cache = _cache_in(arguments), arguments.get("use_cache")
    use_cache = getattr(model.config, "use_cache", False) if use_cache is None else use_cache
    if cache is None and use_cache and any(name in names for name in CACHE_NAMES):
        new = DynamicCache(config=model.config)
        if any(type(layer) is not DynamicLayer for layer in new.layers):  # layers that keep a window only
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


def _name_of_attention(model: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
    """Accept the name "fastformer", except for models whose own code computes attention, such as DeBERTa."""
    if requested_attention == NAME:
        if not calls_the_interface(model):
            raise ValueError(
                f'attn_implementation="{NAME}" does not reach the attention of {type(model).__name__}, which '
                'computes it by itself, outside of transformers\' attention interface; use "eager" or "sdpa" for it'
            )
        for module in model.modules():  # transformers does not call this for models that share its configuration
            if isinstance(module, PreTrainedModel):
                install(module, forward)
    return _original(model, requested_attention, *args, **kwargs)  # type: ignore[no-any-return]


_original = PreTrainedModel.get_correct_attn_implementation
PreTrainedModel.get_correct_attn_implementation = wraps(_original)(_name_of_attention)
