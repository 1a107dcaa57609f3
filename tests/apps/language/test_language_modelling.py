"""The language-model application: one run folder from text to perplexity, and what it refuses."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("safetensors", reason="checkpoints need the extra `apps`")
pytest.importorskip("tomli_w", reason="run folders need the extra `apps`")

from fastformer import functional
from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.language.run import (
    APPLICATION as LANGUAGE,
)
from fastformer.apps.language.run import (
    LanguageDataConfig,
    LanguageRun,
    LanguageTrainConfig,
    evaluate_text,
    load_generator,
    load_language_model,
    perplexity,
    read_text_corpora,
)
from fastformer.apps.language.sampling import SamplingOptions
from fastformer.apps.runs.application import Application
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.text import ColumnBatches, TextCorpus, WordTokenizer, write_lines
from fastformer.apps.train import CheckpointError, TrainConfig
from fastformer.apps.translation.run import APPLICATION as TRANSLATION
from fastformer.apps.translation.run import TranslationRun

MODEL = {"d_model": 16, "heads": 2, "layers": 1, "feed_forward": 32, "dropout": 0.1}
TRAIN = TrainConfig(steps=4, warmup_steps=2, validate_every=2, batch_tokens=64, threads=1, schedule="constant", lr=0.01)
ANIMALS = ("cat", "dog", "cow", "hen", "owl")
LINES = [f"the {a} sees the {b} and the {c}" for a in ANIMALS for b in ANIMALS for c in ANIMALS if len({a, b, c}) == 3]


@pytest.fixture
def data(tmp_path: Path) -> LanguageDataConfig:
    for name, lines in (("train", LINES[:40]), ("valid", LINES[40:50]), ("test", [*LINES[50:], "the unicorn"])):
        write_lines(tmp_path / f"{name}.txt", lines)
    files = {f"{name}_text": tmp_path / f"{name}.txt" for name in ("train", "valid", "test")}
    return LanguageDataConfig(**files, tokenizer="words", context=6)  # type: ignore[arg-type]


@torch.no_grad()
def window_nats(model: LanguageModel, ids: list[int], context: int) -> float:
    """The loss of all ids but the first, each window by itself."""
    nats = 0.0
    for start in range(0, len(ids) - 1, context):
        window = torch.tensor(ids[start : start + context + 1])
        hidden = model(window[:-1], torch.tensor([len(window) - 1]))
        nats += float(F.cross_entropy(model.logits(hidden), window[1:], reduction="sum"))
    return nats


def naive_perplexity(model: LanguageModel, tokenizer: WordTokenizer, lines: list[str], context: int) -> float:
    """A window a document, cut by hand and run one at a time."""
    texts = [[tokenizer.bos_id, *tokenizer.encode(line), tokenizer.eos_id] for line in lines]
    return math.exp(sum(window_nats(model, ids, context) for ids in texts) / sum(len(ids) - 1 for ids in texts))


def test_train_evaluate_generate(tmp_path: Path, data: LanguageDataConfig) -> None:
    run = LanguageRun.create(tmp_path / "run", data, MODEL, TRAIN)
    result = run.fit(show=False)
    assert result.step == 4
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["loss"]))
    assert read_kind(tmp_path / "run") == "language"
    corpus, found = evaluate_text(tmp_path / "run")
    model, tokenizer, _ = load_language_model(tmp_path / "run")
    assert isinstance(tokenizer, WordTokenizer)
    assert found.per_token == pytest.approx(naive_perplexity(model, tokenizer, corpus.lines, 6), rel=1e-5)
    assert found.tokens == found.words == corpus.words == sum(len(line.split()) + 1 for line in corpus.lines)
    assert found.unknown == 1
    texts = load_generator(tmp_path / "run").generate(["the cat"], SamplingOptions(seed=1))
    assert len(texts) == 1
    # The loss reported in training is that of the weights on disk.
    assert evaluate_text(tmp_path / "run", "valid")[1].per_token == pytest.approx(math.exp(result.best_value or 0.0))


def test_it_learns_what_only_attention_knows(tmp_path: Path) -> None:
    """The last word repeats the first: a model of the last few words alone stays at one in five."""
    lines = [f"{a} then {b} again {a}" for a in ANIMALS for b in ANIMALS]
    write_lines(tmp_path / "t.txt", lines)
    files = {f"{name}_text": tmp_path / "t.txt" for name in ("train", "valid", "test")}
    data = LanguageDataConfig(**files, tokenizer="words", context=16)  # type: ignore[arg-type]
    train = replace(TRAIN, steps=150, validate_every=150, label_smoothing=0.0, batch_tokens=160)
    run = LanguageRun.create(tmp_path / "run", data, {**MODEL, "dropout": 0.0, "layers": 2}, train)
    run.fit(show=False)
    _, found = evaluate_text(tmp_path / "run")
    # Of six tokens two are drawn from five words; the others follow.
    assert found.nats / found.tokens == pytest.approx(2 * math.log(5) / 6, rel=0.05)
    options = SamplingOptions(temperature=0.0)
    assert load_generator(tmp_path / "run").generate(["owl then hen again"], options) == [" owl"]


@pytest.mark.parametrize("embeddings", ["tied", "separate"])
def test_tied_is_honoured_through_the_checkpoint(tmp_path: Path, data: LanguageDataConfig, embeddings: str) -> None:
    run = LanguageRun.create(tmp_path / "run", data, {**MODEL, "embeddings": embeddings}, TRAIN)
    run.fit(show=False)
    model, _, _ = load_language_model(tmp_path / "run")
    assert (model.output.weight is model.embedding.tokens.weight) == (embeddings == "tied")
    assert torch.equal(model.output.weight, model.embedding.tokens.weight) == (embeddings == "tied")


@pytest.mark.parametrize("context", [3, 7])
def test_the_window_is_honoured_in_columns(tmp_path: Path, data: LanguageDataConfig, context: int) -> None:
    run = LanguageRun(tmp_path, replace(data, stream="columns", columns=5, context=context), MODEL, TRAIN)
    batches = run.batches
    assert isinstance(batches, ColumnBatches)
    rows = run.corpora["train"].words // 5
    assert [batch.lengths.tolist() for batch in batches.epoch(0)][:-1] == [[context] * 5] * ((rows - 2) // context)
    assert sum(batch.tokens for batch in batches.epoch(0)) == 5 * (rows - 1)


def test_a_stream_is_evaluated_in_windows_of_all_its_tokens(tmp_path: Path, data: LanguageDataConfig) -> None:
    data = replace(data, stream="columns", columns=5, context=7)
    LanguageRun.create(tmp_path / "run", data, MODEL, TRAIN).fit(show=False)
    corpus, found = evaluate_text(tmp_path / "run")
    model, tokenizer, _ = load_language_model(tmp_path / "run")
    stream = [tokenizer.eos_id]
    for line in corpus.lines:
        stream += [*tokenizer.encode(line), tokenizer.eos_id]
    assert found.tokens == corpus.words == len(stream) - 1
    assert found.nats == pytest.approx(window_nats(model, stream, 7), rel=1e-5)


def test_a_text_of_a_stream_model_begins_like_a_line(tmp_path: Path, data: LanguageDataConfig) -> None:
    model = {**MODEL, "embeddings": "separate"}
    LanguageRun.create(tmp_path / "run", replace(data, stream="columns", columns=5), model, TRAIN).fit(show=False)
    generator = load_generator(tmp_path / "run")
    options = SamplingOptions(seed=3, max_new_tokens=5)
    before = generator.generate(["the cat"] * 8, options)
    weight, tokenizer = generator.model.embedding.tokens.weight, generator.tokenizer
    for token, same in ((tokenizer.bos_id, True), (tokenizer.eos_id, False)):  # bos was never read in training
        with torch.no_grad():
            weight[token] = torch.randn(16, generator=torch.Generator().manual_seed(1)) * 100.0
        assert (generator.generate(["the cat"] * 8, options) == before) == same


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
    one, two = (load_language_model(tmp_path / name, "last")[0].state_dict() for name in "ab")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("tokenizer", ["bpe", "unigram"])
def test_subwords_have_a_perplexity_per_word(tmp_path: Path, data: LanguageDataConfig, tokenizer: str) -> None:
    run = LanguageRun.create(tmp_path / "run", replace(data, tokenizer=tokenizer, vocabulary=30), MODEL, TRAIN)
    assert {"loss", "perplexity", "word_perplexity"} <= run.fit(show=False).metrics.keys()
    corpus, found = evaluate_text(tmp_path / "run")
    assert found.words == corpus.words < found.tokens
    assert found.per_word == pytest.approx(math.exp(found.nats / corpus.words))
    assert "per word" in str(found)


def test_a_file_without_held_out_text_is_split(tmp_path: Path, data: LanguageDataConfig) -> None:
    whole = read_text_corpora(replace(data, valid_text=None, test_text=None, held_out=0.1))
    assert [len(whole[name]) for name in ("train", "valid", "test")] == [32, 4, 4]  # type: ignore[index]
    parts = [set(corpus.lines) for corpus in whole.values()]
    assert len(set.union(*parts)) == 40
    given = read_text_corpora(replace(data, test_text=None, held_out=0.1))
    assert [len(given[name]) for name in ("train", "valid", "test")] == [36, 10, 4]  # type: ignore[index]
    assert given["valid"].lines == LINES[40:50]


def test_the_vocabulary_is_that_of_the_training_text(data: LanguageDataConfig, tmp_path: Path) -> None:
    run = LanguageRun(tmp_path, data, MODEL, TRAIN)
    (tokenizer,) = run.tokenizers
    assert tokenizer.encode("unicorn") == [tokenizer.unk_id]


@pytest.mark.parametrize("tokens", [4096, 20, 1])
def test_documents_are_never_looked_at_by_others(
    tmp_path: Path, data: LanguageDataConfig, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastformer.apps.language.evaluation._EVALUATION_TOKENS", tokens)
    run = LanguageRun(tmp_path, data, MODEL, TRAIN)
    model = run.new_model().eval()
    lines = run.corpora["valid"].lines
    alone = [perplexity(model, TextCorpus([[line]]), run.tokenizer, 6, "documents").nats for line in lines]
    together = perplexity(model, run.corpora["valid"], run.tokenizer, 6, "documents")
    assert together.nats == pytest.approx(sum(alone), rel=1e-5)


@torch.no_grad()
def slow_nats(model: LanguageModel, ids: list[int], context: int, overlap: int) -> float:
    """The loss of all ids but the first: for each, the model reads what its window holds before it, no more."""
    nats, begin = 0.0, 0
    for position in range(1, len(ids)):
        if position - begin > context:
            begin = position - 1 - overlap
        seen = torch.tensor(ids[begin:position])
        logits = model.logits(model(seen, torch.tensor([len(seen)]))[-1])
        nats -= float(logits.log_softmax(-1)[ids[position]])
    return nats


@pytest.mark.parametrize("stream", ["documents", "columns"])
@pytest.mark.parametrize(("context", "overlap"), [(1, 0), (6, 0), (6, 2), (6, 5), (40, 39)])
def test_overlapping_windows_are_those_of_a_plain_loop(
    tmp_path: Path, data: LanguageDataConfig, stream: str, context: int, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of 3 and of 9 tokens: shorter and longer than the context; batches cut anywhere between windows."""
    monkeypatch.setattr("fastformer.apps.language.evaluation._EVALUATION_TOKENS", 50)
    run = LanguageRun(tmp_path, data, MODEL, TRAIN)
    model, tokenizer, corpus = run.new_model().double().eval(), run.tokenizer, run.corpora["test"]
    found = perplexity(model, corpus, tokenizer, context, stream, overlap)
    texts = [[*tokenizer.encode(line), tokenizer.eos_id] for line in corpus.lines]
    if stream == "columns":
        ids = [[tokenizer.eos_id, *(i for text in texts for i in text)]]
    else:
        ids = [[tokenizer.bos_id, *text] for text in texts]
    assert found.nats == pytest.approx(sum(slow_nats(model, each, context, overlap) for each in ids), rel=1e-12)
    assert found.tokens == found.words == sum(map(len, texts))
    plain = perplexity(model, corpus, tokenizer, context, stream)
    assert (found.tokens, found.unknown) == (plain.tokens, plain.unknown)
    assert (plain.nats == found.nats) == (overlap == 0 or (stream == "documents" and context == 40))


def test_what_is_read_again_is_not_projected(
    tmp_path: Path, data: LanguageDataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LanguageRun(tmp_path, data, MODEL, TRAIN)
    rows: list[int] = []
    project = functional.linear_cross_entropy
    monkeypatch.setattr(
        functional, "linear_cross_entropy", lambda x, *rest, **named: rows.append(len(x)) or project(x, *rest, **named)
    )
    found = perplexity(run.new_model().eval(), run.corpora["test"], run.tokenizer, 6, "columns", 5)
    assert sum(rows) == found.tokens


def test_the_overlap_is_stated_and_checked(tmp_path: Path, data: LanguageDataConfig) -> None:
    LanguageRun.create(tmp_path / "run", data, MODEL, TRAIN).fit(show=False)
    found = evaluate_text(tmp_path / "run", overlap=4)[1]
    assert str(found).endswith("; each window rereads 4 tokens")
    assert "rereads" not in str(evaluate_text(tmp_path / "run")[1])
    for overlap in (-1, 6):
        with pytest.raises(ValueError, match=rf"^overlap must be at least 0 and below context \(6\), not {overlap}$"):
            evaluate_text(tmp_path / "run", overlap=overlap)


def test_resuming_with_other_text_is_refused(tmp_path: Path, data: LanguageDataConfig) -> None:
    LanguageRun.create(tmp_path / "run", data, MODEL, TRAIN).fit(show=False)
    assert data.train_text is not None
    write_lines(data.train_text, ["the cat sees the cat and the cat", *LINES[1:40]])
    with pytest.raises(ValueError, match="training data differs"):
        LanguageRun.open(tmp_path / "run")


def test_a_run_of_the_other_kind_is_refused(tmp_path: Path, data: LanguageDataConfig) -> None:
    LanguageRun.create(tmp_path / "run", data, MODEL, TRAIN).fit(show=False)
    for refused in (TranslationRun.open, TRANSLATION.read_config):
        with pytest.raises(ValueError, match="run is a language-model run; use `fastformer generate`"):
            refused(tmp_path / "run")
    # A folder of before there was a choice holds translation.
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('[run]\nkind = "language"\n', ""))
    assert read_kind(tmp_path / "run") == "translation"
    with pytest.raises(ValueError, match="run is a translation run; use `fastformer translate`"):
        LANGUAGE.read_config(tmp_path / "run")


def test_a_checkpoint_of_another_kind_or_architecture_is_refused(tmp_path: Path, data: LanguageDataConfig) -> None:
    LanguageRun.create(tmp_path / "run", data, MODEL, TRAIN).fit(show=False)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("feed_forward = 32", "feed_forward = 64"))
    with pytest.raises(CheckpointError, match="feed_forward"):
        load_generator(tmp_path / "run")
    meta = next((tmp_path / "run" / "checkpoints").glob("step-*/meta.json"))
    content = json.loads(meta.read_text())
    content["config"] = {"source_vocabulary": 9, "target_vocabulary": 9}
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/meta.json"):
        path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="another architecture"):
        load_generator(tmp_path / "run")


def test_nothing_of_a_run_is_pickled_modules(tmp_path: Path, data: LanguageDataConfig) -> None:
    LanguageRun.create(tmp_path / "run", data, MODEL, TRAIN).fit(show=False)
    for path in (tmp_path / "run").rglob("*.pt"):
        torch.load(path, weights_only=True)  # raises on anything but tensors and plain values
    assert list((tmp_path / "run").rglob("model.safetensors"))


def test_language_models_have_training_defaults_of_their_own() -> None:
    ours, base = LanguageTrainConfig(steps=1), TrainConfig(steps=1)
    changed = {each.name for each in fields(base) if getattr(ours, each.name) != getattr(base, each.name)}
    assert changed == {"schedule", "warmup_steps", "label_smoothing", "batch_tokens"}
    assert {each.name: each.metadata for each in fields(ours)} == {each.name: each.metadata for each in fields(base)}
    assert (ours.schedule, ours.label_smoothing) == ("cosine", 0.0)
    # config.toml leaves out what is unset: a default in its place would change the settings of runs that exist.
    assert all(getattr(base, name) is not None for name in changed)
    with pytest.raises(ValueError, match="label_smoothing must be at least 0 and below 1, not 1"):
        LanguageTrainConfig(steps=1, label_smoothing=1)


def test_a_resumed_run_keeps_its_settings_whatever_the_defaults(tmp_path: Path, data: LanguageDataConfig) -> None:
    settings = {"steps": 2, "label_smoothing": 0.1, "schedule": "inverse_sqrt", "warmup_steps": 4000, "threads": 1}
    LanguageRun.create(tmp_path / "run", data, MODEL, TrainConfig(**settings))
    run = LanguageRun.open(tmp_path / "run", {"steps": 3})
    assert isinstance(run.train_config, LanguageTrainConfig)
    assert vars(run.train_config) == vars(TrainConfig(**{**settings, "steps": 3}))


@pytest.mark.parametrize("application", [LANGUAGE, TRANSLATION], ids=["language", "translation"])
@pytest.mark.parametrize("name", ["vocabulary", "source_vocabulary", "target_vocabulary", "pad_id", "bos_id", "eos_id"])
def test_what_follows_from_the_tokenizer_is_no_users(tmp_path: Path, application: Application, name: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f"[model]\n{name} = 7\n")
    known = name in {each.name for each in fields(application.model)}
    message = f"{name} is set from the tokenizer; leave it out" if known else f"unknown key {name!r}"
    with pytest.raises(ValueError, match=message):
        application.read_settings(path)


def test_the_tokenizer_wins_over_settings_in_code(tmp_path: Path, data: LanguageDataConfig) -> None:
    run = LanguageRun(tmp_path, data, {**MODEL, "vocabulary": 999, "pad_id": 7, "bos_id": 8, "eos_id": 9}, TRAIN)
    config = run.model_config
    assert (config.vocabulary, config.pad_id, config.bos_id, config.eos_id) == (run.tokenizer.size, 1, 2, 3)


def test_an_empty_text_keeps_its_name(data: LanguageDataConfig, tmp_path: Path) -> None:
    assert data.valid_text is not None
    data.valid_text.write_text("\n\n")
    with pytest.raises(ValueError, match=r"valid\.txt: holds no word"):
        LanguageRun.create(tmp_path / "run", data, MODEL, TRAIN)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", sorted((Path(__file__).parents[3] / "recipes").glob("wikitext2-*.toml")))
def test_recipes_can_be_read(recipe: Path) -> None:
    settings = LANGUAGE.read_settings(recipe)
    LanguageDataConfig(**settings["data"])
    train = LANGUAGE.train(**settings["train"])
    if recipe.stem == "wikitext2-word-cpu":  # what its results were measured with
        assert (train.schedule, train.warmup_steps, train.lr, train.batch_tokens) == ("cosine", 50, 4e-3, 768)
    assert train.label_smoothing == 0.0
    sizes: dict[str, Any] = {"vocabulary": 33_280, **settings["model"]}
    assert LanguageConfig(**sizes).vocabulary == 33_280
