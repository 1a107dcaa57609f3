"""What the stacks of layers share: packed runs, activations that are computed again, and steps with a cache.

Letters: R rows of a cache, t new tokens a row, T packed tokens, D model width.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastformer.host.devices import check_types
from fastformer.modes import compiling, has_values
from fastformer.nn.cache import KVCache
from fastformer.nn.hooks import has_hooks
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.padding_free import check_apart, finite_padding, may_do_more, obstacle, orders_of, zero_padding
from fastformer.nn.sublayers import Pending
from fastformer.nn.torch_calls import causal_hint
from fastformer.nn.wrappers import is_sharded, levels, unwrap, within
from fastformer.packing import Layout, unpack


class _AsTorch(threading.local):
    """Set while an encoder with hooks runs whose padding a decoder will see: its rows are then torch's, not 0.

    Where nobody looks, an argument of the encoder's says so; a hook is to see torch's call.
    """

    def __init__(self) -> None:
        self.rows = False


as_torch = _AsTorch()


class Stack(nn.Module):
    """What encoder and decoder share.

    Attributes:
        padding_free: whether batches with a key padding mask run without their padding, whose rows come out as 0. Set
            it on a stack, or on the class for all of them; `forward` takes it for one call. NaN and inf in padding then
            change nothing else, also where the batch runs padded; with False they spread within their sequence and into
            gradients of parameters, as in torch.
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
        orders = orders_of(self)
        return orders.pop() if len(orders) == 1 else None

    def counts_positions(self, name: str = "self_attn") -> bool:
        """Whether it matters to the attention of this name how far apart tokens stand."""
        layers: Any = self.layers
        found = (unwrap(getattr(unwrap(layer), name, None)) for layer in layers)
        return any(getattr(attention, "counts_positions", False) for attention in found)

    @property
    def watched(self) -> bool:
        """Whether code that is not ours sees with which arguments layers, or attention in them, are called."""
        ours = TransformerEncoderLayer, TransformerDecoderLayer
        for layer in self.layers:  # type: ignore[union-attr]
            *outside, inner = levels(layer)
            if not isinstance(inner, ours) or inner.watched:
                return True
            if any(has_hooks(level) and not is_sharded(level) for level in outside):
                return True
        return False

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

    def _finite(self, x: Tensor, padding: Tensor | None, padding_free: bool | None) -> Tensor:
        """Set NaN and inf in padding to 0 before a padded run, where the rows of padding will be set to 0."""
        return finite_padding(x, padding, self.layers_batch_first) if self._wanted(padding_free) else x

    def _wanted(self, padding_free: bool | None) -> bool:
        """Whether padding is to be skipped, and 0."""
        if padding_free is not None:
            return padding_free
        return self.padding_free and (compiling() or not as_torch.rows)

    def skips(self, padding_free: bool | None, *masks: Tensor | None) -> bool:
        """Whether there is padding to skip, and nothing against skipping it."""
        given = [mask for mask in masks if mask is not None]
        known = all(isinstance(mask, Tensor) and has_values(mask) for mask in given)
        return self._wanted(padding_free) and len(given) > 0 and known and self.obstacle() is None

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
        return self._run(
            tokens,
            lambda _, layer: layer.attends(*arguments),
            lambda _, layer, x: self._call_packed(layer, x, *arguments),
        )

    def _call_packed(self, layer: Any, x: Tensor, *arguments: Any) -> Tensor:
        """Run a layer on packed sequences, within what wraps it."""
        if unwrap(layer) is layer and not is_sharded(layer):
            return self.run_layer(layer.packed, x, *arguments)

        def run(inner: Any, x: Tensor, *memory: Tensor) -> Tensor:
            rest = arguments[2:] if memory else arguments[1:]
            return inner.packed(x, arguments[0], *memory, *rest)  # type: ignore[no-any-return]

        memory = arguments[1:2] if isinstance(unwrap(layer), TransformerDecoderLayer) else ()
        return self.run_layer(within, layer, run, x, *memory)

    def _run(
        self, x: Tensor, attends: Callable[[int, Any], tuple[Any, ...]], call: Callable[[int, Any, Tensor], Tensor]
    ) -> Tensor:
        """Run the layers, then the norm.

        Args:
            x: what the first layer gets.
            attends: what `compose` of a layer takes besides, by its index and itself.
            call: runs a layer that cannot leave its last sum to the next norm.
        """
        layers: Any = self.layers
        carried: Tensor | Pending = x
        for index, layer in enumerate(layers):
            if self._carries(layer):
                carried = layer.carry(carried, *attends(index, layer))
            else:
                carried = call(index, layer, carried.add() if isinstance(carried, Pending) else carried)
        if isinstance(carried, Pending):
            return carried.add() if self.norm is None else carried.norm(self.norm)[0]
        return carried if self.norm is None else self.norm(carried)  # type: ignore[operator, no-any-return]

    def _weigh(self, x: Tensor, attends: Callable[[Any, list[list[Tensor]]], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run the layers on a padded batch, then the norm; with the weights of all layers, `[layers, B, H, T, S]`.

        attends: what `compose` of a layer takes besides, which puts weights into the lists.
        """
        if x.is_nested:
            raise ValueError("need_weights takes padded batches, not nested tensors")
        check_apart(self, "need_weights")
        weights: list[list[Tensor]] = [[], []]
        out = self._run(
            x, lambda _, layer: attends(layer, weights), lambda _, layer, x: layer.compose(x, *attends(layer, weights))
        )
        return out, *(torch.stack(found) for found in weights if found)

    @torch.no_grad()
    def step(self, x: Tensor, cache: KVCache, lengths: Tensor | Layout | None = None) -> Tensor:
        """Read the next tokens of each row: what `forward` gives at their positions, from left to right.

        Call `.eval()` before, or dropout takes part.

        Args:
            x: `[R, t, D]`, or `[t, R, D]` where the layers are not batch_first; packed `[T, D]` with a layout.
            cache: from `new_cache` of this stack, or of the stack that this one was copied from afterwards; holds the
                tokens too, afterwards.
            lengths: int64 `[R]`, on the CPU: how many of the t tokens of each row are real, the others being padding
                behind them, whose outputs are 0; 0 is allowed. Or the layout of packed tokens. None: all t.

        Returns:
            As x. No gradients are kept.

        Raises:
            ValueError: x or lengths do not fit the cache, or the cache the stack, or a row would be longer than its
                `longest`. The cache is as it was.
            RuntimeError: a layer, or attention in it, has come to have hooks, a forward or a block of its own. At all
                other parts `new_cache` alone looks: one that is replaced later must see each token alone.
        """
        if len(cache.layers) != len(self.layers):  # type: ignore[arg-type]
            raise ValueError(f"the cache is of another stack: it has {len(cache.layers)} layers")
        if (cache.layers[0].memory is None) != isinstance(self, nn.TransformerEncoder):
            raise ValueError(f"the cache is of another stack: not of a {type(self).__name__}")
        if cache.stack_id != self.__dict__.get("_stack_id"):
            raise ValueError("the cache is of another stack: make one with new_cache of this stack")
        plain = cache.plain is not None and cache.plain.apply(self, x, cache.layers)
        if not plain and may_do_more(self):
            check_apart(self, "decoding with a cache")
        tokens, layout = cache.tokens_of(x, lengths)
        count = tokens.shape[1]
        place = cache.place(count, layout)
        if plain and layout is None and count == 1 and cache.rows:
            out = cache.plain.run(tokens, cache.layers, place, (cache.hypotheses, cache.memory_limits))  # type: ignore[union-attr]
            out = out if self.norm is None else self.norm(out)  # type: ignore[operator]
        else:
            out = self._run(
                tokens,
                lambda index, layer: cache.attends(index, layer, place),
                lambda index, layer, x: layer.compose(x, *cache.attends(index, layer, place)),
            )
        cache.count(count, layout)
        if layout is None:
            return out if cache.batch_first else out.transpose(0, 1)
        return out if isinstance(lengths, Layout) else unpack(out, layout, cache.batch_first)

    def _carries(self, layer: Any) -> bool:
        """Whether the last sum of a layer may be left to the norm behind it; what is computed again keeps one input."""
        ours = type(layer) in (TransformerEncoderLayer, TransformerDecoderLayer)
        return ours and layer.norm_first and not self.checkpoint_activations

    def _check_packs(self, name: str) -> None:
        """Raise if a nested tensor meets layers that need a padded batch."""
        reason = self.obstacle()
        if reason is not None:
            raise RuntimeError(f"{name} must not be nested where layers need a padded batch: {reason}")


def _with_names(layer: Callable[..., Tensor], names: tuple[str, ...], *values: Any) -> Tensor:
    """Call a layer with values of which the last have these names."""
    first = len(values) - len(names)
    return layer(*values[:first], **dict(zip(names, values[first:], strict=True)))
