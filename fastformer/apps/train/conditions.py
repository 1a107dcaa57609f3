"""Which settings mean something beside which others: stated where a setting is declared, and enforced here.

`option(…, only={"schedule": "plateau"})` says that a setting is read by that schedule alone. A condition names a field,
or a property, of any of the settings of a run, and what it must be: one value, several, `SET` (not None) or None. A
property gives words ("number words", "one process"), which stand in the message as they are.

A setting that was given and would do nothing is refused, never ignored. Defaults are not given, and False asks for
nothing. `fixed=True` says that a run which goes on cannot change the setting.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

SET = "any value"  # in a condition: not None

Given = Mapping[str, Mapping[str, Any]]  # section -> name -> what a user stated


@dataclass(frozen=True)
class Machine:
    """What a run runs on, for conditions.

    device: as torch names it. world: number of processes.
    """

    device: str
    world: int = 1

    @property
    def hardware(self) -> str:
        """The device, in words."""
        return "a CUDA device" if self.device.startswith("cuda") else "a CPU"

    @property
    def processes(self) -> str:
        """How many processes there are, in words."""
        return "one process" if self.world == 1 else "several processes"


def refuse_idle(given: Given, sections: Mapping[str, Any], *others: Any) -> None:
    """Refuse what was given and has no effect.

    Args:
        given: what a user stated, by section.
        sections: the settings of each, dataclass instances.
        others: further objects that conditions may name.

    Raises:
        ValueError: naming all such settings, and what each waits for.
    """
    everything = (*sections.values(), *others)
    idle = []
    for section, settings in sections.items():
        stated = given.get(section, {})
        for item in dataclasses.fields(settings):
            if item.name in stated and stated[item.name] is not False:
                idle += [_explained(item, *each, everything) for each in islice(unmet(item, everything), 1)]
    if idle:
        raise ValueError(f"{'; '.join(idle)}; leave {'it' if len(idle) == 1 else 'them'} out")


def _explained(item: "dataclasses.Field[Any]", name: str, wanted: Any, value: Any, settings: Sequence[Any]) -> str:
    here = "" if wanted in (None, SET) else f", not {words(name, value, settings)}"
    return f"{item.name} has an effect only {words(name, wanted, settings)}{here}"


def refuse_fixed(changes: Mapping[str, Any], settings: Any) -> None:
    """Refuse changes to settings that a run keeps when it goes on.

    Args:
        changes: name -> the new value.
        settings: of the run so far.

    Raises:
        ValueError: naming the setting.
    """
    for item in dataclasses.fields(settings):
        before = getattr(settings, item.name)
        if item.metadata.get("fixed") and item.name in changes and changes[item.name] != before:
            raise ValueError(
                f"{item.name} cannot change when a run goes on: it is {before!r}, not {changes[item.name]!r}; leave it "
                "out, or start a new run"
            )


def unmet(item: "dataclasses.Field[Any]", settings: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """The conditions of a field that do not hold: what is named, what it must be, and what it is."""
    for name, wanted in (item.metadata.get("only") or {}).items():
        for each in settings:
            if hasattr(each, name):
                value = getattr(each, name)
                holds = value is not None if wanted == SET else value in _values(wanted)
                if not holds:
                    yield name, wanted, value
                break


def words(name: str, wanted: Any, settings: Sequence[Any]) -> str:
    """A condition in words; `settings` are dataclasses, or instances of them, which tell fields from properties."""
    if wanted is None:
        return f"without {name}"
    if wanted == SET:
        return f"with {name}"
    values = " or ".join(map(str, _values(wanted)))
    fields = {item.name for each in settings if dataclasses.is_dataclass(each) for item in dataclasses.fields(each)}
    return f"with {name}={values}" if name in fields else f"with {values}"


def _values(wanted: Any) -> tuple[Any, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)
