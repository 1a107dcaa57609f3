"""`python -m tests.kernels.mutations`."""

import argparse
import multiprocessing
import os
import queue
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kernels import mutations
from tests.kernels.mutations.fault import Fault
from tests.kernels.mutations.runner import PRELOADED, copy, judge, run


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


if __name__ == "__main__":
    main(mutations.FAULTS, mutations.__doc__)
