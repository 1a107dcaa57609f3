"""The benchmarks of single ops: what they compare with, what they time, and what they count."""

import ast
import inspect
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import bench_cross_entropy, bench_feed_forward
from benchmarks.bench_feed_forward import FeedForwardShape
from benchmarks.competitors import kernel_packages, known, training
from benchmarks.harness import clock
from benchmarks.harness.clock import Stopwatch
from benchmarks.harness.race import Op
from fastformer.apps.text import EncodedPairs, Sequences, SpecialIds
from fastformer.apps.translation.model import TranslationConfig
from fastformer.host.cuda_graphs import Recorded
from tests.benchmarks.races import CPU, make_race


def test_what_is_timed_may_be_another_call_than_what_is_compared():
    x = torch.randn(3, 4, requires_grad=True)
    ran = []

    def op(name, outputs):
        return Op(name, lambda: ran.append(name) or (2 * x if outputs == 1 else (2 * x, 3 * x)), [x])

    upstream = torch.ones(3, 4)
    race, timed = make_race(), (op("ours, timed", 2), op("theirs, timed", 2), (upstream, upstream))
    settings = {"expected": [2 * x.detach(), 2 * upstream], "tolerance": 1e-6, "direction": "both", "timed": timed}
    race.op("case", op("ours", 1), op("theirs", 1), upstream=upstream, **settings)
    assert ran[:2] == ["ours", "theirs"]
    assert set(ran[2:]) == {"ours, timed", "theirs, timed"}
    assert [row.status for row in race.record.rows] == ["dry run"]


def test_what_is_captured_has_run_before(monkeypatch):
    done = []

    def capture(step):
        step()
        return Recorded(lambda: done.append("replay"), None)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(clock, "CudaRecorder", lambda device, keeps_memory: mock.Mock(capture=capture))
    Stopwatch(torch.device("cpu")).replay(lambda: done.append("run"))()
    assert done == ["run", "run", "run", "wait", "run", "replay"]


def test_the_cache_is_flushed_by_reading_so_that_the_call_pays_for_no_line_of_another(monkeypatch):
    watch = Stopwatch(CPU)
    watch._flushed = other = torch.zeros(64)
    seen = []

    event = mock.Mock(record=lambda: seen.append("event"), elapsed_time=lambda end: 2.0)

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append("reads" if args[0] is other and not op._schema.is_mutable else "writes")
            return op(*args, **(kwargs or {}))

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    with Watching():
        assert watch(lambda: seen.append("call"), 2) == 4e-3
    assert seen == [*["reads"] * clock._FLUSHES, "event", "call", "event"] * 2


@pytest.fixture
def compilations(monkeypatch):
    """What torch.compile has compiled; it runs as it is."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: plain(function, backend=backend, **options))
    return graphs


def test_the_compiled_model_is_compiled(monkeypatch, compilations):
    monkeypatch.setattr(training, "require", lambda name, device: None)
    race = make_race()
    config = TranslationConfig(20, 20, d_model=16, heads=2, encoder_layers=1, decoder_layers=1, feed_forward=16)
    ids = Sequences(np.arange(4, 14, dtype=np.int32), np.array([0, 6, 10]))
    pairs = EncodedPairs(ids, ids, SpecialIds(), SpecialIds())
    training.race_training(race, "case", config, pairs, competitor="torch.nn-compile", rounds=1)
    assert [row.status for row in race.record.rows] == ["dry run"]
    assert len(compilations) == 2, "in evaluation mode and in training"


def test_the_ninth_compilation_of_the_same_code_still_compiles(compilations):
    for k in range(10):
        known.compiled(lambda x, k=k: x * k)(torch.ones(3))
    assert len(compilations) == 10


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_truth_of_the_loss_is_the_same_by_chunks(smoothing, monkeypatch):
    x, w = torch.randn(10, 6, requires_grad=True), torch.randn(12, 6, requires_grad=True)
    target = torch.tensor([0, -100, 3, 11, 5, -100, -100, 2, 2, 7])
    monkeypatch.setattr(bench_cross_entropy, "_TRUTH_ROWS", 3)
    results = bench_cross_entropy.truth(x, w, target, smoothing)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    loss = F.cross_entropy(F.linear(*wide), target, label_smoothing=smoothing)
    torch.testing.assert_close(results, [loss.detach(), *torch.autograd.grad(loss, wide)])


def test_feed_forward_work_is_counted_by_hand():
    counted = bench_feed_forward.work(FeedForwardShape(2, 3, 5), "both")
    assert counted.operations == 3 * (2 * 2 * 3 * 5 * 2)
    # x, y, both weights; x, dy, dx, both weights and their gradients: 2 bytes each.
    assert counted.bytes == 2 * ((2 * 6 + 30) + (3 * 6 + 2 * 30))
    assert bench_feed_forward.work(FeedForwardShape(2, 3, 5, "swiglu"), "forward").operations == 2 * 2 * 3 * 5 * 3


LOSS = {"label_smoothing": 0.1, "accum_dtype": torch.float32}


@pytest.mark.parametrize(
    ("op", "count", "keywords"),
    [
        ("layer_norm", 4, {}),
        ("rms_norm", 3, {}),
        ("swiglu", 2, {}),
        ("fused_add_rms_norm", 4, {}),
        ("fused_linear_cross_entropy", 3, LOSS),
    ],
)
def test_liger_has_the_ops_by_the_names_and_arguments_that_are_used(op, count, keywords):
    """Signatures of Triton's ops; registrations of CuTe's, which cannot be imported here."""
    liger_kernel = pytest.importorskip("liger_kernel")
    inspect.signature(kernel_packages.liger(op, "liger").__self__.forward).bind(*range(count), **keywords)
    file = Path(liger_kernel.__file__).parent / f"ops/backends/_cutedsl/{op}.py"
    (function,) = [
        each for each in ast.parse(file.read_text("utf-8")).body if getattr(each, "name", "") == f"{op}_cutedsl"
    ]
    decorators = map(ast.unparse, function.decorator_list)
    assert any(f"'{op}'" in text and "'nvidia-cutedsl'" in text for text in decorators)
    if not torch.cuda.is_available():
        with pytest.raises(Exception, match="nvidia-cutedsl"):
            kernel_packages.liger(op, "liger-cute")


@pytest.mark.parametrize("name", ["liger-cute", "liger-cute-sm90", "quack"])
def test_kernels_for_hopper_are_not_run_on_an_older_gpu(name, monkeypatch):
    missing, device = partial(known.missing, name), torch.device("cuda")
    monkeypatch.setattr(known.importlib.util, "find_spec", lambda module: None)
    assert missing(device).endswith("is not installed")
    monkeypatch.setattr(known.importlib.util, "find_spec", lambda module: module)
    assert missing(CPU) == known.NEEDS_GPU
    for capability, reason in (((8, 6), "needs compute capability 9.0, this GPU has 8.6"), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert missing(device) == reason
