"""A resumed run equals the run that was never interrupted, bit for bit: weights, state, generators and records."""

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.apps.train import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    Result,
    TrainConfig,
    read_metrics,
    seed_everything,
)
from fastformer.apps.train.interrupt import interruptible
from tests.support.python import python
from tests.support.train_task import Architecture, Clock, Source, config, network, summed_loss, trainer

TIMES = ("seconds", "tokens_per_second")


def final(folder: Path, step: int) -> tuple[dict[str, Any], ...]:
    checkpoint = Checkpoint.open(folder / "checkpoints" / f"step-{step}")
    state = checkpoint.state()
    state["position"].pop("seconds")
    state["sums"].pop("seconds")
    weights = network().parameters()
    parameters = sorted(weights, key=lambda p: p.dim() < 2)  # as the optimizer's groups have them
    return checkpoint.weights(), state, checkpoint.optimizer_state(parameters, state["optimizer_name"])


def records(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in read_metrics(folder)]


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{path}[{index}]")
    else:
        assert one == other, path


def noisy_loss(model: Any, batch: Any) -> torch.Tensor:
    """A loss that draws from Python's and NumPy's generators; dropout draws from torch's."""
    return summed_loss(model, batch) * (1 + 0.1 * random.random() + 0.1 * np.random.random())


def stop_after(steps: int, loss: Any = summed_loss) -> Any:
    """A loss that presses Ctrl-C in the step after `steps` steps; the run ends when that step is done."""
    calls = 0

    def stopping(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == steps:
            signal.raise_signal(signal.SIGINT)
        return loss(model, batch)

    return stopping


@pytest.fixture(
    scope="module",
    params=[
        {"steps": 20},
        {"steps": None, "epochs": 3, "validate_every": None, "schedule": "cosine"},
        {"schedule": "divide_on_plateau", "plateau_divisor": 2.0, "lr": 0.3, "weight_decay": 0.1},
        {"schedule": "plateau", "plateau_patience": 0, "lr": 0.5, "optimizer": "sgd", "warmup_steps": 0},
        {"schedule": "linear", "optimizer": "adam", "precision": "bf16", "clip_norm": 0.0},
        {"precision": "fp16"},
    ],
    ids=["inverse_sqrt", "epochs-cosine", "divide", "plateau-sgd", "linear-bf16", "fp16"],
)
def uninterrupted(request, tmp_path_factory) -> tuple[TrainConfig, Path, Result]:
    """Settings, the folder of a run, and how it ended."""
    settings, folder = config(**request.param), tmp_path_factory.mktemp("whole")
    return settings, folder, trainer(folder, settings, loss=noisy_loss).fit()


# Epochs have 7 batches; validations are at steps 5, 10, … or after epochs; records at even steps.
@pytest.mark.parametrize("stop", [1, 5, 7, 8, 13])
def test_a_run_interrupted_anywhere_and_resumed_equals_the_uninterrupted_one(tmp_path, uninterrupted, stop):
    settings, folder, whole = uninterrupted
    first = trainer(tmp_path / "parts", settings, loss=stop_after(stop, noisy_loss)).fit()
    assert (first.reason, first.step) == ("interrupted", stop)

    seed_everything(99)  # nothing may depend on what the new process drew before
    again = trainer(tmp_path / "parts", settings, loss=noisy_loss, model=network(seed=77))
    assert again.resume().step == stop
    rest = again.fit()
    assert (rest.reason, rest.step, rest.epoch, rest.tokens) == (whole.reason, whole.step, whole.epoch, whole.tokens)
    assert_equal(final(tmp_path / "parts", whole.step), final(folder, whole.step))
    assert records(tmp_path / "parts") == records(folder)


def test_accumulated_batches_and_averaging_resume_too(tmp_path):
    settings = config(accumulate=3, steps=11, average=2, validate_every=4)
    whole = trainer(tmp_path / "whole", settings).fit()
    trainer(tmp_path / "parts", settings, loss=stop_after(14)).fit()
    again = trainer(tmp_path / "parts", settings, model=network(seed=77))
    again.resume()
    assert again.fit().metrics == whole.metrics
    assert_equal(final(tmp_path / "parts", 11), final(tmp_path / "whole", 11))
    average = Path("checkpoints/average")
    assert_equal(
        Checkpoint.open(tmp_path / "parts" / average).weights(), Checkpoint.open(tmp_path / "whole" / average).weights()
    )


def test_weights_of_other_strides_resume_too(tmp_path):
    """Fused optimizers read in the order of memory, and checkpoints store contiguous tensors."""

    def transposed(seed=3):
        model = network(seed)
        model[0].weight = torch.nn.Parameter(model[0].weight.detach().t().contiguous().t())
        return model

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer(whole, config(), model=transposed()).fit()
    trainer(parts, config(), model=transposed(), loss=stop_after(6)).fit()
    again = trainer(parts, config(), model=transposed(77))
    again.resume()
    again.fit()
    assert_equal(final(parts, 20), final(whole, 20))


def test_a_budget_in_minutes_resumes_with_the_time_already_spent(tmp_path):
    settings = config(steps=None, minutes=1.0, schedule="linear", warmup_steps=0)

    def timed(name: str, loss: Any = summed_loss) -> Any:
        return trainer(tmp_path / name, settings, clock=(clock := Clock()), loss=clock.takes(1.0, loss))

    whole, part = timed("whole").fit(), timed("parts", stop_after(6)).fit()
    assert (whole.reason, whole.seconds) == ("minutes", pytest.approx(60, abs=4))
    again = timed("parts")
    again.resume()
    assert again.fit().step == pytest.approx(whole.step, abs=2)
    rates = [r["lr"] for r in read_metrics(tmp_path / "parts") if r["kind"] == "train"]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1 * settings.lr < 0.5 * settings.lr < rates[part.step // 2]


def test_a_longer_budget_goes_on_as_if_it_had_been_the_budget_from_the_start(tmp_path):
    """The data are read on from the batch after the last step."""
    asked: list[tuple[int, int]] = []

    class Noted(Source):
        def epoch(self, epoch: int, start: int = 0) -> Any:
            asked.append((epoch, start))
            return super().epoch(epoch, start)

    trainer(tmp_path / "parts", config(steps=8)).fit()  # ends between two validations, so it validates once more
    again = trainer(tmp_path / "parts", config(steps=17), Noted(), model=network(seed=77))
    again.resume()
    again.fit()
    trainer(tmp_path / "whole", config(steps=17)).fit()
    assert_equal(final(tmp_path / "parts", 17), final(tmp_path / "whole", 17))
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert asked == [(1, 1), (2, 0)]


def test_values_of_the_new_configuration_hold_after_resuming(tmp_path):
    trainer(tmp_path, config(steps=5, weight_decay=0.1)).fit()
    again = trainer(tmp_path, config(steps=6, weight_decay=0.0, lr=0.5, schedule="inverse_sqrt"))
    again.resume()
    again.fit()
    group = again._update.optimizer.param_groups[0]
    assert group["weight_decay"] == 0.0
    assert group["lr"] == pytest.approx(0.5 * (4 / 6) ** 0.5)


def test_another_optimiser_or_architecture_and_a_run_in_the_folder_are_refused_in_one_line(tmp_path):
    trainer(tmp_path, config(steps=5)).fit()
    with pytest.raises(CheckpointError, match=r"was trained with optimizer=adamw, not sgd"):
        trainer(tmp_path, config(optimizer="sgd")).resume()
    wider = network()
    wider.config = Architecture(32)
    with pytest.raises(CheckpointError, match=r"another architecture: it has width=16, this model 32"):
        trainer(tmp_path, config(), model=wider).resume()
    with pytest.raises(ValueError, match="already holds checkpoints"):
        trainer(tmp_path, config(steps=5)).fit()
    assert CheckpointFolder(tmp_path / "checkpoints").open().step == 5


# A process of its own, because it forks: its children train, and are killed at moments drawn by the clock.
SCRIPT = """
import os, random, shutil, signal, sys, time
from pathlib import Path

import torch
from tests.apps.train.test_train_resume import assert_equal, final, records
from tests.support.train_task import config, network, trainer

from fastformer.apps.train import CheckpointFolder

STEPS = 20
torch.set_num_threads(1)
root, kills = Path(sys.argv[1]), int(sys.argv[2])
settings = config(steps=STEPS, validate_every=3, schedule="cosine")
seconds = []
for name in ("cold", "whole"):
    started = time.monotonic()
    trainer(root / name, settings).fit()
    seconds.append(time.monotonic() - started)
random.seed(1)
killed = rounds = resumed_late = 0
while killed < kills:
    folder = root / f"parts-{rounds}"
    while True:
        child = os.fork()
        if child == 0:
            begun = bool(CheckpointFolder(folder / "checkpoints").paths())
            run = trainer(folder, settings, model=network(seed=77) if begun else network())
            if begun:
                run.resume()
            run.fit()
            os._exit(0)
        time.sleep(random.uniform(0.0, seconds[1]))
        os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] == 0:  # it was done before
            break
        killed += 1
        resumed_late += bool(CheckpointFolder(folder / "checkpoints").paths())
    assert_equal(final(folder, STEPS), final(root / "whole", STEPS))
    assert records(folder) == records(root / "whole")
    shutil.rmtree(folder)
    rounds += 1
assert resumed_late > kills // 3, (resumed_late, killed)
print("passed", killed, rounds, resumed_late)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize("kills", [20, pytest.param(50, marks=pytest.mark.long)])
def test_killed_runs_end_as_the_run_that_was_not_killed(tmp_path, kills):
    run = python("-c", SCRIPT, tmp_path, str(kills), OMP_NUM_THREADS="1")
    assert run.stdout.startswith("passed"), run.stdout + run.stderr


def test_ctrl_c_saves_validates_and_puts_the_handler_back_and_other_threads_do_without(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    ended = trainer(tmp_path / "a", config(), loss=stop_after(2), show=True).fit()
    assert (ended.reason, ended.step, ended.best.name) == ("interrupted", 2, "step-2")
    assert "press Ctrl-C again to stop at once" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    with interruptible(lambda: None) as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(trainer(tmp_path / "b", config(steps=2)).fit()))
    thread.start()
    thread.join()
    assert results[0].step == 2
