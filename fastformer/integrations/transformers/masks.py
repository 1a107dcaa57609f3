"""What Hugging Face transformers' masks say, in the words of `fastformer.functional.attention`.

transformers asks an attention implementation once a forward pass for the mask of a pattern. Others answer with a tensor
`[B, 1, T, S]`; the answer here is a `MaskRules`: the padding of the keys `[B, S]`, causality and the window, from which
the kernels skip tiles of padding, or the `Layout` of sequences that position ids of a flattened batch tell apart. A
tensor is built where these words do not suffice: chunked sequences, custom mask functions, several new tokens in a
static cache that holds some, and windows or flattened batches under torch.compile.

Letters: B batch, H heads, T queries, S keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from transformers import masking_utils

from fastformer.functional.attention.rules import Window
from fastformer.integrations.transformers.entry import flattened
from fastformer.modes import compiling, has_values
from fastformer.packing import Layout

V = TypeVar("V")

# The functions that transformers makes for a pattern differ in their cells, never in their code.
_ALL_OF = masking_utils.and_masks().__code__
_LOOKS_BACK = masking_utils.sliding_window_overlay(1).__code__
_LOOKS_BOTH_WAYS = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_SAME_SEQUENCE = masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__
# In later releases the pattern counts by positions; in 5.18 by columns, which is the same within a sequence.
_by_position = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_BY_POSITION = _by_position and _by_position(masking_utils.causal_mask_function, torch.empty(0)).__code__

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
    """

    shape: tuple[int, ...]
    used: int
    key_mask: Tensor | None = None
    causal: bool = False
    window: Window | None = None
    mask: Tensor | None = None
    layout: Layout | None = None
    key_layout: Layout | None = None
    _memory: dict[object, Any] = field(default_factory=dict, repr=False)

    def once(self, name: object, make: Callable[[], V]) -> V:
        """Return what `make` returned the first time; the layers of a model share their rules."""
        if name not in self._memory:
            self._memory[name] = make()
        found: V = self._memory[name]
        return found

    @property
    def weights_wanted(self) -> bool:
        """Whether a model's call with these rules was asked for attention weights."""
        return "weights" in self._memory

    def real_keys(self, device: torch.device) -> Layout:
        """Where the real keys lie in the padded batch `[B, S]`; waits for the device once a mask."""
        B, S, key_mask = self.shape[0], self.shape[3], self.key_mask
        if key_mask is None:
            return self.once("keys", lambda: Layout.from_lengths([S] * B, device, S))
        return self.once("keys", lambda: Layout.from_mask(~key_mask)).to(device)

    def as_mask(self) -> "MaskRules":
        """The rules of a flattened batch with a mask `[B, 1, L, L]` in place of the layout, for attention weights."""
        layout = self.layout
        if layout is None or layout.total != self.shape[0] * self.shape[2]:
            raise ValueError("attention weights, or a bias of all pairs, were asked for in a layer that runs packed")
        numbers = torch.repeat_interleave(
            torch.arange(layout.batch, device=layout.offsets.device), layout.offsets.diff(), output_size=layout.total
        ).view(self.shape[0], 1, -1)
        return replace(self, mask=numbers[..., None] == numbers[..., None, :], layout=None, key_layout=None)

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
        raise TypeError(_REFUSAL)

    def __getattr__(self, name: str) -> NoReturn:  # an AttributeError, for hasattr and copy
        raise AttributeError(f"{_REFUSAL} (it wants .{name})")


class PackedRules(MaskRules):
    """Rules of a batch that `padding_free` packed: queries of `layout`, keys of `key_layout`."""

    layout: Layout
    key_layout: Layout


def packed_rules(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedRules | None:
    """Those that a module of a packed layer is given."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, PackedRules)), None)


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


def _same_sequence(function: Any) -> Any:
    """Return the part of a mask function that keeps the sequences of a flattened batch apart, or None."""
    if getattr(function, "__code__", None) is not _ALL_OF:
        return None
    parts = _cells(function)["mask_functions"]
    return next((part for part in parts if getattr(part, "__code__", None) is _SAME_SEQUENCE), None)


def _flattened(function: Any) -> tuple[Layout, Window] | None:
    """Read the mask function of a flattened batch: its sequences in `[B * L]`, and how far a query sees within one.

    transformers makes it where position ids begin again within a row: `[B, L]` numbers of sequences, and a mask
    function of the positions, which count by one within each. Waits for the device, for the lengths.
    """
    same = None if compiling() else _same_sequence(function)
    others = [part for part in _cells(function)["mask_functions"] if part is not same] if same else []
    if len(others) != 1:
        return None
    by_position = _BY_POSITION is not None and getattr(others[0], "__code__", None) is _BY_POSITION
    window = _window(_cells(others[0])["mask_function"] if by_position else others[0])
    numbers = _cells(same)["packed_sequence_mask"]
    if window is None or not has_values(numbers):
        return None
    rows = torch.arange(numbers.shape[0], device=numbers.device)[:, None]
    lengths = (numbers + rows * numbers.shape[1]).flatten().unique_consecutive(return_counts=True)[1]
    return Layout.from_lengths(lengths.cpu(), numbers.device), window


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

    Args:
        batch_size, q_length, kv_length: B, T and S.
        q_offset: the position of the first query; a tensor for static caches.
        kv_offset: the position of the first key; not 0 where a cache has dropped keys.
        mask_function: whether the query at one position may attend to the key at another.
        attention_mask: bool `[B, positions]`, True = real; or the rules that `generate` has asked for in advance.
        allow_is_causal_skip: False where decoding is compiled, so that every step gives rules of the same form.
        use_vmap: how transformers evaluates the mask function where a tensor is needed.
        device: of the mask.
        **kwargs: what other implementations want: the configuration, the dtype, the window once more.
    """
    if isinstance(attention_mask, MaskRules):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    if (batch := flattened()) is not None:
        attention_mask = None
        kept_apart = not compiling() and _same_sequence(mask_function) is not None
        mask_function = batch.mask_function(mask_function, (batch_size, q_length, kv_length), kept_apart)
    if attention_mask is None and (found := _flattened(mask_function)) is not None:
        layout, (left, right) = found
        within = None if (left, right) in ((None, None), (None, 0)) else (left, right)
        return MaskRules(shape, kv_length, causal=right == 0, window=within, layout=layout, key_layout=layout)
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
