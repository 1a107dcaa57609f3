"""Command-line flags made from settings dataclasses, so that a setting is described in one place only.

A flag that is not given stays out, so that a file's values and then the defaults can fill in.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import typer

from fastformer.apps.train.conditions import refuse_idle, words


def with_settings(**sections: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for every field of the dataclasses that has a help text.

    The command receives what was given as one keyword argument a section: `model={"heads": 4}`.

    Args:
        sections: name of the keyword argument -> dataclass.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name not in sections]
        flags: list[inspect.Parameter] = []
        homes: dict[str, str] = {}
        for section, settings in sections.items():
            hints = typing.get_type_hints(settings)
            for item in dataclasses.fields(settings):
                if not item.metadata.get("help") or "(set from" in item.metadata["help"] or item.name in homes:
                    continue
                homes[item.name] = section
                flags.append(_flag(section, item, hints[item.name], tuple(sections.values())))

        def run(**given: Any) -> None:
            values: dict[str, dict[str, Any]] = {section: {} for section in sections}
            for name in list(given):
                if name in homes:
                    value = given.pop(name)
                    if value is not None:
                        values[homes[name]][name] = value
            command(**given, **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        parameters = [*own, *flags]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def made(settings: type, given: dict[str, Any]) -> Any:
    """Settings with their defaults; what was given and has no effect beside the others is refused, by name."""
    found = settings(**given)
    refuse_idle({"": given}, {"": found})
    return found


def _flag(section: str, item: "dataclasses.Field[Any]", hint: Any, settings: tuple[type, ...]) -> inspect.Parameter:
    choices = item.metadata.get("choices") or ()
    # Choices are shown and checked by the dataclass itself, so that a file gets the same message.
    help_text = item.metadata["help"] + (f": {', '.join(choices)}" if choices else "")
    if only := item.metadata.get("only"):
        help_text += f" (only {', '.join(words(name, wanted, settings) for name, wanted in only.items())})"
    shown: str | bool = _shown(item.default)
    option = typer.Option(
        help=help_text,
        rich_help_panel=f"Settings: {section}",
        show_default=shown,
        metavar="|".join(choices) if 0 < len(choices) <= 4 else None,
    )
    annotation = typing.Annotated[_bare(hint) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _bare(hint: Any) -> Any:
    """The type without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    return hint


def _shown(default: Any) -> str | bool:
    if default is dataclasses.MISSING or default is None:
        return False
    if isinstance(default, bool):
        return "yes" if default else "no"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
