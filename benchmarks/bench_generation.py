"""Writing 1,000 words, one after another, with the model of the word-level tutorial (T2).

2 post-norm layers, d200, 2 heads, feed-forward 200, 33,278 words, fp32, batch 1, the most probable word each time.
`GrowingPrefix` is T2's way, written from its description: torch.nn.TransformerEncoder without a cache. For every word
the whole text so far goes through the model with a causal mask, and log-probabilities of the whole vocabulary come out
at every position, of which the last are used. Both sides have the same parameters and must find the same words.

Two comparisons:

- "whole text": nothing is forgotten. Ours has a context of 1,001 positions, so that its window never slides.
- "context 35": both sides read a window that slides by the rule of `fastformer.apps.language.sampling`, with the 35
  positions that T2 is trained with; theirs reads all of the window again for every word.

Ours writes all 1,000 words. Theirs is timed at words 10, 30, 50, … 990, and compared by the word: its time a word grows
with the text almost linearly, so these 50 cost a twentieth of all (the midpoint rule). With --full all 1,000 are timed.

`bench_writing` is a model of GPT-2's architecture with 6 layers that writes 100 tokens behind prompts of 16, against
what others have with a cache, on a CPU: GPT-2 of transformers, of the same weights, and CTranslate2, from our export.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.competitors.known import require
from benchmarks.harness.race import Contender, Race
from fastformer.apps.export import export_ctranslate2
from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.language.sampling import LanguageState, RandomStreams, SamplingOptions, sample
from fastformer.apps.models.embeddings import sinusoidal_positions
from fastformer.apps.pretrained import to_transformers
from fastformer.apps.text import WordTokenizer
from fastformer.nn import pack_weights

WORDS, VOCABULARY, BPTT = 1000, 33_278, 35
FEW_WORDS, TINY_WORDS = 150, 60  # of "quick", and of a dry run
EVERY_20TH = range(10, WORDS, 20)


class GrowingPrefix(nn.Module):
    """T2's Transformer and its way of writing; parameters copied from `model`."""

    table: Tensor

    def __init__(self, model: LanguageModel, context: int) -> None:
        super().__init__()
        c = model.config
        self.context, self.silent = context, [c.pad_id, c.bos_id]
        layer = nn.TransformerEncoderLayer(c.d_model, c.heads, c.feed_forward, c.dropout)
        self.scale = c.d_model**0.5
        self.words = nn.Embedding(c.vocabulary, c.d_model)
        self.encoder = nn.TransformerEncoder(layer, c.layers, enable_nested_tensor=False)
        self.output = nn.Linear(c.d_model, c.vocabulary)
        self.register_buffer("table", sinusoidal_positions(WORDS + 1, c.d_model))
        self.words.load_state_dict(model.embedding.tokens.state_dict())
        self.encoder.load_state_dict(model.decoder.state_dict())
        self.output.load_state_dict(model.output.state_dict())

    def forward(self, ids: Tensor) -> Tensor:
        """Log-probabilities `[T, 1, V]` of the word after each of `[T, 1]`; pad and bos, which T2 lacks, have none."""
        length = ids.shape[0]
        x = self.words(ids) * self.scale + self.table[:length, None]
        mask = nn.Transformer.generate_square_subsequent_mask(length, ids.device)
        log_p = self.output(self.encoder(x, mask)).log_softmax(-1)
        log_p[..., self.silent] = -torch.inf
        return log_p  # type: ignore[no-any-return]

    @torch.no_grad()
    def write(self, text: Tensor, steps: range) -> Tensor:
        """Word t for each t of `steps`: from all of `text` `[T]` that stands before it, or the window of that."""
        starts = [0]
        for t in range(1, len(text)):
            starts.append(t - self.context // 2 if t - starts[-1] == self.context else starts[-1])
        return torch.stack([self(text[starts[t] : t + 1, None])[-1, 0].argmax() for t in steps])


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
    options = SamplingOptions(max_new_tokens=length, temperature=0, stop_at_eos=False, allow_unk=True)
    model = _model(64 if race.tiny else VOCABULARY).to(race.device).eval()
    first = model.config.eos_id

    def write() -> Tensor:
        written = sample(model, [[first]], options, context, RandomStreams(0).take([[first]]))
        return torch.tensor([word for [(_, word)] in written], device=race.device)

    words = write()
    assert len(words) == length
    assert len(set(words.tolist())) > length // 20, "a text that repeats itself proves little"
    text = torch.cat([words.new_tensor([first]), words[:-1]])
    last = _last_log_probability(model, text, words)
    with race.competitor():
        theirs = GrowingPrefix(model, context).to(race.device).eval()
        if context > length:
            # In one causal pass: position t knows nothing of the words after it, so this is what each prefix gives.
            with torch.no_grad():
                log_p = theirs(text[:, None])[:, 0]  # [T, V]
            race.gate("words", words, log_p.argmax(-1), 0.0)
            race.gate("log-probability", last, log_p[-1, words[-1]], 1e-4)
        else:
            race.gate("words", words, theirs.write(text, range(length)), 0.0)

    read = "prefix" if context > length else f"window of {context}"
    timed = "" if len(steps) == length else " (every 20th timed)"
    found: list[Tensor] = []
    race(
        f"generation of {length:,} words, {'whole text' if context > length else f'context {context}'}, d200 2 layers",
        Contender("fastformer", write, length),
        Contender(f"T2, whole {read} each word{timed}", lambda: found.append(theirs.write(text, steps)), len(steps)),
        rounds=rounds,
        goal=goal,
    )
    assert all(torch.equal(each, words[steps.start :: steps.step]) for each in found), "wrong: timed on other words"
    race.note(steps_timed={"ours": length, "theirs": len(steps)}, context=context)


@torch.inference_mode()
def _last_log_probability(model: LanguageModel, text: Tensor, words: Tensor) -> Tensor:
    """Of the last word, from the cache."""
    state = LanguageState(model, [text[:1].tolist()], len(text) + 1)
    logits = state.logits
    for ids in torch.split(text[1:], 1):
        logits = state.step(ids)
    return logits[0].log_softmax(-1)[words[-1]]


def _model(vocabulary: int) -> LanguageModel:
    return LanguageModel(
        LanguageConfig(
            vocabulary,
            d_model=200,
            heads=2,
            layers=2,
            feed_forward=200,
            norm_first=False,
            final_norm=False,
            embeddings="separate",
            output_bias=True,
            **CLASSICAL,
        )
    )


PROMPT, WRITTEN = 16, 100
GOALS = {("ctranslate2", 512): 0.9, ("ctranslate2", 256): 0.75, ("transformers", 512): 1.25}


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
        pytest.skip("a comparison for a CPU; on a GPU bench_decoding has the same rivals")
    require(competitor, race.device)
    count = 8 if race.tiny else 30 if size == "quick" else WRITTEN
    model = _gpt2(d_model, 2 if race.tiny else 6).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, model.config.vocabulary, (batch, PROMPT), generator=generator).tolist()
    options = SamplingOptions(max_new_tokens=count, min_new_tokens=count, temperature=0, allow_unk=True)
    running = copy.deepcopy(model)
    pack_weights(running)

    def write() -> list[list[int]]:
        steps = sample(running, prompts, options, PROMPT + count, RandomStreams(0).take(prompts))
        return [list(row) for row in zip(*([i for _, i in step] for step in steps), strict=True)]

    words = write()
    assert min(len(set(row)) for row in words) > 2, "a text of one repeated token proves little"
    known = _log_probability(model, prompts, words)
    with tempfile.TemporaryDirectory() as folder, race.competitor():
        make = _transformers if competitor == "transformers" else _ctranslate2
        theirs = make(model, prompts, count, Path(folder))
        probable = _log_probability(model, prompts, theirs())
        race.gate("log probability", known, torch.maximum(known, probable), 1e-3)
        race.gate_theirs("log probability", probable, torch.maximum(known, probable), 1e-3)
        race.note(nats_a_token_ours=float(known.mean()) / count, nats_a_token_theirs=float(probable.mean()) / count)
        name = "GPT-2 of transformers" if competitor == "transformers" else "CTranslate2"
        race(
            f"{count} tokens behind {PROMPT}, batch {batch}, d{d_model} 6 layers",
            Contender("fastformer", write, batch * count),
            Contender(name, theirs, batch * count),
            rounds=3 if size == "quick" else 9,
            goal=GOALS.get((competitor, d_model)) if size != "quick" else None,
        )


Write = Callable[[], list[list[int]]]


def _gpt2(d_model: int, layers: int) -> LanguageModel:
    """GPT-2's architecture; random signs in the last norm keep it from repeating its last token."""
    sizes: dict[str, Any] = {"d_model": d_model, "heads": d_model // 64, "layers": layers, "feed_forward": 4 * d_model}
    positions = {"positions": "learned", "max_positions": 256, "scale_embeddings": False}
    modern = {"activation": "gelu_tanh", "activation_dropout": 0.0}
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(8000, **sizes, **CLASSICAL | positions | modern))
    norm = model.decoder.norm
    assert isinstance(norm, nn.LayerNorm)
    with torch.no_grad():
        norm.weight.copy_(torch.randint(0, 2, (d_model,)) * 2 - 1)
    return model


@torch.no_grad()
def _log_probability(model: LanguageModel, prompts: list[list[int]], words: list[list[int]]) -> Tensor:
    """The model's log probability of each text behind its prompt, in nats, in one pass."""
    ids = torch.tensor([prompt + row for prompt, row in zip(prompts, words, strict=True)])
    batch, length = ids.shape
    hidden = model(ids[:, :-1], torch.full((batch,), length - 1))
    log_p = model.logits(hidden).log_softmax(-1).view(batch, length - 1, -1)[:, PROMPT - 1 :]
    return log_p.gather(-1, ids[:, PROMPT:, None]).sum((1, 2))


def _transformers(model: LanguageModel, prompts: list[list[int]], count: int, folder: Path) -> Write:
    c = model.config
    theirs = to_transformers(model).eval()
    ids = torch.tensor(prompts)
    options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count, "pad_token_id": c.pad_id}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "suppress_tokens": [c.pad_id, c.bos_id]}
    return lambda: theirs.generate(**given, **options)[:, PROMPT:].tolist()


def _ctranslate2(model: LanguageModel, prompts: list[list[int]], count: int, folder: Path) -> Write:
    import ctranslate2

    c = model.config
    words = WordTokenizer.from_lines([f"w{i}" for i in range(c.vocabulary - 4)], splitting="whitespace")
    export_ctranslate2(folder / "model", model, [words])
    options = {"inter_threads": 1, "intra_threads": 1}
    theirs = ctranslate2.Generator(str(folder / "model"), **options)
    start = [words.pieces(ids) for ids in prompts]
    silent = [[words.pieces([i])[0]] for i in (c.pad_id, c.bos_id)]

    def write() -> list[list[int]]:
        found = theirs.generate_batch(
            start,
            max_length=count,
            min_length=count,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            suppress_sequences=silent,
        )
        return [result.sequences_ids[0] for result in found]

    return write
