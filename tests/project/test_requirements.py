"""The lists of what is installed agree: pyproject.toml, constraints.txt, requirements.lock."""

import re
import tomllib
from typing import Any

from tests.support.python import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
UNLOCKED = {"torch"}  # its hash depends on the machine


def name_of(requirement: str) -> str:
    actual = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert actual, requirement
    return re.sub(r"[-_.]+", "-", actual[0]).lower()


def pins(path: str) -> dict[str, str]:
    """The versions of a file, by name."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    actual = [re.match(r"([A-Za-z0-9._-]+)==([^ ;\\]+)", line) for line in lines]
    return {name_of(each[1]): each[2] for each in actual if each}


def wanted(extra: str | None = None) -> set[str]:
    """The names of what is installed on Linux, with an extra."""
    project = PROJECT["project"]
    names = set()
    for each in project["dependencies"] if extra is None else project["optional-dependencies"][extra]:
        if inner := re.match(r"fastformer\[(.*)\]", each):
            names |= {name for other in inner[1].split(",") for name in wanted(other)}
        elif "win32" not in each:
            names.add(name_of(each))
    return names


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    constraints, lock = pins("constraints.txt"), pins("requirements.lock")
    assert {name: version for name, version in lock.items() if name in constraints} == {
        name: version for name, version in constraints.items() if name not in UNLOCKED
    }


def test_the_lock_has_every_requirement_and_the_build_backend() -> None:
    lock = pins("requirements.lock")
    assert wanted() | wanted("dev") <= set(lock) | UNLOCKED
    for each in PROJECT["build-system"]["requires"]:
        name, _, version = each.partition("==")
        assert lock[name_of(name)] == version
    assert not [name for name in lock if name.startswith(("nvidia-", "cuda-")) or name in UNLOCKED]


def test_each_file_of_the_lock_has_a_hash() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[A-Za-z])", re.sub(r"(?m)^#.*\n", "", text).strip())
    assert len(entries) == len(pins("requirements.lock")) > 80
    for entry in entries:
        assert re.fullmatch(r"[^\\]+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\\n)?)+", entry), entry
