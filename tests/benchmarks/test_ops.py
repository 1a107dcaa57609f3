"""The benchmarks of single ops: what they compare with, what they time, and what they count.

Those of attention count, mask and draw lengths as they say; their glue for competitors loses no position.
"""

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
from benchmarks.competitors import attention as rivals
from benchmarks.competitors import kernel_packages, known, training
from benchmarks.harness import clock
from benchmarks.harness.attention_case import AttentionCase
from benchmarks.harness.clock import Stopwatch
from benchmarks.harness.race import DIRECTIONS, Op
from fastformer import functional
from fastformer.apps.text import EncodedPairs, Sequences, SpecialIds
from fastformer.apps.translation.model import TranslationConfig
from fastformer.host.cuda_graphs import Recorded
from tests.benchmarks.conftest import CPU, make_race
from tests.support.closeness import assert_close


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


# Attention


LENGTHS = np.array([5, 2, 0, 7])


def attention_case(causal, lengths=LENGTHS, **settings):
    return AttentionCase(lengths, 3, 8, CPU, causal, dtype=torch.float64, **settings)


def attended(p, inputs):
    ends = p.lengths_on_device
    return functional.attention(*inputs, causal=p.causal, query_lengths=ends, key_lengths=ends)


@pytest.mark.parametrize("causal", [True, False])
def test_useful_pairs_are_those_that_the_mask_allows_to_real_queries(causal):
    p = attention_case(causal)
    allowed = p.allowed().expand(-1, p.heads, p.length, -1) & p.real[:, None, :, None]
    assert p.pairs == int(allowed.sum())


@pytest.mark.parametrize(
    ("value_size", "operations", "tensors"),
    [
        (None, [4 * 9 * 8, 10 * 9 * 8, 14 * 9 * 8], 8 + 8),
        (5, [9 * (2 * 8 + 2 * 5), 9 * (6 * 8 + 4 * 5), 9 * (8 * 8 + 6 * 5)], 8 + 5),
    ],
)
def test_work_is_that_of_the_formula(value_size, operations, tensors):
    p = attention_case(True, np.array([2]), value_size=value_size)  # 3 pairs in each of 3 heads, of 8 channels
    work = [p.work(direction) for direction in DIRECTIONS]
    assert [each.operations for each in work] == operations
    size = 2 * 3 * tensors * 8  # bytes of fp64, of keys and values
    assert [each.bytes for each in work] == [2 * size, 4 * size, 6 * size]


@pytest.mark.parametrize("settings", [{}, {"value_size": 5}])
@pytest.mark.parametrize("causal", [True, False])
def test_fp64_results_are_those_of_sdpa_on_each_sequence(causal, settings):
    p = attention_case(causal, **settings)
    inputs, upstream = p.leaves(), p.random()
    out, *grads = p.expected(inputs, upstream)
    rows, heads = p.compared_heads
    for i, (b, h) in enumerate(zip(rows.tolist(), heads.tolist(), strict=True)):
        n = int(LENGTHS[b])
        wide = [x.detach()[b, h, :n].requires_grad_() for x in inputs]
        expected = F.scaled_dot_product_attention(*(x[None, None] for x in wide), is_causal=causal)[0, 0]
        assert_close(out[i, :n], expected)
        for grad, x in zip(grads, torch.autograd.grad(expected, wide, upstream[b, h, :n]), strict=True):
            assert_close(grad[i, :n], x)
            assert not grad[i, n:].any()


def test_long_sequences_are_compared_in_some_heads_of_the_first_and_the_last_row(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.attention_case._COMPARED_SCORES", 2 * 49)
    p = attention_case(True)
    rows, heads = p.compared_heads
    assert (rows.tolist(), heads.tolist()) == ([0, 3], [0, 2])
    inputs, upstream = p.leaves(), p.random()
    some = p.expected(inputs, upstream)
    monkeypatch.undo()
    whole = attention_case(True).expected(inputs, upstream)
    for a, b in zip(some, whole, strict=True):
        assert_close(a, b[[0, -1]])


def test_what_dropout_adds_is_its_mean_square():
    p = attention_case(False, np.array([6]), dropout=0.3)
    torch.manual_seed(0)
    inputs = [x.detach() for x in p.leaves()]
    exact = F.scaled_dot_product_attention(*inputs)
    added = [(F.scaled_dot_product_attention(*inputs, dropout_p=0.3) - exact).square() for _ in range(2000)]
    mean = torch.stack(added).mean(0)[0]
    assert float((mean - p.dropped(inputs)).norm() / mean.norm()) < 0.05


WAYS = [
    (True, rivals.MASK),
    (True, rivals.KEY_MASK),
    (True, rivals.ALONE),
    (False, rivals.MASK),
    (False, rivals.KEY_MASK),
]


@pytest.mark.parametrize("name", ["sdpa-math", "sdpa-flash"])
@pytest.mark.parametrize(("causal", "way"), WAYS)
def test_sdpa_gets_the_same_rules_in_each_form(name, way, causal):
    p = attention_case(causal, np.array([5, 2, 7]))
    inputs = p.leaves()
    run = rivals.rival(p, name, way)
    refuses_both = name == "sdpa-math" or torch.__version__ >= "2.14"  # a mask beside is_causal
    if refuses_both and way == rivals.KEY_MASK and causal:
        with pytest.raises(RuntimeError, match="is_causal"):
            run(*inputs)
        return
    real = p.real[:, None, :, None]
    assert_close(run(*inputs) * real, attended(p, inputs))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["flex", "flex-per-batch"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gets_the_same_rules(name, causal):
    p = attention_case(causal, np.array([5, 2, 7]))
    with torch.no_grad():
        inputs = [x.detach().float() for x in p.leaves()]
        results = rivals.rival(p, name)(*inputs) * p.real[:, None, :, None]
        assert_close(results, attended(p, inputs))


def test_the_tutorials_attention_is_causal():
    p = attention_case(True, np.array([7, 7]))
    inputs = p.leaves()
    assert_close(rivals.rival(p, "tutorial")(*inputs), attended(p, inputs))


def test_unpadding_and_padding_again_loses_no_position():
    p = attention_case(True)
    inputs, upstream = p.leaves(), p.random()
    run = rivals.unpadded(p, lambda q, k, v: functional.packed_attention(q, k, v, p.layout, causal=True))
    ours, theirs = attended(p, inputs), run(*inputs)
    assert_close(theirs, ours)
    for a, b in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (theirs, ours)), strict=True):
        assert_close(a, b)


def test_varlen_gets_causality_in_either_signature():
    def older(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None): ...

    def later(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)): ...

    assert [rivals.causal_arguments(older, causal) for causal in (True, False)] == [
        {"is_causal": x} for x in (True, False)
    ]
    windows = [rivals.causal_arguments(later, causal)["window_size"] for causal in (True, False)]
    assert windows == [(-1, 0), (-1, -1)]
