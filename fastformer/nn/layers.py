"""Drop-in Transformer layers: torch.nn's classes on fastformer's modules and ops.

If the attention of a layer was replaced or has hooks, or a subclass overrides `forward` or a block, torch's own
`forward` runs and calls every module. Otherwise `compose` runs: one formula over attention callables, for padded
batches, packed sequences and cached steps. Constructors run torch's own, and then change the classes of the children.

Letters: B batch, H heads, T targets, S sources, D model width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import functional
from fastformer.functional.attention.reference import is_finite
from fastformer.host.devices import autocasts, check_types, product_dtype
from fastformer.nn.activations import as_function, is_gated
from fastformer.nn.inspection import BLOCKS, is_unmodified, runs_composed, unmodified_children
from fastformer.nn.modules import (
    NORMS,
    activation_name,
    drop_in,
    make_norm,
    mask_of_fused_ops,
    runs_as_torch,
    take_over_children,
)
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.nn.options import LayerOptions, attention_options, check_options
from fastformer.nn.packed_input import Masks, hidden_keys
from fastformer.packing import Layout, offsets_of

Attention = Callable[[Tensor], Tensor]  # normalised input -> attention output, of the same shape
# The classes of children that ops may replace, so that the children are not called.
PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "self_attn": (MultiheadAttention,),
    "multihead_attn": (MultiheadAttention,),
    **dict.fromkeys(("linear1", "linear2"), (nn.Linear,)),
    **dict.fromkeys(("norm1", "norm2", "norm3"), NORMS),
    **dict.fromkeys(("dropout", "dropout1", "dropout2", "dropout3"), (nn.Dropout,)),
}


class DeferredResidual(NamedTuple):
    """The sum residual + dropout(x) before it is computed: the next norm adds it in the same op."""

    x: Tensor
    residual: Tensor
    dropout: Any
    plain: bool  # whether an op may apply the dropout

    def add(self) -> Tensor:
        """Return the sum."""
        if not self.plain:
            return self.residual + cast(Tensor, self.dropout(self.x))
        return self.residual + functional.dropout(self.x, self.dropout.p if self.dropout.training else 0.0)

    def norm(self, norm: Any, plain: bool, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, in dtype if given, and the sum; plain: whether an op may compute the norm."""
        # A replaced attention may return a tensor that broadcasts.
        if not (plain and self.plain and self.x.shape == self.residual.shape):
            total = self.add()
            return norm(total), total
        operands = self.x, self.residual, norm.normalized_shape, norm.weight
        dropout_p = self.dropout.p if self.dropout.training else 0.0
        if isinstance(norm, nn.RMSNorm):
            return functional.dropout_add_rms_norm(*operands, eps=norm.eps, dropout_p=dropout_p, dtype=dtype)
        return functional.dropout_add_layer_norm(*operands, norm.bias, eps=norm.eps, dropout_p=dropout_p, dtype=dtype)


def _norm_of(
    x: Tensor | DeferredResidual, norm: Any, plain: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of x, and x as a tensor; arguments as of `DeferredResidual.norm`."""
    if isinstance(x, DeferredResidual):
        return x.norm(norm, plain, dtype)
    if dtype is None or not plain:
        return norm(x), x
    operands = x, norm.normalized_shape, norm.weight
    if isinstance(norm, nn.RMSNorm):
        return functional.rms_norm(*operands, norm.eps, dtype=dtype), x
    return functional.layer_norm(*operands, norm.bias, norm.eps, dtype=dtype), x


def _autocast_dtype(x: Tensor | DeferredResidual) -> torch.dtype | None:
    """Return the dtype in which matrix products read x under autocast; None without autocast."""
    x = x.residual if isinstance(x, DeferredResidual) else x
    return product_dtype(x) if autocasts(x) else None


class _Layer(nn.Module):
    """The base class of encoder and decoder layers.

    Attributes:
        runs_packed: whether the class overrides neither torch's `forward` nor a block; see `runs_composed`.
    """

    runs_packed = True
    part_types = PARTS
    activation: Callable[[Tensor], Tensor]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kinds: Any = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
        torch_class = next(kind for kind in kinds if issubclass(cls, kind))
        overrides_block = any(getattr(cls, name, None) is not getattr(torch_class, name, None) for name in BLOCKS)
        cls.runs_packed = not overrides_block and getattr(cls.forward, "__globals__", None) is globals()

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
        sizes = dim_feedforward, dropout, as_function(activation), layer_norm_eps, batch_first, norm_first, bias
        super().__init__(d_model, 1 if options else nhead, *sizes, device, dtype)  # torch's layer
        take_over_children(self)
        self._take_options(nhead, options)

    def _take_options(self, heads: int, options: LayerOptions) -> None:
        """Replace children that torch's constructor created by those that the options ask for."""
        modules: dict[str, Any] = self._modules
        first = modules["linear1"]
        bias, factory = first.bias is not None, {"device": first.weight.device, "dtype": first.weight.dtype}
        if is_gated(self.activation):
            modules["linear1"] = nn.Linear(first.in_features, 2 * first.out_features, bias, **factory)
        if not options:
            return
        check_options(options, LayerOptions)
        for name in ("self_attn", "multihead_attn"):
            if name in modules:
                old, keywords = modules[name], attention_options(options, cross=name == "multihead_attn")
                arguments = {"bias": bias, "batch_first": old.batch_first, **factory}
                modules[name] = MultiheadAttention(old.embed_dim, heads, old.dropout, **arguments, **keywords)
        for name in ("norm1", "norm2", "norm3"):
            if name in modules and "norm" in options:
                modules[name] = make_norm(options["norm"], first.in_features, modules[name].eps, bias, factory)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's method turns an activation that is a module into ReLU on deepcopy and pickle.
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]

    @property
    def attentions(self) -> tuple[nn.Module, ...]:
        """The attention modules, or what took their place."""
        modules: dict[str, Any] = self._modules
        return tuple(modules[name] for name in ("self_attn", "multihead_attn") if name in modules)

    def compose(self, x: Tensor, *attentions: Attention) -> Tensor:
        """Compute the layer on x `[..., D]`, with a callable for each of its attentions, in their order."""
        if self.norm_first:
            return self.carry(x, *attentions).add()
        modules: dict[str, Any] = self._modules
        unmodified = unmodified_children(self, PARTS)
        for number, attend in enumerate((*attentions, None), start=1):
            norm, dropout = f"norm{number}", f"dropout{number}"
            out = self._feed_forward(x, unmodified) if attend is None else attend(x)
            deferred = DeferredResidual(out, x, modules[dropout], dropout in unmodified)
            x, _ = deferred.norm(modules[norm], norm in unmodified)
        return x

    def carry(self, x: Tensor | DeferredResidual, *attentions: Attention) -> DeferredResidual:
        """Compute a layer with `norm_first` up to its last sum, which the next norm adds; arguments as of `compose`."""
        modules: dict[str, Any] = self._modules
        unmodified = unmodified_children(self, PARTS)
        readers = "self_attn", *(["multihead_attn"] if len(attentions) > 1 else []), "linear1"
        for number, reader in enumerate(readers, start=1):
            # If only an unmodified linear layer reads a norm's result, the norm writes it in autocast's dtype.
            dtype = _autocast_dtype(x) if reader in unmodified else None
            norm, dropout = f"norm{number}", f"dropout{number}"
            h, x = _norm_of(x, modules[norm], norm in unmodified, dtype)
            out = self._feed_forward(h, unmodified) if reader == "linear1" else attentions[number - 1](h)
            x = DeferredResidual(out, x, modules[dropout], dropout in unmodified)
        return x  # type: ignore[return-value]

    def padded_attentions(
        self, memory: Tensor | None, masks: Sequence[Masks], weights: Sequence[list[Tensor] | None] = (None, None)
    ) -> tuple[Attention, ...]:
        """Return the attention callables for padded batches, which call the modules as torch's layers do.

        Args:
            memory: the encoder's output, for a decoder.
            masks: of each attention.
            weights: for each attention a list to which its weights `[B, H, T, S]` are appended, or None.
        """

        def attend(attention: Any, memory: Tensor | None, masks: Masks, weights: Any, x: Tensor) -> Tensor:
            kv = x if memory is None else memory
            rules = {"attn_mask": masks.mask, "key_padding_mask": masks.padding, "is_causal": masks.is_causal}
            if weights is None:
                return attention(x, kv, kv, need_weights=False, **rules)[0]  # type: ignore[no-any-return]
            out, of_heads = attention(x, kv, kv, need_weights=True, average_attn_weights=False, **rules)
            weights.append(of_heads)
            return out  # type: ignore[no-any-return]

        return tuple([partial(attend, *x) for x in zip(self.attentions, (None, memory), masks, weights, strict=False)])

    def packed_attentions(
        self,
        layout: Layout,
        causal: bool = False,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_layout: Layout | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Attention, ...]:
        """Return the attention callables for packed sequences; arguments as of `MultiheadAttention.packed`."""
        modules: Any = self._modules
        own = partial(modules["self_attn"].packed, layout=layout, causal=causal, attn_mask=mask)
        if "multihead_attn" not in modules:
            return (own,)
        # With None, attention would be to the tokens themselves.
        check_types(("memory",), memory)
        offsets_of("memory_layout", memory_layout)
        return own, partial(
            modules["multihead_attn"].packed,
            layout=layout,
            memory=memory,
            memory_layout=memory_layout,
            attn_mask=memory_mask,
        )

    def _feed_forward(self, x: Tensor, unmodified: set[str]) -> Tensor:
        modules: Any = self._modules
        first, dropout, second = modules["linear1"], modules["dropout"], modules["linear2"]
        name = activation_name(self.activation) if unmodified.issuperset(("linear1", "dropout", "linear2")) else None
        if name is None:
            return second(dropout(self.activation(first(x))))  # type: ignore[no-any-return]
        weights = first.weight, first.bias, second.weight, second.bias
        return functional.feed_forward(x, *weights, activation=name, dropout_p=dropout.p if dropout.training else 0.0)


@drop_in
class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer on fastformer's ops (Vaswani et al. 2017, section 3.1).

    Masks (True = ignore) and exceptions are torch's. `activation` may also be "silu", "gelu_tanh", "geglu", "swiglu" or
    "reglu"; additional keywords are those of `LayerOptions`.
    """

    self_attn: MultiheadAttention

    @property
    def activation_relu_or_gelu(self) -> int:
        """1 for ReLU and 2 for GELU where torch's inference fast path computes the same as the layer; else 0.

        torch's layer and stack take that fast path if this is not 0. It calls no overridden methods, adapters or hooks.
        """
        number = {"relu": 1, "gelu": 2}.get(activation_name(self.activation) or "", 0)
        modules: Any = self._modules
        if not number or type(self) is not TransformerEncoderLayer or not runs_composed(self):
            return 0
        if any(modules[name].training for name in ("dropout", "dropout1", "dropout2")):
            return 0
        if len(unmodified_children(self, PARTS)) < 8 or not modules["self_attn"].is_torchs_formula():
            return 0
        parameters = [modules[name]._parameters for name in ("linear1", "linear2", "norm1", "norm2")]
        return 0 if any(x.get(name) is None for x in parameters for name in ("weight", "bias")) else number

    @activation_relu_or_gelu.setter
    def activation_relu_or_gelu(self, value: int) -> None:
        self.__dict__["activation_relu_or_gelu"] = value  # torch's class reads it after `revert`

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Encode `[S, B, D]`, `[B, S, D]` if batch_first, or unbatched `[S, D]`; arguments are torch's.

        `is_causal` states that src_mask is the causal mask, which may then be omitted.
        """
        run: Any = src_mask
        if callable(run):  # a stack passes it, to run inside the call in which a sharded layer gathers its parameters
            return run(self, src)  # type: ignore[no-any-return]
        check_types(("src",), src)
        check_types(("src_mask", "src_key_padding_mask"), src_mask, src_key_padding_mask, optional=True)
        if runs_as_torch(src):
            out = self._run_torchs_op(src, Masks(src_mask, src_key_padding_mask, is_causal))
            if out is not None:
                return out
        if not runs_composed(self) or src.is_nested or not is_unmodified(self.self_attn, MultiheadAttention):
            return nn.TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal)
        masks = (Masks(src_mask, src_key_padding_mask, is_causal),)
        return self.compose(src, *self.padded_attentions(None, masks))

    def _run_torchs_op(self, src: Tensor, masks: Masks) -> Tensor | None:
        """Run torch's op for a whole layer on few tokens `[B, S, D]`; return None if it does not compute this layer."""
        attention, modules, mask = self.self_attn, self._modules, masks.mask
        if src.dim() != 3 or type(attention) is not MultiheadAttention or not attention.batch_first:
            return None
        if isinstance(mask, Tensor) and mask.is_floating_point() and (mask := hidden_keys(mask)) is None:
            return None  # torch's layer takes every number except 0 as hidden: NaN with a bias
        fused = mask_of_fused_ops(src, attention.num_heads, masks._replace(mask=mask))
        if fused is None or attention.num_heads % 2:
            return None
        activation, norms = self.activation_relu_or_gelu, cast(Any, (modules["norm1"], modules["norm2"]))
        if not activation or attention.training or norms[0].eps != norms[1].eps:
            return None
        own = attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias
        others: Any = [x for m in (*norms, modules["linear1"], modules["linear2"]) for x in (m.weight, m.bias)]
        if any(type(x) is not nn.Parameter or x.dtype is not src.dtype for x in (*own, *others)):
            return None
        settings = activation == 2, self.norm_first, norms[0].eps
        arguments: Any = (attention.embed_dim, attention.num_heads, *own, *settings, *others, *fused)
        out = torch._transformer_encoder_layer_fwd(src, *arguments)
        return out if fused[0] is None or is_finite(out) else None


@drop_in
class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer on fastformer's ops; activations and keywords as of the encoder's layer."""

    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention

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
        """Decode `[T, B, D]`, `[B, T, D]` if batch_first, or unbatched `[T, D]`; arguments are torch's.

        `tgt_is_causal` and `memory_is_causal` state that a mask is the causal mask, which may then be omitted.
        """
        run: Any = tgt_mask
        if callable(run):  # as in the encoder's layer
            return run(self, tgt, memory)  # type: ignore[no-any-return]
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        if not runs_composed(self):  # a block may take another kind of memory
            return nn.TransformerDecoderLayer.forward(self, tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        check_types(("tgt", "memory"), tgt, memory)
        check_types(
            ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask"), *masks, optional=True
        )
        own_masks = Masks(tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        memory_masks = Masks(memory_mask, memory_key_padding_mask, memory_is_causal)
        return self.compose(tgt, *self.padded_attentions(memory, (own_masks, memory_masks)))
