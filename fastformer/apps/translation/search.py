"""Greedy and beam search with a cache, batched; finished sentences leave the batch.

The translation of a sentence does not depend on the rest of the batch: length limit, penalties and stopping rule apply
to each sentence separately.

Letters: B sentences in the batch, N hypotheses a sentence, R = B * N rows, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fastformer.apps.models.sampling import choose_ids
from fastformer.apps.models.sizes import LARGEST
from fastformer.apps.settings import Settings, setting
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.state import DecoderState
from fastformer.host.cuda_graphs import memory_for_graphs
from fastformer.host.devices import send, widest_dtype
from fastformer.nn.inspection import has_hooks
from fastformer.packing import lengths_of

# Sentences leave the batch once an eighth of it has finished, because each removal copies the cache.
_RUNNING = 7 / 8
# With CUDA graphs a removal also costs an eager step and a capture, which takes at least as long. Sentences leave once
# their rows have cost as much, in rows times steps: on one H200 two eager steps took 10 ms, and each row 15 us a step
# (`pytest benchmarks -k "decoding and graphs"`, 1 to 128 rows, 6+6 layers).
_IDLE_ROWS = 650
# CUDA graphs need a cache for the longest translation from the start, and rows that move are copied: by default it may
# take this share of the device's memory.
_CACHE_SHARE = 1 / 10
_UNLIMITED = 1 << 31  # tokens
_HIGHEST_POWER = 30  # a double holds (2 ** 31) ** 30
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
    cuda_graphs: bool | None = setting(
        None, "replay each step as a CUDA graph, which needs a CUDA GPU; unset: on such a GPU, if memory allows"
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
        most = min(self.max_length or _UNLIMITED, config.longest or _UNLIMITED)
        return limits.clamp(min=1, max=most)


@dataclass(frozen=True)
class Hypothesis:
    """One translation: ids without bos and eos; log probability in nats, and the score that ranked it.

    The log probability is the model's own, summed over the tokens (eos included, unless the length limit cut it off).
    It is not renormalised over the tokens that the options allow.
    """

    ids: list[int]
    log_probability: float
    score: float


def greedy_search(
    model: TranslationModel, source: Tensor, source_lengths: Tensor, options: SearchOptions | None = None
) -> list[Hypothesis]:
    """Take the most probable token at every step, as `beam_search` with one hypothesis; return one for each sentence.

    The options beam, n_best, length_penalty and sample are ignored.
    """
    options = replace(options or SearchOptions(), beam=1, n_best=1, sample=False)
    return [best for [best] in beam_search(model, source, source_lengths, options)]


@torch.inference_mode()
def beam_search(
    model: TranslationModel,
    source: Tensor,
    source_lengths: Tensor,
    options: SearchOptions | None = None,
    streams: Sequence[np.random.Generator] = (),
) -> list[list[Hypothesis]]:
    """Keep the N most probable hypotheses at every step; with `options.sample`, keep one and draw its tokens.

    A sentence is done when N hypotheses have ended and the best unfinished one scores no better than the worst of
    them.

    Args:
        model: call `.eval()` first; the mode (train or eval) is not changed.
        source: int64 ids with eos, packed `[S]` or padded `[B, S]`.
        source_lengths: int64 `[B]`.
        options: None: the defaults.
        streams: with `options.sample`, a generator for each sentence, from `RandomStreams`.

    Returns:
        `n_best` hypotheses a sentence, best score first; fewer if the vocabulary allows no more.

    Raises:
        FloatingPointError: the model gives NaN.
        ValueError: options.cuda_graphs is True without a CUDA device.
    """
    options = options or SearchOptions()
    source_lengths = lengths_of("source_lengths", source_lengths)
    if not source_lengths.numel():
        return []
    N = 1 if options.sample else options.beam
    limits = options.limits(source_lengths, model.config).tolist()
    sentences = [_Sentence(limit, [[]] * N) for limit in limits]
    graphs = options.cuda_graphs
    if graphs is None:
        graphs = _graphs_apply(model, source.device, N * len(limits) * max(limits))
    state = DecoderState(model, source, source_lengths, N, max(limits) if graphs else None)
    batch = list(range(len(sentences)))  # the sentences whose rows are in the state
    ids = [model.config.bos_id] * (N * len(batch))
    scores = [0.0] + [-math.inf] * (N - 1)  # at first all N are the same, so only one may bring candidates
    scores = scores * len(batch)
    idle_rows = 0  # of sentences that are done, at each step
    for length in range(1, max(limits) + 1):
        fed, totals = send(source.device, torch.tensor(ids, device="cpu"), torch.tensor(scores, device="cpu"))
        log_p = state.step(fed).float().log_softmax(-1)
        _forbid(log_p, [prefix for i in batch for prefix in sentences[i].prefixes], length, model.config, options)
        draws = [streams[i].random() for i in batch] if options.sample else []
        candidates = _candidates(log_p, totals, N, options, draws)
        parents, ids, scores = [], [], []
        for row, (i, best) in enumerate(zip(batch, candidates, strict=True)):
            for parent, token, score in sentences[i].advance(best, length, N, model.config.eos_id, options):
                parents.append(row * N + parent)
                ids.append(token)
                scores.append(score)
        running = [row for row, i in enumerate(batch) if not sentences[i].done]
        if not running:
            break
        if parents != list(range(len(parents))):
            state.cache.reorder(torch.tensor(parents, device="cpu"))
        idle_rows += N * (len(batch) - len(running))
        if idle_rows > _IDLE_ROWS if state.recorder else len(running) <= len(batch) * _RUNNING:
            idle_rows = 0
            state.keep(torch.tensor(running, device="cpu"))
            rows = [row * N + n for row in running for n in range(N)]
            ids, scores = [ids[row] for row in rows], [scores[row] for row in rows]
            batch = [batch[row] for row in running]
    return [sentence.finished[: options.n_best] for sentence in sentences]


def _graphs_apply(model: TranslationModel, device: torch.device, tokens: int) -> bool:
    """Return whether a search that may cache this many tokens replays CUDA graphs by default.

    The device must have them, and enough memory; hooks, which replays would not call, may not exist.
    """
    c = model.config
    numbers = 2 * tokens * c.decoder_layers * (c.kv_heads or c.heads) * c.head_width
    cache_bytes = numbers * model.output.weight.element_size()
    return cache_bytes <= _CACHE_SHARE * memory_for_graphs(device) and not has_hooks(model.modules())


@dataclass
class _Sentence:
    """The hypotheses of a sentence."""

    limit: int  # tokens, eos included
    prefixes: list[list[int]]  # of the N unfinished ones, without bos
    finished: list[Hypothesis] = field(default_factory=list)  # the best N, best first
    done: bool = False

    def advance(
        self, candidates: list[tuple[float, int, int]], length: int, N: int, eos_id: int, options: SearchOptions
    ) -> list[tuple[int, int, float]]:
        """Continue with the candidates (log probability, prefix, token) of `length` tokens, the most probable first.

        Return (continued prefix, token, log probability) for N rows. Rows without a candidate, such as those of a
        sentence that is done, have log probability -inf.
        """
        idle = (0, eos_id, -math.inf)
        if self.done:
            return [idle] * N
        if math.isnan(candidates[0][0]):
            raise FloatingPointError("the model's scores are not numbers: it has diverged")
        possible = [each for each in candidates if each[0] > -math.inf]
        # Candidates among the best N that end compete with those that ended before; the best N others continue.
        ended = [(self.prefixes[parent], total) for total, parent, token in possible[:N] if token == eos_id]
        continued = [each for each in possible if each[2] != eos_id][:N]
        self.prefixes = [[*self.prefixes[parent], token] for _, parent, token in continued]
        if length == self.limit:
            ended += [(prefix, total) for prefix, (total, *_) in zip(self.prefixes, continued, strict=True)]
        divisor = length**options.length_penalty if N > 1 else 1.0
        if ended:
            self.finished += [Hypothesis(prefix, total, total / divisor) for prefix, total in ended]
            self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[:N]
        bound = continued[0][0] / divisor if continued else -math.inf
        self.done = length == self.limit or (len(self.finished) == N and bound <= self.finished[-1].score)
        missing = N - len(continued)
        self.prefixes += [[]] * missing
        return [(parent, token, total) for total, parent, token in continued] + [idle] * missing


def _candidates(
    log_p: Tensor, totals: Tensor, N: int, options: SearchOptions, draws: list[float]
) -> Iterator[list[tuple[float, int, int]]]:
    """Yield candidates of each sentence, (log probability, prefix, token), from log p `[R, V]` and totals `[R]`.

    A sentence has one candidate, drawn or the best; with a beam it has the 2N most probable, so that N continue even if
    N of them end.
    """
    V = log_p.shape[1]
    if options.sample:
        (uniform,) = send(log_p.device, torch.tensor(draws, dtype=widest_dtype(log_p.device), device="cpu"))
        where = choose_ids(log_p, options, uniform)[:, None]
        values = totals[:, None] + log_p.gather(1, where)
    elif N == 1:
        best, where = log_p.max(-1, keepdim=True)
        values = totals[:, None] + best
    else:
        values, where = (totals[:, None] + log_p).view(-1, N * V).topk(min(2 * N, N * V), -1)
    for row_values, row_where in zip(values.tolist(), where.tolist(), strict=True):
        yield [(value, *divmod(place, V)) for value, place in zip(row_values, row_where, strict=True)]


def _forbid(
    log_p: Tensor, prefixes: list[list[int]], length: int, config: TranslationConfig, options: SearchOptions
) -> None:
    """Set the log p `[R, V]` of tokens that may not follow the prefixes to -inf, in place.

    Padding and bos are always forbidden, eos up to the minimum length unless no other token is allowed.
    """
    for i in {config.pad_id, config.bos_id} - {config.eos_id}:  # a list would be copied to the device: a wait
        log_p[:, i] = -math.inf
    if options.no_repeat_ngram:
        repeats = [(row, i) for row, ids in enumerate(prefixes) for i in _repeats(ids, options.no_repeat_ngram)]
        if repeats:
            rows, ids = send(log_p.device, *torch.tensor(repeats, device="cpu").T)
            log_p[rows, ids] = -math.inf
    if length <= options.min_length:
        eos = log_p[:, config.eos_id].clone()
        log_p[:, config.eos_id] = -math.inf
        log_p[:, config.eos_id] = torch.where(log_p.amax(-1) == -math.inf, eos, -math.inf)


def _repeats(ids: list[int], size: int) -> set[int]:
    """Return the tokens that would repeat an n-gram of `ids`."""
    last = ids[len(ids) - size + 1 :]  # the n - 1 tokens before the next one
    return {ids[i + size - 1] for i in range(len(ids) - size + 1) if ids[i : i + size - 1] == last}
