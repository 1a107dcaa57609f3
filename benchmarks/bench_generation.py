"""Write 1,000 words with the model of the word-level tutorial (T2), and 100 tokens with GPT-2's architecture.

`bench_generation`: 2 post-norm layers, d200, 2 heads, feed-forward 200, 33,278 words, fp32, batch 1, the most probable
word each time. T2 has no cache: for every word the whole text so far goes through the model with a causal mask, and
log-probabilities of the whole vocabulary come out at every position. Both sides have the same parameters and must write
the same words.

- "whole text": nothing is forgotten. fastformer has a context of 1,001 positions, so that its window never slides.
- "context 35": both read a window that slides as fastformer's does, with the 35 positions that T2 is trained with; T2
  reads the whole window again for every word.

fastformer writes all words. T2 is timed at words 10, 30, 50, … 990, and compared by the word: its time a word grows
almost linearly, so these 50 cost a twentieth of all (the midpoint rule). With --full all 1,000 are timed.

`bench_writing`, on a CPU: GPT-2's architecture with 6 layers and prompts of 16 tokens, against transformers' GPT-2 and
CTranslate2 with the same weights.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.competitors.generators import NAMES, gate_probabilities, loader_of, vary_output
from benchmarks.competitors.known import require
from benchmarks.competitors.tutorials import TutorialLanguageModel
from benchmarks.harness.race import Contender, Race
from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.language.sampling import LanguageState, SamplingOptions, sample
from fastformer.apps.models.sampling import RandomStreams
from fastformer.nn import pack_weights

WORDS, VOCABULARY, BPTT = 1000, 33_278, 35
FEW_WORDS, TINY_WORDS = 150, 60  # of "quick", and of a dry run
EVERY_20TH = range(10, WORDS, 20)
PROMPT, WRITTEN = 16, 100
GOALS = {("ctranslate2", 512): 0.9, ("ctranslate2", 256): 0.75, ("transformers", 512): 1.25}


@pytest.mark.parametrize(
    ("size", "context", "steps", "goal", "rounds"),
    [
        pytest.param("quick", FEW_WORDS + 1, range(10, FEW_WORDS, 20), None, 3, marks=pytest.mark.cpu),
        ("usual", WORDS + 1, EVERY_20TH, 20.0, 3),
        ("full", WORDS + 1, range(WORDS), 20.0, 1),
        ("usual", BPTT, EVERY_20TH, None, 3),
    ],
    ids=["quick-whole-text", "usual-whole-text", "full-whole-text", "usual-window"],
)
def bench_generation(race: Race, size: str, context: int, steps: range, goal: float | None, rounds: int) -> None:
    if race.tiny:
        context, steps = min(context, TINY_WORDS + 1), range(2, TINY_WORDS, 10)
    length = TINY_WORDS if race.tiny else FEW_WORDS if size == "quick" else WORDS
    graphs = race.device.type == "cuda" or None  # None on a GPU: eager without a warning, if the cache is large
    options = SamplingOptions(
        max_new_tokens=length, temperature=0, stop_at_eos=False, allow_unk=True, cuda_graphs=graphs
    )
    sizes: dict[str, Any] = {"d_model": 200, "heads": 2, "layers": 2, "feed_forward": 200, "norm_first": False}
    settings: dict[str, Any] = {"final_norm": False, "embeddings": "separate", "output_bias": True, **CLASSICAL}
    model = LanguageModel(LanguageConfig(64 if race.tiny else VOCABULARY, **sizes, **settings)).to(race.device).eval()
    first = model.config.eos_id

    def write() -> Tensor:
        written = sample(model, [[first]], options, context, RandomStreams(0))
        return torch.tensor([word for [(_, word)] in written], device=race.device)

    words = write()
    assert len(words) == length
    assert len(set(words.tolist())) > length // 20, "a text that repeats itself proves little"
    text = torch.cat([words.new_tensor([first]), words[:-1]])
    last = _last_log_probability(model, text, words)
    with race.competitor():
        tutorial = TutorialLanguageModel(model, WORDS + 1).to(race.device).eval()
        if context > length:
            log_p = tutorial.next_words(text)  # [T, V], in one causal pass as from each prefix
            race.gate("words", words, log_p.argmax(-1), 0.0)
            race.gate("log-probability", last, log_p[-1, words[-1]], 1e-4)
        else:
            race.gate("words", words, tutorial.write(text, range(length), context), 0.0)

    read = "prefix" if context > length else f"window of {context}"
    timed = "" if len(steps) == length else " (every 20th timed)"
    written: list[Tensor] = []
    race.notes.update(steps_timed={"ours": length, "theirs": len(steps)}, context=context)
    race(
        f"generation of {length:,} words, {'whole text' if context > length else f'context {context}'}, d200 2 layers",
        Contender("fastformer", write, length),
        Contender(
            f"T2, whole {read} each word{timed}",
            lambda: written.append(tutorial.write(text, steps, context)),
            len(steps),
        ),
        rounds=rounds,
        goal=goal,
    )
    assert all(torch.equal(each, words[steps.start :: steps.step]) for each in written), "wrong: timed on other words"


@torch.inference_mode()
def _last_log_probability(model: LanguageModel, text: Tensor, words: Tensor) -> Tensor:
    """Return the log probability of the last word, from the cache."""
    state = LanguageState(model, [text[:1].tolist()], len(text) + 1)
    logits = state.logits
    for ids in torch.split(text[1:], 1):
        logits = state.step(ids)
    return logits[0].log_softmax(-1)[words[-1]]


@pytest.mark.parametrize(
    ("size", "competitor", "d_model", "batch"),
    [
        pytest.param("quick", "transformers", 256, 4, marks=pytest.mark.cpu),
        pytest.param("quick", "ctranslate2", 256, 4, marks=pytest.mark.cpu),
        *(("usual", competitor, 512, batch) for competitor in ("transformers", "ctranslate2") for batch in (1, 32)),
        *(("usual", "ctranslate2", 256, batch) for batch in (1, 32)),
    ],
)
def bench_writing(race: Race, size: str, competitor: str, d_model: int, batch: int) -> None:
    if race.device.type != "cpu":
        pytest.skip("a comparison for a CPU; on a GPU bench_decoding has the same competitors")
    require(competitor, race.device)
    count = 8 if race.tiny else 30 if size == "quick" else WRITTEN
    model = _gpt2(d_model, 2 if race.tiny else 6).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, model.config.vocabulary, (batch, PROMPT), generator=generator).tolist()
    options = SamplingOptions(max_new_tokens=count, min_new_tokens=count, temperature=0, allow_unk=True)
    running = copy.deepcopy(model)
    pack_weights(running)

    def write() -> list[list[int]]:
        steps = sample(running, prompts, options, PROMPT + count, RandomStreams(0))
        return [list(row) for row in zip(*([i for _, i in step] for step in steps), strict=True)]

    words = write()
    assert race.tiny or min(len(set(row)) for row in words) > 2, "a text of one repeated token proves little"
    known = _log_probability(model, prompts, words)
    with tempfile.TemporaryDirectory() as folder:
        load = loader_of(competitor, model, prompts, 1, count, Path(folder))
        with race.competitor():
            generate = load()
            gate_probabilities(race, known, _log_probability(model, prompts, generate()))
            race(
                f"{count} tokens behind {PROMPT}, batch {batch}, d{d_model} 6 layers",
                Contender("fastformer", write, batch * count),
                Contender(NAMES[LanguageModel][competitor], generate, batch * count),
                rounds=3 if size == "quick" else 9,
                goal=GOALS.get((competitor, d_model)) if size != "quick" else None,
            )


def _gpt2(d_model: int, layers: int) -> LanguageModel:
    sizes: dict[str, Any] = {"d_model": d_model, "heads": d_model // 64, "layers": layers, "feed_forward": 4 * d_model}
    positions = {"positions": "learned", "max_positions": 256, "scale_embeddings": False}
    modern = {"activation": "gelu_tanh", "activation_dropout": 0.0}
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(8000, **sizes, **CLASSICAL | positions | modern))
    vary_output(model.decoder.norm)
    return model


@torch.no_grad()
def _log_probability(model: LanguageModel, prompts: list[list[int]], words: list[list[int]]) -> Tensor:
    """Return the model's log probability of each text after its prompt, in nats, in one pass."""
    ids = torch.tensor([prompt + row for prompt, row in zip(prompts, words, strict=True)])
    batch, length = ids.shape
    hidden = model(ids[:, :-1], torch.full((batch,), length - 1))
    log_p = model.logits(hidden).log_softmax(-1).view(batch, length - 1, -1)[:, PROMPT - 1 :]
    return log_p.gather(-1, ids[:, PROMPT:, None]).sum((1, 2))
