"""Time the tile that each kernel takes against its neighbours, on a GPU.

python -m benchmarks.tuning --minutes 2 --out tuning.jsonl      # as many cases as fit, the most important first
python -m benchmarks.tuning --only 'attention*' --write-tiles   # some kernels; the library then takes the fastest tiles
TRITON_INTERPRET=1 python -m benchmarks.tuning --dry-run        # checks the code without a GPU

For each case of `benchmarks.tuning.cases` the configuration that the library chooses is timed in turn with each of its
neighbours, as CUDA graphs, so that the host does not count. A ratio is the median of chosen / neighbour. Configurations
that do not compile, do not fit or compute something else are recorded as such.

Compiling takes longer than timing: other processes compile the configurations of a few cases into Triton's cache on
disk while this one waits.
"""

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from benchmarks.harness import environment
from benchmarks.harness.clock import Call, Stopwatch
from benchmarks.harness.race import relative_error
from benchmarks.tuning.cases import Config, Kernel, TunedKernel, find_cases
from fastformer_kernels.attention.tiles import MEASURED, measured

FORMAT = 2  # of the file; raised when its fields change
ROUNDS = 15
FASTER = 1.03  # ratio above which another tile replaces the chosen one
TOLERANCE = 1e-2  # bf16 rounds to 4e-3, and another tile adds in another order
DRY_NEIGHBOURS = 2  # of each case, in a dry run
_MOST_WORKERS = 12
_TOGETHER = 5  # cases whose configurations are compiled at once: some 60, which keep the workers busy


@dataclass(frozen=True)
class Trial:
    """One configuration beside the chosen one; times in seconds, `ratio` = chosen / this, None where not timed."""

    kernel: str
    shape: str
    chosen: Config
    config: Config
    status: str  # measured, dry run, or why it was not timed
    seconds: float | None = None
    ratio: float | None = None
    key: str = ""  # of an attention kernel's calls (`Call.key`)


class DeviceLostError(Exception):
    """A configuration broke the CUDA context: nothing can run in this process any more."""


class Sweep:
    """Measures cases until a moment of `time.monotonic`; `tiny`: runs everything once and times nothing."""

    def __init__(
        self, watch: Stopwatch, deadline: float, pool: ProcessPoolExecutor | None = None, *, tiny: bool = False
    ) -> None:
        self.watch, self.deadline, self.pool, self.tiny = watch, deadline, pool, tiny

    def run(self, cases: Sequence[tuple[int, TunedKernel]]) -> Iterator[Trial]:
        """Measure all cases, a few of them compiled at a time."""
        self._compile([(index, None) for index, _ in cases])
        for start in range(0, len(cases), _TOGETHER):
            configs: list[tuple[int, Config | None]] = []
            planned: list[tuple[TunedKernel, Kernel, Config, list[Config]]] = []
            for index, case in cases[start : start + _TOGETHER]:
                try:
                    if time.monotonic() >= self.deadline:
                        raise TimeoutError("no time left")
                    call = case.prepare(self.watch.device)
                    chosen = case.chosen(call)
                except Exception as error:
                    self._check_device(error)
                    yield Trial(case.kernel, case.shape, {}, {}, _status(error))
                    continue
                others = case.others(chosen)[: DRY_NEIGHBOURS if self.tiny else None]
                configs += [(index, config) for config in others]
                planned.append((case, call, chosen, others))
            self._compile(configs)
            for plan in planned:
                yield from self.case(*plan)

    def case(self, case: TunedKernel, call: Kernel, chosen: Config, others: Sequence[Config]) -> Iterator[Trial]:
        """Measure the configurations of a case, one after another."""
        expected, key = case.run(call, chosen), case.key(call)
        base = self._graph(case, call, chosen)
        for config in others:
            status, seconds, ratio = "dry run" if self.tiny else "measured", None, None
            try:
                if time.monotonic() >= self.deadline:
                    raise TimeoutError("no time left")
                _compare(case.run(call, config), expected)
                if not self.tiny:
                    seconds, ratio = self.time_pair(base, self._graph(case, call, config))
            except Exception as error:  # whatever a compiler or a driver raises
                self._check_device(error)
                status = _status(error)
            yield Trial(case.kernel, case.shape, chosen, config, status, seconds, ratio, key)

    def time_pair(self, base: Call, other: Call) -> tuple[float, float]:
        """Return the seconds of the other call, and the median of base / other."""
        pairs = [(self.watch(base), self.watch(other)) for _ in range(ROUNDS)]
        return statistics.median(b for _, b in pairs), statistics.median(a / max(b, 1e-9) for a, b in pairs)

    def _graph(self, case: TunedKernel, call: Kernel, config: Config) -> Call:
        def run() -> object:
            return case.run(call, config)

        if not self.watch.on_gpu:
            return run
        try:
            return self.watch.replay(run)
        except RuntimeError:
            torch.cuda.synchronize()  # raises if more than the capture failed
            return run

    def _compile(self, configs: Sequence[tuple[int, Config | None]]) -> None:
        if self.pool is not None:
            device = str(self.watch.device)
            try:
                jobs = [self.pool.submit(compile_in_worker, *each, self.tiny, device) for each in configs]
            except RuntimeError:  # a worker died; the rest is compiled in this process
                return
            wait(jobs, max(0.0, self.deadline - time.monotonic()))
            for job in jobs:
                job.cancel()

    def _check_device(self, error: Exception) -> None:
        """Raise DeviceLostError if nothing can run after this error."""
        if self.watch.on_gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise DeviceLostError(_status(error)) from error


class WrongResultError(Exception):
    """A configuration computes something else than the chosen one."""


def _compare(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for a, b in zip(results, expected, strict=True):
        error = relative_error(a, b)
        if not error <= TOLERANCE:  # so written that NaN is wrong
            raise WrongResultError(f"wrong: off by {error:.1e}")


def _status(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:160]
    return text if isinstance(error, (TimeoutError, WrongResultError)) else f"fails: {type(error).__name__}: {text}"


@lru_cache(2)  # the inputs of a case take up to a gigabyte
def _prepared(index: int, tiny: bool, device: str) -> tuple[TunedKernel, Kernel]:
    case = find_cases(tiny)[index]
    return case, case.prepare(torch.device(device))


def compile_in_worker(index: int, config: Config | None, tiny: bool, device: str) -> None:
    """Run a configuration (None: the chosen one) once, in another process, so that Triton's cache has it.

    Errors are ignored: they come again where the configuration is measured.
    """
    case, call = _prepared(index, tiny, device)
    if config is None:
        case.chosen(call)
    else:
        case.run(call, config)


def table(trials: Sequence[Trial]) -> list[str]:
    """Return one line a case: the chosen configuration, the fastest one, and how many times faster that is."""
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.kernel, trial.shape, _describe(trial.chosen)), []).append(trial)
    lines = [("kernel", "shape", "chosen", "best", "ratio", "not timed")]
    for (kernel, shape, chosen), group in groups.items():
        timed = [(trial.ratio, trial) for trial in group if trial.ratio is not None]
        ratio, best = max(timed, key=lambda pair: pair[0], default=(math.nan, None))
        changed = "-" if best is None else "chosen" if ratio <= 1 else _describe(best.config, best.chosen)
        lines.append((kernel, shape, chosen, changed, f"{ratio:.2f}" if timed else "-", str(len(group) - len(timed))))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _describe(config: Mapping[str, int], beside: Mapping[str, int] | None = None) -> str:
    """Return a configuration in words; beside another one only what differs."""
    shown = {name: value for name, value in config.items() if beside is None or beside.get(name) != value}
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or "-"


def faster_tiles(trials: Sequence[Trial]) -> dict[str, Config]:
    """Return the fastest tile of each attention kernel's calls by `Call.key`, where it is faster than the chosen one.

    Of cases with the same key, the one with the largest gain decides.
    """
    gains = [(trial.ratio, trial) for trial in trials if trial.key and trial.ratio is not None and trial.ratio > FASTER]
    gains.sort(key=lambda gain: gain[0])
    return dict(sorted({trial.key: trial.config for _, trial in gains}.items()))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.tuning", description="Time the neighbours of kernels' tiles."
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many (default: 60)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each result there (JSON lines)")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="kernels of these names, such as 'attention*'")
    parser.add_argument("--workers", type=int, help="processes that compile (default: 12 at most; 0 in a dry run)")
    parser.add_argument(
        "--write-tiles", action="store_true", help=f"write faster tiles to {MEASURED.name} of the library"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no figures; needs TRITON_INTERPRET=1")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes must be a number above 0, not {options.minutes:g}")
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--dry-run runs kernels in Triton's interpreter: set TRITON_INTERPRET=1")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry-run checks the code without one")
    cases = list(enumerate(find_cases(options.dry_run)))
    options.cases = [case for case in cases if fnmatch.fnmatchcase(case[1].kernel, options.only)]
    if not options.cases:
        kernels = sorted({case.kernel for _, case in cases})
        parser.error(f"--only {options.only}: no kernel has that name; known are {', '.join(kernels)}")
    if options.workers is None:
        options.workers = 0 if options.dry_run else max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) - 1))
    try:
        options.machine = environment.facts(torch.device("cpu" if options.dry_run else "cuda"))
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep; return 1 if the GPU was lost on the way."""
    options = parse(arguments)
    torch.manual_seed(0)
    deadline = time.monotonic() + 60 * options.minutes
    trials: list[Trial] = []
    lost = False
    with ExitStack() as stack:
        pool = None
        if options.workers:
            pool = ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"))  # CUDA forbids forks
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        file = stack.enter_context(open(options.out or os.devnull, "w", encoding="utf-8"))
        file.write(json.dumps({"format": FORMAT, "machine": options.machine}) + "\n")
        watch = Stopwatch(torch.device("cpu" if options.dry_run else "cuda"))
        try:
            for trial in Sweep(watch, deadline, pool, tiny=options.dry_run).run(options.cases):
                trials.append(trial)
                file.write(json.dumps({"tuning": asdict(trial)}) + "\n")
                file.flush()
        except DeviceLostError as error:
            lost = True
            print(f"the GPU is lost, the sweep ends: {error}", file=sys.stderr)
    if options.dry_run:
        print("A dry run: tiny shapes, each configuration once, kernels in the interpreter. Nothing was timed.")
    print("\n".join(table(trials)))
    if options.write_tiles:
        tiles = {**measured(), **faster_tiles(trials)}
        MEASURED.write_text(json.dumps(tiles, indent=1) + "\n", encoding="utf-8")
        print(f"{MEASURED} has {len(tiles)} tiles")
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
