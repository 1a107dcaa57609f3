"""Schedules against their published formulas, computed here independently."""

import json
import math
from typing import Any

import pytest
import torch

from fastformer.apps.train import Schedule, TrainConfig
from fastformer.apps.train.schedules import SCHEDULES


def scheduled(name: str, lr: float, warmup: int = 0, **settings: Any) -> Schedule:
    return Schedule(TrainConfig(schedule=name, lr=lr, warmup_steps=warmup, steps=1, **settings))


def rates(schedule: Schedule, steps: int) -> list[float]:
    """The rates of a budget of `steps` steps."""
    return [schedule.rate(step, (step - 1) / steps) for step in range(1, steps + 1)]


def test_inverse_sqrt_is_the_rate_of_attention_is_all_you_need():
    d_model, warmup = 512, 40
    schedule = scheduled("inverse_sqrt", (d_model * warmup) ** -0.5, warmup)
    expected = [d_model**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in range(1, 201)]
    assert rates(schedule, 200) == pytest.approx(expected, rel=1e-12)


def test_constant_and_warmup():
    assert rates(scheduled("constant", 0.4, 4), 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert rates(scheduled("constant", 0.4, 0), 2) == [0.4, 0.4]


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


def test_linear_falls_from_the_end_of_the_warmup_to_the_end_of_the_budget():
    total, warmup, lr, floor = 20, 5, 0.5, 0.1
    found = rates(scheduled("linear", lr, warmup, min_lr=floor), total)
    assert found[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert found[4:] == pytest.approx([lr - (lr - floor) * i / 16 for i in range(16)])


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
    found = []
    for loss in losses:
        schedule.observe(loss)
        found.append(schedule.rate(100, 0.0))
    assert found == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_state_survives_json_and_goes_on_exactly(name):
    whole, first = (scheduled(name, 0.7, 7, min_lr=0.01, plateau_patience=0) for _ in range(2))
    second = scheduled(name, 0.7, 7, min_lr=0.01, plateau_patience=0)
    losses = [3.0, 2.0, 2.5, 1.0, 1.5, 1.5]

    def run(schedule: Schedule, steps: range) -> list[float]:
        found = []
        for step in steps:
            found.append(schedule.rate(step, (step - 1) / 30))
            if step % 5 == 0:
                schedule.observe(losses[step // 5 - 1])
        return found

    expected = run(whole, range(1, 31))
    part = run(first, range(1, 13))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert part + run(second, range(13, 31)) == expected
