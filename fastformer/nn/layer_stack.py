"""The base class of encoder and decoder stacks: packed and padded runs, attention weights, cached steps.

A stack packs a padded batch once, runs every layer on real tokens, and unpacks once.

Letters: B batch, R rows of a cache, t new tokens a row, T packed tokens, D model width.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastformer.backend import backend, get_backend
from fastformer.host.autograd_function import draw_seeds_together
from fastformer.host.devices import check_types
from fastformer.modes import compiling, needs_dispatcher
from fastformer.nn.cache import KVCache
from fastformer.nn.compiled_stack import CompiledStack
from fastformer.nn.fast_path import run_one_token, run_packed, takes_one_token, takes_packed
from fastformer.nn.inspection import (
    Inspection,
    check_layerwise,
    has_own_hooks,
    inspect_stack,
    is_sharded,
    is_unmodified,
)
from fastformer.nn.layers import DeferredResidual, TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.modules import NORMS, are_few_on_cpu
from fastformer.nn.packed_input import (
    Masks,
    PackedInput,
    finite_padding,
    is_causal_mask,
    mask_of_packed,
    pack_input,
    pack_nested,
    torchs_form,
    zero_padding,
)
from fastformer.packing import Layout, pack, unpack

_LAYERS = (TransformerEncoderLayer, TransformerDecoderLayer)
# Padded tokens * D^2 whose products take as long as packing, measured on a CPU: in inference and in training.
_MOST_WASTED = 1 << 21, 1 << 18


class Stack(nn.Module):
    """The base class of encoder and decoder stacks.

    Attributes:
        padding_free: whether batches with a key padding mask run without their padding; padded rows of the output are
            then 0. Set it on a stack, or on the class for all stacks; `forward` overrides it for one call. NaN and inf
            in padding then change no other value, also if the batch runs padded. With False they spread within their
            sequence and into gradients of parameters, as in torch.
        checkpoint_activations: whether only the input of each layer is stored for backward, which computes the layer
            again: the same bits, with less memory. As with torch's checkpoint, that reads the module's own parameters
            under `torch.func.functional_call`, too.
        mask_keywords: the arguments of a layer for the `Masks` of each of its attentions.
    """

    padding_free: bool = True
    checkpoint_activations: bool = False
    mask_keywords: ClassVar[tuple[tuple[str, str, str], ...]]

    def obstacle(self) -> str | None:
        """Return why this stack cannot run without padding, or None if it can."""
        return inspect_stack(self).obstacle

    def compile(self, *, buckets: bool = False, **options: Any) -> None:
        """Compile the stack in place; batches with padding still run without it.

        Packing stays eager, and the layers are compiled as one graph on packed tokens. A batch that must run padded
        (see `obstacle`) is compiled as one graph, too. `torch.compile` of a model around the stack is one graph of the
        whole model, in which the stack runs padded.

        Args:
            buckets: whether the numbers of tokens are rounded up, by at most an eighth, so that few sizes occur, as
                CUDA graphs need; `dynamic` is then False by default: one graph a bucket. A batch with another
                attention mask than the causal one is then not compiled.
            options: those of torch.compile.
        """
        self._compiled_call_impl = CompiledStack(self, buckets, options)

    def run(
        self,
        x: Tensor,
        memory: Any,
        masks: Sequence[Masks],
        padding_free: bool | None = None,
        need_weights: bool = False,
        keep_packed: bool = False,
    ) -> Any:
        """Run every layer, then the norm, packed if the batch allows it; arguments as in the stacks' `forward`.

        Args:
            memory: of a decoder; may be the packed output of an encoder.
            masks: of self-attention, and of a decoder's attention to the memory.
            keep_packed: whether a packed run returns a `PackedInput`.
        """
        inspection = inspect_stack(self)
        free = self.padding_free if padding_free is None else padding_free
        sources: list[Any] = [x, memory][: len(masks)]
        may_pack = free and not need_weights and inspection.obstacle is None
        keeps_padding = may_pack and self._costs_less_padded(sources, masks)
        inputs = None if need_weights or keeps_padding else self._pack(inspection, free, sources, masks)
        if inputs is not None:
            own, length = masks[0], inputs[0].layout.columns
            causal = is_causal_mask(own, length)
            arguments = [inputs[0].layout, causal, None if causal else own.mask]
            for source in inputs[1:]:
                arguments += [source.tokens, source.layout, masks[1].mask]
            output = inputs[0]._replace(tokens=self._run_packed(inputs[0].tokens, *arguments))
            return output if keep_packed else output.unpack()
        memory = memory.unpack() if isinstance(memory, PackedInput) else memory
        if (compiled := self._compiled()) is not None:
            return compiled.run(x, memory, masks, padding_free, need_weights)
        batch_first = inspection.batch_first
        hidden = [m.padding if free else None for m in masks]
        clean = zero_padding if keeps_padding else finite_padding
        x, memory = clean(x, hidden[0], batch_first), clean(memory, hidden[-1], batch_first)
        causal = masks[0].is_causal is True
        if keeps_padding:
            causal = is_causal_mask(masks[0], x.shape[1 if batch_first and x.dim() == 3 else 0])
        own = masks[0]._replace(is_causal=causal)
        if need_weights:
            x, *weights = self._run_with_weights(x, memory, (own, *masks[1:]))
            return zero_padding(x, hidden[0], batch_first), *weights
        if inspection.must_be_called is not None:
            first: Any = self.layers[0]  # type: ignore[index]
            own = torchs_form(masks[0], x, first.self_attn.batch_first, canonical=len(masks) == 1)
        options: dict[str, Any] = {}
        for names, values in zip(self.mask_keywords, (own, *masks[1:]), strict=True):
            options |= zip(names, values, strict=True)
        for layer in self.layers:  # type: ignore[union-attr]
            x = self._run_layer(layer, x, *[memory][: len(masks) - 1], **options)
        return zero_padding(x if self.norm is None else self.norm(x), hidden[0], batch_first)  # type: ignore[operator]

    def _pack(
        self, inspection: Inspection, free: bool, inputs: list[Any], masks: Sequence[Masks]
    ) -> list[PackedInput] | None:
        """Pack the input, and the memory if there is one; None if the batch runs padded, or they do not fit."""
        x, memory = inputs[0], inputs[-1]
        nested_memory = memory.nested if isinstance(memory, PackedInput) else getattr(memory, "is_nested", False)
        if x.is_nested or nested_memory:
            names = "src" if len(inputs) == 1 else "tgt and memory"
            return pack_nested(names, inputs, masks, inspection.obstacle)
        has_padding = isinstance(memory, PackedInput) or any(m.padding is not None for m in masks)
        if inspection.obstacle is not None or not (free and has_padding):
            return None
        batch_first, across = inspection.batch_first, "multihead_attn" in inspection.position_dependent
        if len(masks) > 1:
            # A custom layer may take a memory that is no tensor.
            if not isinstance(memory, Tensor | PackedInput) or (masks[1].is_causal and masks[1].mask is None):
                return None
            if isinstance(memory, Tensor):
                memory = pack_input(memory, masks[1].padding, batch_first, from_start=across)
            elif across and not memory.layout.starts_rows:
                return None
            if memory is None:
                return None
        packed = pack_input(x, masks[0].padding, batch_first, "self_attn" in inspection.position_dependent, across)
        if packed is None or len(masks) == 1:
            return None if packed is None else [packed]
        fits = packed.layout.batch == memory.layout.batch and packed[2:] == memory[2:]
        return [packed, memory] if fits else None

    def _costs_less_padded(self, inputs: list[Tensor], masks: Sequence[Masks]) -> bool:
        """Return whether few tokens take less time with their padding, on a CPU.

        Whether gradients are enabled decides nothing: a checkpoint computes the layers without them first.
        """
        if self._compiled() is not None or not all(map(are_few_on_cpu, inputs)):
            return False
        paddings = [m.padding for m in masks if m.padding is not None]
        if any(type(p) is not Tensor or p.dtype != torch.bool or not p.is_cpu for p in paddings):
            return False
        return sum(int(p.sum()) for p in paddings) * inputs[0].shape[-1] ** 2 <= _MOST_WASTED[self.training]

    def _run_layer(self, layer: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
        """Call a layer, with activation checkpointing if `checkpoint_activations` is set."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            # Backward may compute the layer again after the end of a `with backend(...)`; compiled code has chosen.
            run = _with_names if compiling() else backend(get_backend())(_with_names)
            # Positional tensors are saved as autograd saves tensors, which detects a mask that changes.
            call = run, layer, tuple(options), *arguments, *options.values()
            return checkpoint(*call, use_reentrant=False)  # type: ignore[no-any-return]
        return layer(*arguments, **options)

    def _packed(self, tokens: Tensor, layout: Layout, causal: bool, mask: Tensor | None, *memory: Any) -> Tensor:
        """Run the stack on packed sequences; on their padded batch if the stack, a layer or attention must be called.

        memory: of a decoder: the tokens, their layout and the mask.
        """
        inspection = inspect_stack(self)
        if inspection.must_be_called is None and not has_own_hooks(self):
            return self._run_packed(tokens, layout, causal, mask, *memory)
        batch_first = inspection.batch_first is not False
        inputs = [unpack(tokens, layout, batch_first)]
        masks = [Masks(mask_of_packed(causal, mask, layout), ~layout.mask(), causal or None)]
        if memory:
            inputs.append(unpack(memory[0], memory[1], batch_first))
            masks.append(Masks(memory[2], ~memory[1].mask(), False))
        arguments = [x for values in zip(*masks, strict=True) for x in values]
        return pack(self(*inputs, *arguments), layout, batch_first)

    def _run_packed(self, tokens: Tensor, *arguments: Any) -> Tensor:
        """Run the layers on packed sequences, then the norm; arguments: of the layers' `packed_attentions`."""
        check_types(("tokens",), tokens)
        compiled = self._compiled()
        if compiled is not None and compiled.takes(*arguments):
            return compiled.run_packed(tokens, *arguments)
        if takes_packed(self, tokens, *arguments):
            return run_packed(self, tokens, *arguments)

        def call(layer: Any, x: Tensor) -> Tensor:
            if not is_sharded(layer):
                return self._run_layer(_compose_packed, layer, x, *arguments)
            # A sharded layer is called, because its hooks gather the parameters.
            layout, causal, mask, *memory = arguments

            def run(layer: Any, x: Tensor, *tokens: Tensor) -> Tensor:
                return _compose_packed(layer, x, layout, causal, mask, *tokens, *memory[1:])

            return self._run_layer(layer, x, *memory[:1], run)

        with nullcontext() if compiling() else draw_seeds_together():
            return self._run(tokens, lambda _, layer: layer.packed_attentions(*arguments), call)

    def _compiled(self) -> CompiledStack | None:
        """Return the compiled functions, if there are some and nothing traces or observes this call."""
        compiled = self._compiled_call_impl
        return compiled if isinstance(compiled, CompiledStack) and not needs_dispatcher() else None

    def _run(
        self,
        x: Tensor,
        attentions: Callable[[int, Any], tuple[Any, ...]],
        call: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run the layers, then the norm.

        Args:
            x: the input of the first layer.
            attentions: returns the attention callables for `compose`, from a layer's index and the layer.
            call: runs a layer of another class, or with activation checkpointing; None: its `compose`.
        """
        layers: Any = self.layers
        norm: Any = self.norm
        carried: Tensor | DeferredResidual = x
        for index, layer in enumerate(layers):
            carries = type(layer) in _LAYERS and not self.checkpoint_activations
            if carries and layer.norm_first:
                carried = layer.carry(carried, *attentions(index, layer))
                continue
            if isinstance(carried, DeferredResidual):
                carried = carried.add()
            if call is None or carries:
                carried = layer.compose(carried, *attentions(index, layer))
            else:
                carried = call(layer, carried)
        if not isinstance(carried, DeferredResidual):
            return carried if norm is None else norm(carried)
        return carried.add() if norm is None else carried.norm(norm, is_unmodified(norm, *NORMS))[0]

    def _run_with_weights(self, x: Tensor, memory: Tensor | None, masks: Sequence[Masks]) -> tuple[Any, ...]:
        """Run the layers on a padded batch, then the norm; also return all weights, `[layers, B, H, T, S]`."""
        if x.is_nested:
            raise ValueError("need_weights takes padded batches, not nested tensors")
        check_layerwise(self, "need_weights")
        weights: tuple[list[Tensor], ...] = ([], [])
        out = self._run(x, lambda _, layer: layer.padded_attentions(memory, masks, weights))
        return out, *(torch.stack(of_layers) for of_layers in weights if of_layers)

    @torch.no_grad()
    def step(self, x: Tensor, cache: KVCache, lengths: Tensor | Layout | None = None) -> Tensor:
        """Run the next tokens of each row, from left to right: return the outputs of `forward` at their positions.

        Call `.eval()` before, because dropout applies in training mode.

        Args:
            x: `[R, t, D]`, or `[t, R, D]` where the layers are not batch_first; packed `[T, D]` with a layout.
            cache: from `new_cache` of this stack, or of the stack that this one was copied from afterwards; the new
                tokens are added to it.
            lengths: int64 `[R]`, on the CPU: how many of the t tokens of each row are real; 0 is allowed. The rest is
                padding behind them, whose outputs are 0. Or the layout of packed tokens. None: all t are real.

        Returns:
            The outputs, of the shape of x, without gradients.

        Raises:
            ValueError: x or lengths do not fit the cache, the cache does not fit the stack, or a row would exceed
                `longest`. The cache is then unchanged.
            RuntimeError: since `new_cache`, a layer or attention got hooks or another class. Other modules are only
                checked by `new_cache`: a later replacement must treat each token alone.
        """
        if len(cache.layers) != len(self.layers):  # type: ignore[arg-type]
            raise ValueError(f"the cache is of another stack: it has {len(cache.layers)} layers")
        if cache.stack_id != self.__dict__.get("_stack_id"):
            raise ValueError("the cache is of another stack: make one with new_cache of this stack")
        tokens, layout = cache.tokens_of(x, lengths)
        count = tokens.shape[1]
        fast = layout is None and takes_one_token(self, tokens, cache)
        if not fast:
            check_layerwise(self, "decoding with a cache")
        write = cache.write(count, layout)
        out: Tensor
        if fast:
            out = run_one_token(self, tokens[:, 0], write, cache)[:, None]
        else:
            out = self._run(tokens, lambda index, layer: cache.attentions(index, layer, write))
        cache.advance(count, layout)
        if layout is None:
            return out if cache.batch_first else out.transpose(0, 1)
        return out if isinstance(lengths, Layout) else unpack(out, layout, cache.batch_first)


def _compose_packed(layer: Any, x: Tensor, *arguments: Any) -> Tensor:
    return layer.compose(x, *layer.packed_attentions(*arguments))  # type: ignore[no-any-return]


def _with_names(layer: Callable[..., Tensor], names: tuple[str, ...], *values: Any) -> Tensor:
    """Call a layer; the last values are keyword arguments with these names."""
    first = len(values) - len(names)
    return layer(*values[:first], **dict(zip(names, values[first:], strict=True)))
