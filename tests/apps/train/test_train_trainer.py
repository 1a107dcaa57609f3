"""The training loop: gradients, ends, faults, and Ctrl-C."""

import errno
import io
import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastformer.apps.train import (
    Checkpoint,
    CheckpointFolder,
    DivergedError,
    Schedule,
    TrainConfig,
    find_checkpoint,
    read_metrics,
)
from fastformer.apps.train.checkpoint import read_weights
from fastformer.apps.train.progress import Progress
from tests.support.train_task import Clock, Overflow, Rows, Source, config, network, summed_loss, trainer, validate


class Listed:
    """The same batches in each epoch."""

    def __init__(self, batches: list[Rows]) -> None:
        self.batches = batches

    def batches_in(self, epoch: int) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, start: int = 0) -> Any:
        return iter(self.batches[start:])


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_accumulating_batches_of_unequal_size_equals_one_big_batch(tmp_path, optimizer):
    small = [Rows(each.inputs.double(), each.labels) for each in Source(6).epoch(0)]
    parts = [small[:3], small[3:]]
    big = [Rows(torch.cat([b.inputs for b in part]), torch.cat([b.labels for b in part])) for part in parts]
    models = []
    for batches, accumulate in ((small, 3), (big, 1)):
        models.append(network(dropout=0.0).double())
        settings = config(steps=6, validate_every=6, optimizer=optimizer, eps=1e-6, accumulate=accumulate)
        run = trainer(
            tmp_path / str(accumulate), settings, Listed(batches), model=models[-1], loss=exact_loss, validate=None
        )
        assert run.fit().tokens == 3 * sum(batch.tokens for batch in small)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def exact_loss(model: nn.Module, batch: Rows) -> Tensor:
    return nn.functional.cross_entropy(model(batch.inputs), batch.labels, reduction="sum")


def test_a_step_is_the_clipped_gradient_of_the_mean_over_tokens(tmp_path):
    model, twin = network(dropout=0.0), network(dropout=0.0)
    batch = next(Source().epoch(0))
    run = trainer(
        tmp_path,
        config(steps=1, optimizer="sgd", momentum=0.0, lr=0.5, warmup_steps=0, clip_norm=0.1, log_every=1),
        model=model,
    )
    run.fit()
    (summed_loss(twin, batch) / batch.tokens).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    for updated, parameter in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(updated, parameter - 0.5 * parameter.grad)
    record = read_metrics(tmp_path)[0]
    assert record["gradient_norm"] == pytest.approx(float(norm))
    assert record["loss"] == pytest.approx(summed_loss(twin, batch).item() / batch.tokens)


def test_weight_decay_leaves_biases_and_norms_alone(tmp_path):
    model = network()
    run = trainer(tmp_path, config(weight_decay=0.1), model=model)
    decays = {id(p): g["weight_decay"] for g in run._update.optimizer.param_groups for p in g["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "4.weight": 0.1, "4.bias": 0.0,
    }  # fmt: skip


def test_the_seed_alone_decides_the_weights_and_validation_changes_nothing(tmp_path):
    """Validation runs in eval mode without gradients, and training goes on in train mode."""
    modes: set[tuple[str, bool, bool]] = set()

    def noted(model: nn.Module) -> dict[str, float]:
        modes.add(("validate", model.training, torch.is_grad_enabled()))
        return validate(model)

    def loss(model: nn.Module, batch: Rows) -> torch.Tensor:
        modes.add(("train", model.training, torch.is_grad_enabled()))
        return summed_loss(model, batch)

    weights = []
    for name, seed, every in [("a", 1, 1), ("b", 1, 1000), ("c", 2, 1000)]:
        model = network()
        trainer(tmp_path / name, config(seed=seed, validate_every=every), model=model, loss=loss, validate=noted).fit()
        weights.append(model[0].weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert modes == {("validate", False, False), ("train", True, True)}


@pytest.mark.parametrize("poison", [2, 6])
def test_a_loss_that_is_not_a_number_stops_before_it_reaches_the_weights(tmp_path, poison):
    model = network()
    run = trainer(tmp_path, config(validate_every=2, log_every=50), Source(poison=poison), model=model)
    last = tmp_path / "checkpoints" / f"step-{poison}"
    with pytest.raises(DivergedError, match=rf"not finite at step {poison + 1} .*last good checkpoint is {last};"):
        run.fit()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert CheckpointFolder(tmp_path / "checkpoints").open().step == poison


def test_an_infinite_gradient_of_a_finite_loss_stops_too(tmp_path):
    def loss(model: nn.Module, batch: Rows) -> torch.Tensor:
        return (model(batch.inputs) * 0.0).sum().sqrt()  # 0 with the gradient 0 / 0

    with pytest.raises(DivergedError, match=r"not finite at step 1 .*no checkpoint was written yet"):
        trainer(tmp_path, config(), loss=loss).fit()


def scripted(*values: float, name: str = "loss") -> Any:
    remaining = iter(values)
    return lambda model: {"loss": 1.0, name: next(remaining)}


def test_early_stopping_keeps_the_best_weights_restorable(tmp_path):
    losses = scripted(3.0, 2.0, 2.5, 2.0, 1.0)
    model = network()
    run = trainer(tmp_path, config(patience=2, steps=100, keep=1), model=model, validate=losses)
    result = run.fit()
    assert (result.reason, result.step) == ("patience", 20)
    assert (result.best_value, result.best) == (2.0, tmp_path / "checkpoints" / "step-10")
    last = model[0].weight.detach().clone()
    best = Checkpoint.open(find_checkpoint(tmp_path))
    assert best.step == 10
    best.load_into(model)
    assert not torch.equal(model[0].weight, last)
    again = trainer(tmp_path, config(patience=2, steps=100, keep=1))
    again.resume()
    assert again.ended == "patience"


def test_a_score_is_better_when_higher_a_loss_when_lower_and_a_nan_never(tmp_path):
    scores = scripted(10.0, 30.0, math.nan, 20.0, name="bleu")
    result = trainer(tmp_path, config(metric="bleu", keep=4), validate=scores).fit()
    assert (result.best_value, result.best) == (30.0, tmp_path / "checkpoints" / "step-10")


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"loss": 1.0, "seconds": 2.5}, ValueError, "none of them kind, step, epoch, seconds: 'seconds'"),
        ({"loss": None}, TypeError, "not 'NoneType'"),
        ({"bleu": 3.0}, ValueError, "metric='loss' is not among the validation's values: bleu; what was trained"),
    ],
)
def test_a_validation_that_fails_loses_nothing_that_was_trained(tmp_path, values, error, message):
    with pytest.raises(error, match=message):
        trainer(tmp_path, config(), validate=lambda model: values).fit()
    again = trainer(tmp_path, config())
    checkpoint = again.resume()
    assert (checkpoint.step, checkpoint.metrics) == (5, {})
    assert again.fit().step == 20


@pytest.mark.parametrize("value", [None, 3.0])
def test_what_could_not_be_saved_is_saved_when_training_goes_on(tmp_path, monkeypatch, value):
    """A full disk at the end of the budget: `fit` again said that all was done, and wrote nothing."""
    full = trainer(tmp_path, config(steps=3), validate=None if value is None else lambda model: {"loss": value})
    with monkeypatch.context() as patch:
        patch.setattr("fastformer.apps.train.checkpoint_folder.write_weights", _no_space)
        with pytest.raises(OSError, match="No space left"):
            full.fit()
    assert full.fit().step == 3
    assert [path.name for path in full.checkpoints.paths()] == ["step-3"]
    assert full.checkpoints.best_value() == value


def _no_space(path, weights):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_run_that_ended_before_its_first_step_goes_on(tmp_path):
    assert trainer(tmp_path, config(steps=None, minutes=1e-9)).fit().step == 0
    with pytest.raises(ValueError, match="already holds checkpoints"):
        trainer(tmp_path, config()).fit()
    again = trainer(tmp_path, config())
    assert again.resume().step == 0
    assert again.fit().step == 20


def test_the_best_of_all_may_be_the_average(tmp_path):
    values = scripted(3.0, 2.0, 2.5, 1.5)
    model = network()
    run = trainer(tmp_path, config(steps=15, average=3), model=model, validate=values)
    result = run.fit()
    last = Checkpoint.open(tmp_path / "checkpoints" / "step-15").weights()
    assert all(torch.equal(last[name], tensor) for name, tensor in model.state_dict().items())
    assert (result.best_value, result.best) == (1.5, tmp_path / "checkpoints" / "average")
    assert result.metrics["loss"] == 2.5
    Checkpoint.open(find_checkpoint(tmp_path)).load_into(model)
    mean = sum(Checkpoint.open(tmp_path / "checkpoints" / f"step-{step}").weights()["4.weight"] for step in (5, 10, 15))
    torch.testing.assert_close(model[4].weight, mean / 3)


def test_budgets_end_the_run_and_the_first_one_wins(tmp_path):
    ends = {
        "steps": (3, {"steps": 3, "epochs": 5}),
        "epochs": (14, {"steps": 100, "epochs": 2, "validate_every": None}),
        "minutes": (0, {"steps": 10**9, "minutes": 1e-9}),
    }
    for name, (step, budget) in ends.items():
        run = trainer(tmp_path / name, config(**budget), validate=None)
        result = run.fit()
        assert (result.reason, result.best) == (name, None)
        assert Checkpoint.open(find_checkpoint(tmp_path / name)).step == result.step == step


def test_an_empty_epoch_is_an_error_and_not_an_endless_loop(tmp_path):
    with pytest.raises(ValueError, match="batches: epoch 0 has no batch"):
        trainer(tmp_path, config(), Source(0)).fit()


def test_the_schedule_reaches_its_end_with_the_budget(tmp_path):
    for name, budget in [("steps", {"steps": 21}), ("epochs", {"steps": None, "epochs": 3})]:
        settings = config(schedule="linear", warmup_steps=0, log_every=1, validate_every=50, **budget)
        trainer(tmp_path / name, settings).fit()
        rates = [r["lr"] for r in records(tmp_path / name)]
        assert rates == pytest.approx([0.01 * (1 - step / 21) for step in range(21)])


def test_plain_progress_shows_loss_speed_time_left_and_validations_by_time(tmp_path, capsys):
    """Records come every 50 steps of 4 seconds; lines after the first step, and then every ten seconds."""
    clock = Clock()
    trainer(tmp_path, config(steps=20, log_every=50), loss=clock.takes(4.0, summed_loss), show=True, clock=clock).fit()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training begins: until 20 steps are made; saved every 5 minutes and with each validation"
    assert lines[1].startswith("  5%  epoch 1  step 1  loss 1.")
    assert "2 tokens/s  left 1:16" in lines[1]  # 19 steps of 4 seconds
    steps = [line.split("step ")[1].split()[0] for line in lines if "tokens/s" in line]
    assert steps == ["1", "4", "7", "10", "13", "16", "19"]
    validations = [line for line in lines if line.startswith("validation: ")]
    assert len(validations) == 4
    assert validations[0].startswith("validation: epoch 1  step 5  loss 1.")
    assert "perplexity" in validations[0]
    assert sum(line.startswith("mean of training: epoch ") for line in lines) == 2
    assert lines[-1] == "training ends at step 20: all steps are made"
    assert not records(tmp_path)


def test_the_mean_of_an_epoch_is_over_all_its_tokens(tmp_path):
    """Of batches of unequal size, whatever records, validations and resumed runs lie between."""
    seen: dict[int, list[tuple[float, int]]] = {}

    def loss(model: torch.nn.Module, batch: Rows) -> torch.Tensor:
        total = summed_loss(model, batch)
        seen.setdefault(len(seen_steps) // 7, []).append((float(total.detach()), batch.tokens))
        seen_steps.append(1)
        return total

    seen_steps: list[int] = []
    made = trainer(tmp_path, config(steps=11, validate_every=4), loss=loss, validate=None)
    made.fit()
    rest = trainer(tmp_path, config(steps=23, validate_every=4), loss=loss, validate=None)
    rest.resume()
    rest.fit()
    actual = [record for record in read_metrics(tmp_path) if record["kind"] == "epoch"]
    assert [(record["epoch"], record["step"]) for record in actual] == [(1, 7), (2, 14), (3, 21)]
    for record, of_epoch in zip(actual, seen.values(), strict=False):
        losses, tokens = zip(*of_epoch, strict=True)
        assert record["loss"] == pytest.approx(sum(losses) / sum(tokens), rel=1e-6)


def test_on_a_terminal_a_bar_is_shown(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress(stream=stream) as progress:
        progress.step({"epoch": 2, "step": 1234, "loss": 2.5, "tokens_per_second": 5e4}, 0.5, 3725.0)
        progress.line("validation: [bold] stays as it is")
    shown = stream.getvalue()
    assert "validation: [bold] stays as it is" in shown
    assert "step 1,234" in shown
    assert "50,000 tokens/s" in shown
    assert "1:02:05" in shown


def overflowing(*at: int) -> Any:
    """The task's loss, whose gradient overflows in these steps, counted from 1; without a number, in all."""
    calls = 0

    def loss(model: nn.Module, batch: Rows) -> Tensor:
        nonlocal calls
        calls += model.training
        value = summed_loss(model, batch)
        return value + Overflow.apply(value) if model.training and (calls in at or not at) else value

    return loss


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    return Checkpoint.open(folder / "checkpoints" / f"step-{step}").weights()


def records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder) if record["kind"] == "train"]


def test_it_learns_what_fp32_learns_in_fp16(tmp_path: Path) -> None:
    dtypes = set()

    def loss(model: nn.Module, batch: Rows) -> Tensor:
        logits = model(batch.inputs)
        dtypes.add(logits.dtype)
        return nn.functional.cross_entropy(logits.float(), batch.labels, reduction="sum")

    for precision in ("fp16", "fp32"):
        settings = config(steps=40, validate_every=20, precision=precision)
        trainer(tmp_path / precision, settings, loss=loss, model=network(dropout=0.0)).fit()
    assert dtypes == {torch.float16, torch.float32}
    for half, single in zip(records(tmp_path / "fp16"), records(tmp_path / "fp32"), strict=True):
        assert half["loss"] == pytest.approx(single["loss"], rel=0.02)
        assert half["gradient_norm"] == pytest.approx(single["gradient_norm"], rel=0.05)  # before scaling
        assert (half["skipped_steps"], half["loss_scale"]) == (0, 65536.0)
        assert not {"skipped_steps", "loss_scale"} & single.keys()


def test_an_overflow_skips_its_step_halves_the_scale_and_counts(tmp_path: Path) -> None:
    settings = config(precision="fp16", steps=4, validate_every=1, log_every=2, keep=4)
    ended = trainer(tmp_path, settings, loss=overflowing(2)).fit()
    assert ended.step == 4
    for step, equal in ((2, True), (3, False)):
        before, after = weights(tmp_path, step - 1), weights(tmp_path, step)
        assert all(torch.equal(before[name], after[name]) == equal for name in before)
    first, second = records(tmp_path)
    assert (first["skipped_steps"], first["loss_scale"]) == (1, 32768.0)
    assert (second["skipped_steps"], second["loss_scale"]) == (0, 32768.0)
    assert 0 < first["gradient_norm"] < 100  # of the step that counts


def test_sgd_begins_without_momentum_if_the_first_step_overflows(tmp_path: Path) -> None:
    settings = config(optimizer="sgd", precision="fp16", steps=1)
    torch.use_deterministic_algorithms(True)  # which fills uninitialised memory with NaN
    try:
        trainer(tmp_path, settings, loss=overflowing(1)).fit()
    finally:
        torch.use_deterministic_algorithms(False)
    tensors = read_weights(tmp_path / "checkpoints" / "step-1" / "optimizer.safetensors")
    assert all(torch.equal(x, torch.zeros_like(x)) for x in tensors.values())
    assert tensors


def test_sgd_trains_a_parameter_that_gets_its_first_gradient_late(tmp_path: Path) -> None:
    model, calls = network(dropout=0.0), itertools.count()
    late = nn.Parameter(torch.zeros(2))
    model.register_parameter("late", late)

    def loss(model: nn.Module, batch: Rows) -> Tensor:
        return summed_loss(model, batch) + (late.sum() if next(calls) >= 2 else 0.0)

    trainer(tmp_path, config(optimizer="sgd", steps=4), model=model, loss=loss, validate=None).fit()
    assert (late < 0).all()


def test_overflow_without_end_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, config(precision="fp16", steps=5)).fit()
    again = trainer(tmp_path, config(precision="fp16", steps=50), loss=overflowing())
    again.resume()
    message = r"not finite at step 22 \(lr .*, loss scale 0.5\); the last good checkpoint is .*step-20; try a lower lr"
    with pytest.raises(DivergedError, match=message):  # 65536 = 2**16: the 17th skipped step is one too many
        again.fit()
    before, after = weights(tmp_path, 5), weights(tmp_path, 20)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("first", "then"), [("fp32", "fp16"), ("fp16", "bf16")])
def test_a_run_goes_on_in_another_precision(tmp_path: Path, first: str, then: str) -> None:
    trainer(tmp_path, config(precision=first, steps=7)).fit()
    again = trainer(tmp_path, config(precision=then, steps=12), model=network(seed=5))
    again.resume()
    assert again.fit().step == 12
    assert ("loss_scale" in records(tmp_path)[-1]) == (then == "fp16")


def scheduled(name: str, lr: float, warmup: int = 0, **settings: Any) -> Schedule:
    return Schedule(TrainConfig(schedule=name, lr=lr, warmup_steps=warmup, steps=1, **settings))


def rates(schedule: Schedule, steps: int) -> list[float]:
    """The rates of a budget of `steps` steps."""
    return [schedule.rate(step, (step - 1) / steps) for step in range(1, steps + 1)]


def test_warmup_then_constant_inverse_sqrt_or_linear():
    """inverse_sqrt is the rate of Vaswani et al. 2017, section 5.3."""
    assert rates(scheduled("constant", 0.4, 4), 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert rates(scheduled("constant", 0.4, 0), 2) == [0.4, 0.4]
    schedule = scheduled("inverse_sqrt", (512 * 40) ** -0.5, 40)
    expected = [512**-0.5 * min(step**-0.5, step * 40**-1.5) for step in range(1, 201)]
    assert rates(schedule, 200) == pytest.approx(expected, rel=1e-12)
    linear = rates(scheduled("linear", 0.5, 5, min_lr=0.1), 20)
    assert linear == pytest.approx([0.1, 0.2, 0.3, 0.4, *(0.5 - 0.4 * i / 16 for i in range(16))])


@pytest.mark.parametrize("warmup", [0, 10])
def test_cosine_equals_torch(warmup):
    total, lr, floor = 50, 0.3, 0.01
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    start = max(warmup - 1, 0)  # the step that reaches the peak is the cosine's first
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - start, eta_min=floor)
    expected = [lr * step / warmup for step in range(1, warmup)]
    while len(expected) < total:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert rates(scheduled("cosine", lr, warmup, min_lr=floor), total) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_decay_follows_the_budget_and_stays_at_the_lowest_rate_after_it(name):
    schedule = scheduled(name, 1.0, 2, min_lr=0.25)
    rates = [schedule.rate(step, progress) for step, progress in ((1, 0.0), (2, 0.5), (3, 0.75), (4, 1.5))]
    assert rates == pytest.approx([0.5, 1.0, 0.625, 0.25])  # half of the rest of the budget is spent at 0.75
    assert scheduled(name, 1.0, 0, min_lr=0.25).rate(1, 1.0) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("schedule", "losses", "expected"),
    [
        (
            scheduled("plateau", 1.0, plateau_factor=0.5, plateau_patience=1),
            [3.0, 3.0, 3.0, 2.0, 2.5, 2.0, 2.1, 2.1],
            [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125],
        ),
        (
            scheduled("divide_on_plateau", 20.0, plateau_divisor=4.0, min_lr=1.0),
            [5.0, 4.0, 4.0, 3.9, 4.5, 4.5, 4.5],
            [20.0, 20.0, 5.0, 5.0, 1.25, 1.0, 1.0],
        ),
        (scheduled("divide_on_plateau", 1.0), [math.nan], [0.25]),
    ],
    ids=["plateau", "divide", "nan is no better"],
)
def test_plateaus_reduce_the_rate(schedule, losses, expected):
    actual = []
    for loss in losses:
        schedule.observe(loss)
        actual.append(schedule.rate(100, 0.0))
    assert actual == expected
