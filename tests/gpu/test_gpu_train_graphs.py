"""Training with CUDA graphs: the eager steps, no wait for the device, little memory, and failures that harm nothing."""

import copy
import functools
import gc

import pytest
import torch

import fastformer
from fastformer.apps.train import Processes, TrainConfig
from fastformer.apps.train.graphs import GraphedUpdate, new_update, shape_of
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import translation_loss
from fastformer.apps.translation.search import greedy_search
from fastformer.host.cuda_graphs import CudaRecorder
from tests.support.gpu import MARKS, counted_captures, no_host_sync
from tests.support.translation_task import random_batch, random_model
from tests.support.uncached_search import RAGGED, sources

pytestmark = MARKS
LOSS = functools.partial(translation_loss, label_smoothing=0.1)


@pytest.fixture
def captures(monkeypatch):
    return counted_captures(monkeypatch)


def groups(steps, accumulate=1, shapes=3):
    """Other batches each time, of few shapes: the same lengths in other orders, other ids."""
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.randint(1, 20, (size, 2), generator=generator) for size in (3, 20, 7)[:shapes]]
    actual = []
    for number in range(steps * accumulate):
        lengths = kinds[number % shapes]
        order = torch.randperm(len(lengths), generator=generator)
        actual.append(random_batch(lengths[order].tolist(), seed=number))
    assert len({shape_of(batch) for batch in actual}) == min(shapes, len(actual))
    return [actual[i : i + accumulate] for i in range(0, len(actual), accumulate)]


def gpu_model(**changes):
    return random_model(1, d_model=64, heads=2, **changes).to("cuda").train()


def update_of(model, **changes):
    given = {"steps": 1000, "lr": 1e-3, "optimizer": "sgd", "cuda_graphs": True}
    return new_update(model, LOSS, TrainConfig(**{**given, **changes}), Processes())


def train(update, given, rate=None):
    """Losses and norms; the rate falls from step to step if none is given."""
    seen = []
    for number, batches in enumerate(given, start=1):
        loss, norm, _ = update.gradients(batches)
        seen.append(torch.stack([loss.float(), norm.float()]))
        update.apply(norm, 1e-2 / number if rate is None else rate)
    return torch.stack(seen).cpu()


def both(given, dropout=0.0, **changes):
    """Losses and norms, eager and graphed, of equal models."""
    model = gpu_model(dropout=dropout)
    other = copy.deepcopy(model)
    results = []
    for net, graphs in ((model, False), (other, None)):  # None: the default
        torch.manual_seed(5)
        results.append(train(update_of(net, cuda_graphs=graphs, **changes), given))
    return results


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adam"])
def test_steps_are_the_eager_ones(backend, precision, optimizer, captures):
    with fastformer.backend(backend):
        expected, actual = both(groups(25, 2), precision=precision, optimizer=optimizer, accumulate=2)
    rtol = 1e-3 if precision == "fp32" else 3e-2
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0)
    assert len(captures) == 5  # three shapes, norm and optimiser


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["eager first", "graphs first"])
def test_steps_with_rotary_positions_are_the_eager_ones(order, captures):
    """Tables of angles are kept, and read by a graph where it was shown them: made before it, in it, and after it."""
    settings = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "rotary_theta": 1e4 + order[0]}
    given, results = groups(12), {}
    for graphs in order:
        model = gpu_model(**settings)
        results[graphs] = train(update_of(model, cuda_graphs=graphs), given)
    torch.testing.assert_close(results[True], results[False], rtol=1e-3, atol=0)


def test_dropout_is_drawn_anew_and_counted():
    """The generator stands where eager steps leave it, so that a resumed run draws the same."""
    batch = groups(1)
    states = []
    for graphs in (False, True):
        model = gpu_model(dropout=0.3)
        torch.manual_seed(5)
        with fastformer.backend("triton"):  # one seed a mask; else it would depend on the sizes
            losses = train(update_of(model, cuda_graphs=graphs), batch * 8, rate=1e-9)[:, 0]
        states.append((losses, torch.cuda.get_rng_state()))
    (eager, state), (graphed, graphed_state) = states
    assert len(set(graphed.tolist())) == 8
    assert state.equal(graphed_state)
    torch.testing.assert_close(graphed, eager, rtol=1e-3, atol=0)  # the kernels' masks do not depend on sizes


def test_a_step_waits_for_nothing(captures):
    model = gpu_model(dropout=0.1)
    update = update_of(model, optimizer="adamw", precision="bf16")
    given = groups(12, shapes=1)
    with fastformer.backend("triton"):
        train(update, given[:3])
        assert len(captures) == 3
        with no_host_sync():
            for batches in given[3:]:
                _, norm, _ = update.gradients(batches)
                update.apply(norm, 1e-3)


def test_many_shapes_share_their_memory(captures):
    """What a step needs between forward and optimiser is taken once, not for each graph; and given back in the end."""

    def reserved():
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    model = gpu_model()
    update = update_of(model)
    sizes = [6000, 5500, 5000, 4500]
    with fastformer.backend("triton"):
        train(update, groups(1) * 3)  # cuBLAS's workspace, gradients
        before, after = reserved(), []
        for size in sizes:
            train(update, [[random_batch([(9, 9)] * size)]] * 3)
            after.append(reserved())
    assert len(captures) == 3 + len(sizes)
    first = after[0] - before
    assert after[-1] - after[0] < 0.5 * first
    del update
    captures.clear()
    assert reserved() - before < 0.5 * first


def test_a_capture_of_another_that_fails_harms_nothing(captures):
    """As of a beam search in a validation: it leaves the generator with another state than earlier graphs have."""
    given = groups(1) * 4
    eager, graphed = (gpu_model(dropout=0.3) for _ in range(2))
    losses = []
    for model, graphs in ((eager, False), (graphed, True)):
        torch.manual_seed(5)
        update = update_of(model, cuda_graphs=graphs)
        with fastformer.backend("triton"):
            first = train(update, given, rate=1e-9)
            with pytest.raises(RuntimeError):
                CudaRecorder(torch.device("cuda"), keeps_memory=True).capture(
                    lambda: torch.ones(1, device="cuda").item()
                )
            losses.append(torch.cat([first, train(update, given, rate=1e-9)])[:, 0])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)  # the same masks
    assert len(captures) == 6


def test_a_capture_that_fails_leaves_eager_steps(captures, monkeypatch):
    given = groups(1) * 6
    expected, _ = both(given)
    backward = Update.backward

    def waiting(self, batch, tokens):
        loss = backward(self, batch, tokens)
        assert float(loss) > 0
        return loss

    captures.clear()
    with monkeypatch.context() as patch:
        patch.setattr(GraphedUpdate, "backward", waiting)
        model = gpu_model()
        with pytest.warns(RuntimeWarning, match="training goes on without CUDA graphs") as said:
            actual = train(update_of(model), given)
    assert len([w for w in said if "CUDA graphs" in str(w.message)]) == 1
    assert not captures
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=0)
    assert not torch.equal(torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda"))


def test_validation_between_steps_harms_nothing():
    """It grows the tables of positions that graphs read, and takes and frees memory."""
    given = groups(1) * 4
    model = gpu_model()
    plain = copy.deepcopy(model)
    update = update_of(model)
    expected = train(update_of(plain, cuda_graphs=False), given * 2, rate=1e-3)
    first = train(update, given, rate=1e-3)
    with torch.no_grad():
        LOSS(model, random_batch([(900, 900)]).to("cuda"))
    # As large as the tables were, so that they take the memory that is free.
    rubbish = [torch.full((512, 64), float("nan"), device="cuda") for _ in range(200)]
    second = train(update, given, rate=1e-3)
    del rubbish
    torch.testing.assert_close(torch.cat([first, second]), expected, rtol=1e-3, atol=0)


def test_a_search_between_steps_harms_nothing(captures):
    """As of a validation: under autocast, from graphs of its own."""
    given, (source, lengths) = groups(1) * 4, sources(RAGGED)
    model = gpu_model()
    plain = copy.deepcopy(model)
    update = update_of(model, precision="bf16", cuda_graphs=None)
    expected = train(update_of(plain, precision="bf16", cuda_graphs=False), given * 2, rate=1e-3)
    first = train(update, given, rate=1e-3)
    with update.autocast():
        greedy_search(model.eval(), source.cuda(), lengths)
    model.train()
    second = train(update, given, rate=1e-3)
    assert len(captures) == 4  # one of them of the search
    torch.testing.assert_close(torch.cat([first, second]), expected, rtol=3e-2, atol=0)
