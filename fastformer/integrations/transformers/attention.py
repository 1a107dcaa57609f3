"""`attn_implementation="fastformer"`: the masks and the attention that transformers calls for that name.

transformers makes the mask of each pattern once per forward pass. `mask_rules` returns a `MaskRules`: the padding of
keys `[B, S]`, causality and window, or the `Layout` of sequences in a packed call; a tensor `[B, 1, T, S]` where these
do not suffice. `attention_forward` gets it in each layer.

Letters: B batch, H heads, T queries, S keys, K head size, Kv that of values, P positions, N tokens of a packed batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils.output_capturing import _active_collector

from fastformer import functional
from fastformer.functional.attention.rules import Window
from fastformer.integrations.transformers.entry import NAME, NotPacked, Packed, current
from fastformer.modes import compiling
from fastformer.packing import Layout

# transformers makes new mask functions for each model: they differ in their cells, not in their code.
_ALL_OF = masking_utils.and_masks().__code__
_LOOKS_BACK = masking_utils.sliding_window_overlay(1).__code__
_LOOKS_BOTH_WAYS = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_NO_WINDOW = ((None, None), (None, 0))

_REFUSAL = (
    "this model computes with its attention mask by itself, outside of transformers' attention interface, "
    'which attn_implementation="fastformer" needs; use attn_implementation="eager" or "sdpa" for it'
)
# Keywords that layers pass on to other modules; no attention of transformers reads them.
_NOT_FOR_ATTENTION = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "labels", "logits_to_keep", "max_length_k",
    "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_ids", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip


def collects_weights() -> bool:
    """Return whether a model's hooks collect attention weights, which its layers cannot see (GPT-2)."""
    return any(key.endswith("attentions") for key in current(_active_collector) or ())


@dataclass(frozen=True, eq=False)
class MaskRules:
    """Which keys each query attends to in one forward pass, in the arguments of `fastformer.functional.attention`.

    It is not a tensor: a model that computes with its mask by itself, without the attention interface, gets an error.
    The last query meets the last of the used keys.
    """

    shape: tuple[int, ...]  # (B, 1, T, S)
    used: int  # number of keys to attend to; later ones are empty slots of a static cache
    key_mask: Tensor | None = None  # bool `[B, used]`, True = a real key; None: all are, or `mask` states it
    causal: bool = False
    window: Window | None = None
    mask: Tensor | None = None  # `[B, 1, T, S]`, bool or additive, where the other attributes do not suffice
    layout: Layout | None = None  # of queries in the row of tokens; None: they are padded
    key_layout: Layout | None = None
    collected: bool = field(default_factory=collects_weights)  # read in forward, also for layers that backward reruns

    ndim = 4  # transformers uses a mask of 4 dimensions unchanged

    def contiguous(self) -> "MaskRules":
        return self

    def to(self, device: Any, non_blocking: bool = False) -> "MaskRules":
        """Return the same rules with their tensors on a device, for models that span several."""
        moved: Any = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor | Layout)}
        return replace(self, **moved)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_REFUSAL)

    __radd__ = _refuse

    def __getitem__(self, index: Any) -> "MaskRules":
        """Return the rules of the last queries, `[:, :, -n:, :]`, for which Gemma 4 asks."""
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if not isinstance(rows, slice) or index != (slice(None), slice(None), slice(rows.start, None), slice(None)):
            self._refuse()
        B, _, T, S = self.shape
        queries = len(range(T)[rows])
        if self.layout is not None and queries < T:
            raise NotPacked("the model attends with its last queries only")
        return replace(self, shape=(B, 1, queries, S), mask=None if self.mask is None else self.mask[:, :, rows])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(_REFUSAL)

    def __getattr__(self, name: str) -> NoReturn:  # an AttributeError, for hasattr and copy
        raise AttributeError(f"{_REFUSAL} (it reads .{name})")


def _window(function: Callable[..., Any]) -> Window | None:
    """Return the window of a mask function of transformers, or None if a window does not describe it."""
    if function is masking_utils.causal_mask_function:
        return None, 0
    if function is masking_utils.bidirectional_mask_function:
        return None, None
    code = getattr(function, "__code__", None)
    if compiling() or code not in (_ALL_OF, _LOOKS_BACK, _LOOKS_BOTH_WAYS):  # Dynamo (2.13) cannot read cells
        return None
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    cells = dict(zip(function.__code__.co_freevars, contents, strict=True))
    if code is not _ALL_OF:
        size: int = cells["sliding_window"]
        return (size - 1, None) if code is _LOOKS_BACK else (size, size)
    windows = [_window(each) for each in cells["mask_functions"]]
    if None in windows:
        return None
    left, right = (min((x for x in side if x is not None), default=None) for side in zip(*windows, strict=True))
    return left, right


def mask_rules(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: "Tensor | MaskRules | None" = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> MaskRules:
    """State a pattern as rules; registered with transformers' AttentionMaskInterface, which documents the arguments.

    attention_mask is bool `[B, positions]`, True = real; or rules that `generate` made in advance. allow_is_causal_skip
    is False where decoding is compiled, so that every step gives rules of the same form.
    """
    if isinstance(attention_mask, MaskRules):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    batch = current()
    if isinstance(batch, Packed):
        return _packed_rules(batch, _window(mask_function), shape)
    if batch is not None and q_length == kv_length == batch.shape[1]:
        same_sequence = masking_utils.packed_sequence_mask_function(batch.expand(batch_size, -1))
        mask_function = masking_utils.and_masks(mask_function, same_sequence)
    window = _window(mask_function)
    causal = window is not None and window[1] == 0
    used = None
    if window is not None and (allow_is_causal_skip or q_length > 1 or not causal):
        used = _used_keys(window, q_length, kv_length, q_offset, kv_offset)
    if used is not None:
        key_mask = _key_mask(attention_mask, used, kv_offset)
        return MaskRules(shape, used, key_mask, causal, None if window in _NO_WINDOW else window)
    others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = masking_utils.sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **others
    )
    if q_length == 1:
        return MaskRules(shape, kv_length, mask[:, 0, 0].contiguous())
    return MaskRules(shape, kv_length, mask=mask)


def _packed_rules(batch: Packed, window: Window | None, shape: tuple[int, ...]) -> MaskRules:
    """Return the rules of a packed call; without a layout for masks of all pairs, or that count padding."""
    layout, counts = batch.sequences, window not in _NO_WINDOW
    key_layout = batch.memory if batch.memory is not None and window == (None, None) else layout
    tokens = shape[0] * shape[2], shape[0] * shape[3]
    if window is None or (counts and layout.has_gaps) or tokens != (layout.total, key_layout.total):
        return MaskRules(shape, shape[3])
    causal = window[1] == 0
    return MaskRules(shape, shape[3], None, causal, window if counts else None, layout=layout, key_layout=key_layout)


def _used_keys(window: Window, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any) -> int | None:
    """Return how many keys to use so that the last query meets the last of them, or None if that is impossible."""
    if window == (None, None):
        return kv_length
    if not isinstance(q_offset, int) or not isinstance(kv_offset, int):  # reading it would wait for the device
        return None
    end = q_offset - kv_offset + q_length  # causal attention never sees keys after the last query
    return end if q_length <= end and (end == kv_length or (window[1] == 0 and end < kv_length)) else None


def _key_mask(padding: Tensor | None, used: int, kv_offset: int) -> Tensor | None:
    """Cut the padding mask `[B, positions]` to the used keys; positions beyond it are padding, as in transformers."""
    if padding is None:
        return None
    padding = masking_utils.prepare_padding_mask(padding, used, kv_offset)
    padding = padding.to(torch.bool, copy=True)  # the caller may change the original before backward
    key_mask: Tensor = padding[:, kv_offset : kv_offset + used]
    # Checked only where that waits for no device: without padding, torch's own attention takes its fast path.
    if key_mask.device.type == "cpu" and not compiling() and bool(key_mask.all()):
        return None
    return key_mask


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRules | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend in one layer; registered with transformers' AttentionInterface, which documents the arguments.

    attention_mask is from `mask_rules`, a tensor `[B, H, T, S]` or None; is_causal is read if it is None, as in `sdpa`.
    position_bias is broadcastable to `[B, H, T, S]` (T5), or by distance `[H, 2 P - 1]` in a packed call. Raises
    ValueError where `functional.attention` has no argument for something that would change the result.

    Returns:
        `[B, T, H, Kv]`, and the weights `[B, H, T, S]` if they are requested, else None. Packed, B is 1.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rules = _rules_of(query, key, attention_mask, bool(causal), sliding_window)
    unknown = {name for name, x in kwargs.items() if x is not None and x is not False} - _NOT_FOR_ATTENTION
    if unknown:
        raise ValueError(
            f"fastformer's attention does not know {', '.join(sorted(unknown))}, which may change the result; "
            'use attn_implementation="eager" for this model or call'
        )
    offsets = kwargs.get("cu_seq_lens_q")
    if offsets is not None and len(offsets) > 2 and rules.mask is None and rules.layout is None:
        raise ValueError(
            "cu_seq_lens_q has several sequences a row, which no mask keeps apart: "
            "pass position_ids that start again at 0 for each, and no attention_mask"
        )
    needs_weights = kwargs.get("output_attentions") or rules.collected or collects_weights()
    settings: dict[str, Any] = {
        "causal": rules.causal, "alignment": "bottom_right", "window": rules.window, "softcap": softcap,
        "dropout_p": dropout if module.training else 0.0, "scale": scaling, "sinks": s_aux,
    }  # fmt: skip
    if rules.layout is not None:
        bias = None if position_bias is None or position_bias.numel() == 1 else position_bias
        if needs_weights or (bias is not None and (bias.dim() > 2 or rules.layout.has_gaps)):
            raise NotPacked("it uses attention weights, a bias of all pairs, or one that counts padding between tokens")
        if rules.key_layout is rules.layout:  # the op would need 8 us to find that
            settings["alignment"] = "top_left"
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [N, H, K]
        out = functional.packed_attention(q, k, v, rules.layout, rules.key_layout, distance_bias=bias, **settings)
        return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None
    S = key.shape[2]
    if query.shape[0] == 1:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    mask = position_bias if rules.mask is None else rules.mask
    if rules.mask is not None and position_bias is not None:
        by_pair = rules.mask.dtype == torch.bool
        mask = torch.where(rules.mask, position_bias, float("-inf")) if by_pair else position_bias + rules.mask
    if rules.used < S:
        key, value = key[:, :, : rules.used], value[:, :, : rules.used]
        mask = None if mask is None else mask[..., : rules.used]
    settings["key_mask"] = rules.key_mask
    if not needs_weights:
        return functional.attention(query, key, value, mask, **settings).transpose(1, 2).contiguous(), None
    out, weights = functional.attention_with_weights(query, key, value, mask, **settings)
    return out.transpose(1, 2).contiguous(), F.pad(weights, (0, S - rules.used))


def _rules_of(query: Tensor, key: Tensor, mask: Any, causal: bool, sliding_window: int | None) -> MaskRules:
    """Return the rules of one layer's call: those of `mask_rules`, or of a mask that a model or user made."""
    T, S = query.shape[2], key.shape[2]
    if isinstance(current(), Packed) and (not isinstance(mask, MaskRules) or mask.layout is None):
        raise NotPacked("it makes a mask itself, or a mask of all pairs, or one that counts padding between tokens")
    if isinstance(mask, MaskRules):
        by_position = mask.causal or mask.window is not None or mask.mask is not None
        if mask.layout is None and (mask.shape[3] != S or (by_position and mask.shape[2] != T)):
            raise ValueError(
                f"attention_mask is for {mask.shape[2]} queries and {mask.shape[3]} keys, not for {T} and {S}"
            )
        return mask  # the op compares a layout with its tensors
    if mask is None:
        causal = T > 1 and causal
        if causal and T != S:
            raise ValueError(f"attention_mask is None, so the positions of {T} queries among {S} keys are unknown")
        if sliding_window is not None and sliding_window < S:
            raise ValueError(f"attention_mask is None, but must contain the sliding window of {sliding_window}")
        return MaskRules((len(key), 1, T, S), S, causal=causal)
    return MaskRules((len(key), 1, T, S), S, mask=mask)


def t5_attention(attention: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run T5's attention with a bias by distance `[H, 2 P - 1]` where tokens are packed, or 0 if it has no bias."""
    rules = kwargs.get("mask")
    if isinstance(rules, MaskRules) and rules.layout is not None and kwargs.get("position_bias") is None:
        if attention.has_relative_attention_bias:
            P = rules.layout.max_length
            bias = attention.compute_bias(1, 2 * P - 1, device=args[0].device, past_seen_tokens=P - 1)[0, :, 0]
        else:
            bias = args[0].new_zeros(1)
        kwargs["position_bias"] = bias
    return inner(*args, **kwargs)


def mpnet_bias(encoder: Any, inner: Any, names: tuple[str, ...], /, x: Tensor, **kwargs: Any) -> Tensor:
    """Return MPNet's bias by distance `[H, 2 P - 1]` in place of all pairs, where tokens are packed."""
    batch = current()
    if not isinstance(batch, Packed):
        return inner(x, **kwargs)  # type: ignore[no-any-return]
    P = batch.sequences.max_length
    buckets = encoder.relative_position_bucket(torch.arange(1 - P, P, device=x.device), **kwargs)
    return encoder.relative_attention_bias(buckets).T  # type: ignore[no-any-return]


def mpnet_attention(attention: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run MPNet's attention, which does not call transformers' interface, through `attention_forward`."""
    arguments = dict(zip(names, args, strict=False)) | kwargs
    x, rules = arguments["hidden_states"], arguments.get("attention_mask")
    if not isinstance(rules, MaskRules):
        return inner(*args, **kwargs)
    q, k, v = (
        linear(x).unflatten(2, (attention.num_attention_heads, -1)).transpose(1, 2)
        for linear in (attention.q, attention.k, attention.v)
    )
    options = {name: arguments.get(name) for name in ("position_bias", "output_attentions")}
    out, weights = attention_forward(attention, q, k, v, rules, attention.dropout.p, **options)
    return attention.o(out.flatten(2)), weights


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_rules)
