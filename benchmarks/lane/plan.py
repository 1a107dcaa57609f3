"""What `benchmarks.lane` runs: the steps of its runs, in the order of their worth, and the seconds kept for each."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.processes import ROOT
from benchmarks.lane.step import LaneStep

# Those that need a GPU, values with every backend, and of what is rarely used.
_TESTS = {
    "gpu-tests": ("test_gpu*.py", "test_transfers.py"),
    "fused-tests": ("test_fused_*.py",),
    "further-tests": ("test_attention_distances.py", "test_value_head_size.py", "test_tf32.py"),
}
# A container may name its host's cores; and of a GPU's 84 GB each worker takes 0.5 for its context and up to 4.5 for
# tensors, one of them 11 (tests of one `xdist_group` are one worker's): 77 in all.
_MOST_WORKERS = 14
_COMPILED = "compile or flex"  # competitors that torch.compile makes, for pytest's -k
_PROCESS = 15.0  # seconds that a process takes to begin and to end
_TUNING = 150.0
_DRY = ("facts", "gpu-tests", "fused-tests", "layer_norm", "profile", "tuning")  # steps that prove the others, too


def _kept(cases: int, each: float, kernels: int = 0) -> float:
    """Seconds: of a process, its cases, and kernels that nothing before has compiled."""
    return _PROCESS + cases * each + 1.5 * kernels


# Run -> step -> seconds. Estimates, none measured on a GPU. A case of an op takes 0.4 s: 30 rounds of both sides, each
# after 0.25 ms of flushes, products in fp64 for the gate, one in fp32 to know the clock by; more if calls take long.
PLAN: dict[str, dict[str, float]] = {
    "tests": {  # 7.5 minutes with the facts and the end; on all cores
        "gpu-tests": 120.0,  # 200 of them, some of a hundred training steps
        "fused-tests": 240.0,  # 1,300; 1,500 compilations, a third of them attention's, 1,500 to 2,100 s of a core
        "further-tests": 60.0,  # 180
    },
    "ops": {  # 8.7 minutes
        "layer_norm": _kept(54, 0.4, kernels=36),  # 9 shapes, forward and backward, ours and Liger-Kernel's
        "dropout_add_layer_norm": _kept(13, 0.4, kernels=16),  # of layer norm and RMS norm, and Liger-Kernel's
        "feed_forward": _kept(23, 1.5, kernels=6),  # up to 13 TFLOP in fp64
        "cross_entropy": _kept(31, 1.5, kernels=6),  # up to 5 TFLOP in fp64, and calls of up to 50 ms
        "ops-compiled": _kept(43, 5.0),
    },
    "positions": {  # 1.6 minutes
        "embedding": _kept(6, 0.4, kernels=2),
        "rotary": _kept(6, 0.4, kernels=3),
        "positions-compiled": _kept(2, 5.0),
    },
    "training": {  # 8.8 minutes
        "attention": _kept(320, 0.5, kernels=40),  # up to 16k tokens, forward, backward, both
        "training_step": _kept(20, 4.0, kernels=10),  # steps of 20 to 60 ms of host time, and captures
        "packing": _kept(30, 2.0),
        "decoding": _kept(16, 4.0, kernels=2),  # three searches of both sides, and captures
    },
    "models": {  # 9.4 minutes
        "multihead_attention": _kept(18, 0.5, kernels=4),
        "modules": _kept(12, 1.0, kernels=20),
        "integrations": _kept(3, 10.0, kernels=6),
        "language": _kept(1, 10.0),
        "generation": _kept(3, 15.0),  # a thousand words from the whole prefix
        "cached_decoding": _kept(2, 4.0),  # 512 steps of 0.4 ms, some ten times
        "scaling": _kept(16, 5.0),
        "profile": _kept(2, 7.0),
        "tuning": _PROCESS + _TUNING,
    },
    "compiled": {  # 9.1 minutes
        "attention-compiled": _kept(14, 9.0),  # flex_attention with backward
        "training_step-compiled": _kept(6, 60.0),  # a model of 6+6 layers with backward
    },
}


def has(module: str) -> bool:
    """It is installed."""
    return importlib.util.find_spec(module) is not None


def chosen(only: str | None, dry: bool) -> dict[str, float]:
    """LaneStep -> seconds, in the plan's order, of some runs or steps separated by commas; the facts are always there.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = [*PLAN] if only is None else only.split(",")
    every = {"facts": _PROCESS} | {name: seconds for steps in PLAN.values() for name, seconds in steps.items()}
    for name in wanted:
        if name not in PLAN and name not in every:
            raise ValueError(
                f"--only: unknown {name!r}; known runs: {', '.join(PLAN)}; known steps: {', '.join(every)}"
            )
    names = {"facts", *wanted}.union(*(PLAN[run] for run in wanted if run in PLAN))
    return {name: seconds for name, seconds in every.items() if name in names and (name in _DRY or not dry)}


def fitting(steps: Sequence[LaneStep], seconds: float) -> list[LaneStep]:
    """The steps, in order, that so many seconds have room for; what does not fit leaves its room to later ones."""
    found = []
    for step in steps:
        if step.seconds <= seconds:
            found.append(step)
            seconds -= step.seconds
    return found


def step_of(name: str, seconds: float, out: Path, part: Path, dry: bool) -> LaneStep:
    """A step of the plan.

    Args:
        name: of the plan, or "facts".
        seconds: that are kept for it.
        out: where results go.
        part: where benchmarks record a step's rows.
        dry: tiny shapes on a CPU.
    """
    module, flag = (sys.executable, "-m"), ("--dry-run",) if dry else ()
    if name in ("facts", "profile"):
        return LaneStep(name, (*module, "benchmarks.lane.steps", name, str(out), *flag), seconds)
    if name == "tuning":
        limits = ("--minutes", f"{_TUNING / 60:g}", "--out", str(out / "tuning.jsonl"))
        return LaneStep(name, (*module, "benchmarks.tuning", *limits, *flag), seconds)
    quiet = "--show-capture=no --color=no -p no:cacheprovider --durations=3 --tb=short"
    what = _tests(name, dry) if name in PLAN["tests"] else (*_race(name, dry), "--record", str(part), *flag)
    return LaneStep(name, (*module, "pytest", *quiet.split(), *what), seconds, proves=True, needs=("pytest",))


def _tests(name: str, dry: bool) -> tuple[str, ...]:
    """Files of tests, on all cores."""
    if name == "fused-tests" and dry:
        return "tests/kernels/test_fused_layer_norm.py", "-k", "value"
    found = [path for pattern in _TESTS[name] for path in (ROOT / "tests").rglob(pattern)]
    files = sorted(str(path.relative_to(ROOT)) for path in found)
    workers = str(min(os.cpu_count() or 1, _MOST_WORKERS))
    jobs = ("-n", workers, "--dist", "loadgroup") if has("xdist") and not dry else ()
    return *jobs, *(("-m", "gpu") if name == "gpu-tests" else ()), *files


def _race(name: str, dry: bool) -> tuple[str, ...]:
    """A benchmark without compiled competitors, or one or all of a run with these alone."""
    what, _, compiled = name.partition("-")
    files = [f"benchmarks/bench_{each}.py" for each in PLAN.get(what, [what]) if "-" not in each]
    if has("pytest_benchmark"):
        # Not --benchmark-disable-gc: it looks after what the plugin times, ours, while theirs would be collected for.
        files += ["--benchmark-only", "--benchmark-columns=median"]
    chosen = ("--competitor", "eager") if dry else ("-k", _COMPILED if compiled else f"not ({_COMPILED})")
    return *files, *chosen
