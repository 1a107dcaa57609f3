"""Drop-in Transformer layers: torch.nn's classes on our modules and ops.

Each layer is one formula, `compose`, written over functions that attend. torch's `forward` gives it attention with
torch's masks, `packed` gives it attention within packed sequences, and a decoder with a cache gives it attention to
what it kept. Constructors run torch's own, so initial values under a seed are torch's, then take over what it made.

Letters: B batch, T targets, S sources, D model width.
"""

from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.host.devices import check_masks, check_types
from fastformer.nn.activations import as_function, is_gated
from fastformer.nn.attends import Attention, is_watched, packed_attention, padded_attention
from fastformer.nn.hooks import has_hooks, plain
from fastformer.nn.modules import LayerNorm, activation_name, drop_in, runs_as_torch, take_over
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.nn.options import LayerOptions, attention_options, check_options, make_norm
from fastformer.nn.sublayers import Pending, feed_forward, first_norm
from fastformer.nn.torch_calls import encoder_masks
from fastformer.nn.wrappers import Inside, is_sharded
from fastformer.packing import Layout, offsets_of

BLOCKS = ("_sa_block", "_mha_block", "_ff_block")
# The parts that torch's fast path of an encoder layer replaces.
_TORCHS: dict[str, tuple[type[nn.Module], ...]] = {
    "self_attn": (MultiheadAttention,),
    "linear1": (nn.Linear,),
    "linear2": (nn.Linear,),
    "norm1": (LayerNorm, nn.LayerNorm),
    "norm2": (LayerNorm, nn.LayerNorm),
    "dropout": (nn.Dropout,),
    "dropout1": (nn.Dropout,),
    "dropout2": (nn.Dropout,),
}


def _overrides(cls: type, original: type, *methods: str) -> bool:
    """Whether a class, by itself or through a base, replaces one of these methods of torch's."""
    return any(getattr(cls, name) is not getattr(original, name) for name in methods)


class _Layer(nn.Module):
    """What encoder and decoder layers share."""

    _overridden = False
    _original: type[nn.Module]

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
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(  # torch's layer
            d_model,
            1 if options else nhead,
            dim_feedforward,
            dropout,
            as_function(activation),
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        take_over(self)
        self._take_options(nhead, options)

    @property
    def has_own_blocks(self) -> bool:
        """Whether a subclass has another `_sa_block`, `_mha_block` or `_ff_block`."""
        return self._overridden

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
        return self.overridden or hooks or any(map(is_watched, self.attentions))

    def _take_options(self, heads: int, options: LayerOptions) -> None:
        """Take what torch's layer has not in the place of what its constructor made."""
        own: dict[str, Any] = self._modules
        first = own["linear1"]
        bias, factory = first.bias is not None, {"device": first.weight.device, "dtype": first.weight.dtype}
        if is_gated(self.activation):
            own["linear1"] = nn.Linear(first.in_features, 2 * first.out_features, bias, **factory)
        if not options:
            return
        check_options(options, LayerOptions)
        for name in ("self_attn", "multihead_attn"):
            if name in own:
                old, theirs = own[name], attention_options(options, cross=name == "multihead_attn")
                arguments = {"bias": bias, "batch_first": old.batch_first, **factory}
                own[name] = MultiheadAttention(old.embed_dim, heads, old.dropout, **arguments, **theirs)
        for name in ("norm1", "norm2", "norm3"):
            if name in own and "norm" in options:
                own[name] = make_norm(options["norm"], first.in_features, own[name].eps, bias, factory)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's own turns an activation that is a module into ReLU on deepcopy and pickle.
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        if not hasattr(self, "activation"):
            self.activation = F.relu


@drop_in
class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer on fastformer's ops (Vaswani et al. 2017, section 3.1).

    Constructor, parameters, masks (True = ignore) and exceptions are torch's; `activation` knows "silu", "gelu_tanh",
    "geglu", "swiglu" and "reglu", too. Keywords behind torch's are those of `LayerOptions`. A subclass or an instance
    that replaces `_sa_block` or `_ff_block` keeps torch's `forward`, which calls them.
    """

    self_attn: MultiheadAttention
    _original = nn.TransformerEncoderLayer

    @property
    def activation_relu_or_gelu(self) -> int:
        """Open torch's fast path in inference, 1 for ReLU and 2 for GELU, only where it computes what the layer does.

        torch reads it in its layer and in its stack. It calls no parts: not overridden methods, adapters and hooks.
        """
        known = {"relu": 1, "gelu": 2}.get(activation_name(self.activation) or "", 0)
        if not known or type(self) is not TransformerEncoderLayer or not self.self_attn._is_torchs_formula:
            return 0
        for name, kinds in _TORCHS.items():
            part: Any = self._modules[name]
            missing = any(x is None for x in part._parameters.values()) and name != "self_attn"
            dropping = name.startswith("dropout") and part.training
            if missing or dropping or not plain(part, *kinds):
                return 0
        return known

    @activation_relu_or_gelu.setter
    def activation_relu_or_gelu(self, value: int) -> None:
        self.__dict__["activation_relu_or_gelu"] = value

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._overridden = _overrides(cls, nn.TransformerEncoderLayer, "_sa_block", "_ff_block")

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
        check_masks(("src_mask", "src_key_padding_mask"), src_mask, src_key_padding_mask)
        if self.has_own_blocks or src.is_nested:  # as torch's encoder hands it over in inference
            return nn.TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal)
        if src_mask is None and src_key_padding_mask is None and runs_as_torch(src) and self.activation_relu_or_gelu:
            return nn.TransformerEncoderLayer.forward(self, src, is_causal=is_causal)
        if not plain(self.self_attn, MultiheadAttention):
            src_mask, src_key_padding_mask = encoder_masks(src_mask, src_key_padding_mask, src, "src_mask")

        return self.compose(src, padded_attention(self.self_attn, None, src_mask, src_key_padding_mask, is_causal))

    def packed(self, tokens: Tensor, layout: Layout, causal: bool = False, src_mask: Tensor | None = None) -> Tensor:
        """Encode packed sequences: `[S, D]` -> `[S, D]`; src_mask as in forward, over layout.columns."""
        check_types(("tokens",), tokens)
        return self.compose(tokens, *self.attends(layout, causal, src_mask))

    def attends(self, layout: Layout, causal: bool = False, src_mask: Tensor | None = None) -> tuple[Attention]:
        """Return what `compose` takes for packed sequences."""
        return (packed_attention(self.self_attn, layout, causal=causal, attn_mask=src_mask),)

    def compose(self, x: Tensor, attention: Attention) -> Tensor:
        """Compute the layer, given what attends."""
        if self.norm_first:
            return self.carry(x, attention).add()
        self._check_composable()
        x, _ = Pending(attention(x), x, self.dropout1).norm(self.norm1)
        return Pending(feed_forward(self, x), x, self.dropout2).norm(self.norm2)[0]

    def carry(self, x: Tensor | Pending, attention: Attention) -> Pending:
        """Compute a layer with `norm_first` but for its last sum, from what the layer before left, too."""
        self._check_composable()
        h, x = first_norm(x, self.norm1, self.self_attn)
        h, x = Pending(attention(h), x, self.dropout1).norm(self.norm2, self.linear1)
        return Pending(feed_forward(self, h), x, self.dropout2)


@drop_in
class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer on fastformer's ops (Vaswani et al. 2017, section 3.1).

    Constructor, parameters, masks (True = ignore) and exceptions are torch's; activations and keywords as of the
    encoder's layer. A subclass or an instance that replaces
    `_sa_block`, `_mha_block` or `_ff_block` keeps torch's `forward`, which calls them.
    """

    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention
    _original = nn.TransformerDecoderLayer

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._overridden = _overrides(cls, nn.TransformerDecoderLayer, "_sa_block", "_mha_block", "_ff_block")

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
        check_masks(("tgt_mask", "memory_mask"), tgt_mask, memory_mask)
        padding_masks = "tgt_key_padding_mask", "memory_key_padding_mask"
        check_masks(padding_masks, tgt_key_padding_mask, memory_key_padding_mask)

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
            packed_attention(self.self_attn, layout, causal=causal, attn_mask=tgt_mask),
            packed_attention(self.multihead_attn, layout, memory, memory_layout, attn_mask=memory_mask),
        )

    def compose(self, x: Tensor, self_attention: Attention, cross_attention: Attention) -> Tensor:
        """Compute the layer, given what attends."""
        if self.norm_first:
            return self.carry(x, self_attention, cross_attention).add()
        self._check_composable()
        x, _ = Pending(self_attention(x), x, self.dropout1).norm(self.norm1)
        x, _ = Pending(cross_attention(x), x, self.dropout2).norm(self.norm2)
        return Pending(feed_forward(self, x), x, self.dropout3).norm(self.norm3)[0]

    def carry(self, x: Tensor | Pending, self_attention: Attention, cross_attention: Attention) -> Pending:
        """Compute a layer with `norm_first` but for its last sum, from what the layer before left, too."""
        self._check_composable()
        h, x = first_norm(x, self.norm1, self.self_attn)
        h, x = Pending(self_attention(h), x, self.dropout1).norm(self.norm2, self.multihead_attn)
        h, x = Pending(cross_attention(h), x, self.dropout2).norm(self.norm3, self.linear1)
        return Pending(feed_forward(self, h), x, self.dropout3)
