"""Declarations of settings: what pydantic refuses is one line that says what, where and what is allowed.

Nothing here knows a setting by name but the examples: a new one is covered by being declared.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import typer

from fastformer.apps.classification.model import ClassifierConfig
from fastformer.apps.classification.run import APPLICATION as CLASSIFICATION
from fastformer.apps.cli import app
from fastformer.apps.language.run import APPLICATION as LANGUAGE
from fastformer.apps.language.sampling import SamplingOptions
from fastformer.apps.runs.folder import load_toml, save_toml
from fastformer.apps.settings import (
    LARGEST,
    FolderOrName,
    Pair,
    Settings,
    Texts,
    default_text,
    help_line,
    setting,
    to_plain,
)
from fastformer.apps.settings import File as PathOrText
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation.model import TranslationConfig
from fastformer.apps.translation.run import APPLICATION as TRANSLATION
from fastformer.apps.translation.run import DataConfig
from fastformer.apps.translation.search import SearchOptions
from fastformer.settings import check_value


def classes(base: type = Settings) -> Iterator[type[Settings]]:
    """Every class of settings of the package, that is no test's own."""
    for each in base.__subclasses__():
        if getattr(sys.modules[each.__module__], each.__name__, None) is each and each.__module__ != __name__:
            yield each
        yield from classes(each)


def needed(owner: type[Settings]) -> dict[str, Any]:
    """What an instance cannot be without: settings without a default, and an end of training."""
    given = {item.name: next(iter(item.metadata["choices"]), 9) for item in fields(owner) if item.default is MISSING}
    return given | ({"steps": 10} if issubclass(owner, TrainConfig) else {})


CLASSES = [each for each in classes() if each.__name__ != "ModelSettings"]  # a base, of which nothing is made
every_class = pytest.mark.parametrize("owner", CLASSES, ids=lambda each: each.__name__)


@every_class
def test_every_setting_is_checked_and_explained_from_its_declaration(owner: type[Settings]) -> None:
    for item in fields(owner):
        with pytest.raises(ValueError, match=rf"^{item.name} must be .*, not <object object at \w+>$"):
            owner(**{**needed(owner), item.name: object()})
        help_ = help_line(item, (owner,))
        assert help_.startswith(item.metadata["description"])
        assert all(choice in help_ for choice in item.metadata["choices"])
        for key, bound in item.metadata["bounds"].items():
            shown = bound if isinstance(bound, str) else f"{bound:,}"
            assert bound == LARGEST or f"{key.replace('_', ' ')} {shown}" in help_
        for name, expected in item.metadata["only"].items():
            assert any(
                str(each) in help_ for each in (name, *(expected if isinstance(expected, tuple) else (expected,)))
            )


@every_class
def test_settings_come_back_from_a_file_and_from_a_checkpoint(tmp_path: Path, owner: type[Settings]) -> None:
    made = owner(**needed(owner))
    save_toml(tmp_path / "c.toml", {"section": made})
    assert owner(**load_toml(tmp_path / "c.toml", {"section": owner})["section"]) == made
    assert owner(**json.loads(json.dumps(to_plain(made)))) == made


@pytest.mark.parametrize(
    ("owner", "values", "message"),
    [
        (
            TranslationConfig,
            {"d_model": 64.0},
            "d_model must be a whole number, at least 1 and at most 2,147,483,647, not 64.0",
        ),
        (ClassifierConfig, {"dropout": "0.1"}, "dropout must be a finite number, at least 0 and below 1, not '0.1'"),
        (TrainConfig, {"min_lr": 0.1}, "min_lr must be at least 0 and at most lr (0.001), not 0.1"),
        (TrainConfig, {"lr": "fast", "min_lr": 0.1}, "lr must be a finite number, above 0, not 'fast'"),
        (TrainConfig, {"betas": [0.9, 1.0]}, "betas must be a list, each less than 1, not [0.9, 1.0]"),
        (
            TrainConfig,
            {"learning_rate": 0.1},
            "unknown setting 'learning_rate'; did you mean 'lr' or 'schedule' or 'min_lr'?",
        ),
        (DataConfig, {"train_source": 3}, "train_source must be a path, not 3"),
    ],
)
def test_a_mistake_is_one_line(owner: type[Settings], values: dict[str, Any], message: str | None) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        owner(**{**needed(owner), **values})
    assert str(raised.value) == message


def test_long_values_are_truncated_in_messages() -> None:
    with pytest.raises(ValueError, match=r"^size must be .*, not .*…$") as refused:
        check_value("size", "x" * 10**6, int, at_most=9)
    assert len(str(refused.value)) < 600


class _Own(Settings):
    size: int = setting(MISSING, "size (set from nothing)")
    folder: PathOrText | None = setting(None, "where it lies")
    name: FolderOrName = setting("x", "what it is called")
    pair: Pair = setting((0.5, 0.25), "two numbers")
    texts: Texts | None = setting(None, "any number of texts")


def test_values_in_another_form_are_replaced() -> None:
    made = _Own(1, "a/b", Path("c"), [0, 0.5])  # type: ignore[call-arg, arg-type]
    assert (made.folder, made.name, made.pair) == (Path("a/b"), "c", (0, 0.5))
    assert [_Own(1, texts=given).texts for given in (None, [], ["a", "b"])] == [None, (), ("a", "b")]  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nwarmup = 3", "unknown key 'warmup' in [train]; did you mean 'warmup_steps'?"),
        ("[trian]\nlr = 3", "unknown section [trian]; did you mean 'train'?"),
        ("[train]\nlr = ?", "not a TOML file: Invalid value (at line 2, column 6)"),
        ("\udcff", "not a TOML file: 'utf-8' codec"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_the_section_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path, sections = tmp_path / "c.toml", {"model": _Own, "train": TrainConfig}
    path.write_bytes(b"[train]\nlr = 1\nbetas = [0.9, 0.95]\n")
    assert load_toml(path, sections) == {"model": {}, "train": {"lr": 1, "betas": (0.9, 0.95)}}  # no defaults
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the message is compared below, as text)
        load_toml(path, sections)
    assert str(raised.value).startswith(f"{path}: {message}")
    assert "\n" not in str(raised.value)


COMMANDS: dict[str, tuple[type[Settings], ...]] = {
    "train": (TRANSLATION.data, TRANSLATION.model, TRANSLATION.train),
    "train lm": (LANGUAGE.data, LANGUAGE.model, LANGUAGE.train),
    "train classify": (CLASSIFICATION.data, CLASSIFICATION.model, CLASSIFICATION.train),
    "translate": (SearchOptions,),
    "evaluate": (SearchOptions,),
    "generate": (SamplingOptions,),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_setting_that_is_a_users_is_a_flag_that_tells_default_and_range(name: str) -> None:
    command = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]
    flags = {each.name: each for each in command.params}
    applications = {"train": TRANSLATION, "train lm": LANGUAGE, "train classify": CLASSIFICATION}
    chosen = applications[name].automatic if name in applications else ()
    items = [item for owner in COMMANDS[name] for item in fields(owner)]
    own = {item.name: item for item in items if not item.metadata["derived"]}
    assert own.keys() == flags.keys() & {item.name for item in items}
    for item in own.values():
        flag = flags[item.name]
        assert f"--{item.name.replace('_', '-')}" in flag.opts
        default = "chosen for corpus and budget" if item.name in chosen else default_text(item)
        assert (flag.help, flag.show_default) == (help_line(item, COMMANDS[name]), default)
