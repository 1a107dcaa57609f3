"""Sizes are bounded before anything is built: settings may be a typing error, or a stranger's."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.apps.export import export_safetensors, load_safetensors
from fastformer.apps.models import sizes
from fastformer.apps.models.embeddings import Embedding
from fastformer.apps.models.sizes import check_memory
from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import CheckpointError, CheckpointFolder, TrainConfig
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.run import APPLICATION as TRANSLATION
from fastformer.apps.translation.run import DataConfig, TranslationRun, load_translator
from tests.support.run_folders import save_run
from tests.support.train_task import config as train_config
from tests.support.train_task import trainer

SMALL: dict[str, Any] = {"d_model": 8, "heads": 2, "feed_forward": 12}
LAYERS = {"encoder_layers": 2, "decoder_layers": 3}


@pytest.mark.parametrize(
    ("name", "most"),
    [("source_vocabulary", "2,147,483,647"), ("d_model", "2,147,483,647"), ("encoder_layers", "10,000")],
)
@pytest.mark.parametrize("size", [2**31, 2**64])
def test_a_size_beyond_counting_is_refused_by_name(name: str, most: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1 and at most {most}, not {size}"):
        TranslationConfig(**{"source_vocabulary": 9, "target_vocabulary": 9, name: size})


def test_a_model_beyond_the_memory_is_refused_before_data_is_read(tmp_path: Path) -> None:
    data = DataConfig(train_source=tmp_path / "no", train_target=tmp_path / "no")
    for settings in ({"d_model": 2**31 - 2, "heads": 2}, {"feed_forward": 2**31 - 1, "encoder_layers": 9999}):
        with pytest.raises(ValueError, match=r"at least [\d,]+ parameters, [\d,.]+ GiB in fp32, but this machine has"):
            TranslationRun.check(data, settings, TrainConfig(steps=1))
    check_memory(TranslationConfig(9, 9))


def run_folder(folder: Path) -> TranslationConfig:
    tokenizer = WordTokenizer.from_lines(["a b c d e f"])
    config = TranslationConfig(tokenizer.size, tokenizer.size, **LAYERS, **SMALL)
    save_run(folder, TranslationModel(config), tokenizer, tokenizer, max_length=9)
    load_translator(folder)
    return config


def build_nothing(*arguments: Any, **named: Any) -> None:
    raise AssertionError("a model was built")


@pytest.mark.parametrize("agreeing", [False, True])
@pytest.mark.parametrize("changes", [{"encoder_layers": 9000}, {"d_model": 2**20}, {"feed_forward": 2**31 - 1}])
def test_a_run_that_claims_a_large_model_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], agreeing: bool
) -> None:
    config = run_folder(tmp_path)
    claimed = replace(config, **changes)
    TRANSLATION.save_settings(tmp_path, {"max_length": 9}, claimed, TrainConfig(steps=1))
    if agreeing:  # with what the checkpoint says of itself
        CheckpointFolder(tmp_path / "checkpoints").save(1, TranslationModel(config).state_dict(), {}, claimed)
    monkeypatch.setattr(TranslationModel, "__init__", build_nothing)
    message = "bytes of weights are there" if agreeing else "is of another architecture"
    with pytest.raises(CheckpointError, match=message):
        load_translator(tmp_path)


def test_a_resumed_run_that_claims_a_large_model_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(train_size=50, valid_size=5, test_size=5, vocabulary=60, bleu_sentences=0)
    TranslationRun.create(tmp_path, data, {**SMALL, **LAYERS}, TrainConfig(steps=1, batch_tokens=99)).fit(show=False)
    places = [tmp_path / "config.toml", tmp_path / "checkpoints" / "step-1" / "meta.json"]
    monkeypatch.setattr(TranslationModel, "__init__", build_nothing)
    for path, message in zip(places, ("is of another architecture", "bytes of weights are there"), strict=True):
        path.write_text(re.sub(r'(feed_forward"?( =|:)) 12', r"\1 300000", path.read_text()))
        with pytest.raises(CheckpointError, match=message):
            TranslationRun.open(tmp_path).fit(resume=True, show=False)


@pytest.mark.parametrize("where", ["run", "exported"])
def test_a_model_beyond_the_memory_is_not_built_whatever_size_its_file_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A hole on a disk has any size; here the memory is small instead."""
    load: Callable[[Path], Any] = load_translator
    if where == "run":
        run_folder(tmp_path)
    else:
        tokenizer = WordTokenizer.from_lines(["a b c d e f"])
        settings = TranslationConfig(tokenizer.size, tokenizer.size, **LAYERS, **SMALL)
        export_safetensors(tmp_path, TranslationModel(settings), [tokenizer, tokenizer])
        load = load_safetensors
    load(tmp_path)
    monkeypatch.setattr(sizes, "_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"at least [\d,]+ parameters, .* but this machine has 0\.0 GiB"):
        load(tmp_path)


def test_a_table_of_sinusoids_begins_small_and_grows() -> None:
    embedding = Embedding(9, 8, "sinusoidal", max_length=2**31 - 1, dropout=0.0)
    assert embedding.table.shape == (4096, 8)
    assert embedding.encodings(5000).shape[0] >= 5000
    assert torch.equal(embedding.table[:9], Embedding(9, 8, "sinusoidal", 9).table)


def test_threads_are_bounded_by_the_processors(tmp_path: Path) -> None:
    most = 4 * (os.cpu_count() or 1)
    with pytest.raises(ValueError, match=f"threads must be at most {most} here, 4 a processor, not {most + 1}"):
        trainer(tmp_path, train_config(threads=most + 1))
    with pytest.raises(ValueError, match=f"threads must be at most {most} here, 4 a processor, not 100000"):
        TranslationRun.check(DataConfig(), SMALL, TrainConfig(steps=1, threads=100_000))
    TranslationRun.check(DataConfig(), SMALL, TrainConfig(steps=1, threads=most))
