"""State the masks of Hugging Face transformers in the arguments of `fastformer.functional.attention`.

transformers asks an attention implementation for the mask of each pattern once a forward pass. Its own implementations
answer with a tensor `[B, 1, T, S]`, `mask_rules` with a `MaskRules`: the padding of the keys `[B, S]`, causality and
window, or the `Layout` of sequences in a packed call. A `MaskRules` holds a tensor where these do not suffice: chunks,
custom mask functions, several new tokens in a static cache that holds some, and windows or flattened batches under
torch.compile.

Letters: B batch, H heads, T queries, S keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.utils.output_capturing import _active_collector

from fastformer.functional.attention.rules import Window
from fastformer.integrations.transformers.entry import NotPacked, Packed, current, running
from fastformer.modes import compiling
from fastformer.packing import Layout

# transformers makes mask functions anew for each model: they differ in their cells, not in their code.
_ALL_OF = masking_utils.and_masks().__code__
_LOOKS_BACK = masking_utils.sliding_window_overlay(1).__code__
_LOOKS_BOTH_WAYS = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_NO_WINDOW = ((None, None), (None, 0))

_REFUSAL = (
    "this model computes with its attention mask by itself, outside of transformers' attention interface, "
    'which attn_implementation="fastformer" needs; use attn_implementation="eager" or "sdpa" for it'
)


def collects_weights() -> bool:
    """Return whether a model's hooks collect attention weights, of which its layers are not told (GPT-2)."""
    return any(key.endswith("attentions") for key in current(_active_collector) or ())


@dataclass(frozen=True, eq=False)
class MaskRules:
    """Which keys each query attends to in one forward pass, in the arguments of `fastformer.functional.attention`.

    transformers passes it from a model's mask to its attention. It is not a tensor: a model that computes with its mask
    by itself, without the attention interface, gets an error instead of wrong numbers.

    The last query meets the last of the used keys.
    """

    shape: tuple[int, ...]  # (B, 1, T, S)
    used: int  # keys that count; later ones are empty slots of a static cache
    key_mask: Tensor | None = None  # bool `[B, used]`, True = a real key; None: all are, or `mask` says it
    causal: bool = False
    window: Window | None = None
    mask: Tensor | None = None  # `[B, 1, T, S]`, bool or additive, where the other attributes do not suffice
    layout: Layout | None = None  # of queries in the row of tokens; None: they are padded
    key_layout: Layout | None = None
    collected: bool = field(default_factory=collects_weights)  # for layers that backward computes again

    ndim = 4  # by which transformers knows a mask that is ready

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
        raise AttributeError(f"{_REFUSAL} (it wants .{name})")


def _window(function: Callable[..., Any]) -> Window | None:
    """Return how far a query sees by a mask function of transformers, or None where that does not say all."""
    if function is masking_utils.causal_mask_function:
        return None, 0
    if function is masking_utils.bidirectional_mask_function:
        return None, None
    code = getattr(function, "__code__", None)
    if compiling() or code not in (_ALL_OF, _LOOKS_BACK, _LOOKS_BOTH_WAYS):  # Dynamo (2.13) knows no cells
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

    Offsets are positions of the first query and key: a tensor for static caches, and not 0 where a cache has dropped
    keys. attention_mask is bool `[B, positions]`, True = real; or the rules that `generate` has asked for in advance.
    allow_is_causal_skip is False where decoding is compiled, so that every step gives rules of the same form.
    """
    if isinstance(attention_mask, MaskRules):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    batch = running()
    if isinstance(batch, Packed):
        return _packed_rules(batch, _window(mask_function), shape)
    if batch is not None and q_length == kv_length == batch.shape[1]:
        apart = masking_utils.packed_sequence_mask_function(batch.expand(batch_size, -1))
        mask_function = masking_utils.and_masks(mask_function, apart)
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
    """Return the rules of a packed call; a bidirectional pattern is of attention to an encoder's states, if any.

    They have no layout, which attention refuses, if the pattern is one of all pairs or counts padding between tokens.
    """
    layout, counts = batch.sequences, window not in _NO_WINDOW
    key_layout = batch.memory if batch.memory is not None and window == (None, None) else layout
    if window is None or (counts and layout.has_gaps) or shape[2:] != (layout.total, key_layout.total):
        return MaskRules(shape, shape[3])
    causal = window[1] == 0
    return MaskRules(shape, shape[3], None, causal, window if counts else None, layout=layout, key_layout=key_layout)


def _used_keys(window: Window, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any) -> int | None:
    """Return how many keys to keep so that the last query meets the last of them, or None if none do that."""
    if window == (None, None):
        return kv_length
    if not isinstance(q_offset, int) or not isinstance(kv_offset, int):  # to look at it would wait for the device
        return None
    end = q_offset - kv_offset + q_length  # what comes after the last query is never seen by causal attention
    return end if q_length <= end and (end == kv_length or (window[1] == 0 and end < kv_length)) else None


def _key_mask(padding: Tensor | None, used: int, kv_offset: int) -> Tensor | None:
    """Cut the padding mask `[B, positions]` to the used keys; positions beyond it are padding, as in transformers."""
    if padding is None:
        return None
    padding = masking_utils.prepare_padding_mask(padding, used, kv_offset)
    padding = padding.to(torch.bool, copy=True)  # the caller's may change before backward
    key_mask: Tensor = padding[:, kv_offset : kv_offset + used]
    # Only where looking waits for no device: without padding, torch's own attention takes its fast path.
    if key_mask.device.type == "cpu" and not compiling() and bool(key_mask.all()):
        return None
    return key_mask
