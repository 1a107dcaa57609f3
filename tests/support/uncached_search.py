"""Greedy and beam search as loops over lists that recompute everything without a cache."""

import math
from functools import partial

import torch

from fastformer.apps.models.decoding import next_logits
from fastformer.apps.text import collate_source
from tests.support.translation_task import BOS, EOS, IDS, PAD, random_ids


def sources(lengths, vocabulary=17):
    """Return packed ids with eos, and lengths with eos, of random sentences."""
    generator = torch.Generator().manual_seed(0)
    return collate_source([random_ids(n, generator, vocabulary) for n in lengths], IDS)


def cached_decoder(model, source, lengths, hypotheses=1, capacity=None):
    """Return a new cache of a search, and the step that feeds it a token for each row and returns the next logits."""
    memory, layout = model.encode(source, lengths)
    cache = model.decoder.new_cache(memory, memory_layout=layout, hypotheses=hypotheses, capacity=capacity)
    return cache, partial(next_logits, model, model.target_embedding, cache)


def rows_of(source, lengths):
    return torch.split(source, lengths.tolist())


@torch.no_grad()
def log_probabilities(model, source, prefixes):
    """Run the uncached model on one sentence: log p of what follows each prefix (ids without bos), `[prefixes, V]`."""
    n = len(prefixes)
    target_in = torch.tensor([[BOS, *prefix] for prefix in prefixes])
    hidden = model(source.repeat(n), torch.full((n,), len(source)), target_in, torch.full((n,), target_in.shape[1]))
    return model.logits(hidden.view(*target_in.shape, -1)[:, -1]).float().log_softmax(-1)


@torch.no_grad()
def sequence_scores(model, source, sequences):
    """Run the uncached model on one sentence: log p of each sequence of tokens."""
    n, sizes = len(sequences), torch.tensor([len(tokens) for tokens in sequences])
    target_in = torch.tensor([i for tokens in sequences for i in (BOS, *tokens[:-1])])
    hidden = model(source.repeat(n), torch.full((n,), len(source)), target_in, sizes)
    log_p = model.logits(hidden).log_softmax(-1)
    chosen = log_p[range(len(log_p)), [i for tokens in sequences for i in tokens]]
    return [float(part.sum()) for part in torch.split(chosen, sizes.tolist())]


def allowed(log_p, prefix, options):
    """Apply the rules: no padding, no bos, no early end, no n-gram twice."""
    log_p = log_p.clone()
    log_p[[PAD, BOS]] = -math.inf
    if len(prefix) < options.min_length:
        log_p[EOS] = -math.inf
    n = options.no_repeat_ngram
    if n:
        grams = [tuple(prefix[i : i + n]) for i in range(len(prefix) - n + 1)]
        for token in range(len(log_p)):
            if (*prefix[len(prefix) - n + 1 :], token)[-n:] in grams:
                log_p[token] = -math.inf
    return log_p


def naive_greedy(model, source, options):
    limit = int(options.limits(torch.tensor([len(source)]), model.config))
    prefix, total = [], 0.0
    while len(prefix) < limit:
        log_p = allowed(log_probabilities(model, source, [prefix])[0], prefix, options)
        token = int(log_p.argmax())
        total += float(log_p[token])
        if token == EOS:
            break
        prefix.append(token)
    return prefix, total


def naive_beam(model, source, options):
    """Apply the documented rule to lists: `n_best` (tokens, log p, score), best first."""
    limit, N = int(options.limits(torch.tensor([len(source)]), model.config)), options.beam
    beams, finished = [([], 0.0)], []
    for t in range(1, limit + 1):
        steps = log_probabilities(model, source, [prefix for prefix, _ in beams])
        candidates = [
            ([*prefix, token], total + log_p)
            for (prefix, total), row in zip(beams, steps, strict=True)
            for token, log_p in enumerate(allowed(row, prefix, options).tolist())
            if log_p > -math.inf
        ]
        candidates.sort(key=lambda item: -item[1])
        ended = [item for item in candidates[:N] if item[0][-1] == EOS]
        beams = [item for item in candidates[: 2 * N] if item[0][-1] != EOS][:N]
        ended += beams if t == limit else []
        finished += [(tokens, total, total / t**options.length_penalty) for tokens, total in ended]
        finished = sorted(finished, key=lambda item: -item[2])[:N]
        if not beams or (len(finished) == N and beams[0][1] / t**options.length_penalty <= finished[-1][2]):
            break
    return [([i for i in tokens if i != EOS], total, score) for tokens, total, score in finished[: options.n_best]]


RAGGED = [3, 1, 7, 1, 5]
