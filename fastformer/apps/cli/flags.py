"""Command-line flags, generated from declared settings (`fastformer.settings`).

Flags that are not given are omitted, so that values from a file, and then the defaults, apply.
"""

import inspect
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import Field
from typing import Any

import typer

from fastformer.apps.settings import Settings, declared, default_text, explained, facts, refuse_idle


def with_settings(
    *, chosen: Collection[str] = (), **sections: type[Settings]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a flag for every setting that a user may set.

    The command receives the given flags as one keyword argument a section: `model={"heads": 4}`.

    Args:
        chosen: names of settings that the command chooses if their flags are not given.
        sections: name of the keyword argument -> settings.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        parameters = [p for p in signature.parameters.values() if p.name not in sections]
        flags: list[inspect.Parameter] = []
        section_of: dict[str, str] = {}
        for section, settings in sections.items():
            for item, hint in declared(settings):
                if not facts(item)["derived"]:
                    section_of[item.name] = section
                    flags.append(_flag(section, item, hint, tuple(sections.values()), item.name in chosen))

        def run(**arguments: Any) -> None:
            values: dict[str, dict[str, Any]] = {section: {} for section in sections}
            for name, section in section_of.items():
                if (value := arguments.pop(name)) is not None:
                    values[section][name] = value
            command(**arguments, **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        parameters += flags
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def int_or_text(text: str) -> Any:
    """Return text as a whole number if it is one, else unchanged, for `typer.Option(parser=…)`.

    The setting's check rejects remaining text. typer's own parser would accept 64.0 as 64.
    """
    try:
        return int(text)
    except ValueError:
        return text


def make_settings(settings: type[Settings], values: dict[str, Any]) -> Any:
    """Return settings with `values` and defaults; raise ValueError for a value that has no effect."""
    instance = settings(**values)
    refuse_idle({"": values}, {"": instance})
    return instance


def _flag(
    section: str, item: "Field[Any]", hint: Any, settings: tuple[type, ...], chosen: bool = False
) -> inspect.Parameter:
    choices = facts(item)["choices"]  # checked by the settings, so that values from a file get the same message
    option = typer.Option(
        help=explained(item, settings),
        parser=int_or_text if _bare(hint) is int else None,
        rich_help_panel=f"Settings: {section}",
        show_default="chosen for corpus and budget" if chosen else default_text(item),
        metavar="|".join(choices) if 0 < len(choices) <= 4 else None,
    )
    annotation = typing.Annotated[_bare(hint) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _bare(hint: Any) -> Any:
    """Return the type without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    return hint
