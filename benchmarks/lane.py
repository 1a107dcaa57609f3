"""Run everything that waits for a GPU, in runs of minutes.

    python -m benchmarks.lane --only tests --out DIR       # then ops, positions, training, models, compiled
    python -m benchmarks.lane --minutes 9 --out DIR        # the steps that fit into 9 minutes
    python -m benchmarks.lane --only layer_norm,profile    # single steps
    python -m benchmarks.lane --dry-run                    # checks this script on a CPU: tiny shapes, interpreter
    python -m benchmarks.report DIR NAME                   # all runs in DIR as one result

Works from a bare checkout. Each step is a process with a time limit: its own seconds and what earlier steps left over.
Results of a run go into the new folder DIR/RUN as they are measured: benchmarks-STEP.jsonl, tuning.jsonl, profile.txt,
and log.txt with the output of the steps. After a failed test step nothing is measured.

Exit code: 1 if a test or a correctness gate failed, 2 for invalid arguments, else 0. Without a git history
FASTFORMER_COMMIT names the commit of the files.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import environment

ROOT = Path(__file__).resolve().parents[1]
GRACE = 5.0  # seconds between interrupting a step and killing it
TESTS = {
    "gpu-tests": ("gpu/test_*.py", "test_transfers.py"),
    "fused-tests": ("test_fused_*.py",),
    "further-tests": ("test_attention_distances.py", "test_value_head_size.py", "test_tf32.py"),
}
# A container may report the cores of its host. On a GPU of 84 GB each worker takes 0.5 GB for its context and up to 4.5
# for tensors, one of them 11 (tests of one `xdist_group` run in one worker): 77 GB in all.
MOST_WORKERS = 14
COMPILED = "compile or flex"  # competitors that torch.compile makes, for pytest's -k
TUNING_SECONDS = 150.0
DRY_STEPS = ("gpu-tests", "fused-tests", "layer_norm", "profile", "tuning")  # one of each kind


def _seconds(cases: int, each: float, kernels: int = 0) -> float:
    """Return the seconds of a process (15), its cases, and kernels that nothing compiled before."""
    return 15.0 + cases * each + 1.5 * kernels


# Run -> step -> seconds. Estimates, not measured on a GPU. A case of an op takes 0.4 s: 30 rounds of both sides, each
# after 0.25 ms of cache flushes, products in fp64 for the gate, one in fp32 for the record; more if calls are long.
PLAN: dict[str, dict[str, float]] = {
    "tests": {  # 7 minutes; on all cores
        "gpu-tests": 120.0,  # 200 tests, some of a hundred training steps
        "fused-tests": 240.0,  # 1,300 tests; 1,500 compilations, a third of attention: 1,500 to 2,100 s of a core
        "further-tests": 60.0,  # 180 tests
    },
    "ops": {  # 8.4 minutes
        "layer_norm": _seconds(54, 0.4, kernels=36),  # 9 shapes, forward and backward, ours and Liger-Kernel's
        "dropout_add_layer_norm": _seconds(13, 0.4, kernels=16),
        "feed_forward": _seconds(23, 1.5, kernels=6),  # up to 13 TFLOP in fp64
        "cross_entropy": _seconds(31, 1.5, kernels=6),  # up to 5 TFLOP in fp64, and calls of up to 50 ms
        "ops-compiled": _seconds(43, 5.0),
    },
    "positions": {  # 1.4 minutes
        "embedding": _seconds(6, 0.4, kernels=2),
        "rotary": _seconds(6, 0.4, kernels=3),
        "positions-compiled": _seconds(2, 5.0),
    },
    "training": {  # 8.5 minutes
        "attention": _seconds(320, 0.5, kernels=40),  # up to 16k tokens, forward, backward, both
        "training_step": _seconds(20, 4.0, kernels=10),  # steps of 20 to 60 ms of host time, and captures
        "packing": _seconds(30, 2.0),
        "decoding": _seconds(16, 4.0, kernels=2),  # three searches of both sides, and captures
    },
    "models": {  # 9.1 minutes
        "multihead_attention": _seconds(18, 0.5, kernels=4),
        "modules": _seconds(12, 1.0, kernels=20),
        "integrations": _seconds(3, 10.0, kernels=6),
        "language": _seconds(1, 10.0),
        "generation": _seconds(3, 15.0),  # a thousand words from the whole prefix
        "cached_decoding": _seconds(2, 4.0),  # 512 steps of 0.4 ms, some ten times
        "scaling": _seconds(16, 5.0),
        "profile": _seconds(1, 10.0),
        "tuning": 15.0 + TUNING_SECONDS,
    },
    "compiled": {  # 8.8 minutes
        "attention-compiled": _seconds(14, 9.0),  # flex_attention with backward
        "training_step-compiled": _seconds(6, 60.0),  # a model of 6+6 layers with backward
    },
}


def chosen_steps(only: str | None, dry: bool) -> dict[str, float]:
    """Return the seconds of the steps of some runs, or of some steps, in the order of the plan.

    Raises:
        ValueError: a name is unknown.
    """
    names = [*PLAN] if only is None else only.split(",")
    every = {step: seconds for steps in PLAN.values() for step, seconds in steps.items()}
    if unknown := [name for name in names if name not in PLAN and name not in every]:
        raise ValueError(f"--only: unknown {unknown[0]!r}; known runs: {', '.join(PLAN)}; steps: {', '.join(every)}")
    chosen = {*names}.union(*(PLAN[name] for name in names if name in PLAN))
    return {step: every[step] for step in every if step in chosen and (step in DRY_STEPS or not dry)}


def command_of(step: str, out: Path, dry: bool) -> list[str]:
    """Return the command of a step whose results go into a folder."""
    module, flag = [sys.executable, "-m"], ["--dry-run"] if dry else []
    if step == "profile":
        return [*module, "benchmarks.host", "--profile", str(out / "profile.txt"), *flag]
    if step == "tuning":
        limits = ["--minutes", f"{TUNING_SECONDS / 60:g}", "--out", str(out / "tuning.jsonl")]
        return [*module, "benchmarks.tuning", *limits, *flag]
    pytest = [
        *module,
        "pytest",
        *["--show-capture=no", "--color=no", "-p", "no:cacheprovider", "--durations=3", "--tb=short"],
    ]
    if step in TESTS:
        return pytest + _test_files(step, dry)
    run, _, compiled = step.partition("-")
    files = [f"benchmarks/bench_{each}.py" for each in PLAN.get(run, [run]) if "-" not in each]
    chosen = ["--competitor", "eager"] if dry else ["-k", COMPILED if compiled else f"not ({COMPILED})"]
    record = ["--record", str(out / f"benchmarks-{step}.jsonl")]
    return [*pytest, *files, "--benchmark-only", "--benchmark-columns=median", *chosen, *record, *flag]


def _test_files(step: str, dry: bool) -> list[str]:
    """Return pytest's arguments for a step of tests, on all cores."""
    if dry and step == "fused-tests":
        return ["tests/kernels/test_fused_norms.py", "-k", "value"]
    files = {path for pattern in TESTS[step] for path in (ROOT / "tests").rglob(pattern)}
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    parallel = importlib.util.find_spec("xdist") is not None and not dry
    jobs = ["-n", str(workers), "--dist", "loadgroup"] if parallel else []
    return jobs + ["-m", "gpu"] * (step == "gpu-tests") + sorted(str(path.relative_to(ROOT)) for path in files)


def _pytest_counts(log: Path, begin: int) -> str:
    """Return the counts in pytest's last line, such as "1 failed, 5 passed"."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if re.search(r"\d+ (?:failed|errors?|passed|skipped)\b.* in ", line)]
    return lines[-1].strip("= ") if lines else ""


def run_command(command: Sequence[str], seconds: float, log: Path, grace: float = 5.0, **environment: str) -> str:
    """Run a command and append its output to a log.

    After `seconds` the command is interrupted (SIGINT), so that it can write its results. After `grace` more seconds it
    is killed. Processes that it started are killed with it. Interpreters find the packages of this checkout.

    Returns:
        "done", "failed, exit code N" or "cut after N s".
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


def run_steps(steps: dict[str, float], seconds: float, out: Path, dry: bool) -> bool:
    """Run the steps one after another; print the state of each. Return whether all tests and gates passed."""
    # Without TRITON_INTERPRET=0, tests take a machine without /dev/nvidiactl for one without a GPU.
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if dry else {"TRITON_INTERPRET": "0"}
    end, log = time.monotonic() + seconds, out / "log.txt"
    log.touch()
    passed = tests_passed = True
    waiting = dict(steps)
    for step, own in steps.items():
        del waiting[step]
        left = end - time.monotonic() - GRACE
        later = sum(other for other in waiting.values() if other <= left - own)
        if not tests_passed and step not in TESTS:
            print(f"{step}: left out, tests failed", flush=True)
        elif left < own:
            print(f"{step}: left out, {left:.0f} s were left", flush=True)
        else:
            begin, place = time.monotonic(), log.stat().st_size
            command = command_of(step, out, dry)
            state = run_command(command, max(own, left - later), log, GRACE, **environment)
            counts = _pytest_counts(log, place) if "pytest" in command else ""
            good = state == "done" or state.endswith("exit code 5") or (state[:3] == "cut" and "failed" not in counts)
            passed &= good or "pytest" not in command
            tests_passed &= step not in TESTS or good
            print(f"{step}: {state}, {time.monotonic() - begin:.0f} s; {counts}", flush=True)
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser("python -m benchmarks.lane", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, help="all steps together (default: the seconds of the plan)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: a new one, printed)")
    parser.add_argument("--only", metavar="NAME,...", help=f"runs ({', '.join(PLAN)}) or their steps")
    parser.add_argument("--dry-run", action="store_true", help="check this script on a CPU with tiny shapes")
    options = parser.parse_args(arguments)
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes is {options.minutes:g}; allowed is more than 0")
    try:
        commit = environment.commit()
        steps = chosen_steps(options.only, options.dry_run)
    except ValueError as error:
        parser.error(str(error))
    out = (options.out or Path(tempfile.mkdtemp(prefix="lane-"))).resolve() / (options.only or "all")
    if out.exists():
        parser.error(f"--out: {out} exists; nothing there is overwritten")
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            parser.error("no CUDA device here; --dry-run checks this script without one")
    out.mkdir(parents=True)
    seconds = 60 * options.minutes if options.minutes else sum(steps.values()) + GRACE + len(steps)
    print(f"{seconds / 60:.1f} minutes for {', '.join(steps)}; commit {commit}; results in {out}", flush=True)
    return 0 if run_steps(steps, seconds, out, options.dry_run) else 1


if __name__ == "__main__":
    sys.exit(main())
