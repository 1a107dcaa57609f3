"""Recipes trained for several seeds under a time limit, with the result of each written when it is known.

    python -m benchmarks.recipes --recipe recipes/multi30k-en-de-gpu.toml --data FOLDER --minutes 9 --out DIR
    python -m benchmarks.recipes --recipe recipes/*-gpu.toml --data FOLDER --dry-run       # tiny models, on a CPU

FOLDER holds the published files of the dataset, or folders that do. Runs from a bare checkout, without installation or
network. Each seed is a process of its own (`seed`), one after another or `--at-once` so many; on a GPU
a short run before the first fills the cache of compiled kernels, which the first seed's clock would otherwise pay for.
A seed is not begun when less time is left than its recipe's budget. What runs when the time is up is interrupted,
evaluated as it is if it can be, and killed. Into DIR:

- record.jsonl: for each seed machine, versions, commit, settings, times, speed, memory, validations, scores, goals
- translations.jsonl: those of the test set
- log.txt: what the runs print; summary.txt: the table that is printed at the end

The same command again, with the same DIR, goes on with the seeds that are not done. Exit code: 1 if a run failed, 2 for
arguments that cannot be, 0 otherwise, goals held or not. Where the files have no git history, FASTFORMER_COMMIT says
which commit they are.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import environment
from benchmarks.harness.processes import POLL, Command, Outcome, Process, exit_when_terminated, variables
from benchmarks.recipes.table import RECORD, read_rows, table

GRACE = 25.0  # seconds from the interruption of what still runs to its end
# Module -> distribution: what trains and scores, and does not come with torch.
_NEEDED = {
    "numpy": "numpy", "sacrebleu": "sacrebleu", "safetensors": "safetensors", "sentencepiece": "sentencepiece",
    "tomli_w": "tomli-w",
}  # fmt: skip


def run_all(steps: Sequence[Command], seconds: float, at_once: int, log: Path) -> list[Outcome]:
    """Run the steps within so many seconds, and give back what became of them."""
    grace = min(GRACE, 0.2 * seconds)
    end = time.monotonic() + seconds - grace
    waiting, outcomes = list(steps), list[Outcome]()
    running: list[Process] = []
    try:
        while waiting or running:
            ended: list[Outcome] = []
            while waiting and len(running) < at_once and not _in_the_way(waiting[0], running):
                step, left = waiting.pop(0), end - time.monotonic()
                if left <= 0 or left + grace < step.seconds:
                    ended.append(Outcome(step.name, f"left out: {left + grace:.0f} s were left"))
                else:
                    running.append(Process(step, left, grace, log, variables()))
                    print(f"{step.name}: begun, {left + grace:.0f} s left", flush=True)
            time.sleep(POLL)
            for process in [*running]:
                if (outcome := process.poll()) is not None:
                    running.remove(process)
                    ended.append(outcome)
            for outcome in ended:
                print(outcome, flush=True)
            outcomes += ended
    finally:
        for process in running:
            process.end()
    return outcomes


def _in_the_way(step: Command, running: Iterable[Process]) -> bool:
    """It must wait for those that run."""
    return any(step.alone or other.command.alone for other in running)


def _check_modules(modules: Mapping[str, str]) -> None:
    missing = [distribution for module, distribution in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(f"not installed here: {', '.join(missing)} (pip install {' '.join(missing)})")


def _change(text: str) -> tuple[str, str, Any]:
    place, equals, value = text.partition("=")
    section, dot, name = place.strip().partition(".")
    if not (equals and dot and name) or section not in ("data", "model", "train"):
        raise argparse.ArgumentTypeError(f"{text!r} is not data.NAME=VALUE, model.NAME=VALUE or train.NAME=VALUE")
    try:
        return section, name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return section, name, value.strip()


def _numbers(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different whole numbers such as 1,2,3")
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--recipe", type=Path, nargs="+", required=True, help="TOML files as `fastformer train --config` takes them")
    add("--data", type=Path, help="folder of the datasets' published files")
    add("--seeds", type=_numbers, default=[1, 2, 3], metavar="N,...", help="default: 1,2,3")
    add("--minutes", type=float, default=9.0, help="of all together (default: 9)")
    add("--at-once", type=int, default=1, metavar="N", help="processes at a time; their times are then no lone run's")
    add("--out", type=Path, help="folder of the results (default: a new one, which is printed)")
    add("--runs", type=Path, help="folder of data and run folders (default: a new temporary one, which is kept)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where there is one")
    add("--beam", type=int, default=5, help="of the test set's translation (default: 5)")
    add("--set", type=_change, action="append", default=[], metavar="SECTION.NAME=VALUE", help="another setting")
    add("--no-warm-up", dest="warm_up", action="store_false", help="let the first seed pay for compilation")
    add("--dry-run", action="store_true", help="prove this command and the recipes on a CPU: tiny models, four steps")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes is {options.minutes:g}; allowed is more than 0")
    for name in ("at_once", "beam"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; allowed is 1 and more")
    for name in ("out", "runs"):
        path = getattr(options, name)
        if path is not None and path.exists() and not path.is_dir():
            parser.error(f"--{name}: {path} is no folder")
    options.change = {}
    for section, name, value in options.set:
        options.change.setdefault(section, {})[name] = value
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done yet, and print the table."""
    begin = time.monotonic()
    options = _options(arguments)
    exit_when_terminated()
    try:
        _check_modules(_NEEDED)
        environment.commit()
        import torch

        if options.device == "auto":
            options.device = "cuda" if torch.cuda.is_available() and not options.dry_run else "cpu"
        out, runs = (
            Path(tempfile.mkdtemp(prefix=f"recipes-{name}-")) if path is None else path.resolve()
            for name, path in (("out", options.out), ("runs", options.runs))
        )
        for folder in (out, runs):
            folder.mkdir(parents=True, exist_ok=True)
        print(f"results in {out}, runs in {runs}, on {options.device}", flush=True)
        from benchmarks.recipes.plan import steps_of

        steps = steps_of(options, out, runs)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    try:
        outcomes = run_all(steps, 60 * options.minutes - (time.monotonic() - begin), options.at_once, out / "log.txt")
    except KeyboardInterrupt:
        return 130
    troubles = [str(outcome) for outcome in outcomes if outcome.state != "done"]
    text = "\n".join([*table(read_rows(out / RECORD)), *troubles])
    (out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if any(outcome.state.startswith("failed") for outcome in outcomes) else 0
