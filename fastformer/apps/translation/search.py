"""Greedy and beam search with a cache, batched; finished sentences leave the batch.

The translation of a sentence does not depend on the rest of the batch: length limit, penalties and stopping rule apply
to each sentence separately.

Letters: B sentences in the batch, N hypotheses a sentence, R = B * N rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fastformer.apps.models import decoding
from fastformer.apps.models.decoding import next_logits, recorder_of
from fastformer.apps.settings import Settings, setting
from fastformer.apps.translation.beams import DIVERGED, DONE, RUNNING, Beams, Hypothesis
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.host.cuda_graphs import ReplayedStep
from fastformer.packing import lengths_of

# Sentences leave the batch once an eighth of it has finished, because each removal copies the cache.
_RUNNING = 7 / 8
_FIRST_CAPACITY = 32  # tokens that a hypothesis can hold at first
_UNLIMITED = 1 << 31  # tokens
_HIGHEST_POWER = 30  # a double holds (2 ** 31) ** 30
_BEAM, _SAMPLE = {"search": "a beam above 1"}, {"sample": True}


class SearchOptions(Settings):
    """Options of greedy and beam search; the help text of each setting describes it."""

    beam: int = setting(
        4, "hypotheses per sentence; 1 is greedy search", at_least=1, at_most=1000, only={"sample": False}
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
        """Compute the most tokens of each sentence, eos included, that the model can hold: int64 `[B]`.

        They are at least `min_length`, which `max_ratio` and `max_extra` do not limit.
        """
        limits = (source_lengths * self.max_ratio).clamp(max=_UNLIMITED).long() + min(self.max_extra, _UNLIMITED)
        most = min(self.max_length or _UNLIMITED, config.longest or _UNLIMITED)
        return limits.clamp(min=max(1, self.min_length), max=most)


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
        RuntimeError: a layer of the decoder, or attention in it, has hooks or a class that fastformer does not know.
    """
    options = options or SearchOptions()
    source_lengths = lengths_of("source_lengths", source_lengths)
    if not source_lengths.numel():
        return []
    N = 1 if options.sample else options.beam
    limits = options.limits(source_lengths, model.config)
    longest = int(limits.max())
    recorder = recorder_of(model, model.config.decoder_layers, N * limits.numel() * longest, options.cuda_graphs)
    # A graph reorders hypotheses by copying the capacity of the cache, so it grows where there are several.
    capacity = longest if recorder and N == 1 else min(longest, _FIRST_CAPACITY)
    memory, layout = model.encode(source, source_lengths)
    # A cache with a capacity counts the positions on the device, so that a CUDA graph can repeat a step.
    fixed = capacity if recorder else None
    cache = model.decoder.new_cache(memory, memory_layout=layout, hypotheses=N, capacity=fixed)
    beams = Beams(limits, N, model.config, options, source.device, capacity)
    chooses = recorder is not None and not options.sample  # a drawn token waits for the device

    def run() -> Tensor | None:
        logits = next_logits(model, model.target_embedding, cache, beams.ids)
        if not chooses:
            return logits
        beams.advance(logits)
        if N > 1:
            cache.gather(beams.parents)  # type: ignore[attr-defined]
        return None

    step = ReplayedStep(recorder, model.target_embedding, run, "decoding")
    results: list[list[Hypothesis]] = [[] for _ in range(limits.numel())]
    batch = list(range(limits.numel()))  # the sentences whose rows are in the cache
    idle_rows = 0  # of sentences that are done, at each step
    for length in range(1, longest + 1):
        if length > capacity:
            capacity = min(longest, 2 * capacity)
            beams.reserve(capacity)
            if recorder:
                cache.grow(capacity)  # type: ignore[attr-defined]
                step.reset()
        logits = step()
        if logits is not None:
            beams.advance(logits, [streams[i].random() for i in batch] if options.sample else [])
        status = beams.status.tolist()
        if DIVERGED in status:
            raise FloatingPointError("the model's scores are not numbers: it has diverged")
        running = [row for row, each in enumerate(status) if each == RUNNING]
        if running and logits is not None and N > 1:
            parents = beams.parents.cpu()
            if not torch.equal(parents, torch.arange(len(parents), device="cpu")):
                cache.reorder(parents)
        idle_rows += N * (len(batch) - len(running))
        leave = idle_rows > decoding.IDLE_ROWS if recorder else len(running) <= len(batch) * _RUNNING
        if leave or not running:
            done = [row for row, each in enumerate(status) if each == DONE]
            for row, hypotheses in zip(done, beams.hypotheses_of(torch.tensor(done, device="cpu")), strict=True):
                results[batch[row]] = hypotheses
            if not running:
                break
            idle_rows, batch = 0, [batch[row] for row in running]
            for each in (cache, beams):
                each.keep(torch.tensor(running, device="cpu"))
            step.reset()
    return results
