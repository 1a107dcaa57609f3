"""What Hugging Face transformers' masks say, in the words of `fastformer.functional.attention`.

transformers asks an attention implementation once a forward pass for the mask of a pattern. Others answer with a tensor
`[B, 1, T, S]`; the answer here is a `MaskRules`: the padding of the keys `[B, S]`, causality and the window, from which
the kernels skip tiles of padding, or the `Layout` of sequences in a packed call. A tensor is built where these words
do not suffice: chunked sequences, custom mask functions, several new tokens in a static cache that holds some, and
windows or flattened batches under torch.compile.

Letters: B batch, H heads, T queries, S keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import masking_utils

from fastformer.functional.attention.rules import Window
from fastformer.integrations.transformers.entry import NotPacked, Packed, packed, traced_sequences
from fastformer.modes import compiling
from fastformer.packing import Layout

# The functions that transformers makes for a pattern differ in their cells, never in their code.
_ALL_OF = masking_utils.and_masks().__code__
_LOOKS_BACK = masking_utils.sliding_window_overlay(1).__code__
_LOOKS_BOTH_WAYS = masking_utils.sliding_window_bidirectional_overlay(1).__code__

_REFUSAL = (
    "this model computes with its attention mask by itself, outside of transformers' attention interface, "
    'which attn_implementation="fastformer" needs; use attn_implementation="eager" or "sdpa" for it'
)


@dataclass(frozen=True, eq=False)
class MaskRules:
    """Who attends to whom in one forward pass, in the words of `fastformer.functional.attention`.

    What transformers passes from a model's mask to its attention. It is not a tensor: a model that computes with its
    mask by itself, without the attention interface, gets an error instead of wrong numbers.

    Attributes:
        shape: (B, 1, T, S), of the mask that this stands for.
        key_mask: bool `[B, used]`, True = a real key; None: all are, or `mask` alone says it.
        causal, window: as in `functional.attention`; the last query meets the last of the used keys.
        used: how many keys count; later ones are empty slots of a static cache.
        mask: `[B, 1, T, S]`, bool (True = may attend) or additive, where the other words do not suffice.
        layout, key_layout: where sequences lie in the run of tokens that queries, and keys, are; None: they are padded.
        notes: "weights" if attention weights were asked for in the forward pass.
    """

    shape: tuple[int, ...]
    used: int
    key_mask: Tensor | None = None
    causal: bool = False
    window: Window | None = None
    mask: Tensor | None = None
    layout: Layout | None = None
    key_layout: Layout | None = None
    notes: set[str] = field(default_factory=set, repr=False)

    @property
    def ndim(self) -> int:
        """4, by which transformers knows a mask that is ready."""
        return 4

    def dim(self) -> int:
        return 4

    def contiguous(self) -> "MaskRules":
        return self

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "MaskRules":
        """The same rules with their tensors on a device, for models that span several."""
        if isinstance(device, torch.dtype):
            self._refuse()
        key_mask, mask = (
            None if x is None else x.to(device, non_blocking=non_blocking) for x in (self.key_mask, self.mask)
        )
        layouts = (self.layout, self.key_layout)
        layout, key_layout = (None if its is None else its.to(torch.device(device)) for its in layouts)
        return replace(self, key_mask=key_mask, mask=mask, layout=layout, key_layout=key_layout)

    def __getitem__(self, index: Any) -> "MaskRules":
        """The rules of the last queries, `[:, :, -n:, :]`, all that a model may ask for."""
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        others = () if rows is None else (*index[:2], index[3])
        if any(part != slice(None) for part in others) or not isinstance(rows, slice) or rows.stop is not None:
            self._refuse()
        B, _, T, S = self.shape
        queries = len(range(T)[rows])
        if queries == T:
            return self
        if self.layout is not None or rows.step is not None:
            self._refuse()
        return replace(self, shape=(B, 1, queries, S), mask=None if self.mask is None else self.mask[:, :, rows])

    def __radd__(self, scores: Any) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        cls._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise TypeError(_REFUSAL) if packed() is None else NotPacked(_REFUSAL)

    def __getattr__(self, name: str) -> NoReturn:  # an AttributeError, for hasattr and copy
        raise AttributeError(f"{_REFUSAL} (it wants .{name})")


def _window(function: Callable[..., Any]) -> Window | None:
    """Return how far a query sees by a mask function of transformers, or None where that does not say all."""
    if function is masking_utils.causal_mask_function:
        return None, 0
    if function is masking_utils.bidirectional_mask_function:
        return None, None
    if compiling():  # Dynamo (2.13) knows no cells of functions made while it traces
        return None
    code = getattr(function, "__code__", None)
    if code not in (_ALL_OF, _LOOKS_BACK, _LOOKS_BOTH_WAYS):
        return None
    cells = _cells(function)
    if code is _ALL_OF:
        windows = [_window(each) for each in cells["mask_functions"]]
        if any(each is None for each in windows):
            return None
        left, right = (min((x for x in side if x is not None), default=None) for side in zip(*windows, strict=True))
        return left, right
    size = cells["sliding_window"]
    if not isinstance(size, int) or size < 1:
        return None
    return (size - 1, None) if code is _LOOKS_BACK else (size, size)


def _cells(function: Any) -> dict[str, Any]:
    """The values that a function has from where it was made, by name."""
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


def _packed_rules(batch: Packed, window: Window | None, queries: int, keys: int) -> MaskRules:
    """Return the rules of a packed call; a bidirectional pattern is of attention to an encoder's states, if any.

    They have no layout, which attention refuses, if the pattern is one of all pairs or counts padding between tokens.
    """
    layout, key_layout, counts = batch.sequences, batch.sequences, window not in ((None, None), (None, 0))
    if batch.memory is not None and window == (None, None):
        key_layout = batch.memory
    shape, lengths = (1, 1, queries, keys), (layout.total, key_layout.total)
    if window is None or (counts and layout.has_gaps) or (queries, keys) != lengths:
        return MaskRules(shape, keys)
    return MaskRules(shape, keys, None, window[1] == 0, window if counts else None, None, layout, key_layout)


def mask_rules(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: "Tensor | MaskRules | None" = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> MaskRules:
    """Say a pattern as rules; registered with transformers' AttentionMaskInterface, which documents the arguments.

    Offsets are positions of the first query and key: a tensor for static caches, and not 0 where a cache has dropped
    keys. attention_mask is bool `[B, positions]`, True = real; or the rules that `generate` has asked for in advance.
    allow_is_causal_skip is False where decoding is compiled, so that every step gives rules of the same form.
    """
    if isinstance(attention_mask, MaskRules):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    if (batch := packed()) is not None:
        return _packed_rules(batch, _window(mask_function), q_length, kv_length)
    sequences = traced_sequences()
    if sequences is not None and shape[2:] == (sequences.shape[1],) * 2:
        apart = masking_utils.packed_sequence_mask_function(sequences.expand(batch_size, -1))
        mask_function = masking_utils.and_masks(mask_function, apart)
    window = _window(mask_function)
    used = None
    if window is not None and (attention_mask is None or attention_mask.shape[:-1] == (batch_size,)):
        used = _used_keys(window, q_length, kv_length, q_offset, kv_offset)
        if q_length == 1 and window[1] == 0 and not (used == kv_length and allow_is_causal_skip):
            used = None
    if window is not None and used is not None:
        causal = window[1] == 0
        key_mask = _key_mask(attention_mask, used, kv_offset)
        return MaskRules(shape, used, key_mask, causal, window if window not in ((None, None), (None, 0)) else None)
    mask = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    if q_length == 1:
        return MaskRules(shape, kv_length, mask[:, 0, 0].contiguous())
    key_mask = None if compiling() else _key_mask(attention_mask, kv_length, kv_offset)
    return MaskRules(shape, kv_length, key_mask, mask=mask)


def _used_keys(
    window: Window, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int | Tensor
) -> int | None:
    """Return how many keys to keep so that the last query meets the last of them, or None if none do that."""
    if not isinstance(kv_offset, int):
        return None
    if window == (None, None):
        return kv_length
    if not isinstance(q_offset, int):  # in a static cache; to look at it would wait for the device
        return None
    end = q_offset - kv_offset + q_length
    if window[1] == 0:  # what comes after the last query is never seen
        return end if q_length <= end <= kv_length else None
    return end if q_length <= end == kv_length else None


def _key_mask(padding: Tensor | None, used: int, kv_offset: int) -> Tensor | None:
    """Cut the padding mask `[B, positions]` to the used keys; positions beyond it are padding, as in transformers."""
    if padding is None:
        return None
    padding = masking_utils.prepare_padding_mask(padding, used, kv_offset)
    padding = padding.to(torch.bool, copy=True)  # theirs may change
    key_mask: Tensor = padding[:, kv_offset : kv_offset + used]
    # Only where looking waits for no device: without padding, torch's own attention takes its fast path.
    if key_mask.device.type == "cpu" and not compiling() and bool(key_mask.all()):
        return None
    return key_mask
