"""Configuration: every mistake is one line that names where it is, what it was and what is allowed."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from fastformer.apps.train import TrainConfig, load_toml, save_toml
from fastformer.apps.train.config import check_values


@dataclass(frozen=True)
class ModelSettings:
    vocabulary: int
    d_model: int = 64
    norm_first: bool = True
    kind: Literal["big", "small"] = "small"
    folder: Path | None = None
    sizes: tuple[int, ...] = (1,)


SECTIONS = {"model": ModelSettings, "train": TrainConfig}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "adamw2"}, "optimizer='adamw2' is not allowed; choose adamw, adam, sgd"),
        ({"schedule": "cosin"}, "schedule='cosin' is not allowed; choose constant, inverse_sqrt, cosine, linear, plat"),
        ({"precision": "fp8"}, "precision='fp8' is not allowed; choose fp32, bf16, fp16"),
        ({"lr": 0.0}, "lr=0.0 is out of range; it must be above 0"),
        ({"lr": "fast"}, "lr='fast' has the wrong type; it must be a number"),
        ({"lr": float("nan")}, "lr=nan is out of range; it must be above 0"),
        ({"lr": float("inf")}, "lr=inf is out of range; it must be above 0"),
        ({"betas": (0.9, 1.0)}, "betas=(0.9, 1.0) is out of range; it must be at least 0 and below 1"),
        ({"betas": (0.9,)}, "betas=(0.9,) has the wrong type; it must be a list of 2 values"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 is out of range; it must be at least 0 and below 1"),
        ({"accumulate": 0}, "accumulate=0 is out of range; it must be at least 1"),
        ({"accumulate": 1.5}, "accumulate=1.5 has the wrong type; it must be a whole number"),
        ({"steps": True}, "steps=True has the wrong type; it must be a whole number"),
        ({"steps": 0}, "steps=0 is out of range; it must be at least 1"),
        ({"tensorboard": 1}, "tensorboard=1 has the wrong type; it must be true or false"),
        ({"min_lr": 0.1}, "min_lr=0.1 is above lr=0.001; it must not be"),
        ({"average": 5}, "average=5 needs keep >= 5, but keep=3"),
        ({"steps": None}, "no end of training is set; give steps, epochs or minutes"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(values, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the message is compared below, as text)
        TrainConfig(**{"steps": 10, **values})
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_every_field_has_a_help_line():
    for field in dataclasses.fields(TrainConfig):
        assert 8 < len(field.metadata["help"]) < 90, field.name


def test_whole_numbers_are_accepted_where_numbers_are():
    assert TrainConfig(minutes=10, lr=1).minutes == 10


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_saved_values_come_back(tmp_path):
    train = TrainConfig(steps=7, lr=2e-3, betas=(0.8, 0.99), validate_every=3)
    model = ModelSettings(100, folder=Path("données/é"), sizes=(1, 2, 3), kind="big")
    save_toml(tmp_path / "config.toml", {"model": model, "train": train})
    loaded = load_toml(tmp_path / "config.toml", SECTIONS)
    assert ModelSettings(**loaded["model"]) == model
    assert TrainConfig(**loaded["train"]) == train
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_file_states_only_what_it_states(tmp_path):
    path = write(tmp_path / "c.toml", "[train]\nlr = 1\nbetas = [0.9, 0.95]\n")
    assert load_toml(path, SECTIONS) == {"model": {}, "train": {"lr": 1, "betas": (0.9, 0.95)}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nwarmup = 3", "unknown key 'warmup' in [train]; did you mean 'warmup_steps'?"),
        ("[model]\nqqq = 3", "unknown key 'qqq' in [model]; known: d_model, folder, kind, norm_first, sizes, vocab"),
        ("[trian]\nlr = 3", "unknown section [trian]; did you mean 'train'?"),
        ("train = 3", "train must be a section [train], not a value"),
        ("[train]\nlr = 'x'", "[train] lr='x' has the wrong type; it must be a number"),
        ("[train]\nbetas = [0.9]", "[train] betas=(0.9,) has the wrong type; it must be a list of 2 values"),
        ("[model]\nkind = 'huge'", "[model] kind='huge' has the wrong type; it must be one of 'big', 'small'"),
        ("[model]\nsizes = [1, 'a']", "[model] sizes=(1, 'a') has the wrong type"),
        ("[train]\nlr = ?", "not a TOML file: Invalid value (at line 2, column 6)"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_the_section_and_the_key(tmp_path, text, message):
    path = write(tmp_path / "c.toml", text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the message is compared below, as text)
        load_toml(path, SECTIONS)
    assert str(raised.value).startswith(f"{path}: {message}")
    assert "\n" not in str(raised.value)


def test_missing_and_binary_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing.toml: there is no such configuration file"):
        load_toml(tmp_path / "nothing.toml", SECTIONS)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"b.toml: not a TOML file"):
        load_toml(tmp_path / "b.toml", SECTIONS)


def test_other_dataclasses_can_use_the_same_checks():
    with pytest.raises(ValueError, match=r"d_model='64' has the wrong type; it must be a whole number"):
        check_values(ModelSettings(1, d_model="64"))  # type: ignore[arg-type]
    check_values(ModelSettings(1))
