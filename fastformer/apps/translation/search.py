"""Greedy and beam search with a cache, batched; finished sentences leave the batch.

The translation of a sentence does not depend on the rest of the batch: length limit, penalties and stopping rule apply
to each sentence separately.

Letters: B sentences, N hypotheses a sentence, T steps taken, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastformer.apps.models.sampling import choose_ids
from fastformer.apps.models.sizes import LARGEST
from fastformer.apps.settings import Settings, setting
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.state import DecoderState, StaticDecoderState
from fastformer.host.devices import send, widest_dtype
from fastformer.packing import lengths_of

# Finished rows are removed once they are an eighth of the batch, because each removal copies the cache. Steps in CUDA
# graphs then need another graph too, so half of the rows must have finished, of more than 64: by its data sheet an H200
# reads weights for longer than it computes up to 206 rows in bf16 and 28 in fp32 (not measured on a GPU).
_REPLAYED_ROWS = 64
_UNLIMITED = 1 << 31  # tokens; the sum of two such numbers fits into 64 bits
_HIGHEST_POWER = 30  # a double holds (2 ** 31) ** 30
_DIVERGED = "the model's scores are not numbers: it has diverged"
_BEAM, _SAMPLE = {"search": "a beam above 1"}, {"sample": True}


class SearchOptions(Settings):
    """Options of greedy and beam search; the help text of each setting describes it."""

    beam: int = setting(
        4, "hypotheses per sentence; 1 is greedy search", at_least=1, at_most=LARGEST, only={"sample": False}
    )
    n_best: int = setting(1, "translations returned a sentence", at_least=1, at_most="beam", only=_BEAM)
    length_penalty: float = setting(
        1.0,
        "a hypothesis of n tokens (eos included) scores log p / n ** length_penalty; 0: none",
        at_least=-_HIGHEST_POWER,
        at_most=_HIGHEST_POWER,
        only=_BEAM,
    )
    max_ratio: float = setting(2.0, "at most max_ratio * source length + max_extra tokens", at_least=0)
    max_extra: int = setting(10, "tokens added to max_ratio * source length", at_least=0)
    max_length: int | None = setting(None, "at most this many tokens, whatever the source", at_least=1)
    min_length: int = setting(0, "at least this many tokens before the end", at_least=0, at_most="max_length")
    no_repeat_ngram: int = setting(0, "no n-gram of this size twice in a translation; 0: off", at_least=0)
    sample: bool = setting(False, "draw each token at random, in place of a search")
    temperature: float = setting(1.0, "logits are divided by it", above=0, only=_SAMPLE)
    top_k: int | None = setting(None, "only the k most probable tokens; unset or 0: all", at_least=0, only=_SAMPLE)
    top_p: float = setting(
        1.0,
        "only the fewest tokens that together have at least this probability; 1: all",
        above=0,
        at_most=1,
        only=_SAMPLE,
    )
    seed: int | None = setting(None, "random seed; unset: other translations each time", at_least=0, only=_SAMPLE)
    cuda_graphs: bool = setting(
        False, "replay each step as a CUDA graph, for small batches; elsewhere than on a GPU, only slower"
    )

    @property
    def search(self) -> str:
        """The kind of search, in words."""
        if self.sample:
            return "sampling"
        return "a beam above 1" if self.beam > 1 else "greedy search"

    def limits(self, source_lengths: Tensor, config: TranslationConfig) -> Tensor:
        """Compute the most tokens of each sentence, eos included, that the model can hold: int64 `[B]`."""
        limits = (source_lengths * self.max_ratio).clamp(max=_UNLIMITED).long() + min(self.max_extra, _UNLIMITED)
        for most in (self.max_length, config.longest):
            if most is not None:
                limits = limits.clamp(max=min(most, _UNLIMITED))
        return limits.clamp(min=1)


@dataclass(frozen=True)
class Hypothesis:
    """One translation: ids without bos and eos; log probability in nats, and the score that ranked it.

    The log probability is the model's own, summed over the tokens (eos included, unless the length limit cut it off).
    It is not renormalised over the tokens that the options allow.
    """

    ids: list[int]
    log_probability: float
    score: float


@torch.inference_mode()
def greedy_search(
    model: TranslationModel,
    source: Tensor,
    source_lengths: Tensor,
    options: SearchOptions | None = None,
    streams: Sequence[np.random.Generator] = (),
) -> list[Hypothesis]:
    """Take the most probable token at every step; with `options.sample`, draw it at random.

    Args:
        model: call `.eval()` first; the mode (train or eval) is not changed.
        source: int64 ids with eos, packed `[S]` or padded `[B, S]`.
        source_lengths: int64 `[B]`.
        options: beam, n_best and length_penalty are ignored.
        streams: with `options.sample`, a generator for each sentence, from `RandomStreams`.

    Returns:
        One hypothesis a sentence.

    Raises:
        FloatingPointError: the model gives NaN.
    """
    options = options or SearchOptions(beam=1)
    config, device = model.config, source.device
    source_lengths = lengths_of("source_lengths", source_lengths)
    B = source_lengths.numel()
    if B == 0:
        return []
    state = _state(model, source, source_lengths, 1, options)
    limits = options.limits(source_lengths, config)
    longest = int(limits.max())
    (limits,) = send(device, limits)
    output = torch.full((B, longest + 1), config.bos_id, device=device)  # column 0 is bos
    scores = torch.zeros(B, device=device)
    lengths = limits.clone()  # tokens of each sentence, eos included
    active = torch.arange(B, device=device)  # sentences still in the batch
    running = torch.ones(B, dtype=torch.bool, device=device)  # [rows in the batch]
    for t in range(longest):
        logits = state.step(output[active, t]).float()
        total = logits.logsumexp(-1)
        _forbid(logits, output[active, 1 : t + 1], config, options)
        if options.sample:
            drawn = [streams[row].random() for row in active.tolist()]
            (uniform,) = send(device, torch.tensor(drawn, dtype=widest_dtype(device), device="cpu"))
            ids = choose_ids(logits, options, uniform)
            log_p = logits.gather(1, ids[:, None]).squeeze(1) - total
        else:
            best, ids = logits.max(-1)
            log_p = best - total
        output[active, t + 1] = ids
        scores[active] += torch.where(running, log_p, 0.0)
        ended = running & (ids == config.eos_id)
        lengths[active] = torch.where(ended, t + 1, lengths[active])
        running = running & ~ended & (limits[active] > t + 1)
        running_rows = int(running.sum())
        if running_rows == 0:
            break
        if _compacts(state, running_rows, len(running)):
            rows = running.nonzero().squeeze(1)
            state.keep(rows)
            active, running = active[rows], running[rows]
    results = list(zip(output[:, 1:].tolist(), lengths.tolist(), scores.tolist(), strict=True))
    if any(math.isnan(score) for *_, score in results):
        raise FloatingPointError(_DIVERGED)
    return [_hypothesis(ids, length, score, score, config.eos_id) for ids, length, score in results]


@torch.inference_mode()
def beam_search(
    model: TranslationModel, source: Tensor, source_lengths: Tensor, options: SearchOptions | None = None
) -> list[list[Hypothesis]]:
    """Keep the N most probable hypotheses at every step.

    A sentence is done when N hypotheses have ended and the best unfinished one scores no better than the worst of
    them. Arguments as in `greedy_search`.

    Returns:
        `n_best` hypotheses a sentence, best score first.

    Raises:
        FloatingPointError: the model gives NaN.
    """
    options = options or SearchOptions()
    config, device = model.config, source.device
    source_lengths = lengths_of("source_lengths", source_lengths)
    B, N = source_lengths.numel(), options.beam
    if B == 0:
        return []
    state = _state(model, source, source_lengths, N, options)
    limits = options.limits(source_lengths, config)
    longest = int(limits.max())
    (limits,) = send(device, limits)
    results: list[list[Hypothesis]] = [[] for _ in range(B)]

    # The unfinished hypotheses [b, N, ...] of the b sentences still in the batch.
    active = torch.arange(B, device=device)
    tokens = torch.full((B, N, longest + 1), config.bos_id, device=device)  # column 0 is bos
    scores = torch.full((B, N), -math.inf, device=device)
    scores[:, 0] = 0.0  # at first all N are the same, so only one may bring candidates
    finished = _Finished(B, N, longest, options.length_penalty, device)
    for t in range(longest):
        b = active.numel()
        log_p = state.step(tokens[:, :, t].flatten()).float().log_softmax(-1)
        _forbid(log_p, tokens[:, :, 1 : t + 1].flatten(0, 1), config, options)
        log_p = log_p.view(b, N, -1)
        V = log_p.shape[-1]
        # 2N candidates: even if N of them end here, N continue.
        candidates, where = (scores[:, :, None] + log_p).flatten(1).topk(min(2 * N, N * V), -1)  # [b, 2N]
        parents, ids = where // V, where % V
        ends = ids == config.eos_id

        # Hypotheses among the best N that end compete with those that ended before.
        if bool(ends[:, :N].any()):
            closing = tokens[:, :, 1:].gather(1, parents[:, :N, None].expand(-1, -1, longest))
            closing[:, :, t] = config.eos_id
            finished.add(closing, t + 1, torch.where(ends[:, :N], candidates[:, :N], -math.inf))

        # The best N that do not end continue.
        scores, best = candidates.masked_fill(ends, -math.inf).topk(N, -1)
        parents, ids = parents.gather(1, best), ids.gather(1, best)
        tokens = tokens.gather(1, parents[:, :, None].expand(-1, -1, longest + 1))
        tokens[:, :, t + 1] = ids

        cut = limits[active] <= t + 1
        if bool(cut.any()):
            # Hypotheses at the length limit are ranked with the finished ones.
            finished.add(tokens[:, :, 1:], t + 1, torch.where(cut[:, None], scores, -math.inf))
        bound = _penalised(scores[:, 0], t + 1, options.length_penalty)
        done = cut | (bound <= finished.scores[:, -1])
        rows = done.nonzero().squeeze(1)
        if rows.numel():
            n_best = finished.best(rows, options.n_best, config)
            for sentence, hypotheses in zip(active[rows].tolist(), n_best, strict=True):
                results[sentence] = hypotheses
        if rows.numel() == b:
            break
        state.reorder((parents + torch.arange(b, device=device)[:, None] * N).flatten())
        if rows.numel():
            rows = (~done).nonzero().squeeze(1)
            state.keep(rows)
            finished.keep(rows)
            active, tokens, scores = active[rows], tokens[rows], scores[rows]
    if not all(results):
        raise FloatingPointError(_DIVERGED)
    return results


def _state(
    model: TranslationModel, source: Tensor, source_lengths: Tensor, hypotheses: int, options: SearchOptions
) -> DecoderState:
    if not options.cuda_graphs:
        return DecoderState(model, source, source_lengths, hypotheses)
    longest = int(options.limits(source_lengths, model.config).max())
    return StaticDecoderState(model, source, source_lengths, hypotheses, longest=longest)


def _compacts(state: DecoderState, running_rows: int, rows: int) -> bool:
    """Return whether to remove finished rows from the batch, of which `running_rows` continue."""
    return rows > _REPLAYED_ROWS and running_rows <= rows // 2 if state.replays else running_rows <= 7 * rows / 8


class _Finished:
    """The best N finished hypotheses of each sentence, best first; scores of -inf where there are fewer."""

    def __init__(self, sentences: int, N: int, longest: int, length_penalty: float, device: torch.device) -> None:
        self.length_penalty = length_penalty
        self.tokens = torch.zeros(sentences, N, longest, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(sentences, N, dtype=torch.int64, device=device)
        self.log_probabilities = torch.full((sentences, N), -math.inf, device=device)
        self.scores = self.log_probabilities.to(widest_dtype(device))

    def add(self, tokens: Tensor, length: int, log_probabilities: Tensor) -> None:
        """Merge N more hypotheses a sentence: tokens `[b, N, longest]`, log probabilities `[b, N]` or -inf."""
        N = self.scores.shape[1]
        scores = torch.cat([self.scores, _penalised(log_probabilities, length, self.length_penalty)], 1)  # [b, 2N]
        self.scores, best = scores.topk(N, -1)
        self.log_probabilities = torch.cat([self.log_probabilities, log_probabilities], 1).gather(1, best)
        self.lengths = torch.cat([self.lengths, torch.full_like(self.lengths, length)], 1).gather(1, best)
        wide = best[:, :, None].expand(-1, -1, tokens.shape[2])
        self.tokens = torch.cat([self.tokens, tokens], 1).gather(1, wide)

    def keep(self, rows: Tensor) -> None:
        """Keep these sentences only."""
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]
        self.log_probabilities, self.scores = self.log_probabilities[rows], self.scores[rows]

    def best(self, rows: Tensor, n: int, config: TranslationConfig) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of the sentences in `rows`; fewer if the vocabulary allows no more."""
        fields = (self.tokens, self.lengths, self.log_probabilities, self.scores)
        return [
            [
                _hypothesis(ids, length, log_probability, score, config.eos_id)
                for ids, length, log_probability, score in zip(*sentence, strict=True)
                if score > -math.inf
            ]
            for sentence in zip(*(field[rows, :n].tolist() for field in fields), strict=True)
        ]


def _penalised(log_probabilities: Tensor, length: int, penalty: float) -> Tensor:
    """Return the scores of hypotheses of `length` tokens, in fp64 where the device has it.

    Scores beyond the range of fp32 would be equal.
    """
    return log_probabilities.to(widest_dtype(log_probabilities.device)) / math.pow(length, penalty)


def _hypothesis(ids: list[int], length: int, log_probability: float, score: float, eos_id: int) -> Hypothesis:
    ids = ids[:length]
    return Hypothesis(ids[:-1] if ids[-1] == eos_id else ids, log_probability, score)


def _forbid(scores: Tensor, tokens: Tensor, config: TranslationConfig, options: SearchOptions) -> None:
    """Set the scores `[R, V]` of ids that may not follow `tokens` `[R, t]` to -inf, in place.

    Padding and bos are always forbidden, eos before the minimum length unless no other id is allowed.
    """
    for i in {config.pad_id, config.bos_id} - {config.eos_id}:  # a list would be copied to the device: a wait
        scores[:, i] = -math.inf
    early = tokens.shape[1] < options.min_length
    eos = scores[:, config.eos_id].clone()
    if early:
        scores[:, config.eos_id] = -math.inf
    if options.no_repeat_ngram:
        _forbid_repeats(scores, tokens, options.no_repeat_ngram)
        if early:
            stuck = scores.amax(-1) == -math.inf
            scores[:, config.eos_id] = torch.where(stuck, eos, -math.inf)


def _forbid_repeats(scores: Tensor, tokens: Tensor, size: int) -> None:
    """Set the scores of ids that would repeat an n-gram of `tokens` `[R, t]` to -inf, in place."""
    t = tokens.shape[1]
    if t < size:
        return
    grams = tokens.unfold(1, size, 1)  # [R, t - size + 1, size]
    last = tokens[:, t - size + 1 :]  # the size - 1 tokens before the next one; none for size 1
    seen = (grams[:, :, :-1] == last[:, None]).all(-1)  # [R, t - size + 1]
    row, start = seen.nonzero(as_tuple=True)
    scores[row, grams[row, start, -1]] = -math.inf
