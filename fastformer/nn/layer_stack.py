"""The base class of encoder and decoder stacks: packed runs, recomputed activations, attention weights, cached steps.

Letters: R rows of a cache, t new tokens a row, T packed tokens, D model width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastformer.host.devices import check_types
from fastformer.modes import has_values
from fastformer.nn.cache import KVCache, check_apart
from fastformer.nn.fast_path import has_fast_path, one_token, runs_fast_path
from fastformer.nn.inspection import Inspection, has_own_hooks, inspect_stack, is_sharded, plain
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.sublayers import NORMS, DeferredResidual
from fastformer.packing import Layout, unpack

_LAYERS = (TransformerEncoderLayer, TransformerDecoderLayer)


class Stack(nn.Module):
    """The base class of encoder and decoder stacks.

    Attributes:
        padding_free: whether batches with a key padding mask run without their padding; padded rows of the output are
            then 0. Set it on a stack, or on the class for all stacks; `forward` overrides it for one call. NaN and inf
            in padding then change no other value, also if the batch runs padded. With False they spread within their
            sequence and into gradients of parameters, as in torch.
        checkpoint_activations: whether only the input of each layer is stored for backward, which computes the layer
            again: the same bits, with less memory.
    """

    padding_free: bool = True
    checkpoint_activations: bool = False

    def obstacle(self) -> str | None:
        """Return why this stack cannot run without padding, or None if it can."""
        return inspect_stack(self).obstacle

    @property
    def _called_padded(self) -> bool | None:
        """The batch_first with which `packed` must call the stack on a padded batch; None if it runs packed.

        It is True if the layers do not state the order of dimensions.
        """
        inspection = inspect_stack(self)
        if inspection.called is None and not has_own_hooks(self):
            return None
        return True if inspection.batch_first is None else inspection.batch_first

    def zeroes(self, padding_free: bool | None) -> bool:
        """Return whether to skip padding and set its rows to 0; padding_free: overrides the attribute."""
        return self.padding_free if padding_free is None else padding_free

    def skips(self, inspection: Inspection, padding_free: bool | None, *masks: Tensor | None) -> bool:
        """Return whether a batch with these key padding masks can run without its padding."""
        if inspection.obstacle is not None or not (self.padding_free if padding_free is None else padding_free):
            return False
        for mask in masks:
            if mask is not None and not (isinstance(mask, Tensor) and has_values(mask)):
                return False
        return masks[0] is not None or masks[-1] is not None

    def run_layer(self, layer: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
        """Call a layer, with activation checkpointing if `checkpoint_activations` is set."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            # Positional tensors are saved as autograd saves tensors, which detects a mask that changes.
            call = _with_names, layer, tuple(options), *arguments, *options.values()
            return checkpoint(*call, use_reentrant=False)  # type: ignore[no-any-return]
        return layer(*arguments, **options)

    def _run_packed(self, tokens: Tensor, *arguments: Any) -> Tensor:
        """Run the layers on packed sequences, then the norm; arguments: of the layers' `packed_attentions`."""
        check_types(("tokens",), tokens)
        return self._run(
            tokens,
            lambda _, layer: layer.packed_attentions(*arguments),
            lambda _, layer, x: self._call_packed(layer, x, *arguments),
        )

    def _call_packed(self, layer: Any, x: Tensor, *arguments: Any) -> Tensor:
        """Run a layer on packed sequences; a sharded layer is called, because its hooks gather the parameters."""
        if not is_sharded(layer):
            return self.run_layer(_compose_packed, layer, x, *arguments)
        memory = arguments[1:2] if isinstance(layer, TransformerDecoderLayer) else ()

        def run(layer: Any, x: Tensor, *memory: Tensor) -> Tensor:
            return _compose_packed(layer, x, arguments[0], *memory, *arguments[1 + len(memory) :])

        return self.run_layer(layer, x, *memory, run)

    def _run(
        self, x: Tensor, attentions: Callable[[int, Any], tuple[Any, ...]], call: Callable[[int, Any, Tensor], Tensor]
    ) -> Tensor:
        """Run the layers, then the norm.

        Args:
            x: the input of the first layer.
            attentions: returns the attention callables for `compose`, from a layer's index and the layer.
            call: runs a layer that is not composed here: of another class, or with activation checkpointing.
        """
        layers: Any = self.layers
        norm: Any = self.norm
        carried: Tensor | DeferredResidual = x
        for index, layer in enumerate(layers):
            if type(layer) in _LAYERS and not self.checkpoint_activations:
                compose = layer.carry if layer.norm_first else layer.compose
                carried = compose(carried, *attentions(index, layer))
            else:
                carried = call(index, layer, carried.add() if isinstance(carried, DeferredResidual) else carried)
        if not isinstance(carried, DeferredResidual):
            return carried if norm is None else norm(carried)
        return carried.add() if norm is None else carried.norm(norm, plain(norm, *NORMS))[0]

    def _run_with_weights(self, x: Tensor, *masks: Any) -> tuple[Any, ...]:
        """Run the layers on a padded batch, then the norm; also return all weights, `[layers, B, H, T, S]`.

        masks: the arguments of a layer's `padded_attentions`.
        """
        if x.is_nested:
            raise ValueError("need_weights takes padded batches, not nested tensors")
        check_apart(self, "need_weights")
        weights: list[list[Tensor]] = [[], []]
        out = self._run(
            x,
            lambda _, layer: layer.padded_attentions(*masks, weights=weights),
            lambda _, layer, x: layer.compose(x, *layer.padded_attentions(*masks, weights=weights)),
        )
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
        if (cache.layers[0].memory is None) != isinstance(self, nn.TransformerEncoder):
            raise ValueError(f"the cache is of another stack: not of a {type(self).__name__}")
        if cache.stack_id != self.__dict__.get("_stack_id"):
            raise ValueError("the cache is of another stack: make one with new_cache of this stack")
        tokens, layout = cache.tokens_of(x, lengths)
        count = tokens.shape[1]
        layers: Any = self.layers
        fast = layout is None and not has_own_hooks(self) and runs_fast_path(tokens, cache)
        fast = fast and all(type(layer) in _LAYERS and has_fast_path(layer) for layer in layers)
        if not fast:
            check_apart(self, "decoding with a cache")
        write = cache.write(count, layout)
        out: Tensor
        if fast:
            rows = tokens[:, 0]
            for layer, layer_cache in zip(layers, cache.layers, strict=True):
                rows = one_token(layer, rows, layer_cache, write, cache)
            out = rows[:, None] if self.norm is None else self.norm(rows[:, None])  # type: ignore[operator]
        else:
            out = self._run(
                tokens,
                lambda index, layer: cache.attentions(index, layer, write),
                lambda index, layer, x: layer.compose(x, *cache.attentions(index, layer, write)),
            )
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
