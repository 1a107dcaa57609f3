"""Translation, d512 with 6+6 layers, 25 tokens a sentence, sources with the lengths of Multi30k; fp32 on a CPU.

"quick" is d256 with 3+3 layers.

Against T1's loop, which decodes the whole padded prefix of 200 positions again for every token, one sentence at a time,
whatever the batch; against Hugging Face's generate, whose Marian has the same weights; and against CTranslate2, from
our export of them. All sides are given a fixed number of tokens, since random weights do not end a sentence. On a GPU
also our own search with CUDA graphs against the same without.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.competitors.known import require
from benchmarks.competitors.marian import marian
from benchmarks.competitors.tutorials import FixedLengthTranslation
from benchmarks.harness.lengths import VOCABULARY, typical_batch
from benchmarks.harness.race import Contender, Race
from fastformer.apps.export import export_ctranslate2
from fastformer.apps.text import WordTokenizer
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.search import Hypothesis, SearchOptions, beam_search, greedy_search
from fastformer.nn import pack_weights

TOKENS = 25
POSITIONS = 256
# Competitor and beam -> goal for batch 1 and for more, on a CPU and on a GPU.
GOALS = {
    ("tutorial", 1): {"cpu": (15.0, 150.0), "cuda": (50.0, 500.0)},
    ("transformers", 1): {"cpu": (1.4, 1.5), "cuda": (10.0, 10.0)},
    ("transformers", 4): {"cpu": (1.6, 1.9), "cuda": (8.0, 8.0)},
    ("ctranslate2", 1): {"cpu": (0.95, 0.95)},
    ("ctranslate2", 4): {"cpu": (0.95, 0.95)},
}
TINY = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 64}
SMALL = {"d_model": 256, "heads": 4, "encoder_layers": 3, "decoder_layers": 3, "feed_forward": 1024}
SIZES: dict[str, dict[str, int]] = {"quick": SMALL, "usual": {}, "full": {}}

Translate = Callable[[], list[list[int]]]
Load = Callable[[], Translate]  # where what it raises is theirs; what ours prepares for it is done by then


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
        ("full", "no-graphs", 4, 1),
    ],
)
def bench_decoding(race: Race, size: str, competitor: str, beam: int, batch: int) -> None:
    require(competitor, race.device)
    tokens = 5 if race.tiny else TOKENS
    packed = typical_batch("random")[0].to(race.device)
    lengths = packed.source_lengths[: min(batch, 3) if race.tiny else batch]
    source = packed.source[: int(lengths.sum())]
    B = len(lengths)
    sizes = TINY if race.tiny else SIZES[size]
    model = _model(sizes, post_norm=competitor != "tutorial").to(race.device).eval()
    sentences = [ids.tolist() for ids in torch.split(source, lengths.tolist())]

    options = SearchOptions(beam=beam, max_ratio=0.0, max_extra=tokens, min_length=tokens, length_penalty=0.0)

    running = copy.deepcopy(model)  # as `fastformer translate` runs it
    pack_weights(running)

    def search(options: SearchOptions) -> list[Hypothesis]:
        if beam == 1:
            return greedy_search(running, source, lengths, options)
        return [hypotheses[0] for hypotheses in beam_search(running, source, lengths, options)]

    graphs = competitor == "no-graphs"
    ours = partial(search, replace(options, cuda_graphs=graphs))
    found = ours()
    assert all(len(hypothesis.ids) == tokens for hypothesis in found)
    assert len(set(found[0].ids)) > 2, "a sentence of one repeated token proves little"

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other programs' own
        known = torch.tensor([hypothesis.log_probability for hypothesis in found])
        exact = _log_probabilities(model, sentences, [h.ids for h in found])
        race.gate("log probability", known, exact, 1e-3)
        run: Callable[[], object] = ours  # never, where theirs cannot be had
        if competitor == "tutorial":
            with race.competitor():
                loop = FixedLengthTranslation(model).to(race.device).eval()
                run = partial(loop.greedy, sentences[0], tokens)
                expected, log_probability = loop.greedy(sentences[0], tokens)
                race.gate("translation", torch.tensor(found[0].ids), torch.tensor(expected), 0.0)
                race.gate("first log probability", known[0], torch.tensor(log_probability), 1e-4)
        elif graphs:
            run = partial(search, options)
            _gate(race, model, sentences, found, [hypothesis.ids for hypothesis in search(options)])
            assert race.fault is None, race.fault  # ours too
        else:
            make = _transformers if competitor == "transformers" else _ctranslate2
            load = make(model, sentences, beam, tokens, Path(folder))
            with race.competitor():
                run = translate = load()
                _gate(race, model, sentences, found, translate())
        c = model.config
        goals = GOALS.get((competitor, beam), {}).get(race.device.type) if size != "quick" else None
        of = f"d{c.d_model} {c.encoder_layers}+{c.decoder_layers}{', CUDA graphs' * graphs}"
        race(
            f"{'greedy search' if beam == 1 else f'beam {beam}'}, batch {B}, {of}",
            Contender("fastformer", ours, B * tokens),
            Contender(_NAMES[competitor], run, tokens if competitor == "tutorial" else B * tokens),
            rounds=9 if race.device.type == "cpu" and size != "quick" else 3,
            goal=goals[min(B - 1, 1)] if goals else None,
            at=None if graphs or size == "quick" else {"batch": B, "beam": beam},
        )


_NAMES = {
    "tutorial": "T1, whole prefix each step",
    "transformers": "transformers, Marian generate",
    "ctranslate2": "CTranslate2",
    "no-graphs": "fastformer without them",
}


def _gate(
    race: Race, model: TranslationModel, sentences: list[list[int]], ours: list[Hypothesis], theirs: list[list[int]]
) -> None:
    """Both are as probable as the better one to rounding, whatever word won a tie; greedy searches find the same."""
    known = torch.tensor([hypothesis.log_probability for hypothesis in ours])
    probable = _log_probabilities(model, sentences, theirs)
    best = torch.maximum(known, probable)
    race.gate("best log probability", known, best, 1e-3)
    race.gate_theirs("log probability", probable, best, 1e-3)
    race.note(same_translations=sum(a.ids == b for a, b in zip(ours, theirs, strict=True)), sentences=len(ours))


def _log_probabilities(model: TranslationModel, sources: list[list[int]], targets: list[list[int]]) -> Tensor:
    return torch.tensor([_log_probability(model, *pair) for pair in zip(sources, targets, strict=True)])


@torch.no_grad()
def _log_probability(model: TranslationModel, source: list[int], target: list[int]) -> float:
    """The model's log probability of a translation, in nats, in one pass."""
    device = model.output.weight.device
    target_in = torch.tensor([model.config.bos_id, *target[:-1]], device=device)
    lengths = [torch.tensor([len(ids)]) for ids in (source, target)]
    hidden = model(torch.tensor(source, device=device), lengths[0], target_in, lengths[1])
    log_p = model.logits(hidden).log_softmax(-1)
    return float(log_p.gather(1, torch.tensor(target, device=device)[:, None]).sum())


def _transformers(model: TranslationModel, sentences: list[list[int]], beam: int, tokens: int, folder: Path) -> Load:
    """Padded ids and a mask go in, as a tokenizer of theirs would give them."""
    c, device = model.config, model.output.weight.device
    longest = max(map(len, sentences))
    ids = torch.tensor([s + [c.pad_id] * (longest - len(s)) for s in sentences], device=device)
    given = {"input_ids": ids, "attention_mask": (ids != c.pad_id).long()}

    def load() -> Translate:
        theirs = marian(model, POSITIONS)

        def translate() -> list[list[int]]:
            out = theirs.generate(
                **given,
                num_beams=beam,
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                length_penalty=0.0,
                suppress_tokens=[c.pad_id, c.bos_id],
            )
            return [ids[1:] for ids in out.tolist()]

        return translate

    return load


def _ctranslate2(model: TranslationModel, sentences: list[list[int]], beam: int, tokens: int, folder: Path) -> Load:
    """Tokens go in; their end is added there."""
    size = model.config.target_vocabulary
    words = WordTokenizer.from_lines([f"w{i}" for i in range(size - 4)], splitting="whitespace")
    export_ctranslate2(folder / "model", model, [words, words], positions=POSITIONS)
    device = model.output.weight.device.type
    source = [words.pieces(ids[:-1]) for ids in sentences]
    silent = [[words.pieces([i])[0]] for i in (model.config.pad_id, model.config.bos_id)]

    def load() -> Translate:
        import ctranslate2

        options = {"device": device, "inter_threads": 1, "intra_threads": 1}
        translator = ctranslate2.Translator(str(folder / "model"), **options)

        def translate() -> list[list[int]]:
            found = translator.translate_batch(
                source,
                beam_size=beam,
                max_decoding_length=tokens,
                min_decoding_length=tokens,
                length_penalty=0.0,
                suppress_sequences=silent,
            )
            return [words.encode(" ".join(result.hypotheses[0])) for result in found]

        return translate

    return load


@torch.no_grad()
def _model(sizes: Mapping[str, int], post_norm: bool) -> TranslationModel:
    """Random weights whose translations vary with the source and from token to token.

    As drawn, tied embeddings make the model repeat its first token, which is still the loudest part of the hidden
    state; random signs in the last norm take that away at no cost.
    """
    config = TranslationConfig(VOCABULARY, VOCABULARY, norm_first=not post_norm, final_norm=not post_norm)
    model = TranslationModel(replace(config, **sizes))  # type: ignore[arg-type]
    norm = model.decoder.layers[-1].norm3 if post_norm else model.decoder.norm
    assert isinstance(norm, torch.nn.LayerNorm)
    norm.weight.copy_(torch.randint(0, 2, (model.config.d_model,)) * 2 - 1)
    return model
