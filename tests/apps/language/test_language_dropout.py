"""The language model's rates of dropout: each at its place and only there, and none but in training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.language_task import random_batch, random_model

pytest.importorskip("safetensors", reason="checkpoints need the extra `apps`")
pytest.importorskip("tomli_w", reason="run folders need the extra `apps`")

from fastformer.apps.language.model import LanguageModel
from fastformer.apps.language.run import LanguageDataConfig, LanguageRun, load_generator
from fastformer.apps.text import write_lines
from fastformer.apps.train import TrainConfig

LENGTHS = [70, 1, 29]
OWN = ("embedding_dropout", "attention_dropout", "output_dropout")
NONE = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0}
PLACES = ("embedding", "attention", "output")
TRAIN = TrainConfig(steps=6, warmup_steps=2, validate_every=3, batch_tokens=64, threads=1, schedule="constant")


def model_of(**rates: float | None) -> LanguageModel:
    return random_model(d_model=48, **rates).train()


def hidden_of(model: LanguageModel, seed: int = 0) -> Tensor:
    """Hidden states of ragged documents: [100, 48]."""
    batch = random_batch(LENGTHS)
    torch.manual_seed(seed)
    return model(batch.ids_in, batch.lengths).detach()


def zeroed(model: LanguageModel) -> dict[str, float]:
    """Share of zeros at each place; without dropout there are none."""
    ids = random_batch([100]).ids_in
    torch.manual_seed(0)
    embedded = model.embedding(ids, torch.arange(100), 100)
    seen = ~torch.ones(100, 100, dtype=torch.bool).triu(1)
    maps = model.attention_maps(ids)[..., seen]  # [layers, H, 5050]
    shares = maps.eq(0).float().mean((1, 2))  # of each layer
    assert shares.max() - shares.min() < 0.03
    places = {"embedding": embedded, "attention": maps, "output": hidden_of(model)}
    return {place: float((x == 0).float().mean()) for place, x in places.items()}


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (NONE, (0.0, 0.0, 0.0)),
        ({**NONE, "embedding_dropout": 0.3}, (0.3, 0.0, 0.0)),
        ({**NONE, "attention_dropout": 0.3}, (0.0, 0.3, 0.0)),
        ({**NONE, "output_dropout": 0.3}, (0.0, 0.0, 0.3)),
        ({**NONE, "dropout": 0.3}, (0.0, 0.0, 0.0)),
        ({"dropout": 0.3}, (0.3, 0.3, 0.0)),
        ({"dropout": 0.4, "embedding_dropout": 0.1, "attention_dropout": 0.2, "output_dropout": 0.6}, (0.1, 0.2, 0.6)),
    ],
)
def test_each_rate_is_that_of_its_place(rates: dict[str, float], expected: tuple[float, ...]) -> None:
    model = model_of(**rates)
    found = zeroed(model)
    for place, rate in zip(PLACES, expected, strict=True):
        assert found[place] == (pytest.approx(rate, abs=0.03) if rate else 0.0), place
    for layer in model.decoder.layers:
        assert {layer.dropout.p, layer.dropout1.p, layer.dropout2.p} == {rates["dropout"]}
    # No place beside these: with every rate at 0 the model is the same each time, with any other it is not.
    assert torch.equal(hidden_of(model, 1), hidden_of(model, 2)) == (not any(rates.values()))
    assert torch.equal(hidden_of(model, 1), hidden_of(model, 1))
    model.eval()
    assert zeroed(model) == dict.fromkeys(PLACES, 0.0)
    assert torch.equal(hidden_of(model, 1), hidden_of(model_of(**NONE)))


# Settings and checkpoints of before there were the rates.


@pytest.fixture
def data(tmp_path: Path) -> LanguageDataConfig:
    write_lines(tmp_path / "t.txt", [f"the {a} sees the {b}" for a in "abcdefg" for b in "hijkl"])
    files: dict[str, Any] = {f"{name}_text": tmp_path / "t.txt" for name in ("train", "valid", "test")}
    return LanguageDataConfig(**files, tokenizer="words", context=6)


MODEL = {"d_model": 16, "heads": 2, "layers": 1, "feed_forward": 32, "dropout": 0.2}


def forget(folder: Path) -> None:
    """Take the rates out of a run folder, as if it had been written before there were any."""
    lines = (folder / "config.toml").read_text().splitlines()
    (folder / "config.toml").write_text("\n".join(x for x in lines if not x.startswith(OWN)) + "\n")
    for path in (folder / "checkpoints").glob("step-*/meta.json"):
        content = json.loads(path.read_text())
        for name in OWN:
            del content["config"][name]
        path.write_text(json.dumps(content))


def test_an_older_run_loads_and_resumes(tmp_path: Path, data: LanguageDataConfig) -> None:
    LanguageRun.create(tmp_path / "whole", data, MODEL, TRAIN).fit(show=False)
    LanguageRun.create(tmp_path / "old", data, MODEL, replace(TRAIN, steps=3)).fit(show=False)
    forget(tmp_path / "old")
    assert "embedding_dropout" not in (tmp_path / "old" / "config.toml").read_text()
    before = load_generator(tmp_path / "old").model
    assert before.config == LanguageRun.open(tmp_path / "whole").model_config
    LanguageRun.open(tmp_path / "old", {"steps": 6}).fit(resume=True, show=False)
    one, two = (load_generator(tmp_path / name, "last").model.state_dict() for name in ("whole", "old"))
    assert all(torch.equal(one[name], two[name]) for name in one)
