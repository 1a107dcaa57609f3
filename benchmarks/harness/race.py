"""Two sides of a comparison: first both prove that they compute the same, then they are timed in turn.

Every round times the competitor and then us, in the same process, and the ratio is the median over rounds of the
ratios of the two, so a slow drift of the machine cancels. What a neighbour on the same core or memory takes away does
not cancel: the rate of a plain matrix product, measured beside each case, shows how much was there.

A competitor that computes something else, runs out of memory or raises is reported as that instead of timed, and the
run goes on. If ours is wrong, the case fails.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from benchmarks.harness.clock import Call, Stopwatch, saved_for_backward
from benchmarks.harness.floors import Ceilings, Work, matmul_rate
from benchmarks.harness.record import Record, Row

Direction = Literal["forward", "backward", "both"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")

_ROUND_SECONDS = 0.05  # on a CPU, shorter work is repeated within a round until it takes this long
_OP_ROUNDS = {"cpu": 5, "cuda": 30}
_GPU_SECONDS, _GPU_ROUNDS = 0.5, 20  # on a GPU, more rounds than asked for: as many as ours has time for, at most
_GRAPH_BELOW = 2e-4  # seconds, below which the host's launches may decide
_OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Contender:
    """One side of a comparison: what to run, and how many tokens a call processes (1: compare calls)."""

    name: str
    run: Call
    tokens: int = 1


@dataclass(frozen=True)
class Op:
    """One side of a comparison of a differentiable op: its output, and what gradients are taken for."""

    name: str
    run: Callable[[], Any]  # a tensor; where it is timed only, several will do
    inputs: Sequence[Tensor]
    compared: Callable[[Tensor], Tensor] = lambda x: x  # what of output and gradients there are fp64 ones of
    upstream: Tensor | None = None  # gradient of its output, where that has another layout than the other side's


@dataclass(frozen=True)
class Memory:
    """A side whose bytes are counted: forward, what it takes gradients for, and a step, which has run before."""

    forward: Call
    leaves: Iterable[Tensor]
    step: Call


Timed = tuple[Op, Op, Any]  # ours, theirs, and the gradients of their outputs


class Race:
    """One case: gates, then time."""

    def __init__(
        self, benchmark: Any, watch: Stopwatch, ceilings: Ceilings, record: Record, *, enforce: bool, tiny: bool
    ) -> None:
        """See the fixture `race`; `tiny`: prove the code on small shapes, in one round."""
        self.benchmark, self.watch, self.ceilings, self.record = benchmark, watch, ceilings, record
        self.enforce, self.tiny = enforce, tiny
        self.device = watch.device
        self.gates: dict[str, float] = {}
        self.fault: str | None = None  # what keeps the competitor from being timed
        self._notes: dict[str, Any] = {}
        self._memory_goals: dict[str, float | None] = {}

    def gate(self, name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
        """Fail as wrong unless |ours - theirs| <= tolerance * |theirs|, in the norm over all elements."""
        error = relative_error(ours, theirs)
        if not error <= tolerance:
            pytest.fail(f"wrong, not timed: {name} differs by {error:.1e}, allowed {tolerance:.0e}")
        self.gates[name] = error

    def gate_theirs(self, name: str, theirs: Tensor, expected: Tensor, tolerance: float) -> None:
        """The same of the competitor, whose fault it becomes."""
        error = relative_error(theirs, expected)
        if not error <= tolerance:
            self.fault = self.fault or f"wrong: {name} is off by {error:.1e}"

    @contextmanager
    def competitor(self) -> Iterator[None]:
        """Code of the competitor: what it raises becomes its result."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.fault = _OUT_OF_MEMORY
            torch.cuda.empty_cache()
        except Exception as error:
            message = str(error).strip().partition("\n")[0]
            self.fault = f"fails: {type(error).__name__}: {message[:160]}"

    @property
    def backend(self) -> Literal["triton", "reference"]:
        """What ours must run by, so that a fallback is no figure: the kernels on a GPU and where they are proven."""
        return "triton" if self.watch.on_gpu or self.tiny else "reference"

    @property
    def dtype(self) -> torch.dtype:
        """Of an op's tensors: a CPU may have no instructions for bf16."""
        return torch.bfloat16 if self.backend == "triton" else torch.float32

    def memory(self, *sides: Memory) -> dict[str, Any]:
        """Fields of the row: the bytes that ours and theirs keep for backward, and on a GPU their peaks.

        Nothing where theirs has a fault.
        """
        saved: list[int] = []
        peaks: list[int | None] = []
        for side in sides:
            with self.competitor() if saved else nullcontext():
                if self.fault is None:
                    saved.append(saved_for_backward(side.forward, side.leaves))
                    peaks.append(self.watch.peak_memory(side.step))
        if self.fault is not None:
            return {}
        return {"saved_bytes": tuple(saved), "peak_bytes": None if None in peaks else tuple(peaks)}

    def memory_goals(self, *, peak: float | None = None, saved: float | None = None) -> None:
        """State what shares of the competitor's peak memory, and of its bytes kept for backward, the kernels' are."""
        if self.backend == "triton":
            self._memory_goals = {"peak_goal": peak, "saved_goal": saved}

    def note(self, **info: Any) -> None:
        """Keep further numbers with the result."""
        self._notes.update(info)

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
        work: Work | None = None,
        goal: float | None = None,
        at: Mapping[str, float] | None = None,
        timed: Timed | None = None,
    ) -> None:
        """Compare an op with a competitor's: output and gradients with fp64 ones, then time, memory and floor.

        Args:
            case: its name in the tables; the direction is added.
            ours: the output is compared and differentiated where `upstream` is not 0.
            theirs: the same of the competitor, with as many inputs.
            upstream: gradient of the output, 0 where the output has no meaning (at padding).
            expected: output and gradients of all inputs in fp64, of what `Op.compared` leaves.
            tolerance: of each, as a share of its norm.
            direction: what is timed.
            work: what the direction must do at least.
            goal: of the ratio.
            at: axes of the scaling plots.
            timed: what is timed in place of what was compared, where that cannot be compared as it is: with dropout,
                whose masks differ, or with several outputs.
        """
        real = ours.compared(upstream if ours.upstream is None else ours.upstream) != 0
        dtype = ours.inputs[0].dtype

        def results(op: Op) -> list[Tensor]:
            out, dout = op.run(), upstream if op.upstream is None else op.upstream
            assert out.shape == dout.shape, f"{op.name} returns {tuple(out.shape)} for {tuple(dout.shape)}"
            found = [out.detach(), *torch.autograd.grad(out, op.inputs, dout)]
            out, *gradients = map(op.compared, found)
            return [torch.where(real, out, 0), *gradients]

        names = ["output", *(f"gradient {i}" for i in range(len(expected) - 1))]
        wanted = [torch.where(real, expected[0], 0), *expected[1:]]
        try:
            found = results(ours)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._add(case, theirs.name, f"fastformer is {_OUT_OF_MEMORY}", goal=goal, at=at)
            pytest.skip(f"{case}: fastformer is {_OUT_OF_MEMORY}")
        for name, a, b in zip(names, found, wanted, strict=True):
            self.gate(name, a, b, tolerance)
        del found
        with self.competitor():
            for name, a, b in zip(names, results(theirs), wanted, strict=True):
                self.gate_theirs(name, a, b, tolerance)
        gradient: Any = upstream
        if timed is not None:
            ours, theirs, gradient = timed
        whole = [_call(op, "both", gradient) for op in (ours, theirs)]
        if timed is not None and self.fault is None:
            whole[0]()  # compiles, and lets libraries allocate; else the comparison has done that
            with self.competitor():
                whole[1]()
        pairs = zip((ours, theirs), whole, strict=True)
        memory = self.memory(*(Memory(op.run, op.inputs, run) for op, run in pairs))
        calls = [_call(op, direction, gradient) for op in ((ours,) if self.fault else (ours, theirs))]
        self(
            f"{case}, {_DIRECTION[direction]}",
            Contender("fastformer", calls[0]),
            Contender(theirs.name, calls[-1]),
            rounds=_OP_ROUNDS[self.device.type],
            goal=goal,
            work=work,
            dtype=dtype,
            at=at,
            **memory,
        )

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
        **kept: Any,
    ) -> None:
        """Time both sides in turn and report how much faster ours is, by the token; ours alone if theirs has a fault.

        Args:
            case: its name in the tables.
            ours: what we run.
            theirs: what the competitor runs.
            rounds: how often both are timed.
            goal: of the ratio.
            work: what a call must do at least.
            dtype: of the matrix products.
            graph_below: seconds; shorter calls are also timed as CUDA graphs, on a GPU.
            kept: further fields of the row.

        Raises:
            AssertionError: no gate was passed; or, with --enforce-goals, the ratio is below the goal.
        """
        assert self.gates or self.fault, "a speed counts only after a gate"
        watch = self.watch
        rounds = 1 if self.tiny else rounds
        calls = 1
        if not self.tiny:
            once = watch(ours.run)
            calls = 1 if watch.on_gpu else max(1, math.ceil(_ROUND_SECONDS / max(once, 1e-7)))
            if self.fault is None and (calls > 1 or watch.on_gpu):  # longer work was warmed up by the gate
                with self.competitor():
                    watch(theirs.run, calls)
            if watch.on_gpu:
                rounds = max(rounds, min(_GPU_ROUNDS, int(_GPU_SECONDS / max(once, 1e-7))))
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        rate = matmul_rate(watch, size=64 if self.tiny else None)

        def time_theirs() -> None:
            if self.fault is None:
                with self.competitor():
                    times["theirs"].append(watch(theirs.run, calls) / calls)

        self.benchmark.pedantic(
            lambda: times["ours"].append(watch(ours.run, calls) / calls),
            setup=time_theirs,
            rounds=rounds,
            iterations=1,
        )
        if self.tiny:
            self._add(case, theirs.name, self.fault or "dry run", tokens=(ours.tokens, theirs.tokens), **kept)
            return
        a = statistics.median(times["ours"])
        measured: dict[str, Any] = {"ours": a, "rounds": rounds, "tokens": (ours.tokens, theirs.tokens)}
        if self.fault is None:
            speed = ours.tokens / theirs.tokens
            pairs = zip(times["ours"], times["theirs"], strict=True)
            measured["theirs"] = statistics.median(times["theirs"])
            measured["ratio"] = statistics.median(speed * b / max(a, 1e-9) for a, b in pairs)
            measured |= self._further_ratios(ours, theirs, a < graph_below)
        if work is not None:
            measured["floor"] = self.ceilings.floor(work, dtype) / a
            measured["operations_per_second"], measured["bytes_per_second"] = work.operations / a, work.bytes / a
        self.note(timer=watch.kind, calls_per_round=calls, gates=self.gates)
        row = self._add(case, theirs.name, self.fault or "measured", rate, goal=goal, **measured, **kept)
        if self.enforce and row.missed:
            pytest.fail(f"{case}: {row.ratio:.2f} times {theirs.name}, the goal is {goal}")

    def _further_ratios(self, ours: Contender, theirs: Contender, as_graphs: bool) -> dict[str, float]:
        """On a GPU: by the clock on the wall, and as CUDA graphs."""
        found = {}
        speed = ours.tokens / theirs.tokens
        try:
            walls = [self.watch.wall(side.run) for side in (ours, theirs)]
        except Exception as error:  # several calls may need more memory than one
            self.note(no_wall=str(error).partition("\n")[0][:160])
        else:
            if walls[0] is not None and walls[1] is not None:
                found["wall"] = speed * walls[1] / walls[0]
        if self.watch.on_gpu and as_graphs:
            times = {}
            for side in (ours, theirs):
                try:
                    graph = self.watch.replay(side.run)
                except Exception as error:  # whatever a compiler or a driver raises
                    self.note(no_graph=f"{side.name}: {str(error).partition(chr(10))[0][:160]}")
                else:
                    times[side.name] = statistics.median(self.watch(graph) for _ in range(10))
            self.note(graph_seconds=times)
            if len(times) == 2:
                found["graph"] = speed * times[theirs.name] / times[ours.name]
        return found

    def _add(self, case: str, against: str, status: str, rate: float = math.nan, **fields: Any) -> Row:
        blank: dict[str, Any] = {"ours": None, "theirs": None, "ratio": None, "goal": None, "rounds": 0}
        blank |= {"tokens": (1, 1), "notes": self._notes}
        fields |= self._memory_goals
        given = {name: value for name, value in fields.items() if value is not None}
        benchmark = Path(self.benchmark.fullname.partition("::")[0]).stem.removeprefix("bench_")
        row = Row(benchmark, case, against, status, matmul_rate=rate, **{**blank, **given})
        self.record.add(row)
        self.benchmark.extra_info.update(asdict(row))
        return row


_DIRECTION = {"forward": "forward", "backward": "backward", "both": "forward and backward"}


def _call(op: Op, direction: Direction, upstream: Any) -> Call:
    upstream = upstream if op.upstream is None else op.upstream
    if direction == "forward":
        return torch.no_grad()(op.run)
    if direction == "both":
        return lambda: torch.autograd.grad(op.run(), op.inputs, upstream)
    out = op.run()
    return lambda: torch.autograd.grad(out, op.inputs, upstream, retain_graph=True)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the norm over all elements; infinite where the shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    a, b = actual.detach().double(), expected.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def flat_gradients(parameters: Iterable[Tensor]) -> Tensor:
    """The gradients of all parameters in one row, zeros where there is none."""
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
