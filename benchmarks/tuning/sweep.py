"""Is the tile that each kernel takes the fastest of its neighbours? A sweep on a GPU.

python -m benchmarks.tuning --minutes 2 --out tuning.jsonl      # what fits into the time, what is worth most first
python -m benchmarks.tuning --only 'attention*' --write-tiles   # some kernels; let the library take the fastest tiles
TRITON_INTERPRET=1 python -m benchmarks.tuning --dry-run        # proves the code without a GPU

For each case of `benchmarks.tuning.cases` the configuration that the package chooses is timed in turn with each of its
neighbours, as CUDA graphs, so that the host does not count; the ratio is the median of chosen / neighbour. What does
not compile, does not fit or computes something else is recorded as that. Each result is written when it exists.

Compiling takes longer than timing: other processes compile the configurations of a few cases into Triton's cache on
disk, and wait while these are timed.
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
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from benchmarks.harness import environment
from benchmarks.harness.clock import Call, Stopwatch
from benchmarks.harness.race import relative_error
from benchmarks.tuning.cases import Config, Kernel, Tuned, find_cases
from fastformer_kernels.attention.tiles import MEASURED, measured

FORMAT = 2  # of the file; raised when its fields change
ROUNDS = 15
FASTER = 1.03  # a tile is worth another
TOLERANCE = 1e-2  # bf16 rounds to 4e-3, and another tile adds in another order
DRY_NEIGHBOURS = 2  # of each case, in a dry run
_MOST_WORKERS = 12
_TOGETHER = 5  # cases whose configurations are compiled at once: some 60, which keep the workers busy
_MEASURED, _DRY, _LATE = "measured", "dry run", "no time left"


@dataclass(frozen=True)
class Trial:
    """One configuration beside the chosen one; times in seconds, `ratio` = chosen / this, None where not timed."""

    kernel: str
    shape: str
    chosen: Config
    config: Config
    status: str  # measured, dry run, or why there is no time
    seconds: float | None = None
    ratio: float | None = None
    key: str = ""  # of an attention kernel's calls (`Call.key`)


class DeviceLost(Exception):
    """A configuration broke the CUDA context: nothing can run in this process any more."""


class Sweep:
    """Measures cases until a moment of `time.monotonic`."""

    def __init__(self, watch: Stopwatch, deadline: float, *, tiny: bool = False) -> None:
        """`tiny`: run everything once, time nothing."""
        self.watch, self.deadline, self.tiny = watch, deadline, tiny

    def case(self, case: Tuned, call: Kernel, chosen: Config, others: Sequence[Config]) -> Iterator[Trial]:
        """Measure the configurations of a case, one after another."""
        expected, key = case.run(call, chosen), case.key(call)
        base = self._graph(case, call, chosen)
        for config in others:
            status, seconds, ratio = _LATE, None, None
            if time.monotonic() < self.deadline:
                try:
                    status = self._fault(expected, case.run(call, config)) or (_DRY if self.tiny else _MEASURED)
                    if status == _MEASURED:
                        seconds, ratio = self._race(base, self._graph(case, call, config))
                except Exception as error:  # whatever a compiler or a driver raises
                    self.check_device(error)
                    status = f"fails: {_line(error)}"
            yield Trial(case.kernel, case.shape, chosen, config, status, seconds, ratio, key)

    def _fault(self, expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str | None:
        for a, b in zip(found, expected, strict=True):
            error = relative_error(a, b)
            if not error <= TOLERANCE:  # so written that NaN is wrong
                return f"wrong: off by {error:.1e}"
        return None

    def _graph(self, case: Tuned, call: Kernel, config: Config) -> Call:
        def run() -> object:
            return case.run(call, config)

        if not self.watch.on_gpu:
            return run
        try:
            return self.watch.replay(run)
        except RuntimeError:
            torch.cuda.synchronize()  # raises if it was more than the capture that failed
            return run

    def _race(self, base: Call, other: Call) -> tuple[float, float]:
        """Seconds of the other, and how many times faster it is."""
        pairs = [(self.watch(base), self.watch(other)) for _ in range(ROUNDS)]
        return statistics.median(b for _, b in pairs), statistics.median(a / max(b, 1e-9) for a, b in pairs)

    def check_device(self, error: Exception) -> None:
        """Raise DeviceLost if nothing can run after this error."""
        if self.watch.on_gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise DeviceLost(_line(error)) from error


def _line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"


@lru_cache(2)  # the inputs of a case take up to a gigabyte
def _prepared(index: int, tiny: bool, device: str) -> tuple[Tuned, Kernel]:
    case = find_cases(tiny)[index]
    return case, case.prepare(torch.device(device))


def compile_in_worker(index: int, config: Config | None, tiny: bool, device: str) -> None:
    """Run a configuration (None: the chosen one) once, in another process, so that Triton's cache has it.

    What fails here is not looked at: it fails again where it is measured.
    """
    case, call = _prepared(index, tiny, device)
    if config is None:
        case.chosen(call)
    else:
        case.run(call, config)


def _compile(pool: ProcessPoolExecutor | None, wanted: Sequence[tuple[int, Config | None]], sweep: Sweep) -> None:
    if pool is not None:
        device = str(sweep.watch.device)
        try:
            jobs = [pool.submit(compile_in_worker, index, config, sweep.tiny, device) for index, config in wanted]
        except RuntimeError:  # a worker has died; what follows is compiled here
            return
        wait(jobs, max(0.0, sweep.deadline - time.monotonic()))
        for job in jobs:
            job.cancel()


def describe(config: Mapping[str, int], beside: Mapping[str, int] | None = None) -> str:
    """A configuration in words; beside another one only what differs."""
    shown = {name: value for name, value in config.items() if beside is None or beside.get(name) != value}
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or "-"


def table(results: Sequence[Trial]) -> list[str]:
    """One line a case: the chosen configuration, the fastest, and how many times faster that is."""
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for result in results:
        groups.setdefault((result.kernel, result.shape, describe(result.chosen)), []).append(result)
    lines = [("kernel", "shape", "chosen", "best", "ratio", "not timed")]
    for (kernel, shape, chosen), found in groups.items():
        timed = [result for result in found if result.ratio is not None]
        best = max(timed, key=lambda result: result.ratio or 0.0, default=None)
        better = best is not None and best.ratio is not None and best.ratio > 1.0
        words = describe(best.config, best.chosen) if better and best is not None else "chosen" if timed else "-"
        ratio = f"{best.ratio:.2f}" if best is not None and best.ratio is not None else "-"
        lines.append((kernel, shape, chosen, words, ratio, str(len(found) - len(timed))))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def faster_tiles(results: Sequence[Trial]) -> dict[str, Config]:
    """Return the fastest tile of each attention kernel's calls by `Call.key`, where it is faster than the chosen one.

    Of cases with the same key, that with the largest gain decides.
    """
    fastest: dict[str, Trial] = {}
    for result in results:
        if result.key and (result.ratio or 0.0) > FASTER:
            best = fastest.get(result.key)
            if best is None or (result.ratio or 0.0) > (best.ratio or 0.0):
                fastest[result.key] = result
    return {key: result.config for key, result in sorted(fastest.items())}


def sweep_all(
    sweep: Sweep, cases: Sequence[tuple[int, Tuned]], pool: ProcessPoolExecutor | None = None
) -> Iterator[Trial]:
    """Measure all cases, a few of them compiled at a time."""
    _compile(pool, [(index, None) for index, _ in cases], sweep)
    for start in range(0, len(cases), _TOGETHER):
        wanted: list[tuple[int, Config | None]] = []
        planned: list[tuple[Tuned, Kernel, Config, list[Config]]] = []
        for index, case in cases[start : start + _TOGETHER]:
            if time.monotonic() >= sweep.deadline:
                yield Trial(case.kernel, case.shape, {}, {}, _LATE)
                continue
            try:
                call = case.prepare(sweep.watch.device)
                chosen = case.chosen(call)
            except Exception as error:
                sweep.check_device(error)
                yield Trial(case.kernel, case.shape, {}, {}, f"fails: {_line(error)}")
                continue
            others = case.others(chosen)[: DRY_NEIGHBOURS if sweep.tiny else None]
            wanted += [(index, config) for config in others]
            planned.append((case, call, chosen, others))
        _compile(pool, wanted, sweep)
        for plan in planned:
            yield from sweep.case(*plan)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.tuning", description="Time each kernel's tile's neighbours.")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many (default: 60)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each result there (JSON lines)")
    parser.add_argument("--only", metavar="PATTERN", help="kernels of these names, such as 'attention*'")
    parser.add_argument("--workers", type=int, help="processes that compile (default: 12 at most; 0 in a dry run)")
    parser.add_argument(
        "--write-tiles", action="store_true", help=f"write faster tiles to {MEASURED.name} of the library"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no figures; needs TRITON_INTERPRET=1")
    options = parser.parse_args(argv)
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes must be a number above 0, not {options.minutes:g}")
    if options.workers is not None and options.workers < 0:
        parser.error(f"--workers must be 0 or more, not {options.workers}")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: {options.out.parent} is no directory")
    if options.out is not None:
        try:
            environment.commit()
        except ValueError as error:
            parser.error(f"--out: {error}")
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--dry-run runs kernels in Triton's interpreter: set TRITON_INTERPRET=1")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry-run proves the code without one")
    options.cases = list(enumerate(find_cases(options.dry_run)))
    if options.only is not None:
        kernels = sorted({case.kernel for _, case in options.cases})
        options.cases = [x for x in options.cases if fnmatch.fnmatchcase(x[1].kernel, options.only)]
        if not options.cases:
            parser.error(f"--only {options.only}: no kernel of that name; there are {', '.join(kernels)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if the device was lost on the way."""
    options = _arguments(argv)
    torch.manual_seed(0)
    deadline = time.monotonic() + 60 * options.minutes
    watch = Stopwatch(torch.device("cpu" if options.dry_run else "cuda"))
    sweep = Sweep(watch, deadline, tiny=options.dry_run)
    workers = options.workers
    if workers is None:
        workers = 0 if options.dry_run else max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) - 1))
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    pool = ProcessPoolExecutor(workers, spawn) if workers else None
    file = options.out.open("w", encoding="utf-8") if options.out is not None else None
    results: list[Trial] = []
    lost = False
    try:
        if file is not None:
            file.write(json.dumps({"format": FORMAT, "machine": environment.facts(watch.device)}) + "\n")
        for result in sweep_all(sweep, options.cases, pool):
            results.append(result)
            if file is not None:
                file.write(json.dumps({"tuning": asdict(result)}) + "\n")
                file.flush()
    except DeviceLost as error:
        lost = True
        print(f"the GPU gave up, and the sweep ends: {error}", file=sys.stderr)
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        if file is not None:
            file.close()
    if options.dry_run:
        print("A dry run: tiny shapes, each configuration once, kernels in the interpreter. Nothing was timed.")
    print("\n".join(table(results)))
    if options.write_tiles:
        tiles = {**measured(), **faster_tiles(results)}
        MEASURED.write_text(json.dumps(tiles, indent=1) + "\n", encoding="utf-8")
        print(f"{MEASURED} has {len(tiles)} tiles")
    return int(lost)
