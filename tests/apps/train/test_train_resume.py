"""A resumed run equals the run that was never interrupted, bit for bit: weights, state, generators and records."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer.apps.train import Checkpoint, CheckpointError, CheckpointFolder, Result, TrainConfig, read_metrics
from tests.support.train_task import Source, config, network, summed_loss, trainer

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


def stop_after(steps: int) -> Any:
    """A loss that presses Ctrl-C in the step after `steps` steps; the run ends when that step is done."""
    import signal

    calls = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == steps:
            signal.raise_signal(signal.SIGINT)
        return summed_loss(model, batch)

    return loss


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
    return settings, folder, trainer(folder, settings).fit()


# Epochs have 7 batches; validations are at steps 5, 10, … or after epochs; records at even steps.
@pytest.mark.parametrize("stop", [1, 5, 7, 8, 13])
def test_a_run_interrupted_anywhere_and_resumed_equals_the_uninterrupted_one(tmp_path, uninterrupted, stop):
    settings, folder, whole = uninterrupted
    first = trainer(tmp_path / "parts", settings, loss=stop_after(stop)).fit()
    assert (first.reason, first.step) == ("interrupted", stop)

    torch.manual_seed(99)  # nothing may depend on what the new process drew before
    again = trainer(tmp_path / "parts", settings, model=network(seed=77))
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


def test_a_budget_in_minutes_resumes_with_the_time_already_spent(tmp_path):
    class Clock:
        now = 1000.0

        def __call__(self) -> float:
            self.now += 0.25
            return self.now

    settings = config(steps=None, minutes=1.0, schedule="linear", warmup_steps=0)
    whole = trainer(tmp_path / "whole", settings, clock=Clock()).fit()
    assert whole.reason == "minutes"
    assert 60 <= whole.seconds < 64
    part = trainer(tmp_path / "parts", settings, clock=Clock(), loss=stop_after(6)).fit()
    again = trainer(tmp_path / "parts", settings, clock=Clock())
    again.resume()
    rest = again.fit()
    assert abs(rest.step - whole.step) <= 2  # the interruption read the clock a few times more
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


def test_a_run_whose_damaged_checkpoints_are_removed_goes_on_from_the_good_one(tmp_path):
    settings = config(steps=15)
    trainer(tmp_path / "whole", settings).fit()
    trainer(tmp_path / "parts", settings).fit()
    for name in ("step-10", "step-15"):
        (tmp_path / "parts" / "checkpoints" / name / "state.json").write_bytes(b"damaged")
    again = trainer(tmp_path / "parts", settings, model=network(seed=77))
    with pytest.raises(CheckpointError, match=r"state.json: is damaged.*, .*step-5, remove those after it$"):
        again.resume()
    for name in ("step-10", "step-15"):
        shutil.rmtree(tmp_path / "parts" / "checkpoints" / name)
    assert again.resume().step == 5
    again.fit()
    assert_equal(final(tmp_path / "parts", 15), final(tmp_path / "whole", 15))
    assert records(tmp_path / "parts") == records(tmp_path / "whole")


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
    with pytest.raises(CheckpointError, match=r"another architecture: it has width=16, this model 32"):
        trainer(tmp_path, config(), architecture={"width": 32}).resume()
    with pytest.raises(ValueError, match="already holds checkpoints"):
        trainer(tmp_path, config(steps=5)).fit()
    assert CheckpointFolder(tmp_path / "checkpoints").open().step == 5
