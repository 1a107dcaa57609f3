"""Texts in progress: the window that a language model reads of each, in the cache of its decoder.

The window rule. A row reads at most `context` tokens, at positions 0 to context - 1. Of a longer prompt it reads the
last `context` tokens. A full row that is given one more token first forgets all but its last context // 2 tokens and
reads these again from position 0, in one pass: memory does not grow, and about one token is read again for each token
written. Keys cannot be moved along instead, because positions were added before the projection.

Letters: R rows, T packed tokens, D model width, V vocabulary.
"""

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.apps.language.model import LanguageModel
from fastformer.host.devices import device_of, send
from fastformer.packing import Layout
from fastformer.settings import check_value


class LanguageState:
    """Texts in progress, a row each; rows may have different lengths and are independent.

    Args:
        model: its mode (train or eval) is left as it is; call `.eval()` first.
        prompts: ids of each row, at least one.
        context: the most tokens that a row reads, see the window rule above.

    Attributes:
        logits: `[R, V]`, of the token after each prompt.

    Raises:
        ValueError: there is no prompt, or one is empty; context is below 1 or beyond what learned positions hold.
        RuntimeError: a layer, or attention in it, has hooks or a class that fastformer does not know.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]], context: int) -> None:
        check_context(model, context)
        if not prompts or not all(prompts):
            raise ValueError("prompts must hold at least one prompt, and each at least one id")
        self.model, self.context = model, min(context, sys.maxsize)  # torch compares lengths with it
        device = device_of(model)
        windows = [list(ids[-context:]) for ids in prompts]
        self.cache = model.decoder.new_cache(len(windows), longest=context)
        self.window = torch.zeros(len(windows), 0, dtype=torch.int64, device=device)  # what each row has read
        layout = Layout.from_lengths([len(window) for window in windows])
        together = torch.tensor([i for window in windows for i in window], device="cpu")
        ids, *placed = send(device, together, *layout.tensors)  # [T]
        layout = layout.made_of(placed)
        x = self._read(ids, layout)
        self.logits = model.logits(x.index_select(0, layout.offsets[1:] - 1))

    @property
    def lengths(self) -> Tensor:
        """int64 `[R]`, on the CPU: the tokens in the window of each row."""
        return self.cache.lengths

    def step(self, ids: Tensor) -> Tensor:
        """Feed the next token of each row, int64 `[R]`; return the logits of the one after, `[R, V]`."""
        self._slide()
        (positions,) = send(ids.device, self.lengths)
        longest = int(self.lengths.max()) + 1
        self._widen(longest)
        self.window[torch.arange(ids.numel(), device=ids.device), positions] = ids
        x = self.model.embedding(ids[:, None], positions[:, None], longest)  # [R, 1, D]
        return self.model.logits(self.model.decoder.step(x, self.cache)[:, 0])

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, int64, ascending."""
        self.window = self.window.index_select(0, rows)
        self.cache.keep(rows)

    def _widen(self, tokens: int) -> None:
        """Make room for so many tokens, and for some more; a context may be far beyond all texts."""
        width = self.window.shape[1]
        if tokens > width:
            self.window = F.pad(self.window, (0, min(self.context, max(tokens, 2 * width)) - width))

    def _slide(self) -> None:
        """Let full rows forget, and read the rest of them again."""
        full = self.lengths == self.context
        if not bool(full.any()):
            return
        kept = self.context // 2
        self.cache.crop(self.lengths.masked_fill(full, 0))
        (rows,) = send(self.window.device, full.nonzero().squeeze(1))
        ids = self.window[rows, self.context - kept :].flatten()
        if kept:
            self._read(ids, Layout.from_lengths(full.long() * kept, ids.device))

    def _read(self, ids: Tensor, layout: Layout) -> Tensor:
        """Read packed ids `[T]` into empty rows; return the hidden states `[T, D]`."""
        of = torch.arange(layout.batch, device=ids.device).repeat_interleave(
            layout.offsets.diff(), output_size=layout.total
        )
        self._widen(layout.max_length)
        self.window[of, layout.positions] = ids
        x = self.model.embedding(ids, layout.positions, layout.max_length)
        return self.model.decoder.step(x, self.cache, layout)


def check_context(model: LanguageModel, context: int) -> None:
    """Raise ValueError if context is below 1 or beyond what learned positions hold."""
    longest = model.config.longest
    most = None if longest is None else "max_positions"
    check_value("context", context, int, {"max_positions": longest}, at_least=1, at_most=most)
