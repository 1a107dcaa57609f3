"""The translation application: one run folder from text to scores, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="checkpoints need the extra `apps`")
pytest.importorskip("sacrebleu", reason="scores need the extra `apps`")
pytest.importorskip("tomli_w", reason="run folders need the extra `apps`")

from fastformer.apps.text import ParallelCorpus, write_lines
from fastformer.apps.text.scores import score_translations
from fastformer.apps.train import CheckpointError, TrainConfig
from fastformer.apps.translation.model import corpus_loss
from fastformer.apps.translation.run import (
    DataConfig,
    TranslationRun,
    build_tokenizers,
    evaluate,
    load_translator,
    read_corpora,
)
from fastformer.apps.translation.search import SearchOptions

DATA = DataConfig(train_size=120, valid_size=10, test_size=10, vocabulary=60, joint=False, bleu_sentences=4)
MODEL = {"d_model": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 32}
TRAIN = TrainConfig(steps=4, warmup_steps=2, validate_every=2, batch_tokens=200, threads=1, metric="loss")


def test_train_load_evaluate(tmp_path: Path) -> None:
    run = TranslationRun.create(tmp_path / "run", DATA, MODEL, TRAIN)
    result = run.fit(show=False)
    assert result.step == 4
    assert {"loss", "perplexity", "bleu", "chrf"} <= result.metrics.keys()
    translator = load_translator(tmp_path / "run")
    scores, translations = evaluate(translator, run.corpora["test"], SearchOptions(beam=2, max_length=8))
    assert scores.sentences == len(translations) == 10
    assert scores == score_translations(translations, run.corpora["test"].target)
    # The loss reported in training is that of the weights on disk.
    best = load_translator(tmp_path / "run", "best").model
    held_out = run.corpora["valid"]
    from fastformer.apps.text import encode_pairs

    loss = corpus_loss(best, encode_pairs(held_out, *run.tokenizers, max_length=256))
    assert result.best_value == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("sampling", [None, 0.1])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, sampling: float | None) -> None:
    data = replace(DATA, sampling=sampling)
    # Interrupted in the second epoch, after three of the four steps; the constant schedule does not look at the budget.
    whole = replace(TRAIN, schedule="constant", batch_tokens=900)
    TranslationRun.create(tmp_path / "a", data, MODEL, whole).fit(show=False)
    run = TranslationRun.create(tmp_path / "b", data, MODEL, replace(whole, steps=3))
    assert run.batches.batches_in(0) == 2
    run.fit(show=False)
    TranslationRun.open(tmp_path / "b", {"steps": 4}).fit(resume=True, show=False)
    one, two = (load_translator(tmp_path / name, "last").model.state_dict() for name in "ab")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("changes", [{}, {"steps": 3, "lr": 0.1}], ids=str)
def test_a_resume_that_trains_nothing_keeps_settings_and_weights(tmp_path: Path, changes: dict[str, float]) -> None:
    run = tmp_path / "run"
    TranslationRun.create(run, DATA, MODEL, replace(TRAIN, steps=3)).fit(show=False)

    def content() -> list[bytes]:
        weights = sorted((run / "checkpoints").rglob("*.safetensors"))
        return [path.read_bytes() for path in (run / "config.toml", *weights)]

    before = content()
    result = TranslationRun.open(run, changes).fit(resume=True, show=False)
    assert (result.reason, result.step) == ("steps", 3)
    assert content() == before


def test_special_ids_are_configurable_and_stored(tmp_path: Path) -> None:
    data = replace(DATA, unk_id=3, pad_id=0, bos_id=1, eos_id=2)
    run = TranslationRun.create(tmp_path / "run", data, MODEL, TRAIN)
    assert (run.model_config.pad_id, run.model_config.bos_id, run.model_config.eos_id) == (0, 1, 2)
    assert run.tokenizers[1].special_ids == data.special_ids
    run.fit(show=False)
    assert load_translator(tmp_path / "run").target_tokenizer.special_ids == data.special_ids


def test_tokenizers_see_the_training_split_only() -> None:
    data = replace(DATA, tokenizer="words", minimum_frequency=1)
    train = ParallelCorpus(["a b", "b c"], ["x", "y"])
    source, _ = build_tokenizers(data, train)
    assert source.encode("d") == [source.unk_id]
    assert source.unk_id not in source.encode("a b c")


def test_words_of_pairs_end_where_the_setting_says(tmp_path: Path) -> None:
    """At spaces alone, text that was split into tokens before (`don't`, `@-@`, `U.S.`) stays as it is."""
    train = ParallelCorpus(["a U.S. @-@ b", "don't , b"], ["ein U.S. x", "y , z"])
    for splitting, pieces in (("punctuation", ["U", ".", "S", "."]), ("whitespace", ["U.S."])):
        data = replace(DATA, tokenizer="words", minimum_frequency=1, splitting=splitting)
        for tokenizer in build_tokenizers(data, train):
            assert tokenizer.pieces(tokenizer.encode("U.S.")) == pieces
    with pytest.raises(ValueError, match="splitting must be one of punctuation, whitespace, not 'spaces'"):
        replace(DATA, splitting="spaces")
    data = replace(DATA, tokenizer="words", minimum_frequency=1, splitting="whitespace", bleu_sentences=0)
    run = TranslationRun.create(tmp_path / "run", data, MODEL, replace(TRAIN, steps=1, validate_every=1))
    run.fit(show=False)
    assert load_translator(tmp_path / "run").source_tokenizer.splitting == "whitespace"


def test_files_are_split_disjointly(tmp_path: Path) -> None:
    write_lines(tmp_path / "s", [f"s{i}" for i in range(40)])
    write_lines(tmp_path / "t", [f"t{i}" for i in range(40)])
    data = DataConfig(train_source=tmp_path / "s", train_target=tmp_path / "t", valid_size=4, test_size=6)
    corpora = read_corpora(data)
    parts = [set(corpora[name].source) for name in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [30, 4, 6]
    assert len(set.union(*parts)) == 40
    for corpus in corpora.values():
        assert [s[1:] for s in corpus.source] == [t[1:] for t in corpus.target]


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    TranslationRun.create(tmp_path / "run", DATA, MODEL, TRAIN).fit(show=False)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("feed_forward = 32", "feed_forward = 64"))
    with pytest.raises(CheckpointError, match="feed_forward"):
        load_translator(tmp_path / "run")
