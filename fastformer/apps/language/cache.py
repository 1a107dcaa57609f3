"""What a language model keeps while it writes: the keys and values of its window, for rows of different lengths.

The window rule. A row reads at most `context` tokens, at positions 0 to context - 1, the ones that the model was
trained with. Of a longer prompt it reads the last `context` tokens. A full row that is given one more token first
forgets all but its last context // 2 tokens and reads these again from position 0, in one pass. So every token is
predicted from at least context // 2 tokens before it, if there are as many; memory does not grow; and the passes add up
to no more than about one token read again for each token written. Keys cannot simply be moved along instead: positions
were added to them before the projection.

Letters: R rows, H heads, S positions kept, K head size, D model width, T packed tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer import functional
from fastformer.apps.language.model import LanguageModel
from fastformer.apps.models.common import check_cached
from fastformer.host.devices import device_of, send
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.packing import Layout
from fastformer.settings import check_value

_FIRST_CAPACITY = 32


class _LayerCache:
    """Keys and values of one layer, `[R, H, capacity, K]`, each row from its own position 0 on."""

    def __init__(self) -> None:
        self.keys = self.values = torch.empty(0)

    def write(self, k: Tensor, v: Tensor, places: tuple[Tensor, Tensor], size: tuple[int, int]) -> None:
        """Store k and v `[T, H, K]` of single tokens.

        Args:
            k: keys.
            v: values.
            places: the row and the position of each token, int64 `[T]`.
            size: rows and capacity to have.
        """
        if self.keys.shape[0] == 0 or self.keys.shape[2] < size[1]:
            self.keys, self.values = _grown(self.keys, k, size), _grown(self.values, v, size)
        rows, positions = places
        self.keys[rows, :, positions] = k
        self.values[rows, :, positions] = v

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


def _grown(old: Tensor, heads: Tensor, size: tuple[int, int]) -> Tensor:
    # Zeros: a padding key has weight 0, but 0 times what happens to lie in memory may be NaN.
    new = heads.new_zeros(size[0], heads.shape[1], size[1], heads.shape[2])
    if old.numel():
        new[:, :, : old.shape[2]] = old
    return new


class LanguageState:
    """Texts in progress, a row each; rows may have different lengths and do not know of one another.

    Args:
        model: its mode (train or eval) is left as it is; call `.eval()` first.
        prompts: ids of each row, at least one.
        context: the most tokens that a row reads, see the window rule above.

    Attributes:
        logits: `[R, V]`, of the token after each prompt.
        lengths: int64 `[R]`, on the CPU, the tokens in the window of each row.

    Raises:
        ValueError: there is no prompt, or one is empty; context is below 1 or beyond what learned positions hold.
        RuntimeError: a layer, or attention in it, has hooks or is somebody's own.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]], context: int) -> None:
        check_context(model, context)
        check_cached(model.decoder)
        if not prompts or not all(prompts):
            raise ValueError("prompts must hold at least one prompt, and each at least one id")
        self.model, self.context = model, context
        device = device_of(model)
        windows = [list(ids[-context:]) for ids in prompts]
        self.lengths = torch.tensor([len(window) for window in windows])
        self.window = torch.zeros(len(windows), context, dtype=torch.int64, device=device)  # what each row has read
        self.layers = [_LayerCache() for _ in model.decoder.layers]
        self.capacity = 0
        layout = Layout.from_lengths(self.lengths)
        ids, *placed = send(device, torch.tensor([i for window in windows for i in window]), *layout.tensors)  # [T]
        layout = layout.made_of(placed)
        rows = torch.arange(len(windows), device=device)
        x = self._read(ids, layout, rows)
        self.logits = model.logits(x.index_select(0, layout.offsets[1:] - 1))

    def step(self, ids: Tensor) -> Tensor:
        """Feed the next token of each row, int64 `[R]`; return the logits of the one after, `[R, V]`."""
        self._slide()
        model, longest = self.model, int(self.lengths.max()) + 1
        size = self._reserve(longest)
        (positions,) = send(ids.device, self.lengths)
        rows = torch.arange(ids.numel(), device=ids.device)
        key_lengths = None if int(self.lengths.min()) + 1 == longest else positions + 1
        self.window[rows, positions] = ids

        def attention(layer: MultiheadAttention, cache: _LayerCache) -> Callable[[Tensor], Tensor]:
            def attend(x: Tensor) -> Tensor:
                q, k, v = layer.queries_keys_values(x)  # [R, 1, H, K]
                cache.write(k[:, 0], v[:, 0], (rows, positions), size)
                return layer.attend(q, cache.keys[:, :, :longest], cache.values[:, :, :longest], key_lengths)

            return attend

        x = model.embedding(ids[:, None], positions[:, None], longest)  # [R, 1, D]
        x = self._through_layers(x, attention)
        self.lengths = self.lengths + 1
        return model.logits(x[:, 0])

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64, ascending."""
        self.lengths = self.lengths.index_select(0, rows.cpu())
        self.window = self.window.index_select(0, rows)
        for cache in self.layers:
            cache.keep(rows)

    def _slide(self) -> None:
        """Let full rows forget, and read the rest of them again."""
        full = (self.lengths == self.context).nonzero().squeeze(1)
        if full.numel() == 0:
            return
        kept = self.context // 2
        self.lengths[full] = kept
        if kept == 0:
            return
        (rows,) = send(self.window.device, full)
        ids = self.window[rows, self.context - kept :].flatten()
        self._read(ids, Layout.from_lengths([kept] * full.numel(), ids.device), rows)

    def _read(self, ids: Tensor, layout: Layout, rows: Tensor) -> Tensor:
        """Read packed ids `[T]` into `rows` from position 0 on: the hidden states `[T, D]`."""
        size = self._reserve(layout.max_length)
        positions = layout.positions
        rows = rows.repeat_interleave(layout.offsets.diff(), output_size=layout.total)  # [T]
        self.window[rows, positions] = ids

        def attention(layer: MultiheadAttention, cache: _LayerCache) -> Callable[[Tensor], Tensor]:
            def attend(x: Tensor) -> Tensor:
                q, k, v = layer.queries_keys_values(x)  # [T, H, K]
                cache.write(k, v, (rows, positions), size)
                out = functional.packed_attention(q, k, v, layout, causal=True)
                return F.linear(out.flatten(-2), layer.out_proj.weight, layer.out_proj.bias)

            return attend

        return self._through_layers(self.model.embedding(ids, positions, layout.max_length), attention)

    def _through_layers(
        self, x: Tensor, attention: Callable[[MultiheadAttention, _LayerCache], Callable[[Tensor], Tensor]]
    ) -> Tensor:
        decoder = self.model.decoder
        for layer, cache in zip(decoder.layers, self.layers, strict=True):
            x = layer.compose(x, attention(layer.self_attn, cache))
        return x if decoder.norm is None else decoder.norm(x)

    def _reserve(self, length: int) -> tuple[int, int]:
        """Rows and capacity of a cache for `length` positions: twice as many as before if they do not suffice."""
        if length > self.capacity:
            self.capacity = min(self.context, max(length, 2 * self.capacity, _FIRST_CAPACITY))
        return self.lengths.numel(), self.capacity


def check_context(model: LanguageModel, context: int) -> None:
    """Refuse a window that the model cannot read.

    Raises:
        ValueError: context is below 1, or beyond what learned positions hold.
    """
    longest = model.config.longest
    most = None if longest is None else "max_positions"
    check_value("context", context, int, {"max_positions": longest}, at_least=1, at_most=most)
