"""Sampling from a language model: the choice of the next token, and the loop that continues prompts.

A text depends on the prompt, the options and the seed. It does not depend on other prompts in the batch, up to the last
bits of the logits: each text draws one number a token from a separate stream, seeded by the seed, the prompt, and how
often the prompt occurred before.

The window rule. A row reads at most `context` tokens, at positions 0 to context - 1. Of a longer prompt it reads the
last `context` tokens. Before another token, a full row drops all but its last context // 2 tokens and reads these
again from position 0, in one pass: memory does not grow, and about one token is read again for each token written.
Cached keys cannot be shifted instead, because positions were added before the projection.

Letters: B rows, T packed tokens, D model width, V vocabulary.
"""

import math
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fastformer.apps.language.model import LanguageModel
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


# Tokens ranked at first for top-p. V 33,278, one CPU core: ranking 256 takes 0.18 ms, sorting all of them 3.1 ms.
_FIRST_RANKED = 256
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


def choose_ids(
    logits: Tensor,
    options: SamplingOptions,
    uniform: Tensor | None = None,
    forbidden: Sequence[int] = (),
) -> Tensor:
    """Choose the next token of each row, by these steps in this order, in fp32.

    1. `forbidden` ids are ruled out.
    2. Temperature 0: the largest logit, the lowest id among equals; done. Else logits are divided by the temperature.
    3. top-k (Fan et al. 2018): the k largest logits remain.
    4. top-p (Holtzman et al. 2020): of softmax over them, the smallest set whose mass is at least p remains.
       Both steps keep no more ids than necessary: among equals, the lowest ones.
    5. The first id, in order of ids, at which the cumulative probability of the set exceeds `uniform` (fp64 sums: in
       fp32 the rare words of a large vocabulary would round to nothing).

    Args:
        logits: `[B, V]`; not changed.
        options: temperature, top_k and top_p are used.
        uniform: fp64 `[B]` in [0, 1), or fp32 on a device without fp64; not needed for temperature 0.
        forbidden: ids that must not be chosen.

    Returns:
        int64 `[B]`.

    Raises:
        ValueError: uniform is missing.
        FloatingPointError: the logits of a row hold NaN, or no id is allowed.
    """
    limits = torch.finfo(torch.float32)
    logits = logits.float().clone()
    for i in forbidden:  # a list of indices would be copied to the device, for which the host waits
        logits[:, i] = -math.inf
    best, ids = logits.max(-1, keepdim=True)
    if not bool(best.isfinite().all()):
        raise FloatingPointError("the model's scores are not numbers: it has diverged")
    if options.temperature == 0:
        return ids.squeeze(1)
    if uniform is None:
        raise ValueError("uniform must be given unless the temperature is 0")
    # The largest is subtracted first, so that no score overflows; beyond the limits, 0 / 0 and inf / inf would be NaN.
    logits = (logits - best) / min(max(options.temperature, limits.tiny), limits.max)
    V = logits.shape[-1]
    if options.top_k and options.top_k < V:
        ranked = logits.topk(options.top_k).values
        logits = logits.masked_fill(~_largest(logits, ranked, torch.full_like(ids, options.top_k)), -math.inf)
    p = logits.softmax(-1)
    if options.top_p < 1:
        p = p.masked_fill(~_largest(p, *_nucleus(p, options.top_p)), 0.0)
    cumulative = p.cumsum(-1, dtype=widest_dtype(p.device))
    total = cumulative[:, -1:]
    # Below the total even where the product is rounded up to it: the chosen id has a probability above 0.
    drawn = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(1)


def _nucleus(p: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Return the largest probabilities of `[B, V]` in order, `[B, n]`, and how few of them reach `mass`, `[B, 1]`."""
    V = p.shape[-1]
    n = min(V, _FIRST_RANKED)
    while True:
        ranked = p.topk(n).values
        sums = ranked.cumsum(-1, dtype=widest_dtype(p.device))
        if n == V or bool((sums[:, -1] >= mass).all()):
            return ranked, ((sums < mass).sum(-1, keepdim=True) + 1).clamp(max=n)
        n = min(V, 8 * n)


def _largest(x: Tensor, ranked: Tensor, counts: Tensor) -> Tensor:
    """Mark the `counts` `[B, 1]` largest elements of each row `[B, V]`, the first ones among equals.

    `ranked` `[B, n]` holds each row's largest in order.
    """
    threshold = ranked.gather(-1, counts - 1)
    above, tied = x > threshold, x == threshold
    return above | (tied & (tied.cumsum(-1) <= counts - above.sum(-1, keepdim=True)))


class RandomStreams:
    """Makes a generator for each prompt, seeded by the seed, the prompt, and how often the prompt occurred before."""

    def __init__(self, seed: int | None) -> None:
        self._seed = secrets.randbits(63) if seed is None else seed
        self._copies: Counter[tuple[int, ...]] = Counter()

    def take(self, prompts: Sequence[Sequence[int]]) -> list[np.random.Generator]:
        """Return the generators of the next prompts."""
        streams = []
        for prompt in map(tuple, prompts):
            # The length is included because numpy ignores zeros at the end of the entropy.
            streams.append(np.random.default_rng((self._seed, self._copies[prompt], len(prompt), *prompt)))
            self._copies[prompt] += 1
        return streams


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
