"""Sampling from a language model: options, and the loop that continues prompts.

A text depends on the prompt, the options and the seed. It does not depend on other prompts in the batch, up to the last
bits of the logits: each text draws one number a token from a separate stream, seeded by the seed, the prompt, and how
often the prompt occurred before.

The window rule. A row reads at most `context` tokens, at positions 0 to context - 1. Of a longer prompt it reads the
last `context` tokens. Before another token, a full row drops all but its last context // 2 tokens and reads these
again from position 0, in one pass: memory does not grow, and about one token is read again for each token written.
Cached keys cannot be shifted instead, because positions were added before the projection.

Letters: B rows, T packed tokens, D model width, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fastformer.apps.language.model import LanguageModel
from fastformer.apps.models.sampling import choose_ids
from fastformer.apps.settings import Settings, setting
from fastformer.host.devices import device_of, send, widest_dtype
from fastformer.packing import Layout
from fastformer.settings import check_value


class LanguageState:
    """Unfinished texts, a row each; rows may have different lengths and are independent.

    Args:
        model: call `.eval()` first; the mode (train or eval) is not changed.
        prompts: ids of each row, at least one.
        context: the most tokens that a row reads, see the window rule above.

    Attributes:
        logits: `[B, V]`, of the token after each prompt.

    Raises:
        ValueError: there is no prompt, or one is empty; context is below 1 or exceeds the number of learned positions.
        RuntimeError: a layer, or attention in it, has hooks or a class that fastformer does not know.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]], context: int) -> None:
        check_context(model, context)
        if not prompts or not all(prompts):
            raise ValueError("prompts must hold at least one prompt, and each at least one id")
        self.model, self.context = model, context
        self.windows = [list(ids[-context:]) for ids in prompts]  # what each row has read
        self.cache = model.decoder.new_cache(len(prompts), longest=context)
        hidden, layout = self._read(self.windows)
        self.logits = model.logits(hidden.index_select(0, layout.offsets[1:] - 1))

    @property
    def lengths(self) -> Tensor:
        """int64 `[B]`, on the CPU: the tokens in the window of each row."""
        return self.cache.lengths

    def step(self, ids: Tensor) -> Tensor:
        """Feed the next token of each row, int64 `[B]`; return the logits of the one after, `[B, V]`."""
        full = [len(window) == self.context for window in self.windows]
        if any(full):
            self._slide(full)
        (positions,) = send(ids.device, self.lengths)
        x = self.model.embedding(ids[:, None], positions[:, None], int(self.lengths.max()) + 1)  # [B, 1, D]
        for window, token in zip(self.windows, ids.tolist(), strict=True):
            window.append(token)
        return self.model.logits(self.model.decoder.step(x, self.cache)[:, 0])

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only, int64, ascending."""
        self.windows = [self.windows[row] for row in rows.tolist()]
        self.cache.keep(rows)

    def _slide(self, full: Sequence[bool]) -> None:
        """Drop the first tokens of full rows and read the rest again; see the window rule above."""
        self.cache.crop(self.lengths.masked_fill(torch.tensor(full, device="cpu"), 0))
        tokens = self.context // 2
        for row, window in enumerate(self.windows):
            if full[row]:
                self.windows[row] = window[len(window) - tokens :]
        if tokens:
            self._read([window if each else [] for window, each in zip(self.windows, full, strict=True)])

    def _read(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Layout]:
        """Read ids into empty rows, none into the others; return packed hidden states `[T, D]` and the layout."""
        layout = Layout.from_lengths([len(row) for row in rows])
        packed = torch.tensor([i for row in rows for i in row], device="cpu")
        ids, *layout_tensors = send(device_of(self.model), packed, *layout.tensors)  # [T]
        layout = layout.made_of(layout_tensors)
        x = self.model.embedding(ids, layout.positions, layout.max_length)
        return self.model.decoder.step(x, self.cache, layout), layout


def check_context(model: LanguageModel, context: int) -> None:
    """Raise ValueError if context is below 1 or exceeds the number of learned positions."""
    longest = model.config.longest
    most = None if longest is None else "max_positions"
    check_value("context", context, int, {"max_positions": longest}, at_least=1, at_most=most)


_DRAWN = {"draws": "a temperature above 0"}


class SamplingOptions(Settings):
    """Options of sampling; the help text of each setting describes it."""

    max_new_tokens: int = setting(100, "at most this many tokens after the prompt", at_least=1)
    min_new_tokens: int = setting(0, "at least this many tokens before the end", at_least=0, at_most="max_new_tokens")
    temperature: float = setting(
        1.0, "logits are divided by it; 0: the most probable token each time (greedy)", at_least=0
    )
    top_k: int | None = setting(None, "only the k most probable tokens; unset or 0: all", at_least=0, only=_DRAWN)
    top_p: float = setting(
        1.0,
        "only the fewest tokens that together have at least this probability; 1: all",
        above=0,
        at_most=1,
        only=_DRAWN,
    )
    seed: int | None = setting(None, "random seed; unset: another text each time", at_least=0, only=_DRAWN)
    stop_at_eos: bool = setting(True, "end at the end token; otherwise it is an end of line, and the text continues")
    allow_unk: bool = setting(False, "allow the unknown token")

    @property
    def draws(self) -> str:
        """Whether tokens are drawn, in words."""
        return "a temperature above 0" if self.temperature > 0 else "temperature 0"


@torch.inference_mode()
def sample(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    context: int,
    streams: Sequence[np.random.Generator],
    unk_id: int | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """Continue prompts in one batch; texts that ended leave it.

    Args:
        model: call `.eval()` first.
        prompts: ids, at least one each.
        options: how to choose, and when to end.
        context: the most tokens that the model reads at a time; see `fastformer.apps.language.sampling`.
        streams: a generator for each prompt, from `RandomStreams`.
        unk_id: the unknown token, forbidden unless options.allow_unk. pad and bos are always forbidden.

    Yields:
        For every step, (index of the prompt, id) of each unfinished text; the last id of a text may be eos.

    Raises:
        ValueError: a prompt is empty, or context is below 1 or exceeds the number of learned positions.
        FloatingPointError: the model gives NaN.
    """
    c = model.config
    special = {c.pad_id, c.bos_id} - {c.eos_id}
    if unk_id is not None and not options.allow_unk:
        special.add(unk_id)
    state = LanguageState(model, prompts, context)
    logits = state.logits
    active, streams = list(range(len(prompts))), list(streams)
    for t in range(options.max_new_tokens):
        dtype = widest_dtype(logits.device)
        drawn = torch.tensor([stream.random() for stream in streams], dtype=dtype, device="cpu")
        (uniform,) = send(logits.device, drawn)
        forbidden = special | ({c.eos_id} if t < options.min_new_tokens else set())
        ids = choose_ids(logits, options, uniform, sorted(forbidden))
        chosen = ids.tolist()
        yield list(zip(active, chosen, strict=True))
        rows = [row for row, i in enumerate(chosen) if not (options.stop_at_eos and i == c.eos_id)]
        if not rows or t + 1 == options.max_new_tokens:
            return
        if len(rows) < len(chosen):
            (unfinished,) = send(ids.device, torch.tensor(rows, device="cpu"))
            state.keep(unfinished)
            ids, active, streams = ids[unfinished], [active[row] for row in rows], [streams[row] for row in rows]
        logits = state.step(ids)
