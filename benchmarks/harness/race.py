"""Compare fastformer with a competitor: first both pass correctness gates, then they are timed in turn.

Each round times the competitor and then fastformer in the same process. The ratio is the median over rounds, so a slow
drift of the machine cancels. Other load on the same core or memory does not cancel: the rate of a plain matrix product,
measured beside each case, shows it.

A competitor that computes something else, runs out of memory or raises is reported instead of timed, and the run goes
on. If fastformer is wrong, the case fails.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.harness.clock import Call, Ceilings, Stopwatch, Work, matmul_rate, saved_for_backward
from benchmarks.harness.record import Record, Row
from fastformer.host import autograd_function

Direction = Literal["forward", "backward", "both"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")

_NAMES = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
_ROUND_SECONDS = 0.05  # on a CPU, shorter work is repeated within a round until it takes this long
_OP_ROUNDS = {"cpu": 5, "cuda": 30}
_GPU_SECONDS, _GPU_ROUNDS = 0.5, 20  # on a GPU, more rounds if they fit into these seconds, at most so many
_GRAPH_BELOW = 2e-4  # seconds; the launches of shorter calls may dominate
_OP_GRAPH_BELOW = 2e-2  # also of longer ones, if the host is slow
_OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Contender:
    """One side of a comparison.

    `run` is timed and processes `tokens`; with 1, times are compared by the call. `forward` is the forward pass of a
    training step whose bytes for backward are counted, without those of the `leaves`; `run` has run before.
    """

    name: str
    run: Call
    tokens: int = 1
    forward: Call | None = None
    leaves: Iterable[Tensor] = ()


@dataclass(frozen=True)
class Op:
    """One side of a comparison of a differentiable op.

    `run` computes the output, or several outputs where the op is only timed. `compared` selects the part of output and
    gradients that is compared with fp64. `upstream` is the gradient of the output, if its layout is not the other's.
    """

    name: str
    run: Callable[[], Any]
    inputs: Sequence[Tensor]
    compared: Callable[[Tensor], Tensor] = lambda x: x
    upstream: Tensor | None = None

    def results(self, upstream: Tensor) -> list[Tensor]:
        """Return the compared parts of the output and of the gradients of all inputs."""
        out, dout = self.run(), upstream if self.upstream is None else self.upstream
        assert out.shape == dout.shape, f"{self.name} returns {tuple(out.shape)} for {tuple(dout.shape)}"
        return [self.compared(x) for x in (out.detach(), *torch.autograd.grad(out, self.inputs, dout))]

    def call(self, direction: Direction, upstream: Any) -> Call:
        """Return a function that runs one direction."""
        upstream = upstream if self.upstream is None else self.upstream
        if direction == "forward":
            return torch.no_grad()(self.run)
        if direction == "both":
            return lambda: torch.autograd.grad(self.run(), self.inputs, upstream)
        out = self.run()
        return lambda: torch.autograd.grad(out, self.inputs, upstream, retain_graph=True)


class Race:
    """One case: correctness gates, then times."""

    def __init__(
        self,
        benchmark: Any,
        watch: Stopwatch,
        ceilings: Ceilings,
        record: Record,
        *,
        tiny: bool,  # run the code once on small shapes, time nothing
        seconds: float = math.inf,  # of the rounds of a case on a CPU; there are fewer rounds if they take longer
        profiles: Path | None = None,  # folder for a profile of a call of fastformer
    ) -> None:
        self.benchmark, self.watch, self.ceilings, self.record = benchmark, watch, ceilings, record
        self.tiny, self.seconds, self.profiles, self.device = tiny, seconds, profiles, watch.device
        self.gates: dict[str, float] = {}
        self.fault: str | None = None  # the reason if the competitor is not timed
        self.notes: dict[str, Any] = {}  # further facts for the record

    @property
    def backend(self) -> Literal["triton", "reference"]:
        """Return the backend of fastformer: fixed, so that a fallback is an error."""
        return "triton" if self.watch.on_gpu or self.tiny else "reference"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype for tensors of ops: a CPU may have no bf16 instructions."""
        return torch.bfloat16 if self.backend == "triton" else torch.float32

    def gate(self, name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
        """Fail unless |ours - theirs| <= tolerance * |theirs|, in the norm over all elements."""
        error = relative_error(ours, theirs)
        if not error <= tolerance:
            pytest.fail(f"wrong, not timed: {name} differs by {error:.1e}, allowed {tolerance:.0e}")
        self.gates[name] = error

    def gate_theirs(self, name: str, theirs: Tensor, expected: Tensor, tolerance: float) -> None:
        """Compare the competitor likewise; if it is wrong, report it instead of timing it."""
        if not (error := relative_error(theirs, expected)) <= tolerance:
            self.fault = self.fault or f"wrong: {name} is off by {error:.1e}"

    @contextmanager
    def competitor(self) -> Iterator[None]:
        """Report exceptions of the competitor's code instead of timing it."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.fault = _OUT_OF_MEMORY
            torch.cuda.empty_cache()
        except Exception as error:
            self.fault = f"fails: {type(error).__name__}: {_first_line(error)}"

    def op(
        self,
        case: str,
        ours: Op,
        theirs: Op,
        *,
        upstream: Tensor,
        expected: Sequence[Tensor],
        tolerance: float,
        direction: Direction,
        timed: tuple[Op, Op, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Compare output and gradients of both sides with fp64, then time one direction.

        `expected` are output and gradients of all inputs in fp64, of the parts that `Op.compared` selects; `tolerance`
        is relative to the norm of each. Positions where the gradient `upstream` of the output is 0 (padding) are not
        compared. `timed` are both ops and their upstream gradients to time instead: with dropout, whose masks differ,
        or with several outputs. `fields` are those of `__call__`.
        """
        real = ours.compared(upstream if ours.upstream is None else ours.upstream) != 0

        def compare(op: Op, gate: Callable[[str, Tensor, Tensor, float], None]) -> None:
            for i, (result, value) in enumerate(zip(op.results(upstream), expected, strict=True)):
                if i == 0:
                    gate("output", torch.where(real, result, 0), torch.where(real, value, 0), tolerance)
                else:
                    gate(f"gradient {i - 1}", result, value, tolerance)

        try:
            compare(ours, self.gate)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._add(case, theirs.name, f"fastformer is {_OUT_OF_MEMORY}", **fields)
            pytest.skip(f"{case}: fastformer is {_OUT_OF_MEMORY}")
        with self.competitor():
            compare(theirs, self.gate_theirs)
        gradient: Any = upstream
        dtype = ours.inputs[0].dtype
        if timed is not None:
            ours, theirs, gradient = timed
            if self.fault is None:
                ours.call("both", gradient)()  # compiles, and lets libraries allocate; else the comparison did that
                with self.competitor():
                    theirs.call("both", gradient)()
        both = [Contender(op.name, op.call("both", gradient), 1, op.run, op.inputs) for op in (ours, theirs)]
        fields |= self._memory(*both) | {"rounds": _OP_ROUNDS[self.device.type], "dtype": dtype}
        fields.setdefault("graph_below", _OP_GRAPH_BELOW)
        run = ours.call(direction, gradient)
        other = run if self.fault else theirs.call(direction, gradient)
        self(f"{case}, {_NAMES[direction]}", Contender("fastformer", run), Contender(theirs.name, other), **fields)

    def __call__(
        self,
        case: str,
        ours: Contender,
        theirs: Contender,
        *,
        rounds: int,
        goal: float | None = None,
        work: Work | None = None,
        dtype: torch.dtype = torch.float32,
        graph_below: float = _GRAPH_BELOW,
        **fields: Any,
    ) -> None:
        """Time both sides in turn and record the ratio, by the token; time fastformer alone if the competitor is wrong.

        Args:
            rounds: how often both are timed.
            goal: of the ratio.
            work: operations and bytes that a call needs at least, in matrix products of `dtype`.
            graph_below: seconds; on a GPU, shorter calls are also timed as CUDA graphs.
            fields: further fields of the row.
        """
        assert self.gates or self.fault, "a speed counts only after a gate"
        watch = self.watch
        fields |= self._memory(ours, theirs)
        if self.profiles is not None:
            self._profile(case, ours.run, self.profiles)
        if self.tiny:
            ours.run()
            if self.fault is None:
                with self.competitor():
                    theirs.run()
            self._add(case, theirs.name, self.fault or "dry run", tokens=(ours.tokens, theirs.tokens), **fields)
            return
        once = watch(ours.run)
        calls = 1 if watch.on_gpu else max(1, math.ceil(_ROUND_SECONDS / max(once, 1e-7)))
        if self.fault is None and (calls > 1 or watch.on_gpu):  # the gate warmed longer work up
            with self.competitor():
                watch(theirs.run, calls)
        if watch.on_gpu:
            rounds = max(rounds, min(_GPU_ROUNDS, int(_GPU_SECONDS / max(once, 1e-7))))
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        rate = matmul_rate(watch)

        def time_theirs() -> None:
            if self.fault is None:
                with self.competitor():
                    times["theirs"].append(watch(theirs.run, calls) / calls)

        def time_ours() -> None:
            times["ours"].append(watch(ours.run, calls) / calls)

        if not watch.on_gpu and self.seconds < math.inf:
            time_theirs()
            time_ours()
            round_seconds = calls * sum(map(sum, times.values()))
            rounds = min(rounds - 1, int(self.seconds / max(round_seconds, 1e-9)) - 1)
        if rounds > 0:
            self.benchmark.pedantic(time_ours, setup=time_theirs, rounds=rounds, iterations=1)
        rounds = len(times["ours"])
        a = statistics.median(times["ours"])
        fields |= {"ours": a, "rounds": rounds, "tokens": (ours.tokens, theirs.tokens)}
        if self.fault is None:
            speed = ours.tokens / theirs.tokens
            pairs = zip(times["ours"], times["theirs"], strict=True)
            fields["theirs"] = statistics.median(times["theirs"])
            fields["ratio"] = statistics.median(speed * b / max(a, 1e-9) for a, b in pairs)
            if watch.on_gpu:
                fields |= self._gpu_ratios(ours, theirs, a < graph_below)
        if work is not None:
            fields["floor"] = self.ceilings.floor(work, dtype) / a
            fields["operations_per_second"], fields["bytes_per_second"] = work.operations / a, work.bytes / a
        self.notes.update(timer=watch.kind, calls_per_round=calls, gates=self.gates)
        self._add(case, theirs.name, self.fault or "measured", matmul_rate=rate, goal=goal, **fields)

    def _profile(self, case: str, run: Call, folder: Path) -> None:
        """Write where the time of a call goes.

        Fused ops take their fast path: under a profiler they would go through the dispatcher. Their launches are in the
        table, their names are not.
        """
        run()  # compiles
        unseen = mock.patch.object(autograd_function, "profiling", return_value=False)
        with torch.profiler.profile() as profile, unseen:
            run()
            if self.watch.on_gpu:
                torch.cuda.synchronize()
        order = "self_cuda_time_total" if self.watch.on_gpu else "self_cpu_time_total"
        text = profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{re.sub('[^a-z0-9]+', '-', case.lower())}.txt").write_text(text, encoding="utf-8")

    def _memory(self, *sides: Contender) -> dict[str, Any]:
        """Return the bytes that both sides save for backward, and on a GPU their peaks; nothing if one is wrong."""
        saved: list[int] = []
        peaks: list[int | None] = []
        for side in sides:
            with self.competitor() if saved else nullcontext():
                if self.fault is None and side.forward is not None:
                    saved.append(saved_for_backward(side.forward, side.leaves))
                    peaks.append(self.watch.peak_memory(side.run))
        complete = self.fault is None and len(saved) == len(sides)
        return {"saved_bytes": saved, "peak_bytes": None if None in peaks else peaks} if complete else {}

    def _gpu_ratios(self, ours: Contender, theirs: Contender, as_graphs: bool) -> dict[str, float]:
        """Return the ratios by the wall clock and of CUDA graphs."""
        ratios: dict[str, float] = {}
        speed = ours.tokens / theirs.tokens
        try:
            walls = [self.watch.wall(side.run) for side in (ours, theirs)]
            ratios["wall"] = speed * walls[1] / walls[0]
        except Exception as error:  # several calls may need more memory than one
            self.notes.update(no_wall=_first_line(error))
        if as_graphs:
            seconds = {}
            for side in (ours, theirs):
                try:
                    graph = self.watch.replay(side.run)
                except Exception as error:  # whatever a compiler or a driver raises
                    self.notes.update(no_graph=f"{side.name}: {_first_line(error)}")
                else:
                    seconds[side.name] = statistics.median(self.watch(graph) for _ in range(10))
            self.notes.update(graph_seconds=seconds)
            if len(seconds) == 2:
                ratios["graph"] = speed * seconds[theirs.name] / seconds[ours.name]
        return ratios

    def _add(self, case: str, against: str, status: str, **fields: Any) -> None:
        benchmark = Path(self.benchmark.fullname.partition("::")[0]).stem.removeprefix("bench_")
        known = {name: value for name, value in fields.items() if value is not None and name in Row.model_fields}
        if self.backend != "triton":  # goals of memory are those of the kernels
            known = {name: value for name, value in known.items() if name not in ("peak_goal", "saved_goal")}
        row = Row(benchmark=benchmark, case=case, against=against, status=status, notes=self.notes, **known)
        self.record.add(row)
        self.benchmark.extra_info.update(row.model_dump())


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return |actual - expected| / |expected| in the norm over all elements; infinity if the shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    a, b = actual.detach().double(), expected.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def flat_gradients(parameters: Iterable[Tensor]) -> Tensor:
    """Return the gradients of all parameters in one row, zeros for parameters without one."""
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
