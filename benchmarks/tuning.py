"""Time the tile that each attention kernel takes against similar ones, on a GPU.

    python -m benchmarks.tuning --minutes 2 --out tuning.jsonl              # as many cases as fit
    python -m benchmarks.tuning --only 'attention backward*' --write-tiles  # the library then takes the fastest tiles
    TRITON_INTERPRET=1 python -m benchmarks.tuning --dry-run                # checks the code without a GPU

The chosen tile is timed in turn with each similar one, as CUDA graphs, so that the host does not count. A ratio is the
median of chosen / other. Tiles that do not compile, do not fit or compute something else are recorded as such. The
tiles of a case are compiled at the same time, because compiling takes longer than timing.
"""

import argparse
import fnmatch
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import environment
from benchmarks.harness.clock import Call, Stopwatch
from benchmarks.harness.race import relative_error
from fastformer_kernels.attention import backward, decode, forward, tiles
from fastformer_kernels.attention.arguments import Arguments
from fastformer_kernels.host.launch import only_compiled

Config = dict[str, int]
Kernel = Callable[..., Sequence[Tensor]]

ROUNDS = 15
FASTER = 1.03  # ratio above which another tile replaces the chosen one
TOLERANCE = 1e-2  # bf16 rounds to 4e-3, and another tile adds in another order
LIMITS = {"BLOCK_T": (16, 256), "BLOCK_S": (16, 256), "num_warps": (1, 16), "num_stages": (1, 5)}


class Case(NamedTuple):
    """A kernel on inputs of one shape; with options, these are compared, the library's own choice first, not tiles."""

    kernel: str
    shape: str
    prepare: Callable[[torch.device], Kernel]  # makes the inputs; the returned call may be repeated
    options: tuple[Config, ...] = ()

    def run(self, call: Kernel, config: Config) -> Sequence[Tensor]:
        """Run the kernel with options or a tile; an empty configuration is the library's choice."""
        if self.options:
            return call(**config)
        with tile_replaced(config):
            return call()


class Trial(NamedTuple):
    """One configuration beside the chosen one; times in seconds, `ratio` = chosen / this, None where not timed."""

    kernel: str
    shape: str
    chosen: Config
    config: Config
    status: str  # measured, dry run, or why it was not timed
    seconds: float | None = None
    ratio: float | None = None
    key: str = ""  # of an attention kernel's calls (`Call.key`)


@contextmanager
def tile_replaced(tile: Config) -> Iterator[list[tiles.Call]]:
    """Let the launchers take a tile inside the block; yield the calls that needed one."""
    calls: list[tiles.Call] = []
    choose = tiles.choose

    def replaced(call: tiles.Call) -> Mapping[str, int]:
        calls.append(call)
        return {**choose(call), **tile}

    with mock.patch.object(tiles, "choose", replaced):
        yield calls


def similar_tiles(chosen: Config) -> list[Config]:
    """Return the tiles one step away.

    One number is doubled or halved (stages: one more or less); a block and the warps are both doubled or both halved,
    which leaves a thread its share; one block is doubled and the other halved.
    """

    def step(name: str, up: bool) -> int:
        lowest, highest = LIMITS[name]
        value = chosen[name]
        moved = value + (1 if up else -1) if name == "num_stages" else value * 2 if up else value // 2
        return min(max(moved, lowest), highest)

    blocks = [name for name in chosen if name.startswith("BLOCK")]
    moves = [{name: up} for name in chosen for up in (False, True)]
    moves += [{block: up, "num_warps": up} for block in blocks for up in (False, True)]
    moves += [{one: True, other: False} for one in blocks for other in blocks if other != one]
    stepped = [{name: step(name, up) for name, up in move.items()} for move in moves]
    return [{**chosen, **each} for each in stepped if all(chosen[name] != value for name, value in each.items())]


def _attention_cases(
    B: int, H: int, L: int, K: int, dtype: torch.dtype = torch.bfloat16, V: int | None = None
) -> Iterator[Case]:
    arguments = Arguments(queries=L, keys=L, scale=K**-0.5, right=0)  # causal, no padding, no mask, no dropout

    def run_forward(device: torch.device) -> Kernel:
        q, k, v = (torch.randn(B, H, L, size, device=device).to(dtype) for size in (K, K, V or K))
        return lambda: forward.forward(q, k, v, *arguments)

    def run_backward(needs_q: bool, needs_keys: bool, device: torch.device) -> Kernel:
        q, k, v, dout = (torch.randn(B, H, L, size, device=device).to(dtype) for size in (K, K, V or K, V or K))
        out, lse = forward.forward(q, k, v, *arguments)
        inputs = (dout, q, k, v, out, lse, None, None, needs_q, needs_keys)

        def call() -> list[Tensor]:
            return [x for x in backward.backward(*inputs, *arguments) if x.numel()]

        return call

    shape = f"{B} x {H} x {L:,} x {K}{f' and {V}' if V else ''}, causal" + (", fp32" if dtype == torch.float32 else "")
    yield Case("attention forward", shape, run_forward)
    yield Case("attention backward, keys", shape, partial(run_backward, False, True))
    yield Case("attention backward, queries", shape, partial(run_backward, True, False))


def _decode_cases(B: int, H: int, S: int, K: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    def prepare(device: torch.device) -> Kernel:
        q, k, v = (torch.randn(B, H, rows, K, device=device).to(dtype) for rows in (1, S, S))
        arguments = Arguments(queries=1, keys=S, scale=K**-0.5)

        def call(split: int = 1) -> list[Tensor]:
            return [decode.decode(q, k, v, *arguments) if split else forward.forward(q, k, v, *arguments)[0]]

        return call

    shape = f"{B} x {H} x {S:,} x {K}"
    yield Case("decode", shape, prepare, ({"split": 1}, {"split": 0}))
    yield Case("decode", shape, prepare)


def find_cases(tiny: bool) -> list[Case]:
    """Return all cases, what is worth most first; `tiny` for the interpreter."""
    if tiny:  # the interpreter multiplies matrices of bf16 as if they were integers
        return [*_attention_cases(1, 2, 20, 16, torch.float16), *_decode_cases(1, 2, 40, 16, torch.float16)]
    cases = [*_attention_cases(8, 12, 2048, 32), *_attention_cases(4, 8, 1024, 256)]
    cases += [*_attention_cases(4, 16, 2048, 192, V=128), *_attention_cases(64, 12, 512, 64)]
    cases += [*_attention_cases(8, 12, 2048, 64), *_attention_cases(8, 12, 2048, 128)]
    for sizes in ((1, 8, 512, 64), (1, 8, 8192, 64), (64, 8, 512, 64), (512, 8, 128, 64)):
        cases += _decode_cases(*sizes)
    return [*cases, *_attention_cases(128, 8, 64, 64), *_attention_cases(8, 8, 512, 64, torch.float32)]


def compile_together(case: Case, call: Kernel, configs: Sequence[Config]) -> None:
    """Compile the kernels of all configurations in threads; errors come again where a configuration is measured."""
    from triton import AsyncCompileMode

    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool), only_compiled():
        for config in configs:
            with suppress(Exception):
                case.run(call, config)


def measure(case: Case, watch: Stopwatch, deadline: float, *, tiny: bool) -> Iterator[Trial]:
    """Measure the tiles around the library's choice for a case, or its other options.

    Args:
        deadline: of `time.monotonic`; what is not timed by then is recorded as such.
        tiny: run everything once, time nothing.
    """

    def check_time() -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError("no time left")

    def graph(config: Config) -> Call:
        run = partial(case.run, call, config)
        return watch.replay(run) if watch.on_gpu else run

    def describe(error: Exception) -> str:
        if watch.on_gpu:
            torch.cuda.synchronize()  # raises if the GPU is lost, since nothing can run then
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"

    try:
        check_time()
        call, key = case.prepare(watch.device), ""
        if case.options:
            chosen, *others = case.options
        else:
            with tile_replaced({}) as calls:
                call()
            chosen, key = dict(tiles.choose(calls[0])), calls[0].key
            others = similar_tiles(chosen)
        if watch.on_gpu:
            with suppress(Exception):  # in a context of its own: a failed compilation leaves Triton's mode on
                copy_context().run(compile_together, case, call, others)
        expected, base = case.run(call, chosen), graph(chosen)
    except Exception as error:  # whatever a compiler or a driver raises
        yield Trial(case.kernel, case.shape, {}, {}, describe(error))
        return
    for config in others:
        status, seconds, ratio = "dry run" if tiny else "measured", None, None
        try:
            check_time()
            for result, value in zip(case.run(call, config), expected, strict=True):
                if not (error_size := relative_error(result, value)) <= TOLERANCE:  # NaN is wrong
                    raise ValueError(f"wrong: off by {error_size:.1e}")
            if not tiny:
                seconds, ratio = time_pair(watch, base, graph(config))
        except Exception as error:
            status = describe(error)
        yield Trial(case.kernel, case.shape, chosen, config, status, seconds, ratio, key)


def time_pair(watch: Stopwatch, base: Call, other: Call) -> tuple[float, float]:
    """Return the seconds of the other call, and the median of base / other."""
    pairs = [(watch(base), watch(other)) for _ in range(ROUNDS)]
    return statistics.median(b for _, b in pairs), statistics.median(a / max(b, 1e-9) for a, b in pairs)


def faster_tiles(trials: Sequence[Trial]) -> dict[str, Config]:
    """Return the fastest tile of each attention kernel's calls by `Call.key`, where it is faster than the chosen one.

    Of cases with the same key, the one with the largest gain decides.
    """
    gains = [(trial.ratio, trial) for trial in trials if trial.key and trial.ratio is not None and trial.ratio > FASTER]
    gains.sort(key=lambda gain: gain[0])
    return dict(sorted({trial.key: trial.config for _, trial in gains}.items()))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.tuning", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so many (default: 9)")
    parser.add_argument("--out", default=os.devnull, metavar="FILE", help="write each result there (JSON lines)")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="kernels of these names, such as 'decode'")
    parser.add_argument("--write-tiles", action="store_true", help=f"write faster tiles to {tiles.MEASURED.name}")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, no figures; needs TRITON_INTERPRET=1")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes must be a number above 0, not {options.minutes:g}")
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--dry-run runs kernels in Triton's interpreter: set TRITON_INTERPRET=1")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry-run checks the code without one")
    cases = find_cases(options.dry_run)
    options.cases = [case for case in cases if fnmatch.fnmatchcase(case.kernel, options.only)]
    if not options.cases:
        known = ", ".join(sorted({case.kernel for case in cases}))
        parser.error(f"--only {options.only}: no kernel has that name; known are {known}")
    options.device = torch.device("cpu" if options.dry_run else "cuda")
    try:
        options.machine = environment.facts(options.device)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep."""
    options = parse(arguments)
    torch.manual_seed(0)
    trials: list[Trial] = []
    deadline, watch = time.monotonic() + 60 * options.minutes, Stopwatch(options.device)
    with Path(options.out).open("w", encoding="utf-8") as file:
        file.write(json.dumps({"machine": options.machine}) + "\n")
        for trial in (each for case in options.cases for each in measure(case, watch, deadline, tiny=options.dry_run)):
            trials.append(trial)
            file.write(json.dumps({"tuning": trial._asdict()}) + "\n")
            file.flush()
            changed = {name: value for name, value in trial.config.items() if trial.chosen.get(name) != value}
            print(f"{trial.kernel}, {trial.shape}: {trial.chosen}, with {changed}: {trial.ratio or trial.status}")
    if options.write_tiles:
        merged = {**tiles.measured(), **faster_tiles(trials)}
        tiles.MEASURED.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
        print(f"{tiles.MEASURED} has {len(merged)} tiles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
