"""Settings of models that ask for layers beyond torch's: what is built, counted, refused, trained and read again."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastformer
from fastformer.apps.classification.model import ClassifierConfig, SequenceClassifier
from fastformer.apps.export import export_safetensors, load_safetensors
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.models import sizes
from fastformer.apps.models.embeddings import Embedding
from fastformer.apps.models.sizes import check_memory
from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import CheckpointError, CheckpointFolder, TrainConfig
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.run import APPLICATION as TRANSLATION
from fastformer.apps.translation.run import DataConfig, TranslationRun, load_translator
from fastformer.nn import ALiBi, Llama3Scaling, RelativeBias, Rotary
from tests.support.command_line import save_run

SMALL: dict[str, Any] = {"d_model": 16, "heads": 4, "feed_forward": 24, "dropout": 0.0}
MODERN: dict[str, Any] = {
    "norm": "rms", "activation": "swiglu", "kv_heads": 2, "head_size": 6, "qk_norm": True, "softcap": 20.0, "window": 3,
    "sinks": True, "positions": "rotary", "bias": False,
}  # fmt: skip
POSITIONS = ("rotary", "alibi", "relative", "none", "sinusoidal", "learned")


def models(**settings: Any) -> list[nn.Module]:
    shape = SMALL | settings
    return [
        TranslationModel(TranslationConfig(21, 21, encoder_layers=2, decoder_layers=1, **shape)),
        LanguageModel(LanguageConfig(23, layers=2, **shape)),
        SequenceClassifier(ClassifierConfig(23, 3, layers=2, **shape)),
    ]


def attentions(model: nn.Module, name: str) -> list[Any]:
    return [part for path, part in model.named_modules() if path.endswith(name)]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("modern", [False, True])
def test_the_numbers_of_a_model_are_counted_from_its_settings(positions, modern):
    shape = SMALL | (MODERN if modern else {}) | {"positions": positions}
    for embeddings in ("separate", "tied", "shared"):
        config = TranslationConfig(21, 21, encoder_layers=2, decoder_layers=3, embeddings=embeddings, **shape)
        for model in (*models(**shape), TranslationModel(config)):
            assert model.config.matrix_numbers == sum(p.numel() for p in model.parameters() if p.dim() > 1)


def test_layers_are_what_the_settings_say():
    for model in models(**MODERN, rotary_theta=500.0, rotary_scaling=4.0, rotary_original=64):
        for attention in attentions(model, "self_attn"):
            assert (attention.num_heads, attention.kv_heads, attention.head_dim) == (4, 2, 6)
            assert attention.rotary == Rotary(500.0, 1.0, Llama3Scaling(4.0, original=64))
            assert attention.window == (3, 3)
            assert attention.softcap == 20.0
            assert attention.sinks.shape == (4,)
            assert isinstance(attention.q_norm, fastformer.RMSNorm)
        for attention in attentions(model, "multihead_attn"):
            assert (attention.kv_heads, attention.rotary, attention.window) == (2, None, None)
        assert not any(isinstance(part, nn.LayerNorm) for part in model.modules())
    translation, language, classifier = models(positions="relative", relative_buckets=8, relative_distance=9)
    for model, bidirectional in ((translation.encoder, True), (translation.decoder, False), (language, False)):
        biases = [part for part in model.modules() if isinstance(part, RelativeBias)]
        assert [(b.buckets, b.max_distance, b.bidirectional) for b in biases] == [(8, 9, bidirectional)] * len(biases)
        assert biases
    assert all(b.bidirectional for b in classifier.modules() if isinstance(b, RelativeBias))
    assert any(isinstance(part, ALiBi) for part in models(positions="alibi")[1].modules())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
        ({"kv_heads": 8}, r"kv_heads must be at least 1 and at most heads \(4\)"),
        ({"head_size": 5, "positions": "rotary"}, "rotary must turn an even number"),
        ({"positions": "relative", "relative_buckets": 9}, "relative_buckets must be even"),
        ({"positions": "relative", "relative_distance": 3}, "half of them below relative_distance"),
        ({"positions": "rope"}, "positions must be one of"),
        ({"norm": "group"}, "norm must be one of layer, rms"),
        ({"window": -1}, "window must be at least 0"),
        ({"softcap": 0.0}, "softcap must be at least 1e-30"),
        (
            {"embedding_range": 0.1},
            "embedding_range has an effect only with embedding_initialisation=normal or uniform",
        ),
        ({"initialisation_range": 0.1}, "only with initialisation=normal or uniform, not with .*xavier_uniform"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        LanguageConfig(23, **SMALL | settings)


SIZES = {"d_model": 96, "heads": 4, "feed_forward": 192, "positions": "learned", "max_positions": 80}
# settings -> standard deviation, largest absolute value; None: no bound.
DRAWN = {
    ("uniform", None): (0.1 / 3**0.5, 0.1),
    ("uniform", 0.5): (0.5 / 3**0.5, 0.5),
    ("normal", 0.3): (0.3, None),
}


def large_models(**settings):
    """One model of each kind; vocabularies of 90, so that every matrix has 7,680 numbers at least."""
    torch.manual_seed(0)
    given = SIZES | settings
    separate = {"embeddings": "separate"}
    return [
        TranslationModel(TranslationConfig(90, 90, encoder_layers=1, decoder_layers=1, **separate, **given)),
        LanguageModel(LanguageConfig(90, layers=1, **separate, **given)),
        SequenceClassifier(ClassifierConfig(90, 85, layers=1, **given)),
    ]


def check(name, weight, deviation, bound=None):
    # The deviation of n numbers is known to 1 / sqrt(2 n), 0.8 %: five times that.
    assert weight.std().item() == pytest.approx(deviation, rel=0.04), name
    assert bound is None or 0.99 * bound < weight.abs().max().item() <= bound, name


@pytest.mark.parametrize(("how", "width"), DRAWN)
@pytest.mark.parametrize("section", ["embedding", "matrices"])
def test_embeddings_separate_outputs_and_matrices_have_the_stated_initialisation(section, how, width):
    changes = {"initialisation": how, "initialisation_range": width}
    if section == "embedding":
        changes = {"embedding_initialisation": how, "embedding_range": width}
    for model in large_models(**changes):
        for name, weight in ((name, p) for name, p in model.named_parameters() if p.dim() > 1):
            over_vocabulary = name == "output.weight" and not isinstance(model, SequenceClassifier)
            embedding = name.endswith(("tokens.weight", "positions.weight"))
            if section == "matrices":
                check(name, weight, *((96**-0.5,) if embedding else DRAWN[how, width]))
            elif embedding or over_vocabulary:
                check(name, weight, *DRAWN[how, width])
            else:
                xavier = (2 / sum(weight.shape)) ** 0.5
                check(name, weight, xavier, 3**0.5 * xavier)


TINY: dict[str, Any] = {"d_model": 8, "heads": 2, "feed_forward": 12}
LAYERS = {"encoder_layers": 2, "decoder_layers": 3}


@pytest.mark.parametrize(
    ("name", "most"),
    [("source_vocabulary", "2,147,483,647"), ("d_model", "2,147,483,647"), ("encoder_layers", "10,000")],
)
@pytest.mark.parametrize("size", [2**31, 2**64])
def test_a_size_beyond_int32_is_refused_by_name(name: str, most: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1 and at most {most}, not {size}"):
        TranslationConfig(**{"source_vocabulary": 9, "target_vocabulary": 9, name: size})


def test_a_model_beyond_the_memory_is_refused_before_data_is_read(tmp_path: Path) -> None:
    data = DataConfig(train_source=tmp_path / "no", train_target=tmp_path / "no")
    for settings in ({"d_model": 2**31 - 2, "heads": 2}, {"feed_forward": 2**31 - 1, "encoder_layers": 9999}):
        with pytest.raises(ValueError, match=r"at least [\d,]+ parameters, [\d,.]+ GiB in fp32, but this machine has"):
            TranslationRun.check(data, settings, TrainConfig(steps=1))
    check_memory(TranslationConfig(9, 9))


def save_small_run(folder: Path) -> TranslationConfig:
    tokenizer = WordTokenizer.from_lines(["a b c d e f"])
    config = TranslationConfig(tokenizer.size, tokenizer.size, **LAYERS, **TINY)
    save_run(folder, TranslationModel(config), tokenizer, tokenizer, max_length=9)
    load_translator(folder)
    return config


def build_nothing(*arguments: Any, **named: Any) -> None:
    raise AssertionError("a model was built")


@pytest.mark.parametrize("agreeing", [False, True])
@pytest.mark.parametrize("changes", [{"encoder_layers": 9000}, {"feed_forward": 2**31 - 1}])
def test_a_run_that_claims_a_large_model_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], agreeing: bool
) -> None:
    config = save_small_run(tmp_path)
    claimed = replace(config, **changes)
    TRANSLATION.save_settings(tmp_path, {"max_length": 9}, claimed, TrainConfig(steps=1))
    if agreeing:  # with the settings in the checkpoint
        CheckpointFolder(tmp_path / "checkpoints").save(1, TranslationModel(config).state_dict(), {}, claimed)
    monkeypatch.setattr(TranslationModel, "__init__", build_nothing)
    message = "bytes of weights are there" if agreeing else "is of another architecture"
    with pytest.raises(CheckpointError, match=message):
        load_translator(tmp_path)


def test_a_resumed_run_that_claims_a_large_model_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(train_size=50, valid_size=5, test_size=5, vocabulary=60, bleu_sentences=0)
    TranslationRun.create(tmp_path, data, {**TINY, **LAYERS}, TrainConfig(steps=1, batch_tokens=99)).fit(show=False)
    paths = [tmp_path / "config.toml", tmp_path / "checkpoints" / "step-1" / "meta.json"]
    monkeypatch.setattr(TranslationModel, "__init__", build_nothing)
    for path, message in zip(paths, ("is of another architecture", "bytes of weights are there"), strict=True):
        path.write_text(re.sub(r'(feed_forward"?( =|:)) 12', r"\1 300000", path.read_text()))
        with pytest.raises(CheckpointError, match=message):
            TranslationRun.open(tmp_path).fit(resume=True, show=False)


@pytest.mark.parametrize("exported", [False, True])
def test_a_model_beyond_the_memory_is_not_built_whatever_size_its_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: bool
) -> None:
    """A sparse file has any size; here the memory is small instead."""
    config = save_small_run(tmp_path / "run")
    tokenizer = WordTokenizer.from_lines(["a b c d e f"])
    export_safetensors(tmp_path / "export", TranslationModel(config), [tokenizer, tokenizer])
    monkeypatch.setattr(sizes, "_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"at least [\d,]+ parameters, .* but this machine has 0\.0 GiB"):
        load_safetensors(tmp_path / "export") if exported else load_translator(tmp_path / "run")


def test_a_table_of_sinusoids_begins_small_and_grows() -> None:
    embedding = Embedding(9, 8, "sinusoidal", max_length=2**31 - 1, dropout=0.0)
    assert embedding.table.shape == (4096, 8)
    assert embedding.encodings(5000).shape[0] >= 5000
    assert torch.equal(embedding.table[:9], Embedding(9, 8, "sinusoidal", 9).table)


def test_threads_are_bounded_by_the_processors() -> None:
    most = 4 * (os.cpu_count() or 1)
    with pytest.raises(ValueError, match=f"threads must be at most {most} here, 4 a processor, not 100000"):
        TranslationRun.check(DataConfig(), TINY, TrainConfig(steps=1, threads=100_000))
    TranslationRun.check(DataConfig(), TINY, TrainConfig(steps=1, threads=most))
