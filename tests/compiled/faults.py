"""Deliberate faults in our kernels: a line of the PTX left out, or another source; and where a finding says it is."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.compiled.ptx.driver import session
from tests.compiled.ptx.machine import KernelFault

KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "fastformer_kernels"


@contextmanager
def edited(kernel: str, pattern: str, number: int) -> Iterator[None]:
    """Leave out the line with match `number` of a pattern, of one kernel's PTX; IndexError: there are fewer."""

    def edit(name: str, ptx: str) -> str:
        if name != kernel:
            return ptx
        match = [*re.finditer(rf"^[^\n]*{pattern}[^\n]*$", ptx, re.MULTILINE)][number]
        return ptx[: match.start()] + ptx[match.end() :]

    session.edit = edit
    try:
        yield
    finally:
        session.edit = None


def finding(call: Any) -> str | None:
    """What is wrong with the kernels of a call."""
    try:
        call()
    except KernelFault as fault:
        return str(fault)
    return None


def missed(call: Any, kernel: str, pattern: str, kind: str) -> str:
    """Leave out the matches one by one, until one is missed, by that kind of finding; return the finding.

    Not each is needed: Triton places some more than that.
    """
    assert finding(call) is None
    for number in range(100):
        try:
            with edited(kernel, pattern, number):
                found = finding(call)
        except IndexError:
            pytest.fail(f"{number} times {pattern} in {kernel}: none is missed")
        if found:
            assert found.startswith(f"{kernel}: ")
            assert re.search(kind, found), found
            return found
    raise AssertionError("more than 100")


def source_lines(found: str) -> list[str]:
    """The lines of our kernels that a finding names: the innermost first, then who calls it."""
    files = {path.name: path for path in KERNELS.rglob("*.py") if path.name != "kernels.py"}
    places = re.findall(r"(\w+\.py):(\d+):\d+", found.split("[", 1)[1].split("]: ")[0])
    return [files[name].read_text().splitlines()[int(line) - 1].strip() for name, line in places if name in files]


def change(monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str, old: str, new: str) -> None:
    """Compile a function of a kernel's module from another source, of as many lines, in this test."""
    jitted = getattr(module, function)
    assert jitted.src.count(old) == 1
    assert old.count("\n") == new.count("\n")
    monkeypatch.setattr(jitted, "_src", jitted.src.replace(old, new))


def forget() -> None:
    """Have Triton and our launchers look at the sources again."""
    from triton.runtime.jit import JITFunction

    from fastformer_kernels.host import launch, plan

    launch._compiled.clear()
    plan.forget()
    for name, module in list(sys.modules.items()):
        if name.startswith("fastformer_kernels"):
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.hash = None
                    value.device_caches.clear()
