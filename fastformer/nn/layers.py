"""Drop-in Transformer layers: torch.nn's classes on our modules and ops.

Each layer is one formula, `compose`, written over functions that attend. torch's `forward` gives it attention with
torch's masks, `packed` gives it attention within packed sequences, and a decoder with a cache gives it attention to
what it kept. Constructors run torch's own, so initial values under a seed are torch's, then take over what it made.

Letters: B batch, T targets, S sources, D model width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import functional
from fastformer.host.devices import autocasts, check_types
from fastformer.nn.modules import (
    LayerNorm,
    RMSNorm,
    activation_name,
    drop_in,
    has_hooks,
    plain,
    run_feed_forward,
    take_over,
)
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.nn.torch_calls import encoder_masks
from fastformer.nn.wrappers import Inside, is_sharded, levels, unwrap, within
from fastformer.packing import Layout, offsets_of

Attention = Callable[[Tensor], Tensor]  # normalised input -> attention output, of the same shape

_BLOCKS = ("_sa_block", "_mha_block", "_ff_block")
_NORMS = (LayerNorm, nn.LayerNorm, RMSNorm, nn.RMSNorm)  # those that an op may take with the sum before them


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    """The second sublayer."""
    parts = layer.linear1, layer.dropout, layer.linear2
    return run_feed_forward(x, *parts, activation_name(layer.activation), layer.activation)


class Pending(NamedTuple):
    """What a layer has still to add up, residual + dropout(x): the next norm does that in one op with its own work."""

    x: Tensor
    residual: Tensor
    dropout: Any

    def add(self) -> Tensor:
        """Add it up."""
        return self.residual + _dropout(self.x, self.dropout)

    def norm(self, norm: Any, reader: Any = None) -> tuple[Tensor, Tensor]:
        """Return its norm, and itself added up.

        reader: what alone reads the norm; under autocast that is then written as its matrix products take it.
        """
        # An attention of somebody's own may return what broadcasts.
        same = self.x.shape == self.residual.shape
        if not (same and plain(self.dropout, nn.Dropout) and plain(norm, *_NORMS)):
            total = self.add()
            return norm(total), total
        given = self.x, self.residual, norm.normalized_shape, norm.weight
        options: Any = {
            "eps": norm.eps,
            "dropout_p": self.dropout.p if self.dropout.training else 0.0,
            "dtype": _product_dtype(self.residual, reader),
        }
        if isinstance(norm, nn.RMSNorm):
            return functional.dropout_add_rms_norm(*given, **options)
        return functional.dropout_add_layer_norm(*given, norm.bias, **options)


def _norm(x: Tensor | Pending, norm: Any, reader: Any) -> tuple[Tensor, Tensor]:
    """The norm at the beginning of a layer, and what it is of."""
    if isinstance(x, Pending):
        return x.norm(norm, reader)
    dtype = _product_dtype(x, reader)
    if dtype is None or not plain(norm, *_NORMS):
        return norm(x), x
    given = x, norm.normalized_shape, norm.weight
    if isinstance(norm, nn.RMSNorm):
        return functional.rms_norm(*given, norm.eps, dtype=dtype), x
    return functional.layer_norm(*given, norm.bias, norm.eps, dtype=dtype), x


def _product_dtype(x: Tensor, reader: Any) -> torch.dtype | None:
    """The dtype in which autocast would have `reader` read x; None without autocast, or where nobody knows."""
    if (
        reader is None
        or not autocasts(x)
        or x.dtype == torch.float64
        or not plain(reader, nn.Linear, MultiheadAttention)
    ):
        return None
    return torch.get_autocast_dtype(x.device.type)


def _dropout(x: Tensor, dropout: Any) -> Tensor:
    if not plain(dropout, nn.Dropout):
        return cast(Tensor, dropout(x))
    return functional.dropout(x, dropout.p if dropout.training else 0.0)


def _overrides(cls: type, original: type, *methods: str) -> bool:
    """Whether a class, by itself or through a base, replaces one of these methods of torch's."""
    return any(getattr(cls, name) is not getattr(original, name) for name in methods)


def padded_attention(
    attention: Any,
    memory: Tensor | None,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    weights: list[Tensor] | None = None,
) -> Attention:
    """Attention in a padded batch, to itself or to memory, called as torch's layers call it.

    weights: gets its weights, `[B, H, T, S]`.
    """

    def attend(x: Tensor) -> Tensor:
        kv = x if memory is None else memory
        rules = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": is_causal}
        if weights is None:
            return attention(x, kv, kv, need_weights=False, **rules)[0]  # type: ignore[no-any-return]
        out, found = attention(x, kv, kv, need_weights=True, average_attn_weights=False, **rules)
        weights.append(found)
        return out  # type: ignore[no-any-return]

    return attend


def _packed(attention: Any, *where: Any, **rules: Any) -> Attention:
    """Attention within packed sequences; arguments as of `MultiheadAttention.packed`, behind query."""
    if isinstance(attention, MultiheadAttention):
        return lambda x: attention.packed(x, *where, **rules)
    # An adapter around it, whose call returns a pair.
    return lambda x: within(attention, lambda inner, x: inner.packed(x, *where, **rules), x)[0]


def _is_watched(attention: nn.Module) -> bool:
    return not plain(unwrap(attention), MultiheadAttention) or any(map(has_hooks, levels(attention)))


class _Layer(nn.Module):
    """What encoder and decoder layers share."""

    _overridden = False

    @property
    def has_own_blocks(self) -> bool:
        """Whether a subclass or the instance replaced `_sa_block`, `_mha_block` or `_ff_block`."""
        return self._overridden or any(name in self.__dict__ for name in _BLOCKS)

    def _check_composable(self) -> None:
        """Refuse to compose a layer with a block of its own."""
        if self.has_own_blocks:
            raise RuntimeError(f"{type(self).__name__} overrides a block of its layer; only forward calls that")

    @property
    def overridden(self) -> bool:
        """Whether `forward` or a block of the layer was replaced, which `packed` and `compose` do not call."""
        forwards = (TransformerEncoderLayer.forward, TransformerDecoderLayer.forward)
        return self.has_own_blocks or type(self).forward not in forwards

    @property
    def attentions(self) -> tuple[nn.Module, ...]:
        """Its attention modules: ours, or what took their place."""
        found: dict[str, Any] = self._modules
        return tuple(found[name] for name in ("self_attn", "multihead_attn") if name in found)

    @property
    def watched(self) -> bool:
        """Whether code that is not ours sees with which arguments the layer, or attention in it, is called."""
        hooks = has_hooks(self) and not is_sharded(self)
        return self.overridden or hooks or any(map(_is_watched, self.attentions))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's own turns an activation that is a module into ReLU on deepcopy and pickle.
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        if not hasattr(self, "activation"):
            self.activation = F.relu


@drop_in
class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer on fastformer's ops (Vaswani et al. 2017, section 3.1).

    Constructor, parameters, masks (True = ignore) and exceptions are torch's. A subclass or an instance that replaces
    `_sa_block` or `_ff_block` keeps torch's `forward`, which calls them.
    """

    self_attn: MultiheadAttention

    @property
    def activation_relu_or_gelu(self) -> int:
        """0: closes torch's inference fast path, which skips overridden methods and hands over nested tensors.

        What torch stores under this name stays in the instance, for the day that the layer becomes torch's again.
        """
        return 0

    @activation_relu_or_gelu.setter
    def activation_relu_or_gelu(self, value: int) -> None:
        self.__dict__["activation_relu_or_gelu"] = value

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._overridden = _overrides(cls, nn.TransformerEncoderLayer, "_sa_block", "_ff_block")

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        take_over(self)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Encode `[S, B, D]`, `[B, S, D]` if batch_first, or unbatched `[S, D]`.

        Args:
            src: the input.
            src_mask: `[S, S]` or `[B * H, S, S]`, bool (True = may not attend) or additive.
            src_key_padding_mask: `[B, S]`, bool (True = ignore) or additive.
            is_causal: states that src_mask is the causal mask, which need not be given.
        """
        given: Any = src_mask
        if isinstance(given, Inside):
            return given.run(self, src)
        check_types(("src",), src)
        if self.has_own_blocks:
            return nn.TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal)
        if not plain(self.self_attn, MultiheadAttention):
            src_mask, src_key_padding_mask = encoder_masks(src_mask, src_key_padding_mask, src, "src_mask")

        return self.compose(src, padded_attention(self.self_attn, None, src_mask, src_key_padding_mask, is_causal))

    def packed(self, tokens: Tensor, layout: Layout, causal: bool = False, src_mask: Tensor | None = None) -> Tensor:
        """Encode packed sequences: `[S, D]` -> `[S, D]`; src_mask as in forward, over layout.columns."""
        check_types(("tokens",), tokens)
        return self.compose(tokens, *self.attends(layout, causal, src_mask))

    def attends(self, layout: Layout, causal: bool = False, src_mask: Tensor | None = None) -> tuple[Attention]:
        """Return what `compose` takes for packed sequences."""
        return (_packed(self.self_attn, layout, causal=causal, attn_mask=src_mask),)

    def compose(self, x: Tensor, attention: Attention) -> Tensor:
        """Compute the layer, given what attends."""
        if self.norm_first:
            return self.carry(x, attention).add()
        self._check_composable()
        x, _ = Pending(attention(x), x, self.dropout1).norm(self.norm1)
        return Pending(_feed_forward(self, x), x, self.dropout2).norm(self.norm2)[0]

    def carry(self, x: Tensor | Pending, attention: Attention) -> Pending:
        """Compute a layer with `norm_first` but for its last sum, from what the layer before left, too."""
        self._check_composable()
        h, x = _norm(x, self.norm1, self.self_attn)
        h, x = Pending(attention(h), x, self.dropout1).norm(self.norm2, self.linear1)
        return Pending(_feed_forward(self, h), x, self.dropout2)


@drop_in
class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer on fastformer's ops (Vaswani et al. 2017, section 3.1).

    Constructor, parameters, masks (True = ignore) and exceptions are torch's. A subclass or an instance that replaces
    `_sa_block`, `_mha_block` or `_ff_block` keeps torch's `forward`, which calls them.
    """

    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._overridden = _overrides(cls, nn.TransformerDecoderLayer, "_sa_block", "_mha_block", "_ff_block")

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        take_over(self)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Decode `[T, B, D]`, `[B, T, D]` if batch_first, or unbatched `[T, D]`.

        Args:
            tgt: the input.
            memory: the encoder's output, likewise with S.
            tgt_mask: `[T, T]` or `[B * H, T, T]`, bool (True = may not attend) or additive.
            memory_mask: `[T, S]` or `[B * H, T, S]`, likewise.
            tgt_key_padding_mask: `[B, T]`, bool (True = ignore) or additive.
            memory_key_padding_mask: `[B, S]`, likewise.
            tgt_is_causal: states that tgt_mask is the causal mask, which need not be given.
            memory_is_causal: the same of memory_mask.
        """
        given: Any = tgt_mask
        if isinstance(given, Inside):
            return given.run(self, tgt, memory)
        if self.has_own_blocks:
            return nn.TransformerDecoderLayer.forward(
                self,
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                tgt_is_causal,
                memory_is_causal,
            )
        check_types(("tgt", "memory"), tgt, memory)

        return self.compose(
            tgt,
            padded_attention(self.self_attn, None, tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            padded_attention(self.multihead_attn, memory, memory_mask, memory_key_padding_mask, memory_is_causal),
        )

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
        """Decode packed sequences: `[T, D]` with memory `[S, D]` -> `[T, D]`; masks as in forward, over the columns."""
        check_types(("tokens",), tokens)
        return self.compose(tokens, *self.attends(layout, memory, memory_layout, causal, tgt_mask, memory_mask))

    def attends(
        self, layout: Layout, memory: Tensor, memory_layout: Layout, causal: bool, *masks: Tensor | None
    ) -> tuple[Attention, Attention]:
        """Return what `compose` takes for packed sequences; masks: of the target, and of the memory."""
        tgt_mask, memory_mask = masks
        offsets_of("memory_layout", memory_layout)  # without these two, attention would be to the tokens themselves
        check_types(("memory",), memory)
        return (
            _packed(self.self_attn, layout, causal=causal, attn_mask=tgt_mask),
            _packed(self.multihead_attn, layout, memory, memory_layout, attn_mask=memory_mask),
        )

    def compose(self, x: Tensor, self_attention: Attention, cross_attention: Attention) -> Tensor:
        """Compute the layer, given what attends."""
        if self.norm_first:
            return self.carry(x, self_attention, cross_attention).add()
        self._check_composable()
        x, _ = Pending(self_attention(x), x, self.dropout1).norm(self.norm1)
        x, _ = Pending(cross_attention(x), x, self.dropout2).norm(self.norm2)
        return Pending(_feed_forward(self, x), x, self.dropout3).norm(self.norm3)[0]

    def carry(self, x: Tensor | Pending, self_attention: Attention, cross_attention: Attention) -> Pending:
        """Compute a layer with `norm_first` but for its last sum, from what the layer before left, too."""
        self._check_composable()
        h, x = _norm(x, self.norm1, self.self_attn)
        h, x = Pending(self_attention(h), x, self.dropout1).norm(self.norm2, self.multihead_attn)
        h, x = Pending(cross_attention(h), x, self.dropout2).norm(self.norm3, self.linear1)
        return Pending(_feed_forward(self, h), x, self.dropout3)
