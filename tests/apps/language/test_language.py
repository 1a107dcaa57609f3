"""The language-model application: one run folder from text to perplexity, and what it refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.language.run import (
    LanguageDataConfig,
    LanguageRun,
    Perplexity,
    evaluate_text,
    load_generator,
    perplexity,
    read_text_corpora,
)
from fastformer.apps.language.sampling import SamplingOptions
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.text import ColumnBatches, WordTokenizer, write_lines
from fastformer.apps.train import TrainConfig
from fastformer.apps.train.trainer import Result
from tests.support.command_line import save_run
from tests.support.language_task import random_batch, random_model

MODEL = {"d_model": 16, "heads": 2, "layers": 1, "feed_forward": 32, "dropout": 0.1}
TRAIN = TrainConfig(steps=4, warmup_steps=2, validate_every=2, batch_tokens=64, threads=1, schedule="constant", lr=0.01)
ANIMALS = ("cat", "dog", "cow", "hen", "owl")
LINES = [f"the {a} sees the {b} and the {c}" for a in ANIMALS for b in ANIMALS for c in ANIMALS if len({a, b, c}) == 3]


def text_files(folder: Path) -> LanguageDataConfig:
    for name, lines in (("train", LINES[:40]), ("valid", LINES[40:50]), ("test", [*LINES[50:], "the unicorn"])):
        write_lines(folder / f"{name}.txt", lines)
    files = {f"{name}_text": folder / f"{name}.txt" for name in ("train", "valid", "test")}
    return LanguageDataConfig(**files, tokenizer="words", context=6)  # type: ignore[arg-type]


@pytest.fixture
def data(tmp_path: Path) -> LanguageDataConfig:
    return text_files(tmp_path)


@torch.no_grad()
def window_nats(model: LanguageModel, ids: list[int], context: int) -> float:
    """The loss of all ids but the first, each window by itself."""
    nats = 0.0
    for start in range(0, len(ids) - 1, context):
        window = torch.tensor(ids[start : start + context + 1])
        hidden = model(window[:-1], torch.tensor([len(window) - 1]))
        nats += float(F.cross_entropy(model.logits(hidden), window[1:], reduction="sum"))
    return nats


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageRun, Result]:
    folder = tmp_path_factory.mktemp("language")
    run = LanguageRun.create(folder / "run", text_files(folder), MODEL, TRAIN)
    return run, run.fit(show=False)


def test_train_evaluate_generate(trained: tuple[LanguageRun, Result]) -> None:
    run, result = trained
    assert result.step == 4
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["loss"]))
    assert read_kind(run.folder) == "language"
    corpus, found = evaluate_text(run.folder)
    generator = load_generator(run.folder)
    model, tokenizer = generator.model, generator.tokenizer
    texts = [[tokenizer.bos_id, *tokenizer.encode(line), tokenizer.eos_id] for line in corpus.lines]
    assert found.nats == pytest.approx(sum(window_nats(model, ids, 6) for ids in texts), rel=1e-5)
    assert found.tokens == found.words == corpus.words == sum(len(line.split()) + 1 for line in corpus.lines)
    assert found.unknown == 1
    assert len(generator.generate(["the cat"], SamplingOptions(seed=1))) == 1
    # The loss reported in training is that of the weights on disk.
    assert evaluate_text(run.folder, "valid")[1].per_token == pytest.approx(math.exp(result.best_value or 0.0))


def test_a_file_has_the_perplexity_that_it_has_as_part_of_a_dataset_of_articles(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        write_lines(tmp_path / f"{name}.txt", ["= One =", "", LINES[0], LINES[1], "", "= Two =", "", LINES[2]])
    write_lines(tmp_path / "plain.txt", LINES[:3])
    tokenizer = WordTokenizer.from_lines(LINES)
    model = LanguageModel(LanguageConfig(tokenizer.size, d_model=16, heads=2, layers=1, feed_forward=16))
    save_run(tmp_path / "run", model, tokenizer, context=6, dataset=tmp_path)
    expected, found = (evaluate_text(tmp_path / "run", text)[1] for text in ("test", tmp_path / "test.txt"))
    assert expected == found
    assert len(evaluate_text(tmp_path / "run", tmp_path / "plain.txt")[0]) == 3  # lines: it has no titles


@pytest.mark.parametrize("embeddings", ["tied", "separate"])
def test_tied_is_honoured_through_the_checkpoint(tmp_path: Path, data: LanguageDataConfig, embeddings: str) -> None:
    train = replace(TRAIN, steps=1, validate_every=1)
    LanguageRun.create(tmp_path / "run", data, {**MODEL, "embeddings": embeddings}, train).fit(show=False)
    model = load_generator(tmp_path / "run").model
    assert (model.output.weight is model.embedding.tokens.weight) == (embeddings == "tied")


@pytest.mark.parametrize("context", [3, 7])
def test_the_window_is_honoured_in_columns(tmp_path: Path, data: LanguageDataConfig, context: int) -> None:
    run = LanguageRun(tmp_path, replace(data, stream="columns", columns=5, context=context), MODEL, TRAIN)
    batches = run.batches
    assert isinstance(batches, ColumnBatches)
    rows = run.corpora["train"].words // 5
    assert [batch.lengths.tolist() for batch in batches.epoch(0)][:-1] == [[context] * 5] * ((rows - 2) // context)
    assert sum(batch.tokens for batch in batches.epoch(0)) == 5 * (rows - 1)


def test_a_text_of_a_stream_model_begins_like_a_line(tmp_path: Path) -> None:
    """With eos: a stream has no bos."""
    tokenizer = WordTokenizer.from_lines(LINES)
    model = LanguageModel(LanguageConfig(tokenizer.size, d_model=8, heads=2, layers=1, feed_forward=8))
    for stream, first in (("columns", tokenizer.eos_id), ("documents", tokenizer.bos_id)):
        save_run(tmp_path / stream, model, tokenizer, context=9, stream=stream)
        assert load_generator(tmp_path / stream).encode(["the cat"]) == [[first, *tokenizer.encode("the cat")]]


def test_the_test_text_is_scored_with_the_best_weights(tmp_path: Path, data: LanguageDataConfig) -> None:
    # A rate that first learns and then ruins it.
    train = replace(TRAIN, steps=40, validate_every=1, keep=2, lr=3.0, warmup_steps=100, clip_norm=0.0)
    LanguageRun.create(tmp_path / "run", data, {**MODEL, **CLASSICAL}, train).fit(show=False)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if r["kind"] == "validation"]
    assert losses[-1] > 1.2 * min(losses)
    found = {which: evaluate_text(tmp_path / "run", "valid", which)[1] for which in ("best", "last")}
    assert found["best"].nats / found["best"].tokens == pytest.approx(min(losses), rel=1e-5)
    assert evaluate_text(tmp_path / "run", "valid")[1] == found["best"]
    assert found["last"].nats > found["best"].nats


@pytest.mark.parametrize("stream", ["documents", "columns"])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, data: LanguageDataConfig, stream: str) -> None:
    data = replace(data, stream=stream, columns=4)
    LanguageRun.create(tmp_path / "a", data, MODEL, replace(TRAIN, steps=20)).fit(show=False)
    LanguageRun.create(tmp_path / "b", data, MODEL, replace(TRAIN, steps=9)).fit(show=False)
    LanguageRun.open(tmp_path / "b", {"steps": 20}).fit(resume=True, show=False)
    one, two = (load_generator(tmp_path / name, "last").model.state_dict() for name in "ab")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_subwords_have_a_perplexity_per_word(tmp_path: Path, data: LanguageDataConfig) -> None:
    run = LanguageRun(tmp_path, replace(data, tokenizer="bpe", vocabulary=30), MODEL, TRAIN)
    corpus = run.corpora["test"]
    found = perplexity(run.new_model().eval(), corpus, run.tokenizer, 6, "documents")
    assert found.words == corpus.words < found.tokens
    assert found.per_word == pytest.approx(math.exp(found.nats / corpus.words))
    assert "per word" in str(found)
    lines_without_spaces = str(Perplexity(nats=2200.0, tokens=1000, words=20, unknown=0))
    assert lines_without_spaces.startswith("perplexity 9.03 per token (1,000 predicted")
    assert "; 5.921e+47 per word" in lines_without_spaces


def test_a_file_without_held_out_text_is_split(tmp_path: Path, data: LanguageDataConfig) -> None:
    whole = read_text_corpora(replace(data, valid_text=None, test_text=None, held_out=0.1))
    assert [len(whole[name]) for name in ("train", "valid", "test")] == [32, 4, 4]  # type: ignore[index]
    parts = [set(corpus.lines) for corpus in whole.values()]
    assert len(set.union(*parts)) == 40
    given = read_text_corpora(replace(data, test_text=None, held_out=0.1))
    assert [len(given[name]) for name in ("train", "valid", "test")] == [36, 10, 4]  # type: ignore[index]
    assert given["valid"].lines == LINES[40:50]


@pytest.mark.parametrize("context", [1, 6, 40])
def test_perplexity_of_a_stream_is_that_of_a_plain_loop(
    tmp_path: Path, data: LanguageDataConfig, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are cut anywhere between windows."""
    monkeypatch.setattr("fastformer.apps.language.run._EVALUATION_TOKENS", 50)
    run = LanguageRun(tmp_path, data, MODEL, TRAIN)
    model, tokenizer, corpus = run.new_model().double().eval(), run.tokenizer, run.corpora["test"]
    found = perplexity(model, corpus, tokenizer, context, "columns")
    ids = [tokenizer.eos_id, *(i for line in corpus.lines for i in (*tokenizer.encode(line), tokenizer.eos_id))]
    assert found.nats == pytest.approx(window_nats(model, ids, context), rel=1e-12)
    assert found.tokens == found.words == len(ids) - 1


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"dropout": 0.3}, (0.3, 0.3, 0.0)),
        ({"dropout": 0.4, "embedding_dropout": 0.1, "attention_dropout": 0.2, "output_dropout": 0.6}, (0.1, 0.2, 0.6)),
    ],
)
def test_dropout_of_embeddings_attention_and_output_has_the_stated_rate(
    rates: dict[str, float], expected: tuple[float, ...]
) -> None:
    """Shares of zeros in embeddings, attention weights and hidden states; none in evaluation mode."""
    model = random_model(d_model=48, **rates).train()
    batch = random_batch([100])
    past = ~torch.ones(100, 100, dtype=torch.bool).triu(1)

    def zeros() -> tuple[float, ...]:
        embedded = model.embedding(batch.ids_in, torch.arange(100), 100)
        weights, hidden = model.attention_maps(batch.ids_in)[..., past], model(batch.ids_in, batch.lengths)
        return tuple(float((x == 0).float().mean()) for x in (embedded, weights, hidden))

    torch.manual_seed(0)
    assert zeros() == tuple(pytest.approx(rate, abs=0.03) if rate else 0.0 for rate in expected)
    for layer in model.decoder.layers:
        assert {layer.dropout.p, layer.dropout1.p, layer.dropout2.p} == {rates["dropout"]}
    model.eval()
    assert zeros() == (0.0, 0.0, 0.0)
