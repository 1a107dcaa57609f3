"""Which cases `-k quick` has, on a CPU and on a GPU; what a case says where the competitor raises."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from _pytest.config import parse_warning_filter

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
from fastformer.host.cuda_graphs import capture_or_warn
from tests.benchmarks.races import broken, make_race, pytest_benchmarks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_every_file_that_says_something_of_a_cpu_has_a_quick_case_there():
    actual = pytest_benchmarks("--collect-only", "benchmarks", "-k", "quick", "-m", "cpu or not gpu")
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
def race(monkeypatch):
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
def test_exceptions_of_a_competitor_are_its_result(name, bench, monkeypatch, race):
    if name[0].isupper():
        name = f"benchmarks.competitors.tutorials.{name}"
    pytest.importorskip(name.partition(".")[0])
    monkeypatch.setattr(name, broken)
    bench(race)
    (row,) = race.record.rows
    assert row.status == "fails: RuntimeError: no kernel image"
    assert row.theirs is None


def test_a_model_of_transformers_whose_attention_has_other_gradients_is_not_timed(monkeypatch, race):
    transformers = pytest.importorskip("transformers")
    attentions = transformers.models.bert.modeling_bert.ALL_ATTENTION_FUNCTIONS._global_mapping
    sdpa = attentions["sdpa"]

    def turned_around(module, *tensors, **options):
        q, k, v = (2 * x.detach() - x for x in tensors[:3])
        return sdpa(module, q, k, v, *tensors[3:], **options)

    monkeypatch.setitem(attentions, "sdpa", turned_around)
    with pytest.raises(pytest.fail.Exception, match="wrong, not timed: gradients differs"):
        bench_integrations.bench_transformers(race, "quick", "BERT", "layers", 0.45, "training step", "sdpa")
    assert race.record.rows == []


def test_a_failing_export_is_no_result_of_ctranslate2(monkeypatch, race):
    monkeypatch.setattr(generators, "export_ctranslate2", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        decode(race, "ctranslate2")
    assert race.record.rows == []


@pytest.mark.parametrize(("theirs", "whose"), [(-25.0, "theirs"), (-20.01, None), (-15.0, "ours")])
def test_the_less_probable_translation_is_wrong(theirs, whose, race):
    wrong = pytest.raises(pytest.fail.Exception, match="wrong, not timed: best log probability differs")
    with wrong if whose == "ours" else nullcontext():
        generators.gate_probabilities(race, torch.tensor([-10.0, -20.0]), torch.tensor([-10.0, theirs]))
    assert (race.fault or "").startswith("wrong: log probability is off by") == (whose == "theirs")
