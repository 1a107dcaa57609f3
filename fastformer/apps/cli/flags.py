"""Command-line flags, made from what settings declare (`fastformer.settings`).

A flag that is not given stays out, so that a file's values and then the defaults can fill in.
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
    """Give a command one flag for every setting that is a user's.

    The command receives what was given as one keyword argument a section: `model={"heads": 4}`.

    Args:
        chosen: names of the settings that the command chooses if they are not given.
        sections: name of the keyword argument -> settings.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name not in sections]
        flags: list[inspect.Parameter] = []
        homes: dict[str, str] = {}
        for section, settings in sections.items():
            for item, hint in declared(settings):
                if not facts(item)["derived"]:
                    homes[item.name] = section
                    flags.append(_flag(section, item, hint, tuple(sections.values()), item.name in chosen))

        def run(**given: Any) -> None:
            values: dict[str, dict[str, Any]] = {section: {} for section in sections}
            for name, home in homes.items():
                if (value := given.pop(name)) is not None:
                    values[home][name] = value
            command(**given, **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        parameters = [*own, *flags]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def int_or_text(text: str) -> Any:
    """Parse a whole number for `typer.Option(parser=…)`; the check of the setting refuses what stays text.

    typer takes 64.0 for 64.
    """
    try:
        return int(text)
    except ValueError:
        return text


def made(settings: type[Settings], given: dict[str, Any]) -> Any:
    """Make settings with their defaults; refuse what was given and has no effect."""
    found = settings(**given)
    refuse_idle({"": given}, {"": found})
    return found


def _flag(
    section: str, item: "Field[Any]", hint: Any, settings: tuple[type, ...], chosen: bool = False
) -> inspect.Parameter:
    choices = facts(item)["choices"]  # checked by the settings themselves, so that a file gets the same message
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
