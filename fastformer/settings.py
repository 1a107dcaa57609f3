"""Settings: the one way to declare, check, explain, save and load one, for models, training, search, data and commands.

    @dataclass(frozen=True)
    class SearchOptions(Settings):
        beam: int = setting(4, "hypotheses kept a sentence; 1 is greedy search", at_least=1)
        n_best: int = setting(1, "translations returned a sentence", at_least=1, at_most="beam")

The type hint says what a value may be, the facts of `setting` the rest. Checks, messages, flags, TOML files and the
architecture in a checkpoint are made from these and from nothing else, so that a new setting is right everywhere.

`only={"schedule": "plateau"}` says that a setting is read beside that value alone. A condition names a field, or a
property, of any of the settings of a run, and what it must be: one value, several, `SET` (not None) or None. A property
gives words ("number words", "one process"), which stand in messages as they are. A setting that was given and would do
nothing is refused, never ignored; defaults are not given, and False asks for nothing.
"""

import dataclasses
import json
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

SET = "any value"  # in a condition: not None

Given = Mapping[str, Mapping[str, Any]]  # section -> name -> what a user stated

_KINDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", Path: "a path"}
_SHOWN = 500  # characters of a wrong value: config.toml may be a stranger's
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "below": operator.lt,
    "at_most": operator.le,
}


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    at_least: float | str | None = None,
    above: float | str | None = None,
    below: float | str | None = None,
    at_most: float | str | None = None,
    only: Mapping[str, Any] | None = None,
    fixed: bool = False,
    derived: str = "",
    before: Any = MISSING,
) -> Any:
    """A field of `Settings`.

    Args:
        default: MISSING for a setting that must be given.
        help: what it means, in a line.
        choices: the texts that are allowed.
        at_least, above, below, at_most: bounds of a number, or of each of several; the name of another setting stands
            for its value, and bounds nothing where that is None.
        only: beside which other settings it has an effect.
        fixed: a run that goes on cannot change it.
        derived: what it follows from, where it is never a user's: such as "the tokenizer".
        before: what it was before there was such a setting, where that is not its default.
    """
    bounds = {"at_least": at_least, "above": above, "below": below, "at_most": at_most}
    facts = {"help": help, "choices": tuple(choices), "only": only or {}, "fixed": fixed, "derived": derived}
    return field(default=default, metadata=facts | bounds | {"before": before})


def inherited(settings: type, name: str, **changes: Any) -> Any:
    """The setting `name` of a class, for a subclass, with changes: another default, other facts."""
    (found,) = (item for item, _ in declared(settings) if item.name == name)
    default = changes.pop("default", found.default)
    return field(default=default, metadata={**found.metadata, **changes})


@dataclass(frozen=True)
class Settings:
    """What all settings derive from; raises ValueError naming the first that is of a wrong type or out of range.

    Values in another form are replaced: a text by the path and a path by the text that is asked for, a list by a tuple.
    """

    def __post_init__(self) -> None:
        for item, hint in declared(type(self)):
            value = check_value(item.name, getattr(self, item.name), hint, vars(self), **item.metadata)
            object.__setattr__(self, item.name, value)  # settings are frozen


def declared(settings: type) -> list[tuple["Field[Any]", Any]]:
    """The fields of settings, each with its type."""
    hints = typing.get_type_hints(settings)
    return [(item, hints[item.name]) for item in dataclasses.fields(settings)]


def befores(settings: type) -> dict[str, Any]:
    """Settings that files may not state because they are newer, each with what it was before, where `setting` says."""
    found = {item.name: item.metadata.get("before", MISSING) for item in dataclasses.fields(settings)}
    return {name: before for name, before in found.items() if before is not MISSING}


def check_value(name: str, value: Any, hint: Any, others: Mapping[str, Any] | None = None, **facts: Any) -> Any:
    """Check one value, of a setting or of a function's argument; returns it in the type that is asked for.

    Args:
        name: of the value.
        value: what it is.
        hint: its type; int is no bool, float is finite, and may be an int.
        others: the values of the settings that bounds name; where one is not there, it bounds nothing.
        facts: choices and bounds, as `setting` takes them.

    Raises:
        ValueError: naming the value, what it is and what is allowed.
    """
    value, choices, others = _as_hinted(value, hint), facts.get("choices"), others or {}
    allowed = f"one of {', '.join(choices)}" if choices else _range(facts, others)
    if not _fits(value, hint):
        allowed = allowed if choices else ", ".join(filter(None, (_kind(hint), allowed)))
    elif value is None or (value in choices if choices else all(_within(value, facts, others))):
        return value
    said = " ".join(repr(value).splitlines())
    raise ValueError(f"{name} must be {allowed}, not {said if len(said) <= _SHOWN else said[:_SHOWN] + '…'}")


def _range(facts: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """The bounds in words; those that are other settings by name, with their values where there are some."""
    parts = []
    for key in _BOUNDS:
        if (bound := facts.get(key)) is not None:
            shown = f"{bound:,}" if not isinstance(bound, str) else bound
            value = f" ({others[bound]})" if others.get(bound) is not None else ""
            parts.append(f"{key.replace('_', ' ')} {shown}{value}")
    return " and ".join(parts)


def _within(value: Any, facts: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[bool]:
    """Whether a number, or each of several, keeps its bounds, bound by bound."""
    for key, keeps in _BOUNDS.items():
        bound = facts.get(key)
        limit = others.get(bound) if isinstance(bound, str) else bound
        if _fits(limit, float):  # another setting may be unset, or wrong itself
            yield from (keeps(each, limit) for each in (value if isinstance(value, tuple) else (value,)))


def _as_hinted(value: Any, hint: Any) -> Any:
    """A value in the type that is asked for, where it is one in another form."""
    kinds = {hint, *typing.get_args(hint)}
    if isinstance(value, list):
        return tuple(value)
    if Path in kinds and isinstance(value, str | os.PathLike):
        return Path(value)
    return os.fspath(value) if str in kinds and isinstance(value, os.PathLike) else value


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return isinstance(value, tuple) and all(_fits(each, arguments[0]) for each in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint in (int, float) and isinstance(value, bool):  # an int to Python, but `steps = true` is a mistake
        return False
    if hint is float:  # not NaN, and no whole number beyond them
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, hint)


def _kind(hint: Any) -> str:
    arguments = [each for each in typing.get_args(hint) if each is not types.NoneType]
    if typing.get_origin(hint) is tuple:
        return f"a list, each {_kind(arguments[0])}" if Ellipsis in arguments else f"a list of {len(arguments)} values"
    return " or ".join(_kind(each) for each in arguments) or _KINDS[hint]


def explained(item: "Field[Any]", settings: Sequence[type]) -> str:
    """A setting's line of help: what it means, and all that is declared of it but its type and its default.

    Args:
        item: of one of `settings`.
        settings: all that its conditions may name.
    """
    facts = item.metadata
    only = ", ".join(words(name, wanted, settings) for name, wanted in facts["only"].items())
    notes = "; ".join(filter(None, (_range(facts, {}), only and f"only {only}")))
    choices = f": {', '.join(facts['choices'])}" if facts["choices"] else ""
    return f"{facts['help']}{choices}{notes and f' ({notes})'}"


def default_text(item: "Field[Any]") -> str:
    """A setting's default, as it is typed."""
    if item.default is None:
        return "unset"
    if isinstance(item.default, bool):
        return "yes" if item.default else "no"
    return " ".join(map(str, item.default)) if isinstance(item.default, tuple) else str(item.default)


def refuse_idle(given: Given, sections: Mapping[str, Any], *others: Any) -> None:
    """Refuse what was given and has no effect.

    Args:
        given: what a user stated, by section.
        sections: the settings of each.
        others: further objects that conditions may name.

    Raises:
        ValueError: naming all such settings, and what each waits for.
    """
    everything = (*sections.values(), *others)
    idle = []
    for section, settings in sections.items():
        stated = given.get(section, {})
        for item, _ in declared(type(settings)):
            if item.name in stated and stated[item.name] is not False:
                for name, wanted, value in islice(unmet(item, everything), 1):
                    here = "" if wanted in (None, SET) else f", not {words(name, value, everything)}"
                    idle.append(f"{item.name} has an effect only {words(name, wanted, everything)}{here}")
    if idle:
        raise ValueError(f"{'; '.join(idle)}; leave {'it' if len(idle) == 1 else 'them'} out")


def unmet(item: "Field[Any]", settings: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """The conditions of a field that do not hold: what is named, what it must be, and what it is."""
    for name, wanted in item.metadata["only"].items():
        for value in islice((getattr(each, name) for each in settings if hasattr(each, name)), 1):
            if not (value is not None if wanted == SET else value in _values(wanted)):
                yield name, wanted, value


def words(name: str, wanted: Any, settings: Sequence[Any]) -> str:
    """A condition in words; `settings` are classes of settings, or instances, which tell fields from properties."""
    if wanted is None:
        return f"without {name}"
    if wanted == SET:
        return f"with {name}"
    values = " or ".join(map(str, _values(wanted)))
    fields = {item.name for each in settings if dataclasses.is_dataclass(each) for item in dataclasses.fields(each)}
    return f"with {name}={values}" if name in fields else f"with {values}"


def _values(wanted: Any) -> tuple[Any, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def refuse_fixed(changes: Mapping[str, Any], settings: Settings) -> None:
    """Raise ValueError naming a setting that a run keeps when it goes on.

    Args:
        changes: name -> the new value.
        settings: of the run so far.
    """
    for item, _ in declared(type(settings)):
        before = getattr(settings, item.name)
        if item.metadata["fixed"] and item.name in changes and changes[item.name] != before:
            raise ValueError(
                f"{item.name} cannot change when a run goes on: it is {before!r}, not {changes[item.name]!r}; leave it "
                "out, or start a new run"
            )


def to_plain(settings: Any) -> dict[str, Any]:
    """Settings, or a mapping, as the plain values that JSON gives back: tuples become lists, paths texts."""
    values = dict(settings) if isinstance(settings, Mapping) else dataclasses.asdict(settings)
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
