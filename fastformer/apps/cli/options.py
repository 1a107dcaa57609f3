"""Options of commands: flags made from settings, help in 80 columns, and suggestions for mistyped options.

Flags that are not given are omitted, so that values from a file, and then the defaults, apply. In help texts, commands
and options are in groups by `rich_help_panel`, and no name is truncated.
"""

import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import Field
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from fastformer.apps.settings import Settings, default_text, help_line, nearest, typed_fields

GROUPS = START, TRAIN, USE, INSPECT, SHARE = "Start", "Train", "Use and evaluate", "Look inside", "Export and check"
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _WithSuggestions:
    """Part of a command: add the nearest options to the error for an unknown one.

    Errors of usage are raised as ValueError, which `main` prints in one line; typer would print four.
    """

    params: list[Any]
    no_args_is_help: bool

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.no_args_is_help and not args:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except _UsageError as error:
            if hasattr(error, "possibilities"):  # an unknown option
                options = {
                    name: re.split(r" \(|  \[", each.help or "")[0]  # without bounds, conditions and default
                    for each in self.params
                    for name in getattr(each, "opts", [])
                    if name.startswith("--")
                }
                near = nearest(error.option_name, options)  # type: ignore[attr-defined]
                error.possibilities = None
                error.message += f"; did you mean {' or '.join(near)}?" if near else ""  # type: ignore[attr-defined]
            raise ValueError(error.format_message()) from None  # type: ignore[attr-defined]


class Command(_WithSuggestions, TyperCommand):
    """A command whose options are in groups, with suggestions for mistyped ones."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(formatter, options_by_group(self, ctx))


class Group(_WithSuggestions, TyperGroup):
    """A group whose help shows all commands below it, in groups, with suggestions for mistyped options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            raise ValueError(error.format_message()) from None  # type: ignore[attr-defined]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for path, command in walk(self, ""):
            if path and (not hasattr(command, "commands") or command.invoke_without_command):
                panels[command.rich_help_panel].append((path.strip(), command.get_short_help_str(1000)))
        _write(formatter, panels | options_by_group(self, ctx))


class App(typer.Typer):
    """A `typer.Typer` whose commands and group have plain help and suggestions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=Group, rich_markup_mode=None, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=Command, **options)


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every command below one, itself first, with the words that call it."""
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from walk(each, f"{path} {name}")


def options_by_group(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the options and arguments of a command with help texts, by group."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is not None:
            help = re.sub(r"\[default: \((.*)\)\]$", r"[default: \1]", record[1])  # typer's form of a given text
            default_group = "Arguments" if parameter.param_type_name == "argument" else "Options"
            group = getattr(parameter, "rich_help_panel", None) or default_group
            groups.setdefault(group, []).append((record[0], help))
    return groups


def _write(formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> None:
    for group, rows in groups.items():
        if rows:
            with formatter.section(group):
                formatter.write_dl(rows)


def with_settings(
    *, chosen: Collection[str] = (), hidden: Collection[str] = (), **sections: type[Settings]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a flag for every setting that a user may set.

    The command receives the given flags as one keyword argument a section: `model={"heads": 4}`.

    chosen: names of settings that the command chooses if their flags are not given. hidden: names of settings that the
    command refuses, which its help does not show. sections: settings by argument.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in sections]
        flags = {
            (section, item.name): _flag(section, item, hint, tuple(sections.values()), chosen, hidden)
            for section, settings in sections.items()
            for item, hint in typed_fields(settings)
            if not item.metadata["derived"]
        }

        def run(**arguments: Any) -> None:
            values: dict[str, dict[str, Any]] = {section: {} for section in sections}
            for section, name in flags:
                if (value := arguments.pop(name)) is not None:
                    values[section][name] = value
            command(**arguments, **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *flags.values()])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *flags.values())}
        return run

    return decorate


def flag(name: str) -> str:
    """Return the command-line option of a parameter."""
    return f"--{name.replace('_', '-')}"


def int_or_text(text: str) -> Any:
    """Return text as a whole number if it is one, else unchanged, for `typer.Option(parser=…)`.

    The setting's check rejects remaining text. typer's own parser would accept 64.0 as 64.
    """
    try:
        return int(text)
    except ValueError:
        return text


def whole_number(help: str, panel: str | None = None) -> Any:
    """Return the declaration of an option for a whole number, which the command checks."""
    return typer.Option(help=help, parser=int_or_text, rich_help_panel=panel)


def _flag(
    section: str,
    item: "Field[Any]",
    hint: Any,
    settings: tuple[type, ...],
    chosen: Collection[str],
    hidden: Collection[str],
) -> inspect.Parameter:
    # Choices are checked by the settings, so that values from a file get the same message.
    kind = typing.get_args(hint)[0] if type(None) in typing.get_args(hint) else hint  # of int | None: int
    option = typer.Option(
        help=help_line(item, settings),
        parser=int_or_text if kind is int else None,
        rich_help_panel=f"Settings: {section}",
        show_default="chosen for corpus and budget" if item.name in chosen else default_text(item),
        hidden=item.name in hidden,
    )
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=typing.Annotated[kind | None, option]
    )
