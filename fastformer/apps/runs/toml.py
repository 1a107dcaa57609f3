"""TOML files of settings: what a user writes, and the config.toml of a run folder.

`load_toml` gives back plain dictionaries of what the file states, and not finished settings: flags on the command line
may then override the file before defaults fill the rest.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastformer.apps.system.foreign_files import read_file, write_file
from fastformer.settings import Settings, check_value, declared, to_plain

# Outside of texts: a key of n parts takes tomllib the square of n, 3 MB of them some hours, or all memory; and so does
# each line below a table of n parts.
_MOST_DOTS = 100
_TEXT = re.compile(
    r'''"""(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5})?|"(?:[^"\\\n]++|\\.)*+"?|#[^\n]*'''
    r"""|'''(?:[^']++|'(?!''))*+(?:'{3,5})?|'[^'\n]*+'?""",
    re.DOTALL,
)
_ENDLESS = re.compile(r"0[xob][0-9A-Fa-f_]{3000}")  # which Python reads and does not write; it refuses decimal ones


def save_toml(path: Path | str, sections: Mapping[str, Any]) -> None:
    """Write {section: settings or mapping} as TOML that `load_toml` reads back; unset values are left out.

    A file that is there is replaced in one step; a link is refused.
    """
    import tomli_w

    plain = {section: to_plain(values).items() for section, values in sections.items()}
    content = {section: {key: value for key, value in items if value is not None} for section, items in plain.items()}
    path = Path(path)
    write_file(path, tomli_w.dumps(content).encode("utf-8"), path.parent)


def load_toml(path: Path | str, sections: Mapping[str, type[Settings]]) -> dict[str, dict[str, Any]]:
    """The values that a TOML file states: {section: {key: value}}, with every section present, to override or to make.

    sections: {"model": TranslationConfig, "train": TrainConfig, …}; a key must be a setting of its section, and a value
    what is allowed for it. Raises FileNotFoundError, or ValueError naming file, section and key.
    """
    path = Path(path)
    result: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for section, values in read_toml(path).items():
        if section not in sections:
            raise ValueError(f"{path}: unknown section [{section}]{_nearest(section, sections)}")
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {section} must be a section [{section}], not a value")
        known = {item.name: (item, hint) for item, hint in declared(sections[section])}
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"{path}: unknown key {key!r} in [{section}]{_nearest(key, known)}")
            item, hint = known[key]
            result[section][key] = check_value(f"{path}: [{section}] {key}", value, hint, **item.metadata)
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds; a byte order mark is dropped. Raises FileNotFoundError, or ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such configuration file")
    try:
        text = read_file(path).decode("utf-8-sig")
        if text.count(".") > _MOST_DOTS < _TEXT.sub("", text).count("."):
            raise ValueError(f"it holds more than {_MOST_DOTS} dots outside of texts")
        if _ENDLESS.search(text):
            raise ValueError("a number of 3,000 digits or more")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not all that tomllib raises is a TOMLDecodeError
        raise ValueError(f"{path}: not a TOML file: {error}") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
