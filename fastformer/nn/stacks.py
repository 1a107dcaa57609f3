"""Drop-in stacks of layers: torch.nn.TransformerEncoder and TransformerDecoder on our layers.

A stack packs a padded batch once, runs every layer on real tokens, and unpacks once: in training and in inference, with
the masks that torch takes. `packed` is the part in between, for sequences that never were padded.

Letters: B batch, T targets, S sources, D model width.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastformer.host.devices import check_types
from fastformer.modes import compiling, has_values
from fastformer.nn.layers import Pending, TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.modules import drop_in, has_hooks, twin
from fastformer.nn.padding_free import PackedInput, is_causal_mask, obstacle, read_side, zero_padding
from fastformer.nn.torch_calls import causal_hint, encoder_masks
from fastformer.packing import Layout, from_nested, pack, to_nested, unpack


class _AsTorch(threading.local):
    """Set while an encoder with hooks runs whose padding a decoder will see: its rows are then torch's, not 0.

    Where nobody looks, an argument of the encoder's says so; a hook is to see torch's call.
    """

    def __init__(self) -> None:
        self.rows = False


as_torch = _AsTorch()


class _Stack(nn.Module):
    """What encoder and decoder share.

    Attributes:
        padding_free: whether batches with a key padding mask run without their padding, whose rows come out as 0. Set
            it on a stack, or on the class for all of them; `forward` takes it for one call.
        checkpoint_activations: whether only the input of each layer is kept for backward, which computes the layer
            again: the same bits, with less memory.
    """

    padding_free: bool = True
    checkpoint_activations: bool = False

    def obstacle(self) -> str | None:
        """Return why this stack cannot run without padding, or None if it can."""
        return obstacle(self)

    @property
    def layers_batch_first(self) -> bool | None:
        """The order of dimensions that the layers take; None where they do not say, or differ."""
        layers: Any = self.layers
        parts: list[Any] = [getattr(layer, name, None) for layer in layers for name in ("self_attn", "multihead_attn")]
        orders = {part.batch_first for part in parts if hasattr(part, "batch_first")}
        return orders.pop() if len(orders) == 1 else None

    @property
    def watched(self) -> bool:
        """Whether code that is not ours sees with which arguments layers, or attention in them, are called."""
        ours = TransformerEncoderLayer, TransformerDecoderLayer
        return not all(isinstance(layer, ours) and not layer.watched for layer in self.layers)  # type: ignore[union-attr]

    @property
    def _called_padded(self) -> bool | None:
        """The order of dimensions where `packed` must call the stack with a padded batch; None where it need not.

        Where the layers do not say the order, the batch is first.
        """
        if not (has_hooks(self) or self.watched):
            return None
        order = self.layers_batch_first
        return True if order is None else order

    def _hint(self, mask: Tensor | None, stated: bool | None, x: Tensor) -> bool:
        """What torch tells layers of a self-attention mask."""
        layers: Any = self.layers
        return causal_hint(mask, stated, x, getattr(layers[0].self_attn, "batch_first", False))

    def _blank(self, output: Tensor, padding: Tensor | None, padding_free: bool | None) -> Tensor:
        """Set the rows of padding to 0 where the stack is to skip it."""
        return zero_padding(output, padding, self.layers_batch_first) if self._wanted(padding_free) else output

    def _wanted(self, padding_free: bool | None) -> bool:
        """Whether padding is to be skipped, and 0."""
        if padding_free is not None:
            return padding_free
        return self.padding_free and (compiling() or not as_torch.rows)

    def skips(self, padding_free: bool | None, *masks: Tensor | None) -> bool:
        """Whether there is padding to skip, and nothing against skipping it."""
        given = [mask for mask in masks if mask is not None]
        return self._wanted(padding_free) and len(given) > 0 and all(map(has_values, given)) and self.obstacle() is None

    def run_layer(self, layer: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
        """Call a layer as `checkpoint_activations` says."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            # All as arguments by place, which are kept the way autograd keeps tensors: it notices a mask that changes.
            called = _with_names, layer, tuple(options), *arguments, *options.values()
            return checkpoint(*called, use_reentrant=False)  # type: ignore[no-any-return]
        return layer(*arguments, **options)

    def _run_packed(self, tokens: Tensor, *arguments: Any) -> Tensor:
        """Run the layers on packed sequences, then the norm; arguments: of the layers' `packed` behind tokens."""
        check_types(("tokens",), tokens)
        layers: Any = self.layers
        x: Tensor | Pending = tokens
        for layer in layers:
            if self._carries(layer):
                x = layer.carry(x, *layer.attends(*arguments))
            else:
                x = self.run_layer(layer.packed, x.add() if isinstance(x, Pending) else x, *arguments)
        if isinstance(x, Pending):
            return x.add() if self.norm is None else x.norm(self.norm)[0]
        return x if self.norm is None else self.norm(x)  # type: ignore[operator, no-any-return]

    def _carries(self, layer: Any) -> bool:
        """Whether the last sum of a layer may be left to the norm behind it; what is computed again keeps one input."""
        ours = type(layer) in (TransformerEncoderLayer, TransformerDecoderLayer)
        return ours and layer.norm_first and not self.checkpoint_activations and "packed" not in vars(layer)

    def _check_packs(self, name: str) -> None:
        """Raise if a nested tensor meets layers that need a padded batch."""
        reason = self.obstacle()
        if reason is not None:
            raise RuntimeError(f"{name} must not be nested where layers need a padded batch: {reason}")


def _with_names(layer: Callable[..., Tensor], names: tuple[str, ...], *values: Any) -> Tensor:
    """Call a layer with values of which the last have these names."""
    first = len(values) - len(names)
    return layer(*values[:first], **dict(zip(names, values[first:], strict=True)))


@drop_in
class TransformerEncoder(_Stack, nn.TransformerEncoder):
    """torch.nn.TransformerEncoder on our layers; a layer of torch's becomes one of ours.

    A batch with a src_key_padding_mask runs without its padding (`padding_free`), and its padded rows are 0. Numbers
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
        *,
        padding_free: bool | None = None,
    ) -> Tensor:
        """Run every layer, then the norm; arguments as in the layer.

        Args:
            src: a padded batch, or a nested tensor, which comes out as one of layout torch.jagged.
            mask: as src_mask of the layer.
            src_key_padding_mask: as there.
            is_causal: states that mask is the causal mask; None = not stated.
            padding_free: overrules the attribute.
        """
        check_types(("src",), src)
        if src.is_nested:
            _refuse("src", src_key_padding_mask, mask)
            self._check_packs("src")
            tokens, layout = from_nested(src)
            return to_nested(self._run_packed(tokens, layout, bool(is_causal), None), layout)
        side = None
        if self.skips(padding_free, src_key_padding_mask) and not lacks_mask((is_causal, mask)):
            side = read_side(src, src_key_padding_mask, self.layers_batch_first)
        if side is not None:
            return side.unpack(self.encode(side, src, mask, bool(is_causal)))
        output, padding, hint = src, src_key_padding_mask, is_causal is True
        if self.watched:
            mask, padding = encoder_masks(mask, padding, src, "mask")
            hint = self._hint(mask, is_causal, src)
        for layer in self.layers:
            output = self.run_layer(layer, output, src_mask=mask, is_causal=hint, src_key_padding_mask=padding)
        output = output if self.norm is None else self.norm(output)
        return self._blank(output, src_key_padding_mask, padding_free)

    def encode(self, side: PackedInput, src: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Encode the real tokens of a padded batch: packed `[S, D]`."""
        causal = is_causal_mask(mask, is_causal, side.layout.columns)
        return self._run_packed(side.pack(src), side.layout, causal, None if causal else mask)

    def packed(self, tokens: Tensor, layout: Layout, causal: bool = False, mask: Tensor | None = None) -> Tensor:
        """Encode packed sequences: `[S, D]` -> `[S, D]`.

        Args:
            tokens: of all sequences, one after another.
            layout: where they lie.
            causal: whether a token attends to itself and earlier ones of its sequence only.
            mask: as in forward, over layout.columns.

        Hooks on the stack, its layers and their attention, and layers and attention of somebody's own, are called by
        `forward` with a padded batch. Other parts see tokens.
        """
        batch_first = self._called_padded
        if batch_first is None:
            return self._run_packed(tokens, layout, causal, mask)
        mask = _mask_of(causal, mask, layout)
        padded = unpack(tokens, layout, batch_first)
        return pack(self(padded, mask, ~layout.mask(), causal or None), layout, batch_first)


@drop_in
class TransformerDecoder(_Stack, nn.TransformerDecoder):
    """torch.nn.TransformerDecoder on our layers; a layer of torch's becomes one of ours.

    A batch with a tgt_key_padding_mask or a memory_key_padding_mask runs without that padding (`padding_free`), and
    its padded rows are 0. Numbers of real tokens are torch's.
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
        *,
        padding_free: bool | None = None,
    ) -> Tensor:
        """Run every layer, then the norm; arguments as in the layer.

        Args:
            tgt, memory: padded batches, or nested tensors, and then the output is one of layout torch.jagged.
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, memory_is_causal: as in the layer.
            tgt_is_causal: states that tgt_mask is the causal mask; None = not stated.
            padding_free: overrules the attribute.
        """
        check_types(("tgt",), tgt)
        usual = isinstance(memory, Tensor)  # layers of your own may take something else, or None, as in torch
        if tgt.is_nested or (usual and memory.is_nested):
            _refuse("tgt and memory", tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
            self._check_packs("tgt")
            (tokens, layout), (keys, key_layout) = from_nested(tgt), from_nested(memory)
            tokens = self._run_packed(tokens, layout, keys, key_layout, bool(tgt_is_causal), None, None)
            return to_nested(tokens, layout)
        lacking = lacks_mask((tgt_is_causal, tgt_mask), (memory_is_causal, memory_mask))
        if usual and self.skips(padding_free, tgt_key_padding_mask, memory_key_padding_mask) and not lacking:
            source = read_side(memory, memory_key_padding_mask, self.layers_batch_first)
            if source is not None:
                side = self.read_target(tgt, tgt_key_padding_mask, source)
                if side is not None:
                    memory = source.pack(memory)
                    return self.decode(side, tgt, source, memory, tgt_mask, memory_mask, bool(tgt_is_causal))
        output, hint = tgt, tgt_is_causal is True
        if self.watched:
            hint = self._hint(tgt_mask, tgt_is_causal, tgt)
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
        return self._blank(output, tgt_key_padding_mask, padding_free)

    def read_target(self, tgt: Tensor, padding: Tensor | None, source: PackedInput) -> PackedInput | None:
        """Read the target side; None if it does not fit the source's, which the padded way then reports."""
        side = read_side(tgt, padding, self.layers_batch_first)
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
            layout: where they lie.
            memory: of all sources, one after another.
            memory_layout: where they lie.
            causal: whether a target attends to itself and earlier ones of its sequence only.
            tgt_mask, memory_mask: as in forward, over the columns of the layouts.

        Hooks and parts of somebody's own: as in the encoder.
        """
        batch_first = self._called_padded
        if batch_first is None:
            return self._run_packed(tokens, layout, memory, memory_layout, causal, tgt_mask, memory_mask)
        masks: dict[str, Any] = {
            "tgt_mask": _mask_of(causal, tgt_mask, layout),
            "memory_mask": memory_mask,
            "tgt_key_padding_mask": ~layout.mask(),
            "memory_key_padding_mask": ~memory_layout.mask(),
            "tgt_is_causal": causal or None,
        }
        padded = unpack(tokens, layout, batch_first), unpack(memory, memory_layout, batch_first)
        return pack(self(*padded, **masks), layout, batch_first)


def _mask_of(causal: bool, mask: Tensor | None, layout: Layout) -> Tensor | None:
    """The mask of the padded batch that packed tokens came from."""
    if not causal:
        return mask
    if mask is not None:
        raise ValueError("causal must be False with attn_mask, which says who attends to whom")
    return torch.ones(layout.columns, layout.columns, dtype=torch.bool, device=layout.offsets.device).triu_(1)


def _refuse(name: str, *masks: Tensor | None) -> None:
    """Raise if a nested tensor comes with a mask."""
    if any(mask is not None for mask in masks):
        raise ValueError(f"{name} must not be nested where a mask is given: nested tensors hold no padding")


def lacks_mask(*hints: tuple[bool | None, Tensor | None]) -> bool:
    """Whether a mask is said to be causal that is not given, which the padded way refuses."""
    return any(stated and mask is None for stated, mask in hints)
