"""Races: a competitor that is wrong, out of memory or broken is reported as that; ours, if wrong, is not timed.

Each device has its own cases, and those of `-k quick` exist on a CPU.
"""

import gc
import json
import warnings
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from _pytest.config import parse_warning_filter
from torch import Tensor

from benchmarks import (
    bench_decoding,
    bench_generation,
    bench_integrations,
    bench_language,
    bench_modules,
    bench_packing,
    conftest,
)
from benchmarks.competitors import generators
from benchmarks.harness.clock import Work, saved_for_backward
from benchmarks.harness.race import Contender, Op, Race
from benchmarks.harness.record import Record
from fastformer.host.cuda_graphs import capture_or_warn
from tests.benchmarks.conftest import broken, make_race
from tests.support.python import python


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_every_file_that_says_something_of_a_cpu_has_a_quick_case_there():
    actual = python(
        "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "benchmarks", "-k", "quick", "-m", "cpu or not gpu"
    )
    assert actual.returncode == 0, actual.stdout + actual.stderr
    cases = [line.removeprefix("benchmarks/") for line in actual.stdout.splitlines() if "::" in line]
    files = {path.name for path in conftest.HERE.glob("bench_*.py")}
    assert {case.partition("::")[0] for case in cases} == files


def collected(size, *marks):
    """A case of a benchmark, as pytest has it."""
    added = []
    return SimpleNamespace(
        path=conftest.HERE / "bench_thing.py",
        callspec=SimpleNamespace(params={"size": size}),
        extra_keyword_matches=set(),
        get_closest_marker=lambda name: name if name in marks else None,
        added=added,
        add_marker=lambda mark: added.append(mark.mark),
    )


@pytest.mark.parametrize("gpu", [True, False])
def test_each_device_has_its_own_shapes_and_a_gpu_the_usual_ones_as_quick(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    sizes = (("quick", "cpu", "gpu"), ("quick", "gpu"), ("usual",), ("full",))
    items = cpu, for_gpu, usual, full = [collected(*each) for each in sizes]
    left = list(items)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: False, hook=hook), left)
    assert left == [item for item in items if not (gpu and item is cpu)]
    assert [item for item in items if "skip" in {mark.name for mark in item.added}] == ([] if gpu else [for_gpu, full])
    assert [item for item in items if item.extra_keyword_matches == {"quick"}] == ([usual] if gpu else [])


def test_a_benchmark_fails_where_a_graph_is_not_captured():
    item, recorder = collected("usual"), SimpleNamespace(capture=broken)
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: True), [item])
    with warnings.catch_warnings():
        for mark in item.added:
            if mark.name == "filterwarnings":
                warnings.filterwarnings(*parse_warning_filter(*mark.args, escape=False))
        with pytest.raises(RuntimeWarning, match="decoding goes on without CUDA graphs"):
            capture_or_warn(recorder, lambda: None, "decoding")


@pytest.fixture
def tiny_race(monkeypatch):
    for module in (bench_decoding, bench_integrations):
        monkeypatch.setattr(module, "require", lambda name, device: None)
    return make_race()


def decode(race, competitor):
    bench_decoding.bench_decoding(race, "quick", competitor, 1, 2)


GENERATION, MODULE = ("quick", 1001, range(10), None, 1), ("MultiheadAttention", "train")
ENCODER = ("quick", True, "fp32", False, 0.55, 1.8, "training step")
BROKEN = [
    ("transformers.GenerationMixin.generate", lambda race: decode(race, "transformers")),
    ("ctranslate2.Translator", lambda race: decode(race, "ctranslate2")),
    ("FixedLengthTranslation.greedy", lambda race: decode(race, "tutorial")),
    ("TutorialLanguageModel.forward", lambda race: bench_generation.bench_generation(race, *GENERATION)),
    (
        "TutorialLanguageModel.forward",
        lambda race: bench_language.bench_training_step_of_the_language_model(race, "quick"),
    ),
    ("torch.nn.MultiheadAttention.forward", lambda race: bench_modules.bench_module(race, "usual", *MODULE)),
    ("torch.nn.TransformerEncoderLayer.forward", lambda race: bench_packing.bench_encoder(race, *ENCODER)),
]


@pytest.mark.filterwarnings("ignore:.*nested.?tensor.*")
@pytest.mark.parametrize(("name", "bench"), BROKEN)
def test_exceptions_of_a_competitor_are_its_result(name, bench, monkeypatch, tiny_race):
    if name[0].isupper():
        name = f"benchmarks.competitors.tutorials.{name}"
    pytest.importorskip(name.partition(".")[0])
    monkeypatch.setattr(name, broken)
    bench(tiny_race)
    (row,) = tiny_race.record.rows
    assert row.status == "fails: RuntimeError: no kernel image"
    assert row.theirs is None


def test_a_model_of_transformers_whose_attention_has_other_gradients_is_not_timed(monkeypatch, tiny_race):
    transformers = pytest.importorskip("transformers")
    attentions = transformers.models.bert.modeling_bert.ALL_ATTENTION_FUNCTIONS._global_mapping
    sdpa = attentions["sdpa"]

    def turned_around(module, *tensors, **options):
        q, k, v = (2 * x.detach() - x for x in tensors[:3])
        return sdpa(module, q, k, v, *tensors[3:], **options)

    monkeypatch.setitem(attentions, "sdpa", turned_around)
    with pytest.raises(pytest.fail.Exception, match="wrong, not timed: gradients differs"):
        bench_integrations.bench_transformers(tiny_race, "quick", "BERT", "layers", 0.45, "training step", "sdpa")
    assert tiny_race.record.rows == []


def test_a_failing_export_is_no_result_of_ctranslate2(monkeypatch, tiny_race):
    monkeypatch.setattr(generators, "export_ctranslate2", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        decode(tiny_race, "ctranslate2")
    assert tiny_race.record.rows == []


@pytest.mark.parametrize(("theirs", "whose"), [(-25.0, "theirs"), (-20.01, None), (-15.0, "ours")])
def test_the_less_probable_translation_is_wrong(theirs, whose, tiny_race):
    wrong = pytest.raises(pytest.fail.Exception, match="wrong, not timed: best log probability differs")
    with wrong if whose == "ours" else nullcontext():
        generators.gate_probabilities(tiny_race, torch.tensor([-10.0, -20.0]), torch.tensor([-10.0, theirs]))
    assert (tiny_race.fault or "").startswith("wrong: log probability is off by") == (whose == "theirs")
