"""The settings that a user leaves out: how they follow from corpus, budget and speed, and what a run keeps of them."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fastformer.apps.classification.run import ClassificationDataConfig, ClassificationRun, ClassificationTrainConfig
from fastformer.apps.language.run import LanguageDataConfig, LanguageRun, LanguageTrainConfig
from fastformer.apps.runs import run as runs
from fastformer.apps.runs.application import application_of
from fastformer.apps.runs.automatic_settings import Choice, Task, choose, vocabulary_size
from fastformer.apps.runs.folder import read_run_section
from fastformer.apps.text import write_lines
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation.model import TranslationConfig
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.support.python import ROOT

TRANSLATION = {"encoder_layers": (1, 2, 4, 4, 6), "decoder_layers": (1, 2, 4, 4, 6)}
MULTI30K, WMT = 460_000, 120_000_000  # tokens


def speeds(*of_widths: float) -> Any:
    """A machine that trains models of 128, 256 and 512 at these numbers of tokens a second."""
    return lambda shape: dict(zip((128, 256, 512), of_widths, strict=False))[shape.model["d_model"]]


def not_asked(shape: Choice) -> float:
    raise AssertionError("the clock was asked")


CPU, GPU = speeds(5000, 1300), speeds(300_000, 250_000, 150_000)


@pytest.mark.parametrize(
    ("tokens", "budget", "speed", "expected"),
    [
        # 1.08 million tokens: 0.8 times their root is 831
        (MULTI30K, {"minutes": 4}, CPU, {"d_model": 128, "dropout": 0.1, "batch_tokens": 800, "warmup_steps": 100}),
        (MULTI30K, {"minutes": 10}, CPU, {"encoder_layers": 2, "decoder_layers": 2, "warmup_steps": 300}),
        (MULTI30K, {"minutes": 30}, CPU, {"encoder_layers": 4, "decoder_layers": 4}),
        (MULTI30K, {"minutes": 3}, GPU, {"d_model": 128, "dropout": 0.3, "batch_tokens": 4000, "lr": 4e-3}),
        (WMT, {"minutes": 4}, CPU, {"d_model": 128, "dropout": 0.0, "heads": 4, "feed_forward": 256}),
        (WMT, {"minutes": 60}, GPU, {"d_model": 512, "encoder_layers": 6, "heads": 8, "feed_forward": 2048}),
        (WMT, {"minutes": 60}, speeds(300_000, 250_000, 50_000), {"d_model": 256, "encoder_layers": 4, "lr": 2e-3}),
        (WMT, {"minutes": 60, "steps": 1000}, GPU, {"d_model": 128, "validate_every": None}),
        (MULTI30K, {"steps": 1000}, not_asked, {"batch_tokens": 600, "warmup_steps": 100, "validate_every": None}),
        (MULTI30K, {"epochs": 10}, not_asked, {"batch_tokens": 2000, "dropout": 0.1, "validate_every": None}),
        (WMT, {"epochs": 3}, not_asked, {"d_model": 512, "batch_tokens": 4000, "warmup_steps": 4000}),
    ],
)
def test_settings_follow_from_corpus_budget_and_speed(
    tokens: int, budget: dict[str, Any], speed: Any, expected: dict[str, Any]
) -> None:
    task, train = Task(TRANSLATION, tokens), TrainConfig(**budget)
    choice = choose(task, TranslationConfig, {}, train, (), speed, on_gpu=speed is GPU)
    actual = {**choice.model, **choice.train}
    assert {name: actual.get(name) for name in expected} == expected
    assert len(choice.lines) == 3
    assert "e+" not in choice.lines[0]
    assert ("measured here" in choice.lines[1]) == ("minutes" in budget)
    assert ("not measured on a GPU" in choice.lines[0]) == (speed is GPU)
    TrainConfig(**budget, **choice.train)
    TranslationConfig(1000, 1000, **choice.model)


@pytest.mark.parametrize(
    "given",
    [
        {"d_model": 96},
        {"d_model": 100},
        {"heads": 3},
        {"kv_heads": 2},
        {"d_model": 256, "heads": 16},
        {"activation": "swiglu"},
        {"dropout": 0.2, "encoder_layers": 1, "embeddings": "tied"},
        {"lr": 1e-4, "warmup_steps": 7, "batch_tokens": 300, "validate_every": 11, "schedule": "constant"},
    ],
    ids=str,
)
def test_a_given_setting_is_never_chosen_and_fits_the_others(given: dict[str, Any]) -> None:
    task = Task(TRANSLATION, MULTI30K, model={"embeddings": "shared"}, train={"schedule": "linear"})
    config = {name: value for name, value in given.items() if hasattr(TranslationConfig, name)}
    train = {name: value for name, value in given.items() if name not in config}
    choice = choose(task, TranslationConfig, config, TrainConfig(steps=1000, **train), given, not_asked)
    assert not given.keys() & {*choice.data, *choice.model, *choice.train}
    TranslationConfig(1000, 1000, **config, **choice.model)


@pytest.mark.parametrize(
    ("sides", "size"),
    [
        ([["hardly any"]], 100),
        ([["nothing"], [f"{i} " * 10 for i in range(300)]], 300),  # words that occur twice
        ([[f"{i} " * 10 for i in range(10_000)]], 6400),  # 64 times the root of the words that occur ten times
        ([["".join(map(chr, range(0x4E00, 0x5200)))]], 2000),  # 1,024 characters in a text of one word
    ],
    ids=["few", "rare", "frequent", "characters"],
)
def test_the_vocabulary_follows_from_words_and_characters(sides: list[list[str]], size: int) -> None:
    assert vocabulary_size(sides) == size


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_leaves_nothing_to_choose(recipe: Path) -> None:
    application = application_of(read_run_section(recipe).kind)
    sections = application.read_settings(recipe)
    given = {name: value for section in sections.values() for name, value in section.items()}
    model, train = sections["model"], application.train(**sections["train"])
    batch = None if given.get("stream") == "columns" else "batch_tokens"
    layers = [name for name in application.automatic if name.endswith("layers")]
    task = Task(dict.fromkeys(layers, (1,)), 1000, batch, data={"context": (1,)} if layers[0] == "layers" else {})
    choice = choose(task, application.model, model, train, given, lambda shape: 1.0)
    assert (choice.data, choice.model, choice.train) == ({}, {}, {})
    assert "vocabulary" in given or given["tokenizer"] == "words"
    assert "schedule" in given or application.kind == "language"


KINDS = {
    "translation": (TranslationRun, DataConfig(train_size=300, valid_size=20, test_size=20), TrainConfig),
    "language": (LanguageRun, LanguageDataConfig(size=100_000), LanguageTrainConfig),
    "classification": (ClassificationRun, ClassificationDataConfig(size=300), ClassificationTrainConfig),
}
GIVEN: dict[str, dict[str, Any]] = {"data": {}, "model": {"d_model": 32}, "train": {"minutes": 0.01, "lr": 1e-3}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_measures_stores_what_was_chosen_and_keeps_it_when_it_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind_of_run, data, train = KINDS[kind]
    run = kind_of_run.create(tmp_path / "run", data, GIVEN["model"], train(**GIVEN["train"]), given=GIVEN)
    assert run.choice is not None
    assert re.search(r"at [\d,]+ tokens a second, measured here", run.choice.lines[1])
    assert (run.model_config.d_model, run.train_config.lr) == (32, 1e-3)
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))
    sections = {"data": run.choice.data, "model": run.choice.model, "train": run.choice.train}
    chosen = {name for values in sections.values() for name in values}
    assert chosen - {"validate_every"} == {*kind_of_run.application.automatic} - {"d_model", "lr", "validate_every"}
    for section, values in sections.items():
        assert {name: stored[section][name] for name in values} == values
    before = [vars(each) for each in (run.data, run.model_config, run.train_config)]
    changes = {"minutes": 5.0, "steps": run.fit(show=False).step + 1, "warmup_steps": 3}
    monkeypatch.setattr(runs, "choose", not_asked)
    again = kind_of_run.open(tmp_path / "run", changes)
    now = [vars(each) for each in (again.data, again.model_config, again.train_config)]
    assert now == [*before[:2], {**before[2], **changes}]
    again.fit(resume=True, show=False)


@pytest.mark.parametrize(
    ("line", "given", "tokenizer"),
    [
        ("a <unk> word", {}, "words"),
        ("an unk word", {}, "bpe"),
        ("a <unk> word", {"vocabulary": 20}, "bpe"),
    ],
)
def test_a_text_without_its_rare_words_has_a_word_list(
    line: str, given: dict[str, Any], tokenizer: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / "text", [f"{line} {i}" for i in range(50)])
    data = LanguageDataConfig(train_text=tmp_path / "text", **given)
    stated = {"data": {"train_text": tmp_path / "text", **given}, "model": {}, "train": {"steps": 1}}
    run = LanguageRun.create(tmp_path / "run", data, {}, LanguageTrainConfig(steps=1), given=stated)
    assert run.data.tokenizer == tokenizer
    assert run.choice is not None
    assert ("tokenizer words" in run.choice.lines[0]) == (tokenizer == "words")
