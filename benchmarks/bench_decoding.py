"""Translate 25 tokens a sentence with d512, 6+6 layers; sources with the lengths of Multi30k; fp32 on a CPU.

"quick" is d256 with 3+3 layers. Competitors: T1's loop, which decodes the whole padded prefix of 200 positions again
for every token, one sentence at a time, whatever the batch; transformers' Marian and CTranslate2 with the same weights.
All generate a fixed number of tokens, because random weights do not end a sentence. On a GPU fastformer's search
replays CUDA graphs, as by default, and is also compared with the same search without.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.competitors.generators import NAMES, gate_probabilities, loader_of, vary_output
from benchmarks.competitors.known import require
from benchmarks.competitors.training import CONFIGS, TINY
from benchmarks.competitors.tutorials import FixedLengthTranslation
from benchmarks.harness.lengths import typical_batch
from benchmarks.harness.race import Contender, Race
from fastformer.apps.translation.beams import Hypothesis
from fastformer.apps.translation.model import TranslationModel
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.nn import pack_weights

TOKENS = 25
# Competitor and beam -> goal for batch 1 and for more, on a CPU and on a GPU.
GOALS = {
    ("tutorial", 1): {"cpu": (15.0, 150.0), "cuda": (50.0, 500.0)},
    ("transformers", 1): {"cpu": (1.4, 1.5), "cuda": (10.0, 10.0)},
    ("transformers", 4): {"cpu": (1.6, 1.9), "cuda": (8.0, 8.0)},
    ("ctranslate2", 1): {"cpu": (0.95, 0.95)},
    ("ctranslate2", 4): {"cpu": (0.95, 0.95)},
}
MARIAN = {"norm_first": False, "final_norm": False, "positions": "sinusoidal_halves"}


@pytest.mark.parametrize(
    ("size", "competitor", "beam", "batch"),
    [
        pytest.param("quick", "tutorial", 1, 1, marks=pytest.mark.cpu),
        pytest.param("quick", "transformers", 1, 8, marks=pytest.mark.cpu),
        pytest.param("quick", "ctranslate2", 1, 8, marks=pytest.mark.cpu),
        ("usual", "tutorial", 1, 1),
        ("usual", "tutorial", 1, 128),
        ("usual", "transformers", 1, 1),
        ("usual", "transformers", 1, 32),
        ("full", "transformers", 1, 8),
        ("full", "transformers", 1, 128),
        ("full", "transformers", 4, 1),
        ("full", "transformers", 4, 32),
        ("full", "ctranslate2", 1, 1),
        ("usual", "ctranslate2", 1, 32),
        ("full", "ctranslate2", 1, 128),
        ("full", "ctranslate2", 4, 1),
        ("full", "ctranslate2", 4, 32),
        ("usual", "no-graphs", 1, 1),
        ("full", "no-graphs", 1, 32),
        ("full", "no-graphs", 1, 128),
        ("full", "no-graphs", 1, 512),
        ("full", "no-graphs", 4, 1),
    ],
)
def bench_decoding(race: Race, size: str, competitor: str, beam: int, batch: int) -> None:
    require(competitor, race.device)
    tokens = 5 if race.tiny else TOKENS
    packed = typical_batch("random").to(race.device)
    times = max(batch // len(packed.source_lengths), 1)  # larger batches repeat its 128 sentences
    lengths = packed.source_lengths.repeat(times)[: min(batch, 3) if race.tiny else batch]
    source = packed.source.repeat(times)[: int(lengths.sum())]
    B = len(lengths)
    config = TINY if race.tiny else CONFIGS["usual" if size == "quick" else "full"]
    if competitor != "tutorial":
        config = replace(config, **MARIAN)  # type: ignore[arg-type]
    model = TranslationModel(config).to(race.device).eval()
    vary_output(model.decoder.norm if competitor == "tutorial" else model.decoder.layers[-1].norm3)
    sentences = [ids.tolist() for ids in torch.split(source, lengths.tolist())]
    options = SearchOptions(beam=beam, max_ratio=0.0, max_extra=tokens, min_length=tokens, length_penalty=0.0)
    if race.device.type == "cuda":
        options = replace(options, cuda_graphs=True)  # None: eager without a warning, if the cache is large
    running = copy.deepcopy(model)  # as `fastformer translate` runs it
    pack_weights(running)

    def search(options: SearchOptions) -> list[Hypothesis]:
        if beam == 1:
            return greedy_search(running, source, lengths, options)
        return [hypotheses[0] for hypotheses in beam_search(running, source, lengths, options)]

    is_own = competitor == "no-graphs"  # the same search without graphs, which a GPU replays by default
    run_search = partial(search, options)
    results = run_search()
    assert all(len(hypothesis.ids) == tokens for hypothesis in results)
    assert race.tiny or max(len(set(hypothesis.ids)) for hypothesis in results) > 2, (
        "sentences of one repeated token prove little"
    )

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the competitors
        warnings.filterwarnings("error", ".* goes on without CUDA graphs", RuntimeWarning)
        known = torch.tensor([hypothesis.log_probability for hypothesis in results])
        probability_of = partial(_log_probabilities, model, source, lengths)
        race.gate("log probability", known, probability_of([hypothesis.ids for hypothesis in results]), 1e-3)
        run: Callable[[], object] = run_search  # not timed, if the competitor cannot be loaded
        if competitor == "tutorial":
            with race.competitor():
                loop = FixedLengthTranslation(model).to(race.device).eval()
                run = partial(loop.greedy, sentences[0], tokens)
                expected, log_probability = loop.greedy(sentences[0], tokens)
                race.gate("translation", torch.tensor(results[0].ids), torch.tensor(expected), 0.0)
                race.gate("first log probability", known[0], torch.tensor(log_probability), 1e-4)
        elif is_own:
            eager = replace(options, cuda_graphs=False)
            run = partial(search, eager)
            gate_probabilities(race, known, probability_of([hypothesis.ids for hypothesis in search(eager)]))
            assert race.fault is None, race.fault  # both sides are fastformer
        else:
            load = loader_of(competitor, model, sentences, beam, tokens, Path(folder))
            with race.competitor():
                run = translate = load()
                gate_probabilities(race, known, probability_of(translate()))
        goals = GOALS.get((competitor, beam), {}).get(race.device.type) if size != "quick" else None
        names = {"tutorial": "T1, whole prefix each step", "no-graphs": "fastformer without them"}
        names |= NAMES[TranslationModel]
        of = f"d{config.d_model} {config.encoder_layers}+{config.decoder_layers}{', CUDA graphs' * is_own}"
        race(
            f"{'greedy search' if beam == 1 else f'beam {beam}'}, batch {B}, {of}",
            Contender("fastformer", run_search, B * tokens),
            Contender(names[competitor], run, tokens if competitor == "tutorial" else B * tokens),
            rounds=9 if race.device.type == "cpu" and size != "quick" else 3,
            goal=goals[min(B - 1, 1)] if goals else None,
        )


@torch.no_grad()
def _log_probabilities(model: TranslationModel, source: Tensor, lengths: Tensor, targets: list[list[int]]) -> Tensor:
    """Return the model's log probability of each translation, all of one length, in nats, in one pass."""
    target = torch.tensor(targets, device=source.device)
    target_in = torch.cat([torch.full_like(target[:, :1], model.config.bos_id), target[:, :-1]], 1)
    hidden = model(source, lengths, target_in.flatten(), torch.full_like(lengths, target.shape[1]))
    log_p = model.logits(hidden).log_softmax(-1)
    return log_p.gather(1, target.flatten()[:, None]).view(target.shape).sum(1).cpu()
