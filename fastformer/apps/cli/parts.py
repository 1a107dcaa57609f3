"""Commands for runs of every kind: a frame, and a part of each application with options of its own.

The command takes every option that any part takes. The run decides whose part works: what was given for another part is
refused by name, and what this part needs and did not get is asked for.
"""

import copy
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastformer.apps.cli.help import App
from fastformer.apps.runs.application import Application
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.runs.kinds import application_of

Part = Callable[..., Any]
_COMMANDS: list["SharedCommand"] = []


class Parts:
    """What the applications added to a command, with the options of theirs that were given."""

    def __init__(self, name: str, parts: Mapping[str, Part], given: Mapping[str, Any]) -> None:
        self._name, self._parts, self._given = name, parts, given

    def of(self, run: Path) -> Part:
        """The part for a run, with its options; the frame hands over the rest by keyword.

        Raises:
            FileNotFoundError: there is no such run.
            ValueError: there is no part for such runs, or options are missing or not for it.
        """
        application = application_of(read_kind(run))
        about = f"{run} is a {application.title} run"
        part = self._parts.get(application.kind)
        if part is None:
            raise ValueError(f"{about}; {self._name} is not for it")
        parameters = inspect.signature(part).parameters
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and self._given.get(name, "") is None:
                raise ValueError(f"{about}; give {_flag(name)}")
        for name in self._stated():
            if name not in parameters:
                raise ValueError(f"{about}; {_flag(name)} is not for it")
        return functools.partial(part, **{name: value for name, value in self._given.items() if name in parameters})

    def refuse_options(self) -> None:
        """Where there is no run, raise ValueError for options that are of one."""
        for name in self._stated():
            raise ValueError(f"{_flag(name)} is of a run; give --run too")

    def _stated(self) -> list[str]:
        return [name for name, value in self._given.items() if value is not None and value is not False]


class SharedCommand:
    """A command of the command line; `frame` is what it does for every run, and its last parameter, `parts`, `Parts`.

    Parameters of a part that the frame has, too, are what the frame hands over; the others are the part's options. Its
    docstring, one line, stands in the help.
    """

    def __init__(self, frame: Callable[..., None], home: App, group: str) -> None:
        self._frame, self._home, self._group = frame, home, group
        self._parts: dict[str, Part] = {}
        _COMMANDS.append(self)

    def part(self, application: Application) -> Callable[[Part], Part]:
        """Decorate an application's part; its parameters have the annotations that typer reads."""

        def add(part: Part) -> Part:
            self._parts[application.kind] = part
            return part

        return add

    def register(self) -> None:
        """Add the command to its home, with the options of all parts."""
        frame = inspect.signature(self._frame)
        own = [each for each in frame.parameters.values() if each.name != "parts"]
        options = self._options({each.name for each in own})

        def command(**given: Any) -> None:
            theirs = {name: given.pop(name) for name in list(given) if name in options}
            self._frame(**given, parts=Parts(command.__name__, self._parts, theirs))

        command.__name__, command.__doc__ = self._frame.__name__, self._help()
        parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in own] + list(options.values())
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        self._home.command(rich_help_panel=self._group)(command)

    def _help(self) -> str:
        """What the command does, and what becomes of it in a run of each kind."""
        lines = [f"Of a {application_of(kind).title} run: {part.__doc__}" for kind, part in self._parts.items()]
        return "\n\n".join([inspect.cleandoc(self._frame.__doc__ or ""), *lines])

    def _options(self, own: set[str]) -> dict[str, inspect.Parameter]:
        """The options of all parts by name; in the help, those that not all have stand under whose they are."""
        found: dict[str, dict[str, inspect.Parameter]] = {}
        for kind, part in self._parts.items():
            for name, parameter in inspect.signature(part).parameters.items():
                if name not in own:
                    found.setdefault(name, {})[application_of(kind).title] = parameter
        return {name: _merged(of, everybody=len(of) == len(self._parts)) for name, of in found.items()}


def shared(home: App, group: str) -> Callable[[Callable[..., None]], SharedCommand]:
    """Make a frame a command of `home`, in a group of its help, that applications add parts to."""
    return lambda frame: SharedCommand(frame, home, group)


def register_shared() -> None:
    """Add all shared commands to the command line, once the applications have added their parts."""
    for command in _COMMANDS:
        command.register()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _merged(parameters: Mapping[str, inspect.Parameter], everybody: bool) -> inspect.Parameter:
    """One option of what several applications, by title, declare under a name; it may be left out."""
    titles, found = list(parameters), list(parameters.values())
    hint, option = typing.get_args(found[0].annotation)
    option = copy.copy(option)
    helps = {title: typing.get_args(each.annotation)[1].help for title, each in parameters.items()}
    if len(set(helps.values())) > 1:
        option.help = "; ".join(f"{title}: {text}" for title, text in helps.items())
    if not everybody and option.rich_help_panel is None:
        option.rich_help_panel = f"Of {' and '.join(titles)} runs"
    default = None if found[0].default is found[0].empty else found[0].default
    hint = hint if default is False else hint | None
    annotation = typing.Annotated[hint, option]  # type: ignore[valid-type]
    return inspect.Parameter(found[0].name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
