"""Drop-in stacks of layers: torch.nn.TransformerEncoder and TransformerDecoder on fastformer's layers.

A stack packs a padded batch once, runs every layer on real tokens, and unpacks once: in training and in inference, with
torch's masks. `packed` only runs the layers, for sequences that are packed already.

Letters: B batch, T targets, S sources, D model width.
"""

from typing import Any

from torch import Tensor, nn

from fastformer.host.devices import check_masks, check_types
from fastformer.nn.cache import KVCache, without_gaps
from fastformer.nn.inspection import inspect_stack
from fastformer.nn.layer_stack import Stack
from fastformer.nn.modules import drop_in, twin
from fastformer.nn.packed_input import (
    PackedInput,
    causal_hint,
    encoder_masks,
    finite_padding,
    is_causal_mask,
    mask_of_packed,
    read_side,
    zero_padding,
)
from fastformer.nn.static_cache import make_cache
from fastformer.packing import Layout, from_nested, pack, to_nested, unpack


@drop_in
class TransformerEncoder(Stack, nn.TransformerEncoder):
    """torch.nn.TransformerEncoder on fastformer's layers; a torch.nn layer is converted.

    A batch with a src_key_padding_mask runs without its padding (`padding_free`), and its padded rows are 0. Outputs
    of real tokens are torch's. A mask may have padding anywhere; one of 0 and -inf counts as bool.

    Args:
        encoder_layer: copied num_layers times.
        num_layers: of the stack.
        norm: applied at the end, or None.
        enable_nested_tensor: changes nothing; `padding_free` decides.
        mask_check: changes nothing; the mask is always read.
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(twin(encoder_layer), num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)  # type: ignore[arg-type]
        self.enable_nested_tensor = enable_nested_tensor
        self.norm = None if norm is None else twin(norm)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        padding_free: bool | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Run every layer, then the norm; arguments as in the layer.

        Args:
            src: a padded batch, or a nested tensor; the output is then nested, with layout torch.jagged.
            mask: as src_mask of the layer.
            src_key_padding_mask: as in the layer.
            is_causal: states that mask is the causal mask, which may then be omitted; None: not stated.
            padding_free: overrides the attribute for this call.
            need_weights: whether the weights of all layers and heads are also returned; the batch then runs padded.

        Returns:
            The output, of src's shape; with need_weights, a pair: the output and the weights `[layers, B, H, S, S]`.

        Raises:
            RuntimeError: need_weights, and a layer or its attention has hooks or another class.
        """
        check_types(("src",), src)
        check_masks(("mask", "src_key_padding_mask"), mask, src_key_padding_mask)
        inspection = inspect_stack(self)
        if src.is_nested and not need_weights:
            _refuse("src", inspection.obstacle, src_key_padding_mask, mask)
            tokens, layout = from_nested(src)
            return to_nested(self._run_packed(tokens, layout, bool(is_causal), None), layout)
        if not need_weights and self.skips(inspection, padding_free, src_key_padding_mask):
            side = read_side(src, src_key_padding_mask, inspection.batch_first, bool(inspection.counting))
            if side is not None:
                return side.unpack(self.encode(side, src, mask, bool(is_causal)))
        zeroed = src_key_padding_mask if self.zeroes(padding_free) else None
        output = src = finite_padding(src, zeroed, inspection.batch_first)
        padding, hint = src_key_padding_mask, is_causal is True
        if need_weights:
            out, weights = self._run_with_weights(src, (mask, padding, hint))
            return zero_padding(out, zeroed, inspection.batch_first), weights
        if inspection.called is not None:  # in torch's form
            mask, padding = encoder_masks(mask, padding, src)
            hint = causal_hint(mask, is_causal, src, self.layers[0].self_attn.batch_first)
        for layer in self.layers:
            output = self.run_layer(layer, output, src_mask=mask, is_causal=hint, src_key_padding_mask=padding)
        output = output if self.norm is None else self.norm(output)
        return zero_padding(output, zeroed, inspection.batch_first)

    def encode(self, side: PackedInput, src: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Encode the real tokens of a padded batch: packed `[S, D]`."""
        causal = is_causal_mask(mask, is_causal, side.layout.columns)
        return self._run_packed(side.pack(src), side.layout, causal, None if causal else mask)

    def packed(self, tokens: Tensor, layout: Layout, causal: bool = False, mask: Tensor | None = None) -> Tensor:
        """Encode packed sequences: `[S, D]` -> `[S, D]`.

        Args:
            tokens: of all sequences, one after another.
            layout: the layout of tokens.
            causal: whether a token attends only to itself and earlier tokens of its sequence.
            mask: as in forward, over layout.columns.

        The stack is called on a padded batch if it, a layer or attention has hooks or another class.
        """
        batch_first = self._called_padded
        if batch_first is None:
            return self._run_packed(tokens, layout, causal, mask)
        mask = mask_of_packed(causal, mask, layout)
        padded = unpack(tokens, layout, batch_first)
        return pack(self(padded, mask, ~layout.mask(), causal or None), layout, batch_first)

    def new_cache(self, rows: int, *, longest: int | None = None, capacity: int | None = None) -> KVCache:
        """Make an empty cache for `step`, with which a causal encoder reads `rows` sequences from left to right.

        Args:
            rows: R.
            longest: the most tokens that a row may read, and the largest capacity.
            capacity: a fixed capacity in tokens, at fixed addresses, as CUDA graphs need
                (`fastformer.nn.static_cache`). It also limits the tokens of a row; `longest` must then be None.

        Raises:
            ValueError: a number is out of range, or both longest and capacity are given.
            RuntimeError: a layer or attention has hooks or another class, or a module may look at several positions.
        """
        return make_cache(self, rows, None, 1, longest, capacity)


@drop_in
class TransformerDecoder(Stack, nn.TransformerDecoder):
    """torch.nn.TransformerDecoder on fastformer's layers; a torch.nn layer is converted.

    A batch with a key padding mask runs without that padding (`padding_free`); its padded rows are 0.
    """

    def __init__(self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__(twin(decoder_layer), num_layers, norm)  # type: ignore[arg-type]
        self.norm = None if norm is None else twin(norm)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        padding_free: bool | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Run every layer, then the norm; arguments as in the layer.

        Args:
            tgt, memory: padded batches, or nested tensors; the output is then nested, with layout torch.jagged.
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, memory_is_causal: as in the layer.
            tgt_is_causal: states that tgt_mask is the causal mask, which may then be omitted; None: not stated.
            padding_free: overrides the attribute for this call.
            need_weights: whether the weights of all layers and heads are also returned; the batch then runs padded.

        Returns:
            The output, of tgt's shape; with need_weights also the weights of self-attention `[layers, B, H, T, T]` and
            of attention to the memory `[layers, B, H, T, S]`.

        Raises:
            RuntimeError: as in the encoder.
        """
        check_types(("tgt",), tgt)
        inspection = inspect_stack(self)
        tensor_memory = isinstance(memory, Tensor)  # custom layers may take another type, or None, as in torch
        if not need_weights and (tgt.is_nested or (tensor_memory and memory.is_nested)):
            masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
            _refuse("tgt and memory", inspection.obstacle, *masks)
            (tokens, layout), (keys, key_layout) = from_nested(tgt), from_nested(memory)
            tokens = self._run_packed(tokens, layout, keys, key_layout, bool(tgt_is_causal), None, None)
            return to_nested(tokens, layout)
        if (
            tensor_memory
            and not need_weights
            and self.skips(inspection, padding_free, tgt_key_padding_mask, memory_key_padding_mask)
            and not (memory_is_causal and memory_mask is None)
        ):
            cross = "multihead_attn" in inspection.counting
            source = read_side(memory, memory_key_padding_mask, inspection.batch_first, from_start=cross)
            if source is not None:
                side = self.read_target(tgt, tgt_key_padding_mask, source, inspection.counting)
                if side is not None:
                    memory = source.pack(memory)
                    return self.decode(side, tgt, source, memory, tgt_mask, memory_mask, bool(tgt_is_causal))
        zeroed = (tgt_key_padding_mask, memory_key_padding_mask) if self.zeroes(padding_free) else (None, None)
        output = tgt = finite_padding(tgt, zeroed[0], inspection.batch_first)
        memory = finite_padding(memory, zeroed[1], inspection.batch_first)
        hint = tgt_is_causal is True
        if need_weights:
            own_masks = tgt_mask, tgt_key_padding_mask, hint
            memory_masks = memory_mask, memory_key_padding_mask, memory_is_causal
            out, *weights = self._run_with_weights(tgt, memory, own_masks, memory_masks)
            return zero_padding(out, zeroed[0], inspection.batch_first), *weights
        if inspection.called is not None:  # in torch's form
            check_masks(("tgt_mask",), tgt_mask)
            hint = causal_hint(tgt_mask, tgt_is_causal, tgt, self.layers[0].self_attn.batch_first)
        for layer in self.layers:
            output = self.run_layer(
                layer,
                output,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=hint,
                memory_is_causal=memory_is_causal,
            )
        output = output if self.norm is None else self.norm(output)
        return zero_padding(output, zeroed[0], inspection.batch_first)

    def read_target(
        self, tgt: Tensor, padding: Tensor | None, source: PackedInput, counting: set[str]
    ) -> PackedInput | None:
        """Return the target side; None if it does not fit the source side, which the padded run then reports."""
        counts = "self_attn" in counting, "multihead_attn" in counting
        side = read_side(tgt, padding, source.batch_first, *counts)
        fits = side is not None and side.layout.batch == source.layout.batch and side.batched == source.batched
        return side if fits else None

    def decode(
        self,
        side: PackedInput,
        tgt: Tensor,
        source: PackedInput,
        memory: Tensor,
        tgt_mask: Tensor | None,
        memory_mask: Tensor | None,
        tgt_is_causal: bool,
    ) -> Tensor:
        """Decode the real tokens of a padded batch with packed memory `[S, D]`; the output is padded."""
        causal = is_causal_mask(tgt_mask, tgt_is_causal, side.layout.columns)
        tgt_mask = None if causal else tgt_mask
        tokens = side.pack(tgt)
        return side.unpack(self._run_packed(tokens, side.layout, memory, source.layout, causal, tgt_mask, memory_mask))

    def packed(
        self,
        tokens: Tensor,
        layout: Layout,
        memory: Tensor,
        memory_layout: Layout,
        causal: bool = True,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Decode packed sequences: `[T, D]` with memory `[S, D]` -> `[T, D]`.

        Args:
            tokens: of all targets, one after another.
            layout: the layout of tokens.
            memory: the encoder's outputs of all sources, one after another.
            memory_layout: the layout of memory.
            causal: whether a target attends only to itself and earlier targets of its sequence.
            tgt_mask, memory_mask: as in forward, over the columns of the layouts.
        """
        batch_first = self._called_padded
        if batch_first is None:
            return self._run_packed(tokens, layout, memory, memory_layout, causal, tgt_mask, memory_mask)
        masks: dict[str, Any] = {
            "tgt_mask": mask_of_packed(causal, tgt_mask, layout),
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": ~layout.mask(),
            "memory_key_padding_mask": ~memory_layout.mask(),
            "tgt_is_causal": causal or None,
        }
        padded = unpack(tokens, layout, batch_first), unpack(memory, memory_layout, batch_first)
        return pack(self(*padded, **masks), layout, batch_first)

    def new_cache(
        self,
        memory: Tensor,
        memory_key_padding_mask: Tensor | None = None,
        *,
        memory_layout: Layout | None = None,
        hypotheses: int = 1,
        longest: int | None = None,
        capacity: int | None = None,
    ) -> KVCache:
        """Make a cache for `step`: it holds the keys and values of the memory, and no token yet.

        Args:
            memory: the encoder's output, `[B, S, D]`, `[S, B, D]` where the layers are not batch_first, nested, or
                packed `[S, D]` with its layout.
            memory_key_padding_mask: `[B, S]`, True or -inf = ignore.
            memory_layout: of packed memory.
            hypotheses: N, the rows that share a sentence's memory: rows b * N to b * N + N - 1 are those of sentence b.
            longest, capacity: as in the encoder.

        Raises:
            ValueError: the memory does not fit the mask or layout; for longest and capacity as in the encoder.
            RuntimeError: as in the encoder.
        """
        check_masks(("memory_key_padding_mask",), memory_key_padding_mask)
        if memory.is_nested:
            _refuse("memory", None, memory_key_padding_mask)
            memory, memory_layout = from_nested(memory)
        elif memory_layout is None:
            side = read_side(memory, memory_key_padding_mask, inspect_stack(self).batch_first)
            if side is None or not side.batched:
                raise ValueError(
                    "memory must be a padded batch, with a mask [B, S] of bool or of 0 and -inf, if any, whose values "
                    "are known: not under torch.compile or torch.jit.trace"
                )
            memory, memory_layout = side.pack(memory), side.layout
        elif memory_key_padding_mask is not None:
            raise ValueError("memory_key_padding_mask must be None with memory_layout: packed memory has no padding")
        packed_memory = memory, without_gaps(memory_layout, memory.device)
        return make_cache(self, memory_layout.batch * hypotheses, packed_memory, hypotheses, longest, capacity)


def _refuse(name: str, obstacle: str | None, *masks: Tensor | None) -> None:
    """Raise if a nested tensor is given with a mask, or to layers that need a padded batch."""
    if any(mask is not None for mask in masks):
        raise ValueError(f"{name} must not be nested where a mask is given: nested tensors hold no padding")
    if obstacle is not None:
        raise RuntimeError(f"{name} must not be nested where layers need a padded batch: {obstacle}")
