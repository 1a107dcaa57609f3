"""Runs tests of a copy of the repository with deliberate faults, in processes of their own."""

import argparse
import multiprocessing
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.support.python import ROOT

LIMIT = 300.0  # seconds for one test, on a busy machine; a fault may make a loop endless
# Most of the time of a small test is that of these imports: a server has them done, and forks. `torch._inductor` is
# imported by `torch.use_deterministic_algorithms`.
PRELOADED = ["pytest", "torch._inductor", "torch.library", "torch.utils.checkpoint", "triton.runtime.interpreter"]
# NumPy's warnings of what a fault makes infinite would end the test before its assertion.
OPTIONS = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore::RuntimeWarning"]


class Fault(NamedTuple):
    """A change of a file that a test must notice."""

    name: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    test: str  # which must fail
    failure: str = ""  # how it fails, where that is no assertion
    compiled: str = ""  # for what GPU, as only compiled code shows it; else it is interpreted


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


def main(faults: list[Fault], description: str | None) -> None:
    """Judge faults, as the arguments of the command choose them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="SUBSTRING", help="of the names or files of faults")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    chosen = [fault for fault in faults if any(part in fault.name or part in fault.file for part in arguments.only)]
    if not chosen:
        parser.error(f"no fault has one of {arguments.only} in its name or file")
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",  # a fault of the same size, in the same second, would pass for the file before
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "COLUMNS": "1000",  # pytest shortens its summary to the terminal
    }
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for index in range(arguments.jobs):
            folders.put(copy(Path(temporary) / str(index)))

        def with_folder(fault: Fault) -> tuple[str, float]:
            folder, begin = folders.get(), time.perf_counter()
            try:
                return judge(fault, folder), time.perf_counter() - begin
            finally:
                folders.put(folder)

        folder = folders.get()
        for compiled in sorted({fault.compiled for fault in chosen}):
            tests = list(dict.fromkeys(fault.test for fault in chosen if fault.compiled == compiled))
            status, output = run(folder, tests, compiled)
            if status != 0 or "skipped" in output:
                sys.exit(f"without any fault:\n{output}")
            passed = f"{len(tests)} tests pass without any fault, {compiled or 'interpreted'}"
            print(f"{passed}, {time.perf_counter() - start:.0f} s", flush=True)
        folders.put(folder)
        verdicts = []
        for fault, (verdict, seconds) in zip(chosen, pool.map(with_folder, chosen), strict=True):
            print(f"{fault.name:<64} {verdict:<8} {seconds:5.1f} s  {fault.test.removeprefix('tests/')}", flush=True)
            verdicts.append(verdict)
    survived, broken = verdicts.count("SURVIVED"), sum(verdict.startswith("broken") for verdict in verdicts)
    caught = len(verdicts) - survived - broken
    print(f"{caught} caught, {survived} survived, {broken} broken, {time.perf_counter() - start:.0f} s")
    sys.exit(bool(survived or broken))
