"""Everything that waits for a GPU in one command that fits a time limit.

    python -m benchmarks.lane --minutes 9 --out DIR
    python -m benchmarks.lane --dry-run                    # proves this script on a CPU: tiny shapes, interpreter
    python -m benchmarks.lane --only facts,layer_norm      # some of the steps

Runs from a bare checkout, without installation or network. Steps go in the order of their worth, each in processes of
its own, which are killed together at the step's share of the time that is left; what a step leaves over, the later ones
get. All is written as it comes, so that a run that is cut keeps what it has:

- facts.json: machine, versions, ceilings
- log.txt: what the steps print
- benchmarks.jsonl: the rows, for `python -m benchmarks.report benchmarks.jsonl NAME`
- tuning.jsonl and profile.txt
- summary.txt: what is printed at the end, 40 lines at most

Exit code: 1 if ours is wrong (a failed test or gate), 2 for arguments that cannot be, 0 otherwise. Where the files have
no git history, FASTFORMER_COMMIT says which commit they are.
"""

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.lane_process import GRACE, Gathered, Outcome, Step, run_step

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
LINES = 40  # of the summary
_ORDER = ("attention", "layer_norm", "cross_entropy", "feed_forward", "training_step", "decoding", "packing")
_STEP_LINES = 24  # of the summary
LEAST = 5.0  # seconds of a step, if they are left
_SUMMARY_SECONDS = 8.0  # kept for the end
NO_GPU = 3  # exit code of benchmarks.lane_steps
_TESTS = ("test_gpu*.py", "test_fused_*.py")  # those that need a GPU, and values with every backend
_OPTIONAL = ("pytest", "pytest_benchmark", "xdist", "matplotlib", "rich", "typer", "liger_kernel", "transformers")


def plan(out: Path, part: Path, dry: bool, minutes: float) -> list[Step]:
    """All steps in order.

    Args:
        out: where results go.
        part: where benchmarks record a step's rows.
        dry: tiny shapes on a CPU.
        minutes: of the whole run; tuning is told its share.
    """
    python, flag = sys.executable, ("--dry-run",) if dry else ()
    quiet = "--show-capture=no --color=no -p no:cacheprovider --durations=3 --tb=short"
    pytest = (python, "-m", "pytest", *quiet.split())
    jobs = ("-n", "4") if _has("xdist") and not dry else ()
    gpu_tests, fused = (sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob(name)) for name in _TESTS)
    if dry:
        fused = ["tests/test_fused_layer_norm.py", "-k", "value"]
    race = (*pytest, "--record", str(part), *flag)
    if _has("pytest_benchmark"):
        race += ("--benchmark-only", "--benchmark-columns=median", "--benchmark-disable-gc")
    files = _benchmarks()
    chosen = {name: path for name, path in files.items() if not dry or name == "layer_norm"}
    narrow = ("--competitor", "eager") if dry else ()
    here = (python, "-m")
    steps = [
        Step("facts", (*here, "benchmarks.lane_steps", "facts", str(out), *flag), 8),
        Step("gpu-tests", (*pytest, "-m", "gpu", *jobs, *gpu_tests), 12, True, ("pytest",)),
        Step("fused-tests", (*pytest, *jobs, *fused), 12, True, ("pytest",)),
        Step("quick", (*race, "-k", "quick", *narrow, *chosen.values()), 25, True, ("pytest",)),
    ]
    weights = dict.fromkeys(_ORDER, 6.0) | {"attention": 12.0}
    steps += [
        Step(name, (*race, *narrow, path), weights.get(name, 3.0), True, ("pytest",)) for name, path in chosen.items()
    ]
    tuning = ("benchmarks.tuning", "--minutes", f"{minutes / 8:.2f}", "--out", str(out / "tuning.jsonl"))
    steps.append(Step("tuning", (*here, *tuning, *flag), 8, needs=("benchmarks/tuning.py",)))
    steps.append(Step("profile", (*here, "benchmarks.lane_steps", "profile", str(out), *flag), 4))
    return steps


def _benchmarks() -> dict[str, str]:
    """Name -> file, by value."""
    files = {path.stem.removeprefix("bench_"): str(path.relative_to(ROOT)) for path in sorted(HERE.glob("bench_*.py"))}
    return {name: files[name] for name in [*(n for n in _ORDER if n in files), *(n for n in files if n not in _ORDER)]}


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run_all(
    steps: Sequence[Step], seconds: float, out: Path, environment: Mapping[str, str], gathered: Gathered
) -> list[Outcome]:
    """Run the steps one after another within so many seconds."""
    end = time.monotonic() + seconds - min(_SUMMARY_SECONDS, 0.1 * seconds)
    outcomes: list[Outcome] = []
    quick_done = False
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        for number, step in enumerate(steps):
            left = end - time.monotonic() - GRACE
            missing = [name for name in step.needs if not (_has(name) if "/" not in name else (ROOT / name).is_file())]
            if missing:
                outcome = Outcome(step.name, f"left out: no {', '.join(missing)}")
            elif left < 1:
                outcome = Outcome(step.name, "left out: no time")
            else:
                if quick_done and step.records:  # those cases are recorded
                    step = Step(step.name, (*step.command, "-k", "not quick"), step.weight, step.proves, step.needs)
                share = step.weight / sum(other.weight for other in steps[number:])
                # Most steps end before their time, so each may take twice its share.
                outcome = run_step(step, min(left, max(2 * share * left, LEAST)), log, environment, gathered)
                quick_done |= step.name == "quick" and outcome.state.startswith("done")
            outcomes.append(outcome)
            print(f"{step.name}: {outcome.state}, {outcome.seconds:.0f} s", flush=True)
            if step.name == "facts":
                if outcome.state == f"failed, exit code {NO_GPU}":
                    raise ValueError("no CUDA device here; --dry-run proves this script without one")
                gathered.ceilings = _facts(out).get("ceilings", {})
    return outcomes


def _facts(out: Path) -> dict[str, Any]:
    path = out / "facts.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def summary(outcomes: Sequence[Outcome], out: Path) -> list[str]:
    """At most 40 lines: the machine, the steps, then the ratios by benchmark and competitor, missed goals first."""
    machine = _facts(out).get("machine", {})
    lines = [", ".join(f"{key} {machine[key]}" for key in ("gpu", "torch", "triton", "commit") if key in machine)]
    width = max((len(outcome.name) for outcome in outcomes), default=0)
    # The least telling ones make room: those that are done.
    shown = sorted(outcomes, key=lambda outcome: outcome.state.startswith("done"))[:_STEP_LINES]
    for outcome in [outcome for outcome in outcomes if outcome in shown]:
        lines.append(f"{outcome.name:<{width}}  {outcome.seconds:>4.0f} s  {outcome.state}")
    if len(shown) < len(outcomes):
        lines.append(f"and {len(outcomes) - len(shown)} more steps, done")
    ratios = _ratio_lines(out / "benchmarks.jsonl")
    room = LINES - len(lines)
    if len(ratios) > room:
        ratios = [*ratios[: room - 1], f"and {len(ratios) - room + 1} more in benchmarks.jsonl"]
    return [*lines, *ratios]


def _ratio_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    from benchmarks import runs, tables  # imports torch, which the steps before do not wait for

    groups: dict[tuple[str, str], list[Any]] = {}
    for row in runs.read_run(path).rows:
        groups.setdefault((row.benchmark, row.against), []).append(row)
    lines = []
    for (benchmark, against), rows in groups.items():
        ratios = [row.ratio for row in rows if row.ratio is not None]
        text = f"{f'{benchmark} / {against}':<44.44}"
        if ratios:
            text += (
                f" mean {tables.geometric_mean(ratios):6.2f}  worst {min(ratios):6.2f}  goals {tables.goals_held(rows)}"
            )
        else:
            text += f" {rows[0].status[:60]}"
        missed = sum(row.missed for row in rows)
        lines.append((not missed, text + ("  MISSED" if missed else "")))
    return [text for _, text in sorted(lines, key=lambda line: line[0])]


def _environment(dry: bool) -> dict[str, str]:
    """The children's: our packages found where they are; for a dry run no GPU, and the interpreter."""
    found = dict(os.environ)
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [found.get("PYTHONPATH")])]
    found |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if dry:
        found |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lane", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="all steps together (default: 9)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: a new one, which is printed)")
    parser.add_argument("--only", metavar="STEP,...", help="some of the steps")
    parser.add_argument("--dry-run", action="store_true", help="prove this script on a CPU with tiny shapes")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes is {options.minutes:g}; allowed is more than 0")
    if options.out is not None and options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        parser.error(f"--out: {options.out} is not an empty folder; nothing there is overwritten")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and print the summary."""
    options = _options(arguments)
    out = Path(tempfile.mkdtemp(prefix="lane-")) if options.out is None else options.out.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        part = Path(scratch) / "rows.jsonl"
        steps = plan(out, part, options.dry_run, options.minutes)
        if options.only is not None:
            known, wanted = [step.name for step in steps], options.only.split(",")
            for name in wanted:
                if name not in known:
                    print(f"error: --only: unknown step {name!r}; known: {', '.join(known)}", file=sys.stderr)
                    return 2
            steps = [step for step in steps if step.name in wanted]
        out.mkdir(parents=True, exist_ok=True)
        print(f"results in {out}")
        missing = [name for name in _OPTIONAL if not _has(name)]
        if missing:
            print(f"not installed here, so left out where needed: {', '.join(missing)}")
        signal.signal(signal.SIGTERM, _terminated)
        gathered = Gathered(out / "benchmarks.jsonl", part)
        try:
            outcomes = run_all(steps, 60 * options.minutes, out, _environment(options.dry_run), gathered)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        recording = {step.name for step in steps if step.records}
        gathered.finish([outcome.name for outcome in outcomes if outcome.name in recording and not outcome.ended])
    text = "\n".join(summary(outcomes, out))
    (out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
