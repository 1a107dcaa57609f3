"""The state of decoding with a language model: the window that it reads of each unfinished text, and the cache.

The window rule. A row reads at most `context` tokens, at positions 0 to context - 1. Of a longer prompt it reads the
last `context` tokens. Before another token, a full row drops all but its last context // 2 tokens and reads these
again from position 0, in one pass: memory does not grow, and about one token is read again for each token written.
Cached keys cannot be shifted instead, because positions were added before the projection.

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
    """Unfinished texts, a row each; rows may have different lengths and are independent.

    Args:
        model: call `.eval()` first; the mode (train or eval) is not changed.
        prompts: ids of each row, at least one.
        context: the most tokens that a row reads, see the window rule above.

    Attributes:
        logits: `[R, V]`, of the token after each prompt.

    Raises:
        ValueError: there is no prompt, or one is empty; context is below 1 or exceeds the number of learned positions.
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
        packed = torch.tensor([i for window in windows for i in window], device="cpu")
        ids, *layout_tensors = send(device, packed, *layout.tensors)  # [T]
        layout = layout.made_of(layout_tensors)
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
        """Keep these rows only, int64, ascending."""
        self.window = self.window.index_select(0, rows)
        self.cache.keep(rows)

    def _widen(self, tokens: int) -> None:
        """Widen the windows to at least `tokens`, doubling them; the context may be far longer than all texts."""
        width = self.window.shape[1]
        if tokens > width:
            self.window = F.pad(self.window, (0, min(self.context, max(tokens, 2 * width)) - width))

    def _slide(self) -> None:
        """Drop the first tokens of full rows and read the rest again; see the window rule above."""
        full = self.lengths == self.context
        if not bool(full.any()):
            return
        tokens = self.context // 2
        self.cache.crop(self.lengths.masked_fill(full, 0))
        (rows,) = send(self.window.device, full.nonzero().squeeze(1))
        ids = self.window[rows, self.context - tokens :].flatten()
        if tokens:
            self._read(ids, Layout.from_lengths(full.long() * tokens, ids.device))

    def _read(self, ids: Tensor, layout: Layout) -> Tensor:
        """Read packed ids `[T]` into empty rows; return the hidden states `[T, D]`."""
        rows = torch.arange(layout.batch, device=ids.device).repeat_interleave(
            layout.offsets.diff(), output_size=layout.total
        )
        self._widen(layout.max_length)
        self.window[rows, layout.positions] = ids
        x = self.model.embedding(ids, layout.positions, layout.max_length)
        return self.model.decoder.step(x, self.cache, layout)


def check_context(model: LanguageModel, context: int) -> None:
    """Raise ValueError if context is below 1 or exceeds the number of learned positions."""
    longest = model.config.longest
    most = None if longest is None else "max_positions"
    check_value("context", context, int, {"max_positions": longest}, at_least=1, at_most=most)
