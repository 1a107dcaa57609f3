"""Every setting of every class, from its declaration; a mistake is one line that says what, where and what is allowed.

Nothing here knows a setting by name but the examples: a new one is covered by being declared.
"""

import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from fastformer.apps.classification.model import ClassifierConfig
from fastformer.apps.language.model import LanguageConfig
from fastformer.apps.language.run import APPLICATION as LANGUAGE
from fastformer.apps.language.run import LanguageDataConfig, LanguageTrainConfig
from fastformer.apps.language.sampling import SamplingOptions
from fastformer.apps.models.embeddings import Embedding
from fastformer.apps.runs.application import Application
from fastformer.apps.runs.folder import RunConfig
from fastformer.apps.runs.toml import load_toml, save_toml
from fastformer.apps.text import (
    Batches,
    ParallelCorpus,
    WordTokenizer,
    docstring_corpora,
    encode_pairs,
    number_corpus,
    train_sentencepiece,
)
from fastformer.apps.train import TrainConfig, find_checkpoint
from fastformer.apps.train.checkpoint import defaults
from fastformer.apps.train.weights import check_architecture
from fastformer.apps.translation.model import TranslationConfig
from fastformer.apps.translation.run import APPLICATION as TRANSLATION
from fastformer.apps.translation.run import DataConfig
from fastformer.apps.translation.search import SearchOptions
from fastformer.settings import (
    Settings,
    check_value,
    declared,
    default_text,
    explained,
    inherited,
    setting,
    to_plain,
)

KINDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", Path: "a path"}
TEXTS = tuple[str, ...]
WRONG: dict[Any, list[Any]] = {
    int: [64.0, "64", True, math.nan, (1,), b"1"],
    float: ["0.1", True, math.nan, math.inf, -math.inf, 10**400, (0.5,)],
    str: [3, True, ("a",)],
    bool: [3, 0, 1.0, "yes"],
    Path: [3, True, ("a",)],
    tuple: [0.5, (0.5,), ("a", "b"), (0.5, math.nan), (0.5, True)],
    TEXTS: [0.5, "ab", ("a", 3), (("a",),)],
}
BOUNDS = {"at_least": "at least", "above": "above", "below": "below", "at_most": "at most"}


CORPUS = ParallelCorpus(["a b"], ["c"], "train")
WORDS = WordTokenizer.from_lines(["a b c"])
PAIRS = encode_pairs(CORPUS, WORDS, WORDS)


def classes(base: type = Settings) -> Iterator[type[Settings]]:
    """Every class of settings of the package, that is no test's own."""
    for each in base.__subclasses__():
        if getattr(sys.modules[each.__module__], each.__name__, None) is each and each.__module__ != __name__:
            yield each
        yield from classes(each)


SETTINGS = [(each, item, hint) for each in classes() for item, hint in declared(each)]
IDS = [f"{each.__name__}.{item.name}" for each, item, _ in SETTINGS]
every_setting = pytest.mark.parametrize(("owner", "item", "hint"), SETTINGS, ids=IDS)


def needed(owner: type[Settings]) -> dict[str, Any]:
    """What an instance cannot be without: settings without a default, and an end of training."""
    items = [item for item, _ in declared(owner)]
    given = {item.name: next(iter(item.metadata["choices"]), 9) for item in items if item.default is MISSING}
    return given | ({"steps": 10} if "steps" in {item.name for item in items} else {})


def kind_of(hint: Any) -> tuple[Any, bool]:
    """The type without None, and whether None was in it."""
    if get_origin(hint) is tuple:
        return tuple, False
    kinds = [each for each in get_args(hint) if each is not type(None)]
    return (kinds[0], True) if kinds else (hint, False)


def limits(owner: type[Settings], item: Any) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """Each bound: its name, as it is written, its value, and what must be given beside it."""
    defaults = {each.name: each.default for each, _ in declared(owner)} | needed(owner)
    for key in BOUNDS:
        bound = item.metadata[key]
        if isinstance(bound, str):
            number = 7 if defaults[bound] is None else defaults[bound]
            yield key, f"{bound} ({number})", number, {bound: number}
        elif bound is not None:
            yield key, f"{bound:,}", bound, {}


def beside(key: str, bound: float, kind: Any) -> tuple[Any, Any]:
    """The first number that a bound refuses, and the last that it allows."""
    away = -math.inf if key in ("at_least", "above") else math.inf
    step = (lambda x, to: x + int(math.copysign(1, to))) if kind is int else math.nextafter
    return (step(bound, away), bound) if key in ("at_least", "at_most") else (bound, step(bound, -away))


def refused(owner: type[Settings], name: str, value: Any, **others: Any) -> str:
    """The line that refuses a value."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the message is compared by the callers, as text)
        owner(**{**needed(owner), **others, name: value})
    message = str(raised.value)
    assert message.startswith(f"{name} must be ")
    assert message.endswith(f", not {value!r}")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("value", ["x" * 10**6, 10**4000, [1] * 10**5], ids=["string", "integer", "list"])
def test_a_long_value_is_not_repeated_whole(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^size must be .*, not .*…$") as refused:
        check_value("size", value, int, at_most=9)
    assert len(str(refused.value)) < 600


def test_all_applications_declare_their_settings() -> None:
    expected = {DataConfig, TrainConfig, TranslationConfig, SearchOptions, SamplingOptions, ClassifierConfig, RunConfig}
    assert expected | {LanguageConfig, LanguageDataConfig, LanguageTrainConfig} <= set(classes())


@every_setting
def test_a_value_of_another_type_is_refused(owner: type[Settings], item: Any, hint: Any) -> None:
    kind, optional = kind_of(hint)
    allowed = f"one of {', '.join(item.metadata['choices'])}" if item.metadata["choices"] else KINDS.get(kind, "a list")
    for value in WRONG[kind] + ([] if optional else [None]):
        assert f" must be {allowed}" in refused(owner, item.name, value)
    if optional:
        check_value(item.name, None, hint, **item.metadata)


@every_setting
def test_a_value_out_of_range_is_refused_and_the_last_one_in_range_is_not(
    owner: type[Settings], item: Any, hint: Any
) -> None:
    kind, _ = kind_of(hint)
    for key, shown, bound, others in limits(owner, item):
        outside, inside = beside(key, bound, float if kind is tuple else kind)
        if kind is tuple:
            outside, inside = (inside, outside), (inside, inside)
        assert f"{BOUNDS[key]} {shown}" in refused(owner, item.name, outside, **others)
        check_value(item.name, inside, hint, others, **item.metadata)
    for choice in ("", "no such choice") if item.metadata["choices"] else ():
        assert f"one of {', '.join(item.metadata['choices'])}," in refused(owner, item.name, choice)


@every_setting
def test_a_default_is_allowed_and_the_help_tells_what_is_declared(owner: type[Settings], item: Any, hint: Any) -> None:
    if item.default is not MISSING:
        check_value(item.name, item.default, hint, needed(owner), **item.metadata)
        assert default_text(item)
    help_ = explained(item, (owner,))
    assert 8 < len(item.metadata["help"]) < 180
    assert help_.startswith(item.metadata["help"])
    assert all(choice in help_ for choice in item.metadata["choices"])
    for key, words in BOUNDS.items():
        bound = item.metadata[key]
        assert bound is None or f"{words} {bound if isinstance(bound, str) else f'{bound:,}'}" in help_
    for name, wanted in item.metadata["only"].items():
        assert any(str(each) in help_ for each in (name, *(wanted if isinstance(wanted, tuple) else (wanted,))))


def values(owner: type[Settings], item: Any, hint: Any) -> list[Any]:
    """Values of a setting that are allowed: choices, ends of its range, its default."""
    kind, _ = kind_of(hint)
    examples: dict[Any, list[Any]] = {
        str: ["a \u00e9\n\"'"],
        bool: [True, False],
        TEXTS: [("a", "\u00e9\n"), ("\x1b", "", "a\tb")],
        Path: [Path("donn\u00e9es/\u00e9 ' \".txt")],
    }
    ends = [beside(key, bound, kind)[1] for key, _, bound, _ in limits(owner, item) if kind is not tuple]
    found = list(item.metadata["choices"]) or ends or examples.get(kind, [])
    return found + ([item.default] if item.default not in (None, MISSING) else [])


@every_setting
def test_what_is_saved_comes_back(tmp_path: Path, owner: type[Settings], item: Any, hint: Any) -> None:
    for value in values(owner, item, hint):
        save_toml(tmp_path / "c.toml", {"section": {item.name: value}})
        assert load_toml(tmp_path / "c.toml", {"section": owner}) == {"section": {item.name: value}}
    bad = WRONG[kind_of(hint)[0]][0]
    path = tmp_path / "c.toml"
    path.write_text(f"[section]\n{item.name} = {json.dumps(bad)}\n")
    with pytest.raises(ValueError, match="must be") as raised:
        load_toml(path, {"section": owner})
    assert str(raised.value).startswith(f"{path}: [section] {item.name} must be ")


@pytest.mark.parametrize("owner", list(classes()), ids=lambda each: each.__name__)
def test_settings_come_back_from_a_file_and_from_a_checkpoint(tmp_path: Path, owner: type[Settings]) -> None:
    if owner.__name__ == "ModelSettings":
        pytest.skip("a base, that nobody makes")
    made = owner(**needed(owner))
    save_toml(tmp_path / "c.toml", {"section": made})
    assert owner(**load_toml(tmp_path / "c.toml", {"section": owner})["section"]) == made
    assert owner(**json.loads(json.dumps(to_plain(made)))) == made
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]


@pytest.mark.parametrize("owner", [TranslationConfig, LanguageConfig, ClassifierConfig])
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("d_model", 64.0, "a whole number, at least 1 and at most 2,147,483,647, not 64.0"),
        ("norm_eps", -1.0, "above 0, not -1.0"),
        ("bias", 3, "true or false, not 3"),
        ("dropout", "0.1", "a finite number, at least 0 and below 1, not '0.1'"),
    ],
)
def test_models_refuse_by_name(owner: type[Settings], name: str, value: Any, allowed: str) -> None:
    assert refused(owner, name, value) == f"{name} must be {allowed}"


@pytest.mark.parametrize(
    ("owner", "values", "message"),
    [
        (TrainConfig, {"min_lr": 0.1}, "min_lr must be at least 0 and at most lr (0.001), not 0.1"),
        (TrainConfig, {"average": 5}, "average must be at least 1 and at most keep (3), not 5"),
        (TrainConfig, {"steps": None}, "no end of training is set; give steps, epochs or minutes"),
        (TrainConfig, {"lr": "fast", "min_lr": 0.1}, "lr must be a finite number, above 0, not 'fast'"),
        (TrainConfig, {"betas": [0.9]}, "betas must be a list of 2 values, at least 0 and below 1, not (0.9,)"),
        (SearchOptions, {"beam": 2, "n_best": 3}, "n_best must be at least 1 and at most beam (2), not 3"),
        (SearchOptions, {"beam": "x"}, "beam must be a whole number, at least 1 and at most 2,147,483,647, not 'x'"),
        (SearchOptions, {"min_length": -1}, "min_length must be at least 0 and at most max_length, not -1"),
    ],
)
def test_settings_that_depend_on_others(owner: type[Settings], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        owner(**{**needed(owner), **values})
    assert str(raised.value) == message


CALLS: dict[str, Callable[[], Any]] = {
    "width must be a whole number, at least 1 and at most 2,147,483,647": lambda: Embedding(9, 8.0),  # type: ignore[arg-type]
    "scale must be true or false": lambda: Embedding(9, 8, scale=2),  # type: ignore[arg-type]
    "dropout must be a finite number, at least 0 and below 1": lambda: Embedding(9, 8, dropout="0.1"),  # type: ignore[arg-type]
    "dropout must be at least 0 and below 1": lambda: Embedding(9, 8, dropout=1.0),
    "positions must be one of sinusoidal, sinusoidal_halves, learned, none": lambda: Embedding(9, 8, "rotary"),  # type: ignore[arg-type]
    "tokens must be a whole number, at least 1": lambda: Batches(PAIRS, tokens=9.5),  # type: ignore[arg-type]
    "sentences must be at least 1": lambda: Batches(PAIRS, sentences=0),
    "max_length must be a whole number, at least 2": lambda: encode_pairs(CORPUS, WORDS, WORDS, "9"),  # type: ignore[arg-type]
    "size must be a whole number, at least 1": lambda: docstring_corpora(2.5),  # type: ignore[arg-type]
    "valid must be a whole number, at least 1": lambda: number_corpus("fr", 9, True, 1),
    "lowercase must be true or false": lambda: WordTokenizer.from_lines(["a"], lowercase=1),  # type: ignore[arg-type]
    "minimum_frequency must be a whole number, at least 1": lambda: WordTokenizer.from_lines([], minimum_frequency=1.5),  # type: ignore[arg-type]
    "maximum_size must be above 4": lambda: WordTokenizer.from_lines(["a"], maximum_size=4),
    "character_coverage must be a finite number, at least 0.98 and at most 1": lambda: train_sentencepiece(
        ["a"], 9, character_coverage=math.nan
    ),
    "which must be one of best, last, average": lambda: find_checkpoint(Path("no"), "first"),
}


@pytest.mark.parametrize("message", CALLS)
def test_functions_refuse_their_arguments_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}, not "):
        CALLS[message]()


@dataclass(frozen=True)
class _Own(Settings):
    size: int = setting(MISSING, "size (set from nothing)")
    folder: Path | None = setting(None, "where it lies")
    name: str = setting("x", "what it is called")
    pair: tuple[float, float] = setting((1.0, 2.0), "two numbers", above=0)
    texts: tuple[str, ...] | None = setting(None, "any number of texts")


@dataclass(frozen=True)
class _Other(_Own):
    name: str = inherited(_Own, "name", default="y", choices=("y", "z"))


def test_values_in_another_form_are_replaced() -> None:
    made = _Own(1, "a/b", Path("c"), [3, 4])  # type: ignore[arg-type]
    assert (made.folder, made.name, made.pair) == (Path("a/b"), "c", (3, 4))
    assert TrainConfig(minutes=10, lr=1).minutes == 10
    assert [_Own(1, texts=given).texts for given in (None, [], ["a", "b", "c"])] == [None, (), ("a", "b", "c")]  # type: ignore[arg-type]
    for wrong in ("ab", ["a", 3]):
        with pytest.raises(ValueError, match=r"^texts must be a list, each a text, not "):
            _Own(1, texts=wrong)  # type: ignore[arg-type]


def test_an_inherited_setting_keeps_what_is_not_changed() -> None:
    (item,) = (each for each, _ in declared(_Other) if each.name == "name")
    assert (_Other(1).name, explained(item, (_Other,))) == ("y", "what it is called: y, z")


def test_a_value_of_several_lines_is_shown_in_one() -> None:
    class Lines:
        def __repr__(self) -> str:
            return "two\nlines"

    with pytest.raises(ValueError, match=r"^size must be a whole number, not two lines$"):
        _Own(Lines())  # type: ignore[arg-type]


SECTIONS: dict[str, type[Settings]] = {"model": _Own, "train": TrainConfig}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_states_only_what_it_states(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "[train]\nlr = 1\nbetas = [0.9, 0.95]\n")
    assert load_toml(path, SECTIONS) == {"model": {}, "train": {"lr": 1, "betas": (0.9, 0.95)}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nwarmup = 3", "unknown key 'warmup' in [train]; did you mean 'warmup_steps'?"),
        ("[model]\nqqq = 3", "unknown key 'qqq' in [model]; known: folder, name, pair, size, texts"),
        ("[trian]\nlr = 3", "unknown section [trian]; did you mean 'train'?"),
        ("train = 3", "train must be a section [train], not a value"),
        ("[train]\nlr = ?", "not a TOML file: Invalid value (at line 2, column 6)"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_the_section_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "c.toml", text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the message is compared below, as text)
        load_toml(path, SECTIONS)
    assert str(raised.value).startswith(f"{path}: {message}")
    assert "\n" not in str(raised.value)


def test_missing_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing.toml: there is no such configuration file"):
        load_toml(tmp_path / "nothing.toml", SECTIONS)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"b.toml: not a TOML file"):
        load_toml(tmp_path / "b.toml", SECTIONS)


@pytest.mark.parametrize("application", [TRANSLATION, LANGUAGE], ids=lambda each: each.kind)
def test_a_run_folder_written_before_settings_were_one_still_loads(tmp_path: Path, application: Application) -> None:
    """Every setting that such a folder states comes back, and its checkpoint is of the same architecture."""
    old = Path(__file__).parent / "old_runs" / f"{application.kind}.toml"
    (tmp_path / "config.toml").write_bytes(old.read_bytes())
    found = application.read_config(tmp_path)
    parts = {name: getattr(application, name)(**found[name]) for name in found}
    for name, stated in found.items():
        assert stated
        assert {key: getattr(parts[name], key) for key in stated} == stated
        others = {f.name: f.default for f in fields(parts[name]) if f.name not in stated}
        assert {key: getattr(parts[name], key) for key in others} == others  # what was unset, is; what is newer is off
    check_architecture({**defaults(parts["model"]), **found["model"]}, to_plain(parts["model"]), old)
    application.save_settings(tmp_path, parts["data"], parts["model"], parts["train"])
    before, after = (path.read_text().splitlines() for path in (old, tmp_path / "config.toml"))
    assert not set(before) - set(after)
    newer = {line.split(" = ")[0] for line in set(after) - set(before)}
    said = tomllib.loads(old.read_text(encoding="utf-8"))["model"]
    newer -= {"save_minutes"}  # which changes no number
    assert newer <= {f.name for f in fields(parts["model"])} - said.keys()


COMMANDS: dict[str, tuple[type[Settings], ...]] = {
    "train": (DataConfig, TranslationConfig, TrainConfig),
    "train lm": (LanguageDataConfig, LanguageConfig, LanguageTrainConfig),
    "translate": (SearchOptions,),
    "evaluate": (SearchOptions,),
    "generate": (SamplingOptions,),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_setting_that_is_a_users_is_a_flag_that_tells_default_and_range(name: str) -> None:
    typer = pytest.importorskip("typer", reason="the command line needs the extra `apps`")
    from fastformer.apps.cli import app

    command = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]
    flags = {each.name: each for each in command.params}
    own = {item.name for owner in COMMANDS[name] for item, _ in declared(owner) if not item.metadata["derived"]}
    derived = {item.name for owner in COMMANDS[name] for item, _ in declared(owner)} - own
    chosen = {"train": TRANSLATION.automatic, "train lm": LANGUAGE.automatic}.get(name, ())
    assert own <= flags.keys()
    assert not derived & flags.keys()
    for owner in COMMANDS[name]:
        for item, _ in declared(owner):
            if not item.metadata["derived"]:
                flag = flags[item.name]
                assert f"--{item.name.replace('_', '-')}" in flag.opts
                default = "chosen for corpus and budget" if item.name in chosen else default_text(item)
                assert (flag.help, flag.show_default) == (explained(item, COMMANDS[name]), default)


def test_no_word_of_a_help_text_decides_what_is_a_flag() -> None:
    """A setting is hidden by `derived` alone."""
    pytest.importorskip("typer", reason="the command line needs the extra `apps`")
    import inspect

    from fastformer.apps.cli.flags import with_settings

    def command(own: dict[str, Any]) -> None: ...

    flags = list(inspect.signature(with_settings(own=_Own)(command)).parameters)
    assert flags == ["size", "folder", "name", "pair", "texts"]
