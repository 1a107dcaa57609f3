"""The projections of attention: from tokens and masks to queries, keys, values and masks of the op, and to the output.

Options beyond torch's are here: fewer heads of keys and values, any head size, norms over each head, rotary positions.
Parameters have torch's names; the weights of q, k and v, one below the other, are `in_proj_weight`,
`[(H + 2 Hkv) * K, D]`.

Letters: D model width, H heads of queries, Hkv of keys and values, K head size, L tokens.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from fastformer import functional
from fastformer.host.devices import check_masks
from fastformer.nn.inspection import has_own_hooks
from fastformer.nn.modules import RMSNorm
from fastformer.nn.options import AttentionOptions
from fastformer.nn.rotary import Positions, Rotary
from fastformer.packing import Layout

OUT_PROJECTIONS = (NonDynamicallyQuantizableLinear, nn.Linear)
QK_EPS = 1e-6


class Projections(nn.MultiheadAttention):
    """The projections of an attention module, with stacked or separate weights.

    Attributes:
        rotary: the rotation of queries and keys by their positions; None: no rotation.
    """

    part_types: ClassVar[dict[str, tuple[type[nn.Module], ...]]] = {
        "out_proj": OUT_PROJECTIONS,
        "q_norm": (RMSNorm,),
        "k_norm": (RMSNorm,),
    }
    _kv_heads: int | None = None
    _head_dim: int  # only with options
    rotary: Rotary | None = None

    def _build(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        kdim: int | None,
        vdim: int | None,
        batch_first: bool,
        factory: dict[str, Any],
        options: AttentionOptions,
    ) -> None:
        """Construct the module as torch does, with sizes that torch's constructor does not support."""
        nn.Module.__init__(self)
        kv_heads, head_size = options.get("kv_heads") or num_heads, options.get("head_size")
        if num_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"kv_heads must divide num_heads, {num_heads}, not {kv_heads}")
        if head_size is None and (embed_dim < 1 or embed_dim % num_heads):
            raise ValueError(f"num_heads must divide embed_dim, {embed_dim}, or head_size be given, not {num_heads}")
        K = embed_dim // num_heads if head_size is None else head_size
        self.embed_dim, self.kdim, self.vdim = embed_dim, kdim or embed_dim, vdim or embed_dim
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim
        self.num_heads, self._kv_heads, self.head_dim = num_heads, kv_heads, K
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, False
        self.bias_k = self.bias_v = None
        q, kv = num_heads * K, kv_heads * K
        shapes = {"in_proj_weight": (q + 2 * kv, embed_dim)}
        if not self._qkv_same_embed_dim:
            widths = {"q": (q, embed_dim), "k": (kv, self.kdim), "v": (kv, self.vdim)}
            shapes = {f"{name}_proj_weight": shape for name, shape in widths.items()}
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight"):
            weight = nn.Parameter(torch.empty(shapes[name], **factory)) if name in shapes else None
            self.register_parameter(name, weight)
        in_bias = nn.Parameter(torch.empty(q + 2 * kv, **factory)) if bias else None
        self.register_parameter("in_proj_bias", in_bias)
        self.out_proj = NonDynamicallyQuantizableLinear(q, embed_dim, bias=bias, **factory)
        self._reset_parameters()  # before qkv_bias: torch expects biases in both projections, or in none
        if options.get("qkv_bias") not in (None, bias):
            in_bias = None if bias else nn.Parameter(torch.zeros(q + 2 * kv, **factory))
            self.register_parameter("in_proj_bias", in_bias)
        if options.get("qk_norm"):
            self.q_norm, self.k_norm = (RMSNorm(K, eps=QK_EPS, **factory) for _ in range(2))
        self.rotary = options.get("rotary")
        if self.rotary is not None:
            self.rotary.turned(K)

    @property
    def head_dim(self) -> int:
        """K; without options it follows num_heads in each call, which may be set later, as in torch."""
        if self._kv_heads is not None:
            return (
                self._head_dim
            )  # another name: Dynamo of torch 2.11 reads a dict item `head_dim` in place of this property
        return self.embed_dim // self.num_heads  # type: ignore[no-any-return]

    @head_dim.setter
    def head_dim(self, size: int) -> None:
        if self._kv_heads is None:
            self.__dict__["head_dim"] = size  # where torch stores it
        else:
            self._head_dim = size

    @property
    def kv_heads(self) -> int:
        """Hkv, heads of keys and values."""
        return self.num_heads if self._kv_heads is None else self._kv_heads

    def project_out(self, x: Tensor) -> Tensor:
        """Apply the output projection to `[..., D]`; the module is called only if it has hooks or another class."""
        kind = type(self.out_proj)
        if kind not in OUT_PROJECTIONS and is_parametrized(self.out_proj):
            kind = kind.__bases__[0]
        if kind not in OUT_PROJECTIONS or has_own_hooks(self.out_proj):
            return self.out_proj(x)  # type: ignore[no-any-return]
        return F.linear(x, self.out_proj.weight, self.out_proj.bias)

    def _heads(self, x: Tensor) -> Tensor:
        """View `[..., heads * K]` as `[..., heads, K]`."""
        K = self.head_dim
        return x.view(*x.shape[:-1], x.shape[-1] // K, K)

    def project(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        positions: Positions | None = None,
        key_positions: Positions | None = None,
    ) -> Any:
        """Project `[..., D]` to queries `[..., H, K]`, and keys and values `[..., Hkv, K]`; None to None.

        Inputs that are the same tensor take one matrix product. Rotary attention needs the positions of the tokens.
        """
        H, Hkv = self.num_heads, self._kv_heads or self.num_heads
        q, k, v = query, key, value
        if self._qkv_same_embed_dim and query is key is value:
            qkv = self._heads(F.linear(query, self.in_proj_weight, self.in_proj_bias))  # type: ignore[arg-type]
            if self.rotary is not None and not self._has_qk_norms:  # one call rotates both
                qk, v = qkv.split_with_sizes([H + Hkv, Hkv], -2)
                q, k = self.turn(qk, positions).split_with_sizes([H, Hkv], -2)
                return q, k, v
            q, k, v = qkv.split_with_sizes([H, Hkv, Hkv], -2)
        elif self._qkv_same_embed_dim and key is value:
            # `split_with_sizes` (1.7 us; `split`: 3.7 us) concatenates both gradients in backward; slices would pad
            # each with zeros.
            sizes = [H * self.head_dim, 2 * Hkv * self.head_dim]
            weights = self.in_proj_weight.split_with_sizes(sizes)
            q, kv = self._linear_each((query, key), weights, sizes)
            k, v = (None, None) if kv is None else kv.split_with_sizes([Hkv, Hkv], -2)
        else:
            sizes = [H * self.head_dim, Hkv * self.head_dim, Hkv * self.head_dim]
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.split_with_sizes(sizes)
            else:
                weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            q, k, v = self._linear_each((query, key, value), weights, sizes)
        if self.rotary is None and len(self._modules) == 1:  # no norms: out_proj is the only child
            return q, k, v
        q = None if q is None else self._norm_and_rotate(q, "q_norm", positions)
        return q, None if k is None else self._norm_and_rotate(k, "k_norm", key_positions), v

    def _linear_each(self, inputs: Any, weights: Sequence[Tensor], sizes: list[int]) -> list[Any]:
        bias = self.in_proj_bias
        biases = [None] * len(sizes) if bias is None else bias.split_with_sizes(sizes)
        triples = zip(inputs, weights, biases, strict=True)
        return [None if x is None else self._heads(F.linear(x, w, b)) for x, w, b in triples]

    @property
    def _has_qk_norms(self) -> bool:
        return any(self._modules.get(norm) is not None for norm in ("q_norm", "k_norm"))

    def _norm_and_rotate(self, x: Tensor, norm: str, positions: Positions | None) -> Tensor:
        """Apply the norm and the rotation to queries or keys, if the module has them."""
        norm_module = self._modules.get(norm)
        x = x if norm_module is None else norm_module(x)
        return x if self.rotary is None else self.turn(x, positions)

    def turn(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Rotate queries or keys `[..., heads, K]` by their positions."""
        assert self.rotary is not None
        if positions is None:
            raise ValueError("positions must be given: rotary attention rotates queries and keys by them")
        cos, sin = self.rotary.tables(self.head_dim, positions.end, x)
        return functional.rotary(x, positions.at, cos, sin, interleaved=self.rotary.interleaved)

    def _positions(self, length: int, keys: int, time: int, device: torch.device) -> tuple[Positions | None, ...]:
        """Return the positions of queries and keys in a padded batch, in the order of its dimensions."""
        if self.rotary is None:
            return None, None
        index = torch.arange(max(length, keys), device=device)
        index = index if time == 1 else index[:, None]
        return Positions(index[:length], length), Positions(index[:keys], keys)

    def _extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append the learned and the zero key of `add_bias_kv` and `add_zero_attn` to `[B, H, S, K]`."""
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            shape = (k.shape[0], self.num_heads, 1, self.head_dim)
            k = torch.cat([k, self.bias_k.view(1, *shape[1:]).expand(shape).to(k.dtype)], 2)
            v = torch.cat([v, self.bias_v.view(1, *shape[1:]).expand(shape).to(v.dtype)], 2)
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        return k, v, extra

    def _fits(self, query: Tensor, key: Tensor, value: Tensor, padding: Any, mask: Any, rows: int, time: int) -> bool:
        """Return whether the shapes of a padded batch, and its masks, fit together; rows, time: of the dimensions."""
        B, T, S = query.shape[rows], query.shape[time], key.shape[time]
        if mask is not None and not _is_mask(mask, (T, S), (B * self.num_heads, T, S)):
            return False
        if padding is not None and not _is_mask(padding, (B, S)):
            return False
        compared = 3 if self._qkv_same_embed_dim else 2
        same = key.shape[:compared] == value.shape[:compared] and key.shape[rows] == B
        return same and query.shape[-1] == self.embed_dim


def _is_mask(mask: Tensor, *shapes: tuple[int, ...]) -> bool:
    return (mask.dtype == torch.bool or mask.is_floating_point()) and mask.shape in shapes


def check_attn_mask(attn_mask: Tensor, heads: int, layout: Layout, key_layout: Layout) -> None:
    """Raise what torch raises for an attn_mask that does not fit the padded batches of two layouts."""
    check_masks(("attn_mask",), attn_mask)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise AssertionError(f"attn_mask must be bool or floating point, not {attn_mask.dtype}")
    columns = layout.columns, key_layout.columns
    shape = columns if attn_mask.dim() == 2 else (layout.batch * heads, *columns)
    if attn_mask.shape != shape:
        raise RuntimeError(f"attn_mask must be of shape {list(shape)}, not {list(attn_mask.shape)}")


def op_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, sizes: tuple[int, int], extra: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return torch's masks (True = ignore) as the mask and key mask of `functional.attention` (True = attend).

    Args:
        attn_mask: `[T, S]` or `[B * H, T, S]`.
        key_padding_mask: `[B, S]`.
        sizes: B and H.
        extra: number of keys behind the S, which all queries may attend to.
        dtype: of additive masks.
    """
    mask, padding = attn_mask, key_padding_mask
    if extra:
        mask, padding = (None if x is None else F.pad(x, (0, extra)) for x in (mask, padding))
    if mask is not None:
        mask = mask.view(*sizes, *mask.shape[1:]) if mask.dim() == 3 else mask  # [B, H, T, S] or [T, S]
        mask = ~mask if mask.dtype == torch.bool else mask
    if padding is None or padding.dtype == torch.bool:
        return mask, None if padding is None else ~padding
    padding = padding[:, None, None, :].to(dtype)
    if mask is None:
        return padding, None
    return padding.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else mask + padding, None
