"""Read and write TOML files of settings: users' files, and the config.toml of a run folder.

`load_toml` returns plain dictionaries, not complete settings: flags override the file before defaults are added.
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fastformer.apps.settings import Settings, check_stated, helps, suggestion, to_plain
from fastformer.apps.system.files import write_file


def save_toml(path: Path | str, sections: Mapping[str, Any]) -> None:
    """Write {section: settings or mapping} as TOML for `load_toml`, atomically; None is left out."""
    import tomli_w

    plain = {section: to_plain(values).items() for section, values in sections.items()}
    content = {section: {key: value for key, value in items if value is not None} for section, items in plain.items()}
    write_file(path, tomli_w.dumps(content).encode("utf-8"))


def load_toml(
    path: Path | str, sections: Mapping[str, type[Settings]], removed: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return the values that a TOML file states, {section: {key: value}}, with every section present.

    sections: {"model": TranslationConfig, …}. removed: settings of earlier versions, which are left out. Raises
    FileNotFoundError, or ValueError naming the section, key or value that is not allowed.
    """
    path = Path(path)
    result: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for section, values in read_toml(path).items():
        if section not in sections:
            raise ValueError(f"{path}: unknown section [{section}]{suggestion(section, dict.fromkeys(sections, ''))}")
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {section} must be a section [{section}], not a value")
        known = helps(sections[section])
        values = {key: value for key, value in values.items() if key not in removed}
        if unknown := next((key for key in values if key not in known), None):
            raise ValueError(f"{path}: unknown key {unknown!r} in [{section}]{suggestion(unknown, known)}")
        check_stated(sections[section], values, f"{path}: [{section}] ")
        result[section] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raises FileNotFoundError, or ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such configuration file")
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # tomllib also raises errors other than TOMLDecodeError
        raise ValueError(f"{path}: not a TOML file: {error}") from None
