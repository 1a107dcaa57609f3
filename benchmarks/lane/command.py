"""Everything that waits for a GPU, in runs of minutes.

    python -m benchmarks.lane --only tests --out DIR       # then ops, training, models, compiled: `plan`
    python -m benchmarks.lane --minutes 9 --out DIR        # of everything what fits into 9 minutes
    python -m benchmarks.lane --only layer_norm            # some of the steps
    python -m benchmarks.lane --dry-run                    # proves this script on a CPU: tiny shapes, interpreter
    python -m benchmarks.report DIR NAME                   # all runs in DIR as one result

Works from a bare checkout, without installation or network. Steps go in the order of the plan, each in processes of its
own, which are killed together when they have used their time and what the earlier ones left over. Steps that do not fit
in are named before anything begins. All is written as it comes, so that a run that is cut keeps what it has, into the
folder DIR/WHAT, where WHAT is what `--only` says or "all":

- facts.json: machine, versions, ceilings
- log.txt: what the steps print
- benchmarks.jsonl: the rows
- tuning.jsonl and profile.txt
- summary.txt: what is printed at the end, 40 lines at most

Exit code: 1 if ours is wrong (a failed test or gate), 2 for arguments that cannot be, 0 otherwise. After failed tests
nothing is measured. Where the files have no git history, FASTFORMER_COMMIT says which commit they are.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, processes
from benchmarks.harness.processes import Outcome
from benchmarks.lane.plan import PLAN, chosen, fitting, has, step_of
from benchmarks.lane.step import GRACE, Gathered, LaneStep, run_step

LINES = 40  # of the summary
_STEP_LINES = 24  # of the summary
_SUMMARY_SECONDS = 8.0  # kept for the end
NO_GPU = 3  # exit code of benchmarks.lane.steps
# Variables of a dry run: no GPU, and the interpreter.
_DRY = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_ON_GPU = {"TRITON_INTERPRET": "0"}  # else tests take a machine without /dev/nvidiactl for one without a GPU
_OPTIONAL = ("pytest", "pytest_benchmark", "xdist", "matplotlib", "rich", "typer", "liger_kernel", "transformers")


def _without_summary(seconds: float) -> float:
    return seconds - min(_SUMMARY_SECONDS, 0.1 * seconds)


def run_all(
    steps: Sequence[LaneStep], seconds: float, out: Path, variables: dict[str, str], gathered: Gathered
) -> list[Outcome]:
    """Run the steps one after another within so many seconds; each has its own, and what the earlier ones left over."""
    end = time.monotonic() + _without_summary(seconds)
    outcomes: list[Outcome] = []
    wrong = ""  # the tests that failed
    for number, step in enumerate(steps):
        left = end - time.monotonic() - sum(later.seconds for later in steps[number + 1 :]) - GRACE
        missing = [name for name in step.needs if not has(name)]
        if missing:
            outcome = Outcome(step.name, f"left out: no {', '.join(missing)}")
        elif wrong and not step.is_test:
            outcome = Outcome(step.name, f"left out: {wrong} failed")
        elif left <= 0:
            outcome = Outcome(step.name, "left out: no time")
        else:
            outcome = run_step(step, left, out / "log.txt", variables, gathered)
            wrong = wrong or step.name * (outcome.wrong and step.is_test)
        outcomes.append(outcome)
        print(outcome, flush=True)
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
    from benchmarks.report import results, tables  # imports torch, which the steps before do not wait for

    groups: dict[tuple[str, str], list[Any]] = {}
    for row in results.read_run(path).rows:
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


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lane", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, help="all steps together (default: what the plan has for them)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: a new one, printed)")
    parser.add_argument("--only", metavar="NAME,...", help=f"runs ({', '.join(PLAN)}) or their steps")
    parser.add_argument("--dry-run", action="store_true", help="prove this script on a CPU with tiny shapes")
    options = parser.parse_args(arguments)
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes is {options.minutes:g}; allowed is more than 0")
    if options.out is not None:
        options.out = options.out.resolve()
        here = options.out / _name(options)
        if (options.out.exists() and not options.out.is_dir()) or (here.is_dir() and any(here.iterdir())):
            parser.error(f"--out: {here} is not an empty folder; nothing there is overwritten")
    return options


def _name(options: argparse.Namespace) -> str:
    return options.only or "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and print the summary."""
    options = _options(arguments)
    processes.exit_when_terminated()
    with tempfile.TemporaryDirectory() as scratch:
        part = Path(scratch) / "rows.jsonl"
        try:
            commit = environment.commit()
            asked = chosen(options.only, options.dry_run)
            out = (options.out or Path(tempfile.mkdtemp(prefix="lane-"))) / _name(options)
            # The grace is there beside, else the first step would have that much less than is kept for it.
            seconds = 60 * options.minutes if options.minutes else sum(asked.values()) + GRACE + _SUMMARY_SECONDS
            wanted = [step_of(name, kept, out, part, options.dry_run) for name, kept in asked.items()]
            steps = fitting(wanted, _without_summary(seconds))
            out.mkdir(parents=True, exist_ok=True)
            print(f"{seconds / 60:.1f} minutes; results in {out}, of commit {commit}")
            late = [Outcome(step.name, f"left out: no {step.seconds:.0f} s") for step in wanted if step not in steps]
            if late:
                print(f"no time for {', '.join(outcome.name for outcome in late)}")
            missing = [name for name in _OPTIONAL if not has(name)]
            if missing:
                print(f"not installed here, so left out where needed: {', '.join(missing)}")
            gathered = Gathered(out / "benchmarks.jsonl", part)
            outcomes = (
                run_all(steps, seconds, out, processes.variables(**(_DRY if options.dry_run else _ON_GPU)), gathered)
                + late
            )
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        recording = {step.name for step in wanted if step.records}
        gathered.finish([outcome.name for outcome in outcomes if outcome.name in recording and not outcome.ended])
    text = "\n".join(summary(outcomes, out))
    (out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if any(outcome.wrong for outcome in outcomes) else 0
