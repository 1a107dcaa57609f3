"""Run all measurements on a GPU, in runs of minutes: each is one process for all its files.

    python -m benchmarks.lane --only tests --out DIR       # then models, ops, other-tests, compiled, tuning
    python -m benchmarks.lane                              # all of them, one after another
    python -m benchmarks.report DIR NAME                   # all runs in DIR as one result

The runs are in the order of their value. Works from a bare checkout. Results of a run go into the new folder DIR/RUN as
they are measured: benchmarks.jsonl or tuning.jsonl, and log.txt with the output. After failed or cut `tests` nothing is
measured.

Exit code: 1 if a run failed or was cut, 2 for invalid arguments, else 0. Without a git history FASTFORMER_COMMIT names
the commit of the files.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.harness import environment

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 590.0  # seconds of a run, after which it is interrupted
GRACE = 5.0  # seconds between interrupting a run and killing it
# On a GPU of 84 GB each worker takes 0.5 GB for its context and up to 4.5 for tensors, one of them 11: 77 GB in all.
MOST_WORKERS = 14
COMPILED = "compile or flex"  # competitors that torch.compile makes, for pytest's -k
TUNING_MINUTES = 2.5


class Run(NamedTuple):
    """One process of pytest: its seconds, patterns of its files below the root, and for benchmarks pytest's -k."""

    seconds: float
    files: tuple[str, ...] = ()
    choice: str = ""


def _benchmarks(*names: str) -> tuple[str, ...]:
    return tuple(f"benchmarks/bench_{name}.py" for name in names)


_OPS = _benchmarks("training_step", "packing", "attention", "layer_norm", "cross_entropy", "feed_forward", "positions")
_MODELS = _benchmarks(
    *("decoding", "modules", "multihead_attention", "integrations", "language", "cached_decoding", "scaling"),
    "generation",
)
# Seconds on one H200 with kernels in Triton's cache, commits 70fda915 and 7a7a1035. Estimated on top of what ended
# there: 1.1 a case for the 150 of `ops` that were cut, 60 for generation, 45 for each of four compiled models, and
# other-tests.
RUNS = {
    "tests": Run(
        195,
        (
            *("tests/gpu/test_*.py", "tests/**/test_devices.py", "tests/**/test_fused_*.py"),
            *("tests/**/test_attention_options.py", "tests/**/test_tf32.py", "tests/**/test_fast_path.py"),
        ),
    ),
    "models": Run(385, _MODELS, f"not ({COMPILED})"),
    "ops": Run(510, _OPS, f"not ({COMPILED})"),
    "other-tests": Run(
        120,
        (
            *("tests/functional/test_all_ops.py", "tests/functional/test_arguments.py"),
            *("tests/functional/test_numerics.py", "tests/functional/test_packing.py", "tests/host/test_autocast.py"),
            *("tests/kernels/test_block_order.py", "tests/kernels/test_registered_ops.py", "tests/nn/test_compile.py"),
            *("tests/nn/test_padding_values.py", "tests/nn/test_stacks.py", "tests/integrations/test_packed_models.py"),
            *("tests/apps/models/test_single_stack_models.py", "tests/apps/language/test_window.py"),
        ),
    ),
    "compiled": Run(320, _OPS[::-1], COMPILED),  # models, which compile for a minute, come last
    "tuning": Run(15 + 60 * TUNING_MINUTES),
}


def chosen_runs(only: str | None) -> list[str]:
    """Return the names of the chosen runs, in the order of RUNS."""
    names = {*RUNS} if only is None else {*only.split(",")}
    if unknown := sorted(names - {*RUNS}):
        raise ValueError(f"--only: unknown {unknown[0]!r}; known runs: {', '.join(RUNS)}")
    return [name for name in RUNS if name in names]


def command_of(name: str, out: Path) -> list[str]:
    """Return the command of a run whose results go into a folder."""
    run, module = RUNS[name], [sys.executable, "-m"]
    if name == "tuning":
        return [*module, "benchmarks.tuning", "--minutes", str(TUNING_MINUTES), "--out", str(out / "tuning.jsonl")]
    files = dict.fromkeys(str(path.relative_to(ROOT)) for each in run.files for path in sorted(ROOT.glob(each)))
    pytest = [*module, "pytest", "--show-capture=no", "--color=no", "-p", "no:cacheprovider", "--tb=short", *files]
    if not run.choice:
        workers = str(min(os.cpu_count() or 1, MOST_WORKERS))
        pytest.append("--benchmark-disable")  # pytest-benchmark warns where tests run in parallel
        return [*pytest, *(["-n", workers, "--dist", "loadgroup"] if importlib.util.find_spec("xdist") else [])]
    record = ["--record", str(out / "benchmarks.jsonl")]
    return [*pytest, "--benchmark-only", "--benchmark-columns=median", *record, "-k", run.choice]


def run_command(command: Sequence[str], seconds: float, log: Path, grace: float = GRACE, **environment: str) -> str:
    """Run a command and append its output to a log.

    After `seconds` the command is interrupted (SIGINT), so that it can write its results. After `grace` more seconds it
    is killed, and so are processes that it started. Return "done", "failed, exit code N" or "cut after N s".
    """
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": os.pathsep.join(paths)} | environment
    with log.open("ab") as file:
        file.write(f"\n===== {seconds:.0f} s at most: {' '.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        code = process.wait(seconds)
        return f"failed, exit code {code}" if code else "done"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        return f"cut after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(names: Sequence[str], out: Path) -> bool:
    """Do some runs one after another; print the state and the last line of each. Return whether all ended well."""
    passed = True
    for name in names:
        folder = out / name
        folder.mkdir(parents=True)
        begin, log = time.monotonic(), folder / "log.txt"
        # Without TRITON_INTERPRET=0, tests take a machine without /dev/nvidiactl for one without a GPU.
        state = run_command(command_of(name, folder), LIMIT, log, TRITON_INTERPRET="0")
        passed &= state == "done"
        last = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
        print(f"{name}: {state}, {time.monotonic() - begin:.0f} s; {last.strip('= ')}", flush=True)
        if name == "tests" and state != "done":
            print("nothing is measured after failed tests", flush=True)
            return False
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the runs."""
    parser = argparse.ArgumentParser("python -m benchmarks.lane", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: a new one, printed)")
    parser.add_argument("--only", metavar="NAME,...", help=f"some of the runs {', '.join(RUNS)}")
    options = parser.parse_args(arguments)
    try:
        commit = environment.commit()
        names = chosen_runs(options.only)
    except ValueError as error:
        parser.error(str(error))
    out = (options.out or Path(tempfile.mkdtemp(prefix="lane-"))).resolve()
    if existing := [str(out / name) for name in names if (out / name).exists()]:
        parser.error(f"--out: {existing[0]} exists; nothing there is overwritten")
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; `pytest benchmarks --benchmark-only --dry-run` checks the code without one")
    minutes = sum(RUNS[name].seconds for name in names) / 60
    print(f"{minutes:.1f} minutes for {', '.join(names)}; commit {commit}; results in {out}", flush=True)
    return 0 if run_all(names, out) else 1


if __name__ == "__main__":
    sys.exit(main())
