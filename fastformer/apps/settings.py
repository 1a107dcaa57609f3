"""Settings of the applications: pydantic dataclasses, from which checks, flags, help and TOML files are derived.

    class SearchOptions(Settings):
        beam: int = setting(4, "hypotheses per sentence; 1 is greedy search", at_least=1)
        n_best: int = setting(1, "translations returned a sentence", at_least=1, at_most="beam")
        length_penalty: float = setting(1.0, "…", only={"search": "a beam above 1"})

`only` names settings, or properties of settings, and the values with which the setting has an effect: one value,
several, `SET` (anything but None) or None. A setting that a user gave and that has no effect is refused.
"""

import difflib
import functools
import json
import os
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Strict, ValidationError
from pydantic import Field as Pydantic
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from fastformer.settings import BOUNDS, allowed_range, refusal

SET = "any value"  # in `only`: any value but None
LARGEST = 2**31 - 1  # of one size: kernels use int32

Given = Mapping[str, Collection[str]]  # section -> names of the settings that a user gave
_AsText = BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)
File = Annotated[Path, Strict(False), _AsText]  # takes a text, too
FolderOrName = Annotated[str, _AsText]
Texts = Annotated[tuple[str, ...], Strict(False)]  # takes a list, too
Share = Annotated[float, Pydantic(ge=0, lt=1)]
Pair = Annotated[tuple[Share, Share], Strict(False)]  # each at least 0 and below 1

_VAGUE = {"n", "num", "max", "min", "dim", "size", "rate", "steps"}  # words too common to identify a setting
_FACTS = ("choices", "only", "fixed", "derived")
_PYDANTIC = {"at_least": "ge", "above": "gt", "below": "lt", "at_most": "le"}
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "bool_type": "true or false",
    "path_type": "a path",
    "tuple_type": "a list",
    "too_long": "a list of fewer values",
}


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    only: Mapping[str, Any] | None = None,
    fixed: bool = False,
    derived: str = "",
    **bounds: float | str,
) -> Any:
    """Declare a field of `Settings`.

    Args:
        default: MISSING for a setting that must be given.
        help: meaning of the setting, in a line.
        choices: allowed texts.
        only: values of other settings with which this one has an effect.
        fixed: whether a resumed run cannot change the setting.
        derived: source of the value, such as "the tokenizer", for a setting that users cannot give.
        bounds: `at_least`, `above`, `below`, `at_most`: a number, or the name of another setting.
    """
    numbers = {_PYDANTIC[key]: bound for key, bound in bounds.items() if not isinstance(bound, str)}
    pattern = {"pattern": f"^(?:{'|'.join(map(re.escape, choices))})$"} if choices else {}
    facts = dict(zip(_FACTS, (tuple(choices), only or {}, fixed, derived), strict=True))
    return field(default=default, metadata={"description": help, "bounds": bounds, **facts, **numbers, **pattern})


def inherited(settings: type, name: str, **changes: Any) -> Any:
    """Declare the setting `name` of a base class again, with another default or other facts."""
    item = next(item for item in fields(settings) if item.name == name)
    about = item.metadata
    arguments = {"default": item.default, "help": about["description"], **{fact: about[fact] for fact in _FACTS}}
    return setting(**{**arguments, **about["bounds"], **changes})


@dataclass_transform(frozen_default=True)
class Settings:
    """Base of all settings: each subclass becomes a frozen pydantic dataclass whose errors are one line."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, kw_only: bool = False) -> None:
        config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
        dataclass(frozen=True, kw_only=kw_only, config=config)(cls)
        validate = cls.__init__

        @functools.wraps(validate)
        def __init__(self: Settings, *values: Any, **named: Any) -> None:
            try:
                validate(self, *values, **named)
            except ValidationError as error:
                raise ValueError(_one_line(error.errors(include_url=False)[0], cls, named)) from None

        cls.__init__ = __init__  # type: ignore[assignment, method-assign]

    def __post_init__(self) -> None:
        """Check bounds that are other settings; pydantic has checked all others."""
        for item in fields(self):
            value, bounds = getattr(self, item.name), item.metadata["bounds"]
            limits = {key: getattr(self, name) for key, name in bounds.items() if isinstance(name, str)}
            if not all(None in (value, limit) or BOUNDS[key](value, limit) for key, limit in limits.items()):
                raise ValueError(refusal(item.name, value, allowed_range((), bounds, vars(self))))


def _one_line(error: ErrorDetails, settings: type[Settings], given: Mapping[str, Any]) -> str:
    """Return one line for an error of pydantic: the setting, the value and the declared range."""
    if not error["loc"]:  # of __post_init__
        return str(error["ctx"]["error"])
    items = {item.name: item for item in fields(settings)}
    place = error["loc"][0]  # the number of a positional argument
    name = place if isinstance(place, str) else list(items)[place]
    if name not in items:
        return f"unknown setting {name!r}{suggestion(name, helps(settings))}"
    if error["type"] == "missing" and len(error["loc"]) == 1:
        return f"{name} must be given: {items[name].metadata['description']}"
    if len(error["loc"]) > 1:  # of one value of a list
        each = error["msg"].removeprefix("Input should be ")
        kind = "a list of more values" if error["type"] == "missing" else f"a list, each {each}"
        return refusal(name, given.get(name, error["input"]), kind)
    choices, bounds = items[name].metadata["choices"], items[name].metadata["bounds"]
    kind = "" if choices else _KINDS.get(error["type"], "")
    return refusal(name, error["input"], allowed_range(choices, bounds, given), kind)


def suggestion(unknown: str, known: Mapping[str, str]) -> str:
    """Return the end of a message that suggests similar names of `known` (name -> help), or lists all."""
    near = nearest(unknown, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; known: {', '.join(sorted(known))}"


def nearest(unknown: str, known: Mapping[str, str]) -> list[str]:
    """Return known names with a spelling similar to the unknown one, or with the same words in name or help.

    >>> nearest("--learning-rate", {"--lr": "peak learning rate", "--embedding-range": "of the embeddings"})
    ['--lr']
    """
    words = [word for word in _words(unknown) if word not in _VAGUE] or _words(unknown)

    def rate(name: str) -> float:
        in_name, in_both = ({word for word in words if _has(text, word)} for text in (name, f"{name} {known[name]}"))
        share = (len(in_name) + 0.8 * len(in_both - in_name)) / max(len(words), 1)
        if len(in_both) == len(set(words)):  # prefer names and helps with fewer other words
            share += 0.2 * len(words) / max(len(_words(name if in_name == in_both else known[name])), 1)
        spelling = difflib.SequenceMatcher(None, unknown.strip("-"), name.strip("-")).ratio()
        return max(spelling + 0.3 if spelling > 0.85 else spelling, share)  # a typing error comes before all else

    rates = {name: rate(name) for name in known}
    least = max(0.5, 0.95 * max(rates.values(), default=0.0))
    return sorted((name for name in known if rates[name] >= least), key=lambda name: -rates[name])[:3]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _has(text: str, word: str) -> bool:
    """Return whether a text has a word or one with the same beginning: accumulate, accumulation; vocab, vocabulary."""
    return any(
        word[:6] == other[:6]
        or (len(word) > 2 and other.startswith(word))
        or (len(other) > 3 and word.startswith(other))
        for other in _words(text)
    )


def typed_fields(settings: type) -> list[tuple["Field[Any]", Any]]:
    """Return the fields of settings, each with its type."""
    hints = typing.get_type_hints(settings)
    return [(item, hints[item.name]) for item in fields(settings)]


def helps(settings: type) -> dict[str, str]:
    """Return the names of settings with their help."""
    return {item.name: item.metadata["description"] for item in fields(settings)}


def derived(settings: type) -> dict[str, str]:
    """Return the settings that users cannot give, each with the source it is computed from."""
    return {item.name: item.metadata["derived"] for item in fields(settings) if item.metadata["derived"]}


def help_line(item: "Field[Any]", settings: Sequence[type]) -> str:
    """Return a setting's line of help: meaning, choices, bounds and conditions, which may name fields of `settings`.

    Choices that the description names, and the limit of kernels' sizes, are left out.
    """
    about = item.metadata
    only = ", ".join(_in_words(name, condition, settings) for name, condition in about["only"].items())
    bounds = {key: bound for key, bound in about["bounds"].items() if bound != LARGEST}
    notes = "; ".join(filter(None, (allowed_range((), bounds), only and f"only {only}")))
    named = set(re.findall(r"\w+", about["description"])).issuperset(about["choices"])
    choices = "" if named else f": {', '.join(about['choices'])}"
    return f"{about['description']}{choices}{notes and f' ({notes})'}"


def default_text(item: "Field[Any]") -> str:
    """Return a setting's default as a user would type it."""
    if item.default is None:
        return "unset"
    if isinstance(item.default, bool):
        return "yes" if item.default else "no"
    return " ".join(map(str, item.default)) if isinstance(item.default, tuple) else str(item.default)


def reject_unused_options(given: Given, sections: Mapping[str, Any], *others: Any) -> None:
    """Raise ValueError for settings that were given and have no effect, naming all and the unmet conditions.

    A given False needs no effect. others: further objects whose attributes conditions may name.
    """
    everything = (*sections.values(), *others)
    idle = []
    for section, settings in sections.items():
        for item in fields(settings):
            if item.name not in given.get(section, ()) or getattr(settings, item.name) is False:
                continue
            for name, condition, value in list(unmet_conditions(item, everything))[:1]:
                actual = "" if condition in (None, SET) else f", not {_in_words(name, value, everything)}"
                idle.append(f"{item.name} has an effect only {_in_words(name, condition, everything)}{actual}")
    if idle:
        raise ValueError(f"{'; '.join(idle)}; leave {'it' if len(idle) == 1 else 'them'} out")


def make_settings(settings: type[Settings], values: Mapping[str, Any]) -> Any:
    """Return settings with `values` and defaults; raise ValueError for a value that has no effect."""
    instance = settings(**values)
    reject_unused_options({"": values}, {"": instance})
    return instance


def unmet_conditions(item: "Field[Any]", settings: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the conditions of a field that do not hold: name, allowed values, actual value."""
    for name, condition in item.metadata["only"].items():
        owner = next((each for each in settings if hasattr(each, name)), None)
        value = getattr(owner, name, None)
        if owner is not None and not (value is not None if condition == SET else value in _values(condition)):
            yield name, condition, value


def _in_words(name: str, condition: Any, settings: Sequence[Any]) -> str:
    """Return a condition in words; `settings` are classes or instances, by which fields differ from properties."""
    if condition is None:
        return f"without {name}"
    if condition == SET:
        return f"with {name}"
    values = " or ".join(map(str, _values(condition)))
    names = {item.name for each in settings if is_dataclass(each) for item in fields(each)}
    return f"with {name}={values}" if name in names else f"with {values}"


def _values(condition: Any) -> tuple[Any, ...]:
    return condition if isinstance(condition, tuple) else (condition,)


def refuse_fixed(changes: Mapping[str, Any], settings: Settings) -> None:
    """Raise ValueError naming the first of the changes (name -> new value) that a resumed run cannot make."""
    for item in fields(settings):
        before = getattr(settings, item.name)
        if item.metadata["fixed"] and changes.get(item.name, before) != before:
            raise ValueError(
                f"{item.name} cannot change when a run goes on: it is {before!r}, not {changes[item.name]!r}; leave it "
                "out, or start a new run"
            )


def to_plain(settings: Any) -> dict[str, Any]:
    """Return settings, or a mapping, as plain values of JSON: lists for tuples, texts for paths."""
    values = dict(settings) if isinstance(settings, Mapping) else asdict(settings)
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
