"""A competitor that is wrong, out of memory or broken is reported as that; ours, if wrong, is not timed."""

import gc
import json
import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.harness.clock import Work, saved_for_backward
from benchmarks.harness.race import Contender, Op, Race
from benchmarks.harness.record import Record
from tests.benchmarks.races import broken, make_race


@pytest.fixture
def race(tmp_path):
    record = Record({"commit": "0"}, tmp_path / "run.jsonl")
    yield make_race(record, tiny=False)
    record.close({})


X = torch.randn(40, 40)


def square(x: Tensor) -> Tensor:
    return x * x


def compare(race: Race, theirs, ours=square, **fields) -> None:
    x = X.clone().requires_grad_()
    fields |= {"upstream": torch.ones_like(X), "expected": [X.double() ** 2, 2 * X.double()], "tolerance": 1e-5}
    fields |= {"direction": "both", "work": Work(2.0 * X.numel(), 8.0 * X.numel())}
    race.op("a case", Op("fastformer", lambda: ours(x), [x]), Op("other", lambda: theirs(x), [x]), **fields)


def test_both_right(race, tmp_path):
    compare(race, lambda x: x**2, goal=1e9)
    (row,) = race.record.rows
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]  # written at once
    assert (lines[0]["machine"], lines[1]["row"]["case"]) == ({"commit": "0"}, row.case)
    assert (row.benchmark, row.case, row.against) == ("thing", "a case, forward and backward", "other")
    assert row.status == "measured"
    assert min(row.ours, row.theirs) > 0
    assert row.ratio == pytest.approx(row.theirs / row.ours, rel=0.9)
    assert row.missed
    assert row.floor > 0
    assert row.operations_per_second == pytest.approx(2.0 * X.numel() / row.ours)
    assert row.saved_bytes is not None


def oom(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def wrong_gradient(x: Tensor) -> Tensor:
    return x + (x * x - x).detach()


@pytest.mark.parametrize(
    ("theirs", "status"),
    [
        (lambda x: 1.01 * x * x, "wrong: output is off by 1.0e-02"),
        (lambda x: x * x * float("nan"), "wrong: output is off by nan"),
        (wrong_gradient, "wrong: gradient 0 is off by"),
        (oom, "out of memory"),
        (broken, "fails: RuntimeError: no kernel image"),
    ],
    ids=["output", "nan", "gradient", "memory", "raises"],
)
def test_a_competitor_with_a_fault_is_reported_not_timed(race, theirs, status):
    compare(race, theirs, goal=2.0)
    (row,) = race.record.rows
    assert row.status.startswith(status)
    assert row.theirs is None
    assert row.ratio is None
    assert row.ours > 0
    assert not row.missed


def test_a_wrong_result_of_fastformer_fails_and_is_not_timed(race):
    with pytest.raises(pytest.fail.Exception, match=r"wrong, not timed: output differs by 1\.0e-02"):
        compare(race, square, ours=lambda x: 1.01 * x * x)
    assert race.record.rows == []


def test_fastformer_out_of_memory_is_a_row(race):
    with pytest.raises(pytest.skip.Exception, match="out of memory"):
        compare(race, square, ours=oom)
    (row,) = race.record.rows
    assert row.status == "fastformer is out of memory"
    assert row.ours is None


def test_no_time_without_a_gate(race):
    with pytest.raises(AssertionError, match="only after a gate"):
        race("a case", Contender("fastformer", lambda: None), Contender("other", lambda: None), rounds=1)


class Stashing(torch.autograd.Function):
    """Keeps a tensor as an attribute, of which no hook knows."""

    @staticmethod
    def forward(ctx, x):
        ctx.twice = 2 * x
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.twice


@pytest.mark.parametrize("op", [torch.exp, Stashing.apply], ids=["saved", "attribute"])
def test_counting_saved_tensors_saves_none(op):
    x = X.clone().requires_grad_()
    outputs = []

    def forward():
        out = op(x)  # exp saves its own output
        outputs.append(weakref.ref(out))
        return out.sum()

    assert saved_for_backward(forward, [x]) == X.numel() * 4
    gc.collect()
    assert outputs[0]() is None


def test_a_competitor_that_breaks_while_it_is_timed(race):
    other = mock.Mock(side_effect=[None, None, torch.OutOfMemoryError("CUDA out of memory")])
    race.gate("result", X, X, 0.0)
    race("a case", Contender("fastformer", lambda: X @ X), Contender("other", other), rounds=3)
    assert race.record.rows[0].status == "out of memory"


def test_ratios_are_by_the_token(race):
    race.gate("result", X, X, 0.0)
    sides = (Contender(name, lambda: X @ X, tokens) for name, tokens in (("fastformer", 100), ("other", 10)))
    race("a case", *sides, rounds=5)
    assert race.record.rows[0].ratio == pytest.approx(10, rel=0.7)


@pytest.mark.parametrize("fails", [False, True])
def test_a_side_that_cannot_be_captured_takes_nothing_from_the_other(race, fails):
    """On a GPU; this watch only says that it is on one."""

    def replay(run):
        if fails and run is theirs:
            raise RuntimeError("it waits for the device\nand more")
        return run

    def ours():
        return None

    def theirs():
        return None

    race.watch.on_gpu, race.watch.replay = True, replay
    race.watch.wall = lambda run: 1.0
    sides = Contender("fastformer", ours), Contender("other", theirs)
    ratios = race._gpu_ratios(*sides, True)
    assert set(race.notes["graph_seconds"]) == ({"fastformer"} if fails else {"fastformer", "other"})
    assert ("graph" in ratios) is not fails
    assert race.notes.get("no_graph") == ("other: it waits for the device" if fails else None)
    assert "graph" not in race._gpu_ratios(*sides, False)


@pytest.mark.parametrize(("seconds", "rounds"), [(1000.0, 9), (5.0, 2), (0.1, 1)])
def test_long_cases_have_fewer_rounds_on_a_cpu(seconds, rounds, race, monkeypatch):
    """Each side takes one second a call."""
    monkeypatch.setattr(type(race.watch), "__call__", lambda self, run, calls=1: 1.0 * calls)
    race.seconds = seconds
    race.gate("result", X, X, 0.0)
    race("a case", Contender("fastformer", lambda: None), Contender("other", lambda: None), rounds=9)
    assert race.record.rows[0].rounds == rounds
