"""Which cases `-k quick` has, on a CPU and on a GPU; what a case says where the competitor raises."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import (
    bench_decoding,
    bench_generation,
    bench_integrations,
    bench_language,
    bench_modules,
    bench_packing,
    conftest,
)
from benchmarks.competitors import generators, tutorials
from tests.benchmarks.races import broken, make_race, pytest_benchmarks

WITHOUT_A_GPU_TORCHS_OWN = {"bench_layer_norm.py"}  # there the reference calls F.layer_norm and F.rms_norm


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_every_file_that_says_something_of_a_cpu_has_a_quick_case_there():
    found = pytest_benchmarks("--collect-only", "benchmarks", "-k", "quick", "-m", "cpu or not gpu")
    assert found.returncode == 0, found.stdout + found.stderr
    cases = [line.removeprefix("benchmarks/") for line in found.stdout.splitlines() if "::" in line]
    files = {path.name for path in conftest.HERE.glob("bench_*.py")}
    assert {case.partition("::")[0] for case in cases} == files - WITHOUT_A_GPU_TORCHS_OWN


class Item:
    """A case of a benchmark, as pytest has it."""

    path = conftest.HERE / "bench_thing.py"

    def __init__(self, size, *marks):
        self.callspec, self.marks, self.added = SimpleNamespace(params={"size": size}), marks, []
        self.extra_keyword_matches = set()

    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, mark):
        self.added.append(mark.mark.name)


@pytest.mark.parametrize("gpu", [True, False])
def test_each_device_has_its_own_shapes_and_a_gpu_the_usual_ones_as_quick(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    items = cpu, for_gpu, usual, full = Item("quick", "cpu", "gpu"), Item("quick", "gpu"), Item("usual"), Item("full")
    left = list(items)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: False, hook=hook), left)
    assert left == [item for item in items if not (gpu and item is cpu)]
    assert [item for item in items if "skip" in item.added] == ([] if gpu else [for_gpu, full])
    assert [item for item in items if item.extra_keyword_matches == {"quick"}] == ([usual] if gpu else [])


@pytest.fixture
def race(monkeypatch):
    for module in (bench_decoding, bench_integrations):
        monkeypatch.setattr(module, "require", lambda name, device: None)
    return make_race()


def decode(race, competitor):
    bench_decoding.bench_decoding(race, "quick", competitor, 1, 2)


def break_ctranslate2(monkeypatch, race):
    monkeypatch.setattr(pytest.importorskip("ctranslate2"), "Translator", broken)
    decode(race, "ctranslate2")


def break_module(monkeypatch, race):
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: broken() if type(self) is nn.LayerNorm else None)
    bench_modules.bench_module(race, "usual", "LayerNorm", "train")


def break_packing(monkeypatch, race):
    monkeypatch.setattr(nn.TransformerEncoderLayer, "forward", broken)
    bench_packing.bench_encoder(race, "quick", True, "fp32", 0.55, 1.8, "training step")


def break_integration(monkeypatch, race):
    transformers = pytest.importorskip("transformers")
    attention = transformers.models.bert.modeling_bert.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(attention._global_mapping, "sdpa", broken)
    bench_integrations.bench_transformers(race, "quick", "BERT", "layers", 0.45, "training step", "sdpa")


def breaking(place, name, bench, by=broken):
    return lambda monkeypatch, race: (monkeypatch.setattr(place, name, by), bench(race))


BROKEN = {
    "translations": breaking(
        generators, "to_transformers", lambda race: decode(race, "transformers"),
        lambda model: SimpleNamespace(
            eval=lambda: SimpleNamespace(generate=broken, generation_config=SimpleNamespace())
        ),
    ),
    "ctranslate2": break_ctranslate2,
    "tutorial": breaking(bench_decoding.FixedLengthTranslation, "greedy", lambda race: decode(race, "tutorial")),
    "generation": breaking(
        tutorials.TutorialLanguageModel, "forward",
        lambda race: bench_generation.bench_generation(race, "quick", 1001, range(10), None, 1),
    ),
    "language": breaking(
        tutorials.TutorialLanguageModel, "forward",
        lambda race: bench_language.bench_training_step_of_the_language_model(race, "quick"),
    ),
    "module": break_module,
    "packing": break_packing,
    "integration": break_integration,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*nested.?tensor.*")
@pytest.mark.parametrize("side", BROKEN)
def test_what_a_competitor_raises_is_its_result(side, monkeypatch, race):
    BROKEN[side](monkeypatch, race)
    (row,) = race.record.rows
    assert row.status == "fails: RuntimeError: no kernel image"
    assert row.theirs is None


def test_a_model_of_transformers_whose_attention_has_other_gradients_is_not_timed(monkeypatch, race):
    transformers = pytest.importorskip("transformers")
    attention = transformers.models.bert.modeling_bert.ALL_ATTENTION_FUNCTIONS
    sdpa = attention["sdpa"]

    def turned_around(module, *tensors, **options):
        q, k, v = (2 * x.detach() - x for x in tensors[:3])
        return sdpa(module, q, k, v, *tensors[3:], **options)

    monkeypatch.setitem(attention._global_mapping, "sdpa", turned_around)
    with pytest.raises(pytest.fail.Exception, match="wrong, not timed: gradients differs"):
        bench_integrations.bench_transformers(race, "quick", "BERT", "layers", 0.45, "training step", "sdpa")
    assert race.record.rows == []


def test_a_failing_export_is_no_result_of_ctranslate2(monkeypatch, race):
    monkeypatch.setattr(generators, "export_ctranslate2", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        decode(race, "ctranslate2")
    assert race.record.rows == []


@pytest.mark.parametrize(("theirs", "whose"), [(-25.0, "theirs"), (-20.01, None), (-15.0, "ours")])
def test_the_less_probable_translation_is_wrong(theirs, whose, monkeypatch, race):
    found = torch.tensor([-10.0, theirs])
    monkeypatch.setattr(bench_decoding, "_log_probabilities", lambda model, sources, targets: found)
    ours = [bench_decoding.Hypothesis([1], score, score) for score in (-10.0, -20.0)]
    if whose == "ours":
        with pytest.raises(pytest.fail.Exception, match="wrong, not timed: best log probability differs"):
            bench_decoding._compare(race, nn.Identity(), [[1], [2]], ours, [[1], [1]])
        return
    bench_decoding._compare(race, nn.Identity(), [[1], [2]], ours, [[1], [1]])
    assert (race.fault is None) == (whose is None)
    assert whose is None or race.fault.startswith("wrong: log probability is off by")
