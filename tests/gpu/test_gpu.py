"""Models on a GPU, and decoding with CUDA graphs: `pytest -m gpu`; in benchmarks/GPU_TODO.md until it has run."""

import copy

import pytest
import torch

import fastformer
from fastformer.apps.language.sampling import SamplingOptions, sample
from fastformer.apps.models import decoding
from fastformer.apps.models.sampling import RandomStreams
from fastformer.apps.translation import search
from fastformer.apps.translation.beams import Beams
from fastformer.apps.translation.model import TranslationModel, translation_loss
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.host.cuda_graphs import ReplayedStep, recorder
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import DEVICE
from tests.support.gpu import MARKS, captured, counted_captures, no_host_sync
from tests.support.language_task import random_model as random_language_model
from tests.support.recorded_steps import steps_of_both
from tests.support.translation_task import config, random_batch, random_model, reverse_batch
from tests.support.uncached_search import RAGGED, cached_decoder, sources

pytestmark = MARKS


def batch():
    return random_batch([(3, 5), (9, 2), (1, 8), (70, 66)])


def model() -> TranslationModel:
    return random_model(d_model=32, heads=4).double()


def test_loss_and_gradients_are_those_of_the_cpu():
    here, there = model(), model().cuda()
    one = translation_loss(here, batch())
    two = translation_loss(there, batch().to(torch.device("cuda")))
    assert_close(two.cpu(), one, roundings=1e4)
    for a, b in zip(gradients(two, there.parameters()), gradients(one, here.parameters()), strict=True):
        assert_close(a.cpu(), b, roundings=1e5)


def test_searches_find_what_they_find_on_the_cpu():
    here, given = model(), batch()
    options = SearchOptions(beam=3, max_length=12)

    def found(source):
        greedy, beams = (search(here, source, given.source_lengths, options) for search in (greedy_search, beam_search))
        return [h.ids for h in greedy], [[h.ids for h in n] for n in beams]

    expected = found(given.source)
    here.cuda()
    assert found(given.source.cuda()) == expected


STEPS = 100


def loss_curve(backend: str, dtype: torch.dtype, autocast: bool = False) -> list[float]:
    """Train for 100 steps on the reversal of sentences; GELU, as a ReLU that rounding turns on is a jump."""
    torch.manual_seed(0)
    settings = {"d_model": 128, "heads": 4, "feed_forward": 256, "activation": "gelu"}
    model = TranslationModel(config(source_vocabulary=12, target_vocabulary=12, **settings)).to(DEVICE, dtype).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, 0.98))
    losses = []
    with fastformer.backend(backend):
        for step in range(STEPS):
            given = reverse_batch(step, 32, longest=40).to(torch.device(DEVICE))
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                loss = translation_loss(model, given, label_smoothing=0.1) / given.tokens
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_the_loss_curve_is_that_of_the_reference(autocast):
    """The largest difference along the curve from that in fp64 is at most 3 x the reference's own.

    Of curves of the reference in fp32 and bf16 whose parameters were changed by a rounding, the largest differences
    were 1 to 1.5 x one another (a smaller model, on a CPU).
    """
    exact = loss_curve("reference", torch.float64)
    plain = loss_curve("reference", torch.float32, autocast)
    actual = loss_curve("triton", torch.float32, autocast)
    assert actual[-1] < 0.75 * actual[0]
    error, noise = (max(abs(a - e) for a, e in zip(curve, exact, strict=True)) for curve in (actual, plain))
    assert error <= 3 * noise + 4 * torch.finfo(torch.float32).eps * max(exact)


# ---- decoding with CUDA graphs


def gpu_model(dtype=torch.float32, **changes):
    return random_model(1, d_model=64, heads=2, **changes).to("cuda", dtype)


@pytest.fixture
def captures(monkeypatch):
    return counted_captures(monkeypatch)


# Random errors of the dtype, as a share of the norm; a position that stands still makes it 0.09 and more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("backend", ["triton", "reference"])
@torch.inference_mode()
def test_replayed_steps_are_the_growing_ones(dtype, norm_first, backend, captures):
    """With rows that are reordered and leave."""
    model = gpu_model(dtype, norm_first=norm_first)
    with fastformer.backend(backend):
        for static, growing in steps_of_both(
            model, RAGGED, 40, recorder(torch.device(DEVICE), keeps_memory=True), hypotheses=2, leave_at=(3, 14)
        ):
            error = (static.float() - growing.float()).norm() / growing.float().norm()
            assert float(error) <= TOLERANCE[dtype]
    assert len(captures) == 3


@pytest.mark.parametrize("rules", [{}, {"min_length": 5, "no_repeat_ngram": 2}], ids=str)
@pytest.mark.parametrize("find", [greedy_search, beam_search])
def test_searches_find_the_same(find, rules, captures):
    model = gpu_model()
    source, lengths = sources([*RAGGED, 20])
    options = {"beam": 1 if find is greedy_search else 3, **rules}
    expected = find(model, source.cuda(), lengths, SearchOptions(**options, cuda_graphs=False))
    actual = find(model, source.cuda(), lengths, SearchOptions(**options))
    for one, two in zip(actual, expected, strict=True):
        for a, b in zip(*(x if isinstance(x, list) else [x] for x in (one, two)), strict=True):
            assert a.ids == b.ids
            assert a.log_probability == pytest.approx(b.log_probability, abs=1e-3)
    assert captures


@pytest.mark.parametrize("options", [{}, {"temperature": 0}], ids=str)
def test_generation_writes_the_same_texts(options, captures, monkeypatch):
    """With texts that end, windows that slide, and rows that leave."""
    monkeypatch.setattr(decoding, "IDLE_ROWS", 20)
    model = random_language_model(1, output_bias=True).double().cuda()
    prompts = [[2], [2, 5, 6, 7], [2, 9, 10, 11, 12]] * 4

    def texts(**graphs):
        written = SamplingOptions(seed=1, max_new_tokens=40, **options, **graphs)
        return list(sample(model, prompts, written, 12, RandomStreams(1)))

    assert texts() == texts(cuda_graphs=False)
    assert captures


@torch.inference_mode()
def test_a_replayed_step_waits_for_nothing(captures):
    source, lengths = sources(RAGGED)
    model, N = gpu_model(), 3
    cache, next_token = cached_decoder(model, source.cuda(), lengths, N, capacity=40)
    options = SearchOptions(beam=N, min_length=30, no_repeat_ngram=2)
    beams = Beams(torch.full_like(lengths, 40), N, model.config, options, source.cuda().device, 40)

    def run():
        beams.advance(next_token(beams.ids))
        cache.gather(beams.parents)

    step = ReplayedStep(recorder(torch.device("cuda"), keeps_memory=True), model, run, "decoding")
    for _ in range(3):
        step()
    assert len(captures) == 1
    with no_host_sync():
        for _ in range(10):
            step()


def test_a_capture_that_fails_leaves_everything_usable(captures, monkeypatch):
    model = gpu_model()
    source, lengths = sources(RAGGED)
    source = source.cuda()
    expected = greedy_search(model, source, lengths, SearchOptions(beam=1, cuda_graphs=False))
    forward = search.next_logits

    def waiting(model, embedding, cache, ids):
        assert int(ids[0]) >= 0
        return forward(model, embedding, cache, ids)

    with monkeypatch.context() as patch:
        patch.setattr(search, "next_logits", waiting)
        with pytest.warns(RuntimeWarning, match="goes on without CUDA graphs") as said:
            actual = greedy_search(model, source, lengths, SearchOptions(beam=1, cuda_graphs=True))
    assert len([w for w in said if "CUDA graphs" in str(w.message)]) == 1
    assert [h.ids for h in actual] == [h.ids for h in expected]
    assert not captures
    before = torch.randn(1000, device="cuda")
    assert not torch.equal(before, torch.randn(1000, device="cuda"))
    replay, [drawn] = captured(lambda: [torch.randn(1000, device="cuda")])
    replay()
    assert torch.isfinite(drawn).all()
    captures.clear()
    actual = greedy_search(model, source, lengths, SearchOptions(beam=1, cuda_graphs=True))
    assert [h.ids for h in actual] == [h.ids for h in expected]
    assert captures


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # a hint of TorchInductor
def test_a_stack_compiled_in_buckets_runs_from_cuda_graphs():
    layer = fastformer.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True, device=DEVICE)
    stack = fastformer.TransformerEncoder(layer, 2).eval()
    eager = copy.deepcopy(stack)
    stack.compile(buckets=True, mode="reduce-overhead")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(20):
            hidden = torch.arange(40) >= torch.randint(1, 41, (8, 1), generator=generator)
            x = torch.randn(8, 40, 64, generator=generator).to(DEVICE)
            out = stack(x, src_key_padding_mask=hidden.to(DEVICE))
            assert_close(out, eager(x, src_key_padding_mask=hidden.to(DEVICE)))
