"""Check one argument or setting by its type, bounds and choices; an error message is one line."""

import operator
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "below": operator.lt,
    "at_most": operator.le,
}
_KINDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false"}
_MAX_CHARACTERS = 500  # of a wrong value in a message


def check_value(
    name: str,
    value: Any,
    hint: Any,
    others: Mapping[str, Any] | None = None,
    *,
    choices: Collection[str] = (),
    **bounds: Any,
) -> Any:
    """Check one value, an argument or a setting, and return it.

    Args:
        name: of the value, for the message.
        value: to check.
        hint: `int`, `float`, `str` or `bool`, or one of these `| None`. A bool is no int; a float is finite, and may be
            an int.
        others: values by name, for bounds that are names; a bound whose value is missing or None is ignored.
        choices: the texts that are allowed.
        bounds: `at_least`, `above`, `below`, `at_most`: a number, or a name in `others`.

    Raises:
        ValueError: naming the value, what it is and what is allowed.
    """
    others = others or {}
    if not _has_type(value, hint):
        kinds = [each for each in typing.get_args(hint) or (hint,) if each is not types.NoneType]
        kind = () if choices else (" or ".join(_KINDS[each] for each in kinds),)
        raise ValueError(refusal(name, value, allowed_range(choices, bounds, others), *kind))
    if value is not None and not (value in choices if choices else _is_within_bounds(value, bounds, others)):
        raise ValueError(refusal(name, value, allowed_range(choices, bounds, others)))
    return value


def refusal(name: str, value: Any, allowed: str, kind: str = "") -> str:
    """Return an error message of one line: what is allowed, and the value that is not."""
    shown = " ".join(repr(value).splitlines())
    shown = shown if len(shown) <= _MAX_CHARACTERS else f"{shown[:_MAX_CHARACTERS]}…"
    return f"{name} must be {', '.join(filter(None, (kind, allowed)))}, not {shown}"


def allowed_range(choices: Collection[str], bounds: Mapping[str, Any], others: Mapping[str, Any] | None = None) -> str:
    """Return choices or bounds in words; a bound that is a name is followed by its value in `others`."""
    if choices:
        return f"one of {', '.join(choices)}"
    limits = []
    for key in BOUNDS:
        if (bound := bounds.get(key)) is not None:
            shown = f"{bound:,}" if not isinstance(bound, str) else bound
            value = f" ({others[bound]})" if others and others.get(bound) is not None else ""
            limits.append(f"{key.replace('_', ' ')} {shown}{value}")
    return " and ".join(limits)


def _is_within_bounds(value: Any, bounds: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    limits = {key: others.get(bound) if isinstance(bound, str) else bound for key, bound in bounds.items()}
    return all(BOUNDS[key](value, limit) for key, limit in limits.items() if limit is not None)


def _has_type(value: Any, hint: Any) -> bool:
    if kinds := typing.get_args(hint):
        return any(_has_type(value, kind) for kind in kinds)
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, hint)
