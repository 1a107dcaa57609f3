"""Help as plain text in 80 columns, without truncated option names, and suggestions for mistyped options.

Commands and options are in groups, by `rich_help_panel`; groups of commands are in the order of `GROUPS`.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from fastformer.apps.settings import nearest

GROUPS = START, TRAIN, USE, INSPECT, SHARE = "Start", "Train", "Use and evaluate", "Look inside", "Export and check"
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Command(TyperCommand):
    """A command whose options are in groups, with suggestions for mistyped ones."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(formatter, options_by_group(self, ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return _parse_with_suggestions(self, ctx, super().parse_args, args)


class Group(TyperGroup):
    """A group whose help shows all commands below it, in groups, with suggestions for mistyped options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for path, command in walk(self, ""):
            if path and (not hasattr(command, "commands") or command.invoke_without_command):
                panel = getattr(command, "rich_help_panel", None) or "Commands"
                panels.setdefault(panel, []).append((path.strip(), command.get_short_help_str(1000)))
        _write(formatter, panels)
        _write(formatter, options_by_group(self, ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return _parse_with_suggestions(self, ctx, super().parse_args, args)


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
        record = parameter.get_help_record(ctx)
        if record is not None:
            name, help = record
            help = re.sub(r"\[default: \((.*)\)\]$", r"[default: \1]", help)  # typer's form of a given text
            default_group = "Arguments" if parameter.param_type_name == "argument" else "Options"
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or default_group, []).append((name, help))
    return groups


def _write(formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> None:
    for group, rows in groups.items():
        if rows:
            with formatter.section(group):
                formatter.write_dl(rows)


def _parse_with_suggestions(
    command: Any, ctx: Any, parse: Callable[[Any, list[str]], list[str]], args: list[str]
) -> list[str]:
    """Parse arguments; add the nearest options to the error for an unknown one."""
    try:
        return parse(ctx, args)
    except _UsageError as error:
        if hasattr(error, "possibilities"):  # an unknown option
            options = {
                name: re.split(r" \(|  \[", each.help or "")[0]  # without bounds, conditions and default
                for each in command.params
                for name in getattr(each, "opts", [])
                if name.startswith("--")
            }
            near = nearest(error.option_name, options)  # type: ignore[attr-defined]
            error.possibilities = None
            error.message += f"; did you mean {' or '.join(near)}?" if near else ""  # type: ignore[attr-defined]
        raise
