"""Runs tests of a copy of the repository, in processes of their own."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.kernels.mutations.fault import Fault
from tests.support.python import ROOT

LIMIT = 300.0  # seconds for one test, on a busy machine; a fault may make a loop endless
# Most of the time of a small test is that of these imports: a server has them done, and forks. `torch._inductor` is
# imported by `torch.use_deterministic_algorithms`.
PRELOADED = ["pytest", "torch._inductor", "torch.library", "torch.utils.checkpoint", "triton.runtime.interpreter"]
# NumPy's warnings of what a fault makes infinite would end the test before its assertion.
OPTIONS = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore::RuntimeWarning"]


def copy(to: Path) -> Path:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def _pytest(folder: Path, log: Path, tests: list[str]) -> None:
    """Run tests in a process of their own."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "kernels")]  # before the installed ones
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # this function's own: the copy has others of these names
    import pytest

    sys.exit(int(pytest.main([*OPTIONS, *tests])))


def run(folder: Path, tests: list[str], compiled: str) -> tuple[int | None, str]:
    """Return the exit status of pytest, None for too long, and what it printed."""
    log = folder.parent / f"{folder.name}.log"
    if compiled:  # which the server cannot do: the interpreter is in it
        paths = os.pathsep.join([str(folder), str(folder / "kernels")])
        command = [sys.executable, "-m", "pytest", *OPTIONS, "--compiled", compiled, *tests]
        with log.open("w") as output:
            try:
                status: int | None = subprocess.run(
                    command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, timeout=LIMIT * len(tests),
                    stdout=output, stderr=subprocess.STDOUT, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = None
        return status, log.read_text()
    process = multiprocessing.get_context("forkserver").Process(target=_pytest, args=(folder, log, tests))
    process.start()
    process.join(LIMIT * len(tests))
    if process.is_alive():
        process.kill()
        process.join()
        return None, log.read_text()
    return process.exitcode, log.read_text()


def judge(fault: Fault, folder: Path) -> str:
    file = folder / fault.file
    text = file.read_text()
    file.write_text(text.replace(fault.old, fault.new))
    try:
        if fault.compiled and run(folder, [fault.test], "")[0] != 0:
            return "broken: the interpreter shows it too"
        status, output = run(folder, [fault.test], fault.compiled)
    finally:
        file.write_text(text)
    if status == 0:
        return "SURVIVED"
    expected = fault.failure or r"assert |AssertionError|Failed: DID NOT RAISE"
    if status == 1 and re.search(rf"^FAILED .* - ({expected})", output, re.MULTILINE):
        return "caught"
    lines = [line for line in output.splitlines() if line.startswith(("E  ", "ERROR", "FAILED"))]
    return f"broken: status {status}, {lines[-1] if lines else output[-200:]}"
