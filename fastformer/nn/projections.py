"""The projections of attention: from tokens and masks to queries, keys, values and masks of the op, and to the output.

Options beyond torch's are here: fewer heads of keys and values, any head size, norms over each head, rotary positions.
Parameters have torch's names; the weights of q, k and v, one below the other, are `in_proj_weight`,
`[(H + 2 Hkv) * K, D]`.

Letters: D model width, H heads of queries, Hkv of keys and values, K head size, L tokens.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastformer import functional
from fastformer.functional.attention.rules import Window
from fastformer.host.devices import check_types
from fastformer.nn.inspection import has_own_hooks
from fastformer.nn.modules import RMSNorm
from fastformer.nn.options import AttentionOptions, check_options
from fastformer.nn.rotary import Positions, Rotary
from fastformer.packing import Layout

OUT_PROJECTIONS = (NonDynamicallyQuantizableLinear, nn.Linear)
QK_EPS = 1e-6


class Projections(nn.MultiheadAttention):
    """The parameters, options and projections of an attention module, with stacked or separate weights.

    Attributes:
        rotary: the rotation of queries and keys by their positions; None: no rotation.
        window: how many positions (left, right) a query sees; None: as many as masks allow.
        softcap: of the scores; None: no cap.
    """

    part_types: ClassVar[dict[str, tuple[type[nn.Module], ...]]] = {
        "out_proj": OUT_PROJECTIONS,
        "q_norm": (RMSNorm,),
        "k_norm": (RMSNorm,),
    }
    _kv_heads: int | None = None
    rotary: Rotary | None = None
    window: Window | None = None
    softcap: float | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        sizes: dict[str, Any] = {
            "dropout": dropout,
            "bias": bias,
            "kdim": kdim,
            "vdim": vdim,
            "batch_first": batch_first,
        }
        if not options:
            extra = {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
            super().__init__(embed_dim, num_heads, **sizes, **extra, device=device, dtype=dtype)
            return
        check_options(options, AttentionOptions)
        if add_bias_kv or add_zero_attn:
            raise ValueError(f"add_bias_kv and add_zero_attn must be False with {', '.join(options)}")
        kv_heads, K = options.get("kv_heads") or num_heads, options.get("head_size")
        if num_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"kv_heads must divide num_heads, {num_heads}, not {kv_heads}")
        if K is None and (embed_dim < 1 or embed_dim % num_heads):
            raise ValueError(f"num_heads must divide embed_dim, {embed_dim}, or head_size be given, not {num_heads}")
        K = K or embed_dim // num_heads
        super().__init__(embed_dim, 1, **sizes, device="meta")  # draws no random numbers
        self.num_heads, self._kv_heads, self.head_dim = num_heads, kv_heads, K
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        q, kv = num_heads * K, kv_heads * K
        rows = {"q_proj_weight": q, "k_proj_weight": kv, "v_proj_weight": kv}
        for name, parameter in self._parameters.items():
            if parameter is not None:
                shape = rows.get(name, q + 2 * kv), *parameter.shape[1:]
                self._parameters[name] = nn.Parameter(torch.empty(shape, **factory))
        self.out_proj = NonDynamicallyQuantizableLinear(q, embed_dim, bias=bias, **factory)
        self._reset_parameters()  # before qkv_bias: torch expects biases in both projections, or in none
        if options.get("qkv_bias") not in (None, bias):
            self._parameters["in_proj_bias"] = None if bias else nn.Parameter(torch.zeros(q + 2 * kv, **factory))
        if options.get("qk_norm"):
            self.q_norm, self.k_norm = (RMSNorm(K, eps=QK_EPS, **factory) for _ in range(2))
        self.window, self.softcap, self.rotary = (options.get(name) for name in ("window", "softcap", "rotary"))  # type: ignore[assignment]
        if self.rotary is not None:
            self.rotary.rotated_size(K)
        if options.get("position_bias") is not None:
            self.position_bias = options["position_bias"]
        if options.get("sinks"):
            self.sinks = nn.Parameter(torch.zeros(num_heads, **factory))

    @property
    def kv_heads(self) -> int:
        """Hkv, heads of keys and values."""
        return self.num_heads if self._kv_heads is None else self._kv_heads

    def project_out(self, x: Tensor) -> Tensor:
        """Apply the output projection to `[..., D]`; as in torch, hooks of all modules do not see it."""
        out_proj: Any = self.out_proj
        if type(out_proj) in OUT_PROJECTIONS and not has_own_hooks(out_proj):
            return F.linear(x, out_proj.weight, out_proj.bias)
        return out_proj(x)  # type: ignore[no-any-return]

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
        stacked, q, k, v = self._qkv_same_embed_dim, query, key, value
        if stacked and query is key is value:
            qkv = _as_heads(F.linear(query, self.in_proj_weight, self.in_proj_bias), H + 2 * Hkv)  # type: ignore[arg-type]
            if self.rotary is not None and not self._has_qk_norms:  # one call rotates both
                qk, v = qkv.split_with_sizes([H + Hkv, Hkv], -2)
                q, k = self.rotate(qk, positions).split_with_sizes([H, Hkv], -2)
                return q, k, v
            q, k, v = qkv.split_with_sizes([H, Hkv, Hkv], -2)
        elif stacked and key is value:
            q, kv = self._project_each((query, key), (H, 2 * Hkv))
            k, v = (None, None) if kv is None else kv.split_with_sizes([Hkv, Hkv], -2)
        else:
            q, k, v = self._project_each((query, key, value), (H, Hkv, Hkv))
        if self.rotary is None and len(self._modules) == 1:  # no norms: out_proj is the only child
            return q, k, v
        q = None if q is None else self._norm_and_rotate(q, "q_norm", positions)
        return q, None if k is None else self._norm_and_rotate(k, "k_norm", key_positions), v

    def _project_each(self, inputs: Sequence[Tensor | None], heads: Sequence[int]) -> list[Any]:
        """Project each input with its share of weights and biases; heads: of each result."""
        # `split_with_sizes` (1.7 us; `split`: 3.7 us) concatenates gradients in backward; slices would pad each with
        # zeros.
        weight: Any = self.in_proj_weight  # None if the weights are separate
        bias = self.in_proj_bias
        if weight is not None:
            sizes = [n * (weight.shape[0] // sum(heads)) for n in heads]
            weights = weight.split_with_sizes(sizes)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            sizes = [x.shape[0] for x in weights]
        biases = [None] * len(sizes) if bias is None else bias.split_with_sizes(sizes)
        each = zip(inputs, weights, biases, heads, strict=True)
        return [None if x is None else _as_heads(F.linear(x, w, b), n) for x, w, b, n in each]

    @property
    def _has_qk_norms(self) -> bool:
        return any(self._modules.get(norm) is not None for norm in ("q_norm", "k_norm"))

    def _norm_and_rotate(self, x: Tensor, norm: str, positions: Positions | None) -> Tensor:
        """Apply the norm and the rotation to queries or keys, if the module has them."""
        norm_module = self._modules.get(norm)
        x = x if norm_module is None else norm_module(x)
        return x if self.rotary is None else self.rotate(x, positions)

    def rotate(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Rotate queries or keys `[..., heads, K]` by their positions."""
        assert self.rotary is not None
        if positions is None:
            raise ValueError("positions must be given: rotary attention rotates queries and keys by them")
        cos, sin = self.rotary.tables(x.shape[-1], positions.end, x)
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
            shape = (*k.shape[:2], 1, k.shape[3])
            k = torch.cat([k, self.bias_k.view(1, *shape[1:]).expand(shape).to(k.dtype)], 2)
            v = torch.cat([v, self.bias_v.view(1, *shape[1:]).expand(shape).to(v.dtype)], 2)
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        return k, v, extra

    def _fits(self, query: Tensor, key: Tensor, value: Tensor, padding: Any, mask: Any, rows: int, time: int) -> bool:
        """Return whether shapes and masks of a padded batch fit together; rows, time: dimensions of B and T."""
        B, T, S = query.shape[rows], query.shape[time], key.shape[time]
        if mask is not None and not _is_mask(mask, (T, S), (B * self.num_heads, T, S)):
            return False
        if padding is not None and not _is_mask(padding, (B, S)):
            return False
        compared = 3 if self._qkv_same_embed_dim else 2
        same = key.shape[:compared] == value.shape[:compared] and key.shape[rows] == B
        return same and query.shape[-1] == self.embed_dim


def _as_heads(x: Tensor, heads: int) -> Tensor:
    """View `[..., heads * K]` as `[..., heads, K]`."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


def _is_mask(mask: Tensor, *shapes: tuple[int, ...]) -> bool:
    # Not `mask.shape in shapes`, which is False in a graph of torch 2.13 if a constant size equals a symbolic one.
    fits = any(mask.shape == shape for shape in shapes)
    return fits and (mask.dtype == torch.bool or mask.is_floating_point())


def check_attn_mask(attn_mask: Tensor, heads: int, layout: Layout, key_layout: Layout) -> None:
    """Raise what torch raises for an attn_mask that does not fit the padded batches of two layouts."""
    check_types(("attn_mask",), attn_mask)
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
