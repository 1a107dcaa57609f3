"""Run all measurements on a GPU, in runs of minutes.

    python -m benchmarks.lane --only tests --out DIR       # then ops, positions, training, models, compiled
    python -m benchmarks.lane --only layer_norm,tuning     # single steps
    python -m benchmarks.report DIR NAME                   # all runs in DIR as one result

Works from a bare checkout. Each step is a process; its time limit is what is left of the run less the seconds of later
steps. Results of a run go into the new folder DIR/RUN as they are measured: benchmarks-STEP.jsonl, tuning.jsonl,
profiles of training steps, and log.txt with the output of the steps. After a failed or cut test step nothing is
measured.

Exit code: 1 if a step failed or was cut, 2 for invalid arguments, else 0. Without a git history FASTFORMER_COMMIT names
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

import torch

from benchmarks.harness import environment

ROOT = Path(__file__).resolve().parents[1]
GRACE = 5.0  # seconds between interrupting a step and killing it
TESTS = {
    "gpu-tests": ("gpu/test_*.py", "test_devices.py"),
    "fused-tests": ("test_fused_*.py",),
    "further-tests": ("test_attention_options.py", "test_tf32.py"),
}
# On a GPU of 84 GB each worker takes 0.5 GB for its context and up to 4.5 for tensors, one of them 11: 77 GB in all.
MOST_WORKERS = 14
COMPILED = "compile or flex"  # competitors that torch.compile makes, for pytest's -k
TUNING_MINUTES = 2.5
# Run -> step -> seconds. Estimates, not measured on a GPU: 15 for the process, 0.4 a case of an op (30 rounds of both
# sides, each after 0.25 ms of cache flushes, products in fp64 for the gate, one in fp32 for the record; more if calls
# are long), 1.5 a kernel that nothing compiled before, 5 a case that torch.compile compiles.
PLAN: dict[str, dict[str, float]] = {
    "tests": {"gpu-tests": 120, "fused-tests": 240, "further-tests": 60},  # on all cores
    "ops": {
        "layer_norm": 135,  # 75 cases, 50 kernels of ours and Liger-Kernel's
        "feed_forward": 59,  # up to 13 TFLOP in fp64
        "cross_entropy": 71,  # up to 5 TFLOP in fp64, and calls of up to 50 ms
        "ops-compiled": 230,
    },
    "positions": {"positions": 42, "positions-compiled": 25},
    "training": {
        "attention": 235,  # 320 cases up to 16k tokens, 40 kernels
        "training_step": 120,  # steps of 20 to 60 ms of host time, captures, profiles
        "packing": 75,
        "decoding": 82,  # three searches of both sides, and captures
    },
    "models": {
        "multihead_attention": 30,
        "modules": 57,
        "integrations": 63,
        "language": 25,
        "generation": 60,  # a thousand words from the whole prefix
        "cached_decoding": 23,  # 512 steps of 0.4 ms, some ten times
        "scaling": 95,
        "tuning": 15 + 60 * TUNING_MINUTES,
    },
    "compiled": {
        "attention-compiled": 141,  # flex_attention with backward
        "training_step-compiled": 375,  # a model of 6+6 layers with backward takes a minute to compile
    },
}


def chosen_steps(only: str | None) -> dict[str, float]:
    """Return the seconds of the steps of some runs, or of some steps, in the order of the plan."""
    names = {*PLAN} if only is None else {*only.split(",")}
    every = {step: seconds for steps in PLAN.values() for step, seconds in steps.items()}
    if unknown := sorted(names - {*PLAN, *every}):
        raise ValueError(f"--only: unknown {unknown[0]!r}; known runs: {', '.join(PLAN)}; steps: {', '.join(every)}")
    chosen = names.union(*(PLAN[name] for name in names if name in PLAN))
    return {step: seconds for step, seconds in every.items() if step in chosen}


def command_of(step: str, out: Path) -> list[str]:
    """Return the command of a step whose results go into a folder."""
    module = [sys.executable, "-m"]
    if step == "tuning":
        return [*module, "benchmarks.tuning", "--minutes", str(TUNING_MINUTES), "--out", str(out / "tuning.jsonl")]
    pytest = [*module, "pytest", "--show-capture=no", "--color=no", "-p", "no:cacheprovider", "--tb=short"]
    if step in TESTS:
        files = {path for pattern in TESTS[step] for path in (ROOT / "tests").rglob(pattern)}
        workers = str(min(os.cpu_count() or 1, MOST_WORKERS))
        jobs = ["-n", workers, "--dist", "loadgroup"] if importlib.util.find_spec("xdist") else []
        marked = ["-m", "gpu"] * (step == "gpu-tests")
        return [*pytest, *jobs, *marked, *sorted(str(path.relative_to(ROOT)) for path in files)]
    run, _, compiled = step.partition("-")
    files_of_run = [f"benchmarks/bench_{each}.py" for each in PLAN.get(run, [run]) if "-" not in each]
    options = ["--benchmark-only", "--benchmark-columns=median", "--record", str(out / f"benchmarks-{step}.jsonl")]
    options += ["-k", COMPILED if compiled else f"not ({COMPILED})"]
    options += ["--profile", str(out / "profiles")] if step == "training_step" else []
    return [*pytest, *files_of_run, *options]


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


def run_steps(steps: dict[str, float], out: Path) -> bool:
    """Run the steps one after another; print the state and the last line of each. Return whether all ended well."""
    left, log = 0.0, out / "log.txt"  # seconds that earlier steps did not need
    passed = tests_passed = True
    for step, seconds in steps.items():
        if not tests_passed and step not in TESTS:
            print(f"{step}: left out, tests failed", flush=True)
            continue
        begin = time.monotonic()
        limit = max(1.0, seconds + left)
        # Without TRITON_INTERPRET=0, tests take a machine without /dev/nvidiactl for one without a GPU.
        state = run_command(command_of(step, out), limit, log, TRITON_INTERPRET="0")
        passed &= state == "done"
        tests_passed &= state == "done" or step not in TESTS
        last = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
        needed = time.monotonic() - begin
        left += seconds - needed
        print(f"{step}: {state}, {needed:.0f} s; {last.strip('= ')}", flush=True)
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser("python -m benchmarks.lane", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: a new one, printed)")
    parser.add_argument("--only", metavar="NAME,...", help=f"runs ({', '.join(PLAN)}) or their steps")
    options = parser.parse_args(arguments)
    try:
        commit = environment.commit()
        steps = chosen_steps(options.only)
    except ValueError as error:
        parser.error(str(error))
    out = (options.out or Path(tempfile.mkdtemp(prefix="lane-"))).resolve() / (options.only or "all")
    if out.exists():
        parser.error(f"--out: {out} exists; nothing there is overwritten")
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; `pytest benchmarks --benchmark-only --dry-run` checks the code without one")
    out.mkdir(parents=True)
    minutes = sum(steps.values()) / 60
    print(f"{minutes:.1f} minutes for {', '.join(steps)}; commit {commit}; results in {out}", flush=True)
    return 0 if run_steps(steps, out) else 1


if __name__ == "__main__":
    sys.exit(main())
