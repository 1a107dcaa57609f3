"""Training steps as a CUDA graph would repeat them: equal to eager ones, and eager again where they cannot be.

What repeats them here is `recorded_steps.TapeRecorder`, on a CPU; on a GPU: test_gpu_train_graphs.py.
"""

import copy
import functools
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastformer.apps.classification.run import ClassificationTrainConfig
from fastformer.apps.language.model import language_model_loss
from fastformer.apps.runs import automatic_settings
from fastformer.apps.text import (
    Batches,
    EncodedPairs,
    LabelledBatch,
    LanguageBatch,
    Sequences,
)
from fastformer.apps.train import TrainConfig, Trainer, graphs, read_metrics
from fastformer.apps.train.config import check_machine
from fastformer.apps.train.graphs import FixedBatch, GraphedUpdate, new_update, shape_of
from fastformer.apps.train.processes import Processes
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import translation_loss
from fastformer.host import cuda_graphs
from tests.support import language_task
from tests.support.recorded_steps import read_nothing, taped
from tests.support.translation_task import IDS, random_batch, random_model

LOSS = functools.partial(translation_loss, label_smoothing=0.1)
ALONE = Processes.current()


@pytest.fixture
def tape(monkeypatch):
    return taped(monkeypatch, graphs)


def settings(**changes):
    given = {"steps": 100, "lr": 0.01, "weight_decay": 0.01, "cuda_graphs": True}
    return TrainConfig(**{**given, **changes})


def batches(count, seed=0):
    """Of few shapes: sides of 16, 32, 48 … tokens."""
    generator = torch.Generator().manual_seed(seed)
    actual = []
    for number in range(count):
        sentences = int(torch.randint(1, 9, (), generator=generator))
        lengths = torch.randint(1, 12, (sentences, 2), generator=generator).tolist()
        actual.append(random_batch(lengths, seed=100 * seed + number))
    return actual


def train(update, groups, rates=None):
    """Losses, norms and tokens of each step."""
    seen = []
    for number, group in enumerate(groups):
        loss, norm, tokens = update.gradients(group)
        seen.append((float(loss), float(norm), tokens))
        update.apply(norm, 0.01 / (1 + number) if rates is None else rates[number])
    return torch.tensor(seen, dtype=torch.float64)


def assert_same_parameters(a, b):
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def updates(tape, config, loss=LOSS):
    """An eager update and a graphed one, of equal models."""
    model = random_model(1).double().train()
    other = copy.deepcopy(model)
    return Update(model, loss, config, ALONE), GraphedUpdate(other, loss, config, ALONE, tape), model, other


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 3},
        {"optimizer": "adam", "clip_norm": 0.0},
        {"optimizer": "sgd", "clip_norm": 0.2, "accumulate": 2},
    ],
    ids=str,
)
def test_steps_are_the_eager_ones(tape, changes):
    config = settings(**changes)
    eager, graphed, model, other = updates(tape, config)
    given = batches(20)
    groups = [given[i : i + config.accumulate] for i in range(0, len(given), config.accumulate)]
    expected, actual = train(eager, groups), train(graphed, groups)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert_same_parameters(model, other)
    assert tape.captured >= 4  # norm, optimizer and more than one shape
    assert tape.replayed > 3 * len(groups) // 2
    states = [update.optimizer.state_dict()["param_groups"] for update in (eager, graphed)]
    assert states[0] == states[1]
    assert all(type(group["lr"]) is float for group in states[1])


@pytest.mark.parametrize("broken", ["backward", "norm", "step"])
def test_a_part_that_cannot_be_captured_leaves_eager_steps(tape, broken):
    eager, graphed, model, other = updates(tape, settings(accumulate=2))
    real, capture = getattr(graphed, broken), tape.capture

    def capturing(step):
        def refuse(*args):
            real(*args)
            raise RuntimeError("operation not permitted when stream is capturing")

        setattr(graphed, broken, refuse)
        try:
            return capture(step)
        finally:
            setattr(graphed, broken, real)

    tape.capture = capturing
    groups = [batches(2)] * 3 + [batches(2, seed=number) for number in range(5)]
    with pytest.warns(RuntimeWarning, match="^training goes on without CUDA graphs, .* not permitted") as seen:
        actual = train(graphed, groups)
    assert len(seen) == 1
    torch.testing.assert_close(actual, train(eager, groups), rtol=1e-6, atol=0)
    assert_same_parameters(model, other)


def replace_parameters(update, net, tape):
    for p in net.parameters():
        p.data = p.data * 1.5


def replace_a_gradient(update, net, tape):
    update.parameters[0].grad = torch.zeros_like(update.parameters[0])


def load_state(update, net, tape):
    update.load_state_dict(copy.deepcopy(update.optimizer.state_dict()["state"]), {})


def fail_elsewhere(update, net, tape):
    """As of a beam search in a validation: it has replaced the generator's state, which earlier graphs belong to."""
    tape.failures += 1


@pytest.mark.slow
@pytest.mark.parametrize("change", [replace_parameters, replace_a_gradient, load_state, fail_elsewhere])
def test_graphs_are_captured_anew_after_a_change_that_they_cannot_see(tape, change):
    eager, graphed, model, other = updates(tape, settings())
    batch = batches(1)
    for update, net in ((eager, model), (graphed, other)):
        train(update, [batch] * 4)
        change(update, net, tape)
        train(update, [batch] * 4)
    assert_same_parameters(model, other)
    assert tape.captured == 6  # the tape would find what is new, a graph would not


def trainer(folder, **changes):
    given = {"steps": 12, "lr": 0.01, "warmup_steps": 4, "log_every": 1, "validate_every": 4, "batch_tokens": 64}
    model = random_model(1, positions="learned", max_positions=9).double()  # no sentence may be taken for a longer one
    random = np.random.default_rng(0)
    lists = [[random.integers(4, 17, random.integers(1, 9)).tolist() for _ in range(40)] for _ in range(2)]
    source = Batches(EncodedPairs(*map(Sequences.from_lists, lists), IDS, IDS), tokens=64)
    return Trainer(model, LOSS, source, TrainConfig(**{**given, **changes}), folder, show=False)


def losses(folder):
    return [(r["kind"], r["step"], r["loss"], r.get("gradient_norm", 0)) for r in read_metrics(folder)]


@pytest.mark.slow
def test_a_run_is_the_eager_one_and_resumes_with_and_without_graphs(tape, tmp_path):
    """Bit for bit where both parts have graphs."""
    for name, on in (("eager", False), ("graphs", True)):
        trainer(tmp_path / name, cuda_graphs=on).fit()
    assert tape.replayed > 20
    for name, on in (("with", True), ("without", False)):
        trainer(tmp_path / name, cuda_graphs=True, steps=5).fit()
        again = trainer(tmp_path / name, cuda_graphs=on)
        again.resume()
        again.fit()
    assert losses(tmp_path / "with") == losses(tmp_path / "graphs")
    for name in ("graphs", "without"):
        for actual, expected in zip(losses(tmp_path / name), losses(tmp_path / "eager"), strict=True):
            assert actual == (*expected[:2], pytest.approx(expected[2], rel=1e-6), pytest.approx(expected[3], rel=1e-5))


@pytest.mark.parametrize(
    ("config", "processes", "graphed"),
    [
        (TrainConfig(steps=1), 1, True),
        (TrainConfig(steps=1, precision="bf16"), 1, True),
        (TrainConfig(steps=1, cuda_graphs=True), 1, True),
        (TrainConfig(steps=1, cuda_graphs=False), 1, False),
        (TrainConfig(steps=1), 2, False),
        (TrainConfig(steps=1, precision="fp16"), 1, False),
        (TrainConfig(steps=1, compile="eager"), 1, False),
        (TrainConfig(steps=1, checkpoint_activations=True), 1, False),
        (ClassificationTrainConfig(steps=1), 1, False),
    ],
)
def test_graphs_are_the_default_where_the_settings_allow_them(tape, monkeypatch, config, processes, graphed):
    monkeypatch.setattr(graphs, "Update", lambda *arguments: "eager")
    monkeypatch.setattr(graphs, "GraphedUpdate", lambda *arguments: "graphed")
    update = new_update(random_model(), LOSS, config, SimpleNamespace(world=processes))
    assert update == ("graphed" if graphed else "eager")


@pytest.mark.parametrize(
    "obstacle", ["none", "a hook", "a later hook", "a parameter's hook", "other code", "padded batches", "memory"]
)
def test_by_default_graphs_repeat_only_what_they_can(tape, monkeypatch, obstacle):
    """Elsewhere steps are eager, without an error or a warning."""
    loss = (lambda model, batch: LOSS(model, batch)) if obstacle == "other code" else LOSS
    eager, graphed, model, other = updates(tape, settings(cuda_graphs=None), loss)
    groups, hooked = [[random_batch([(1, 2), (3, 1)], packed=obstacle != "padded batches")]] * 4, []
    if obstacle == "memory":
        monkeypatch.setattr(graphs, "memory_for_graphs", lambda device: -1)  # a peak of 0 is more than half of it
    if obstacle == "a later hook":
        train(eager, groups)
        train(graphed, groups)
    captured, replayed = tape.captured, tape.replayed
    if "parameter" in obstacle:
        other.output.weight.register_hook(hooked.append)
    elif "hook" in obstacle:
        other.output.register_forward_hook(lambda *_: hooked.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(train(graphed, groups), train(eager, groups), rtol=1e-6, atol=0)
    assert_same_parameters(model, other)
    assert len(hooked) == ("hook" in obstacle) * len(groups)
    assert captured == 3 * (obstacle == "a later hook")
    assert (tape.captured > captured) == (tape.replayed > replayed) == (obstacle == "none")


def test_the_speed_of_replays_is_measured(tape, monkeypatch):
    monkeypatch.setattr(automatic_settings, "_TRIAL_SECONDS", 0.0)
    source = SimpleNamespace(epoch=lambda number: batches(2))
    arguments = random_model(1).double(), LOSS, source, TrainConfig(steps=1)
    assert automatic_settings.targets_per_second(*arguments, world=2) > 0
    assert not tape.captured
    assert automatic_settings.targets_per_second(*arguments, world=1) > 0
    assert tape.replayed > tape.captured > 0


def test_settings_that_exclude_graphs_are_named_and_other_devices_run_eagerly(tape, monkeypatch):
    config = TrainConfig(steps=1, cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs=True is for one process, not for 2"):
        check_machine(config, "cuda", world=2)
    with pytest.raises(ValueError, match="cuda_graphs=True is for precision fp32 and bf16, not for fp16"):
        TrainConfig(steps=1, cuda_graphs=True, precision="fp16")
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (config, TrainConfig(steps=1)):
            assert type(new_update(random_model(), LOSS, each, Processes())) is Update


@dataclass(frozen=True)
class Weighted(LanguageBatch):
    """With a field that no side has, which a graph would take for that of the first batch."""

    weight: float


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    """The targets of padding are no classes, and nothing looks at values, as on a GPU."""
    read_nothing(monkeypatch)


@pytest.mark.parametrize("lengths", [[16], [0, 3, 0], [130, 2]], ids=str)
def test_loss_and_gradients_of_documents(lengths):
    batch, model, results = language_task.random_batch(lengths), language_task.random_model().double(), []
    memory = FixedBatch(batch, shape_of(batch), torch.device("cpu"))
    memory.load(batch)
    for each in (batch, memory.batch()):
        loss = language_model_loss(model, each)
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (random_batch([(1, 2), (3, 1)], packed=False), "Batch with padded ids"),
        (LabelledBatch(*torch.ones(2, 3, dtype=torch.int64), torch.tensor([3])), "LabelledBatch"),
        (Weighted(*torch.ones(2, 3, dtype=torch.int64), torch.tensor([3]), 2.0), "Weighted"),
    ],
)
def test_batches_that_do_not_fit_are_named(batch, what):
    with pytest.raises(TypeError, match=f"cuda_graphs=True needs batches of packed ids .*; not {what}$"):
        shape_of(batch)


@pytest.mark.parametrize(
    ("free", "unused", "released"),
    [(49, 10, True), (50, 10, False), (49, 9, False), (5, 5, True), (5, 4, False)],
)
def test_a_capture_finds_free_memory(free, unused, released, monkeypatch):
    """On an H200, captures failed once deleted graphs had used most of its memory."""
    calls = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 30 - unused)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    cuda_graphs.release_unused_memory(0)
    assert bool(calls) == released
