"""Sampling: choices against an oracle in plain Python, texts by batch and as a stream, and wrong arguments."""

import logging
import math
import tracemalloc
from dataclasses import replace

import pytest
import torch

from fastformer.apps.language.model import LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.language.sampling import SamplingOptions, TextGenerator, sample
from fastformer.apps.models.sampling import RandomStreams, choose_ids
from fastformer.apps.text import EncodedDocuments, LanguageBatches, Sequences, SpecialIds, WordTokenizer
from tests.support.language_task import random_model

UNK, PAD, BOS, EOS = range(4)


def oracle(logits, options, uniform, forbidden):
    """The five documented steps for one row, in fp64 and plain Python."""
    x = {i: float(value) for i, value in enumerate(logits) if i not in forbidden}
    ranked = sorted(x, key=lambda i: (-x[i], i))
    if options.temperature == 0:
        return ranked[0]
    ranked = ranked[: options.top_k or None]
    weight = {i: math.exp((x[i] - x[ranked[0]]) / options.temperature) for i in ranked}
    total = math.fsum(weight.values())
    kept, mass = [], 0.0
    for i in ranked:
        if options.top_p < 1 and mass >= options.top_p:
            break
        kept.append(i)
        mass += weight[i] / total
    mass = math.fsum(weight[i] for i in kept)
    below = 0.0
    for i in sorted(kept):
        below += weight[i] / mass
        if below > uniform:
            return i
    return max(kept)


def grid(n):
    """Numbers in [0, 1) that meet no boundary of a probability by chance."""
    return (torch.arange(n, dtype=torch.float64) + math.sqrt(2) / 2) / n


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 7.0},
        {"top_k": 1},
        {"top_k": 0, "top_p": 0.6},
        {"top_p": 0.999},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
        {"temperature": 2.5, "top_k": 5, "top_p": 0.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [13, 700])
def test_every_choice_is_the_oracles(options, vocabulary):
    options = SamplingOptions(**options)
    B = 60
    logits = 3 * torch.randn(B, vocabulary)
    before = logits.clone()
    forbidden = [1, 2, 7]
    uniform = grid(B)[torch.randperm(B)]
    actual = choose_ids(logits, options, uniform, forbidden)
    expected = [oracle(logits[b].double(), options, float(uniform[b]), forbidden) for b in range(B)]
    assert actual.tolist() == expected
    assert torch.equal(logits, before)
    assert actual.dtype == torch.int64


def kept(logits, **options):
    """The ids that can be chosen, each hit by many numbers."""
    n = 4000
    return choose_ids(torch.tensor([logits]).expand(n, -1), SamplingOptions(**options), grid(n)).unique().tolist()


def test_ties_go_to_the_lowest_ids_and_no_more_remain_than_necessary():
    flat = [0.0] * 8
    for k in range(1, 9):
        assert kept(flat, top_k=k) == list(range(k))
    for p, n in ((0.01, 1), (0.125, 1), (0.126, 2), (0.25, 2), (0.5, 4), (0.874, 7), (0.876, 8), (1.0, 8)):
        assert kept(flat, top_p=p) == list(range(n)), p
    # Equals around the boundary: ids 1, 3 and 5 are the largest, two of them stay, or all and one of the next.
    tied = [0.0, 2.0, 0.0, 2.0, 0.0, 2.0]
    assert kept(tied, top_k=2) == [1, 3]
    assert kept(tied, top_k=4) == [0, 1, 3, 5]
    assert kept(tied, top_k=4, top_p=0.5) == [1, 3]
    assert choose_ids(torch.tensor([tied]), SamplingOptions(temperature=0)).tolist() == [1]


def test_top_p_beyond_the_first_ranked():
    """A nucleus larger than what is ranked at first, beside a row whose nucleus is one token."""
    V = 5000
    logits = torch.zeros(2, V)
    logits[1, 77] = 50.0
    n = round(0.5 * V)
    options = SamplingOptions(top_p=0.5 - 0.5 / V)
    last = torch.tensor([1 - 1e-12, 1 - 1e-12], dtype=torch.float64)
    assert choose_ids(logits, options, last).tolist() == [n - 1, 77]


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 30.0}], ids=str)
def test_the_ends_of_the_unit_interval_choose_what_is_allowed(options):
    """The first and the last token that have a probability, never one that was ruled out."""
    logits = torch.randn(200, 37) - 4.0
    forbidden = [0, 1, 35, 36]
    for number in (0.0, 1 - 2**-53):
        uniform = torch.full((200,), number, dtype=torch.float64)
        actual = choose_ids(logits, SamplingOptions(**options), uniform, forbidden=forbidden)
        expected = [oracle(row.double(), SamplingOptions(**options), number, forbidden) for row in logits]
        assert actual.tolist() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_no_numbers(value):
    logits = torch.zeros(3, 5)
    logits[1, 2] = value
    for temperature in (0, 1.0):
        ids = choose_ids(logits, SamplingOptions(temperature=temperature), grid(3)).tolist()
        assert ids[1] == -1
        assert min(ids[0], ids[2]) >= 0


def test_streams_depend_on_seed_prompt_and_copy_alone():
    def numbers(prompts, seed):
        return [tuple(stream.random(4)) for stream in RandomStreams(seed).take(prompts)]

    a, b, again = numbers([[2, 5], [2, 6], [2, 5]], 3)
    assert len({a, b, again}) == 3
    assert numbers([[2, 6], [2, 9], [2, 5], [2, 5]], 3) == [b, numbers([[2, 9]], 3)[0], a, again]
    assert numbers([[2, 5]], 4) != [a]
    # Zeros at the end are part of a prompt, and which number is the seed matters.
    assert len(set(numbers([[0], [0, 0], [0, 0, 0], [1, 0], [1]], 0))) == 5
    assert numbers([[2]], None) != numbers([[2]], None)


def test_streams_do_not_keep_the_prompts():
    streams = RandomStreams(1)
    tracemalloc.start()
    try:
        for i in range(200):
            streams.take([range(i, i + 1000)])
        assert tracemalloc.get_traced_memory()[0] < 200 * 300
    finally:
        tracemalloc.stop()


def texts(model, prompts, options, **arguments):
    """Ids that follow each prompt."""
    actual = [[] for _ in prompts]
    for step in sample(model, prompts, options, 6, RandomStreams(options.seed), **arguments):
        for row, token in step:
            actual[row].append(token)
    return actual


@pytest.fixture(scope="module")
def model():
    return random_model(3)


PROMPTS = [[2, 5, 6, 7], [2], [2, 9, 10, 11, 12, 13, 14, 15, 16, 4], [2, 8]]


def eager_model(bias, **changes):
    """A model that prefers eos, by `bias`."""
    model = random_model(3, output_bias=True, **changes)
    with torch.no_grad():
        model.output.bias[EOS] += bias
    return model


def test_special_tokens_are_not_written(model):
    options = SamplingOptions(seed=0, max_new_tokens=60, stop_at_eos=False, temperature=1e3)
    assert {t for text in texts(model, PROMPTS, options, unk_id=UNK) for t in text} == set(range(17)) - {UNK, PAD, BOS}
    allowed = replace(options, allow_unk=True)
    for actual in (texts(model, PROMPTS, options), texts(model, PROMPTS, allowed, unk_id=UNK)):
        assert {t for text in actual for t in text} == set(range(17)) - {PAD, BOS}


def test_a_text_ends_at_eos_and_leaves_the_batch(model):
    options = SamplingOptions(seed=1, max_new_tokens=60, temperature=2.0)
    actual = texts(model, PROMPTS * 3, options)
    assert len({len(text) for text in actual}) > 4
    for text in actual:
        assert EOS not in text[:-1]
        assert len(text) == 60 or text[-1] == EOS
    endless = texts(model, PROMPTS, replace(options, stop_at_eos=False))
    assert [len(text) for text in endless] == [60] * 4
    assert any(EOS in text[:-1] for text in endless)
    # Eos may also be padding or bos, as in GPT-2.
    for changes in ({}, {"pad_id": EOS}, {"bos_id": EOS}):
        for least in (0, 1, 9):
            actual = texts(eager_model(1000.0, **changes), PROMPTS, replace(options, min_new_tokens=least))
            assert [(len(text), text.index(EOS)) for text in actual] == [(least + 1, least)] * 4


@pytest.mark.parametrize(
    "options", [{"seed": 5, "temperature": 1.5, "top_k": 8, "top_p": 0.9}, {"temperature": 0}], ids=str
)
def test_a_text_does_not_depend_on_the_batch(options):
    """Nor on other texts that leave the batch."""
    model, options = eager_model(2.0), SamplingOptions(max_new_tokens=25, **options)
    prompts = [*PROMPTS, [2, 16, 6], [2, 12], [2, 7, 7, 7]]
    together = texts(model, prompts, options)
    if options.temperature:
        assert len({len(text) for text in together}) >= 3
    assert [texts(model, [prompt], options)[0] for prompt in prompts] == together
    assert texts(model, prompts[::-1], options) == together[::-1]
    assert texts(model, prompts, replace(options, max_new_tokens=10)) == [text[:10] for text in together]


# TextGenerator


ALPHABET = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]


@pytest.fixture(scope="module")
def alphabet():
    """A generator that has learned to continue the alphabet, also after its end."""
    tokenizer = WordTokenizer.from_lines([" ".join(ALPHABET)])
    ids = tokenizer.encode(" ".join(ALPHABET * 3))
    documents = EncodedDocuments(Sequences.from_lists([ids[i : i + 20] for i in range(12)]), SpecialIds())
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(16, d_model=32, heads=2, layers=1, feed_forward=32, dropout=0.0))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(40):
        for batch in LanguageBatches(documents, context=8, tokens=1000, seed=step).epoch(0):
            optimizer.zero_grad()
            (language_model_loss(model, batch) / batch.tokens).backward()
            optimizer.step()
    return TextGenerator(model, tokenizer, context=8)


def test_a_learned_text_continues_beyond_the_context_by_batch_and_as_a_stream(alphabet, caplog):
    options = SamplingOptions(temperature=0, max_new_tokens=40, stop_at_eos=False, min_new_tokens=40)
    prompts = ["d e f", "k", "a b c d e f g h i j k l a"]
    expected = [
        " " + " ".join((ALPHABET * 5)[6:46]),
        " l " + " ".join((ALPHABET * 5)[:39]),
        " " + " ".join((ALPHABET * 5)[1:41]),
    ]
    with caplog.at_level(logging.WARNING, "fastformer"):
        assert alphabet.generate(prompts, options, batch_size=2) == expected
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 1 prompts are longer than the context: the last 8 tokens are read"
    ]
    assert ["".join(alphabet.stream(prompt, options)) for prompt in prompts] == expected
    assert list(alphabet.stream("d", replace(options, max_new_tokens=2, min_new_tokens=0))) == [" e", " f"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fastformer"):
        assert len(alphabet.generate(["b yak zebra", "a zebra", "c"], SamplingOptions(max_new_tokens=1))) == 3
    message = "the model does not know 3 words or characters of the prompts"
    assert [record.getMessage() for record in caplog.records] == [message]


def test_new_lines_are_eos_and_first_id_precedes_prompts(alphabet, monkeypatch):
    tokenizer, encoded = alphabet.tokenizer, []

    def planned(model, prompts, *rest):
        encoded.extend(prompts)
        for i in [*tokenizer.encode("c"), tokenizer.eos_id, *tokenizer.encode("d e")]:
            yield [(row, i) for row in range(len(prompts))]

    monkeypatch.setattr("fastformer.apps.language.sampling.sample", planned)
    options, prompts = SamplingOptions(stop_at_eos=False), ["a b", "a\nb", "a\n", "", "\n\na"]
    a, b, eos = *tokenizer.encode("a b"), tokenizer.eos_id
    for first in (None, eos):
        encoded.clear()
        generator = TextGenerator(alphabet.model, tokenizer, 8, first_id=first)
        assert generator.generate(prompts, options) == [" c\nd e", " c\nd e", "c\nd e", "c\nd e", " c\nd e"]
        begin = tokenizer.bos_id if first is None else first
        assert encoded == [[begin, *ids] for ids in ([a, b], [a, eos, b], [a, eos], [], [eos, eos, a])]


def test_texts_are_seeded_without_the_random_state_of_torch():
    tokenizer = WordTokenizer.from_lines([" ".join(ALPHABET)])
    generator = TextGenerator(random_model(1, vocabulary=tokenizer.size, output_bias=True), tokenizer, context=12)
    options = SamplingOptions(max_new_tokens=30, stop_at_eos=False)
    assert generator.generate(["a"], options) != generator.generate(["a"], options)
    before = torch.get_rng_state()
    seeded = replace(options, seed=1)
    assert (
        generator.generate(["a"], seeded)
        == generator.generate(["a"], seeded)
        == ["".join(generator.stream("a", seeded))]
    )
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():  # a model that ends at once
        generator.model.output.bias[tokenizer.eos_id] = 1e3
    assert generator.generate(["a"]) == ["".join(generator.stream("a"))] == [""]


def test_wrong_arguments_are_named(alphabet):
    with pytest.raises(TypeError, match=r"^prompts must be a list of prompts, not one string$"):
        alphabet.generate("a b")
    with pytest.raises(ValueError, match=r"^batch_size must be at least 1, not 0$"):
        alphabet.generate(["a"], batch_size=0)
    with pytest.raises(ValueError, match=r"^first_id .* at least 0 and below vocabulary \(16\), not 16$"):
        TextGenerator(alphabet.model, alphabet.tokenizer, 8, first_id=16)
    learned = random_model(vocabulary=16, positions="learned", max_positions=5)
    for context in (0, 6):
        with pytest.raises(ValueError, match=rf"^context must be at least 1 .*max_positions \(5\), not {context}$"):
            TextGenerator(learned, alphabet.tokenizer, context)
