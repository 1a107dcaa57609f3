"""Of torch's number of threads and one, a run by the clock takes what is faster at the time."""

import itertools

import pytest
import torch

from fastformer.apps.train.thread_choice import ThreadChoice
from tests.support.train_task import config, summed_loss, trainer


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def simulate(seconds, speed):
    """The threads of each second of a run whose steps have 1,000 tokens, `speed(threads, now)` a second."""
    choice, now, taken = ThreadChoice(config(steps=None, minutes=10.0)), 0.0, {}
    while now < seconds:
        threads = torch.get_num_threads()
        taken[int(now)] = threads
        spent = 1000 / speed(threads, now)
        choice.step(1000, spent)
        now += spent
    choice.close()
    return [taken[second] for second in sorted(taken)]


IDLE, BUSY = {1: 4400.0, 2: 6200.0}, {1: 5100.0, 2: 2800.0}


@pytest.mark.parametrize(("speeds", "best"), [(IDLE, 2), (BUSY, 1)])
def test_the_faster_one_is_kept_and_the_other_costs_little(speeds, best):
    taken = simulate(600, lambda threads, now: speeds[threads])
    assert taken.count(best) / len(taken) > 0.94
    assert torch.get_num_threads() == 2


def test_a_machine_that_becomes_busy_is_answered_at_once_and_one_that_becomes_idle_soon():
    taken = simulate(600, lambda threads, now: (BUSY if 200 < now < 400 else IDLE)[threads])
    assert set(taken[208:400]) == {1, 2}
    assert taken[208:400].count(1) > 180
    assert taken[480:].count(2) > 110


def test_a_bad_moment_is_soon_forgotten():
    taken = simulate(120, lambda threads, now: 3300.0 if threads == 2 and 40 < now < 42 else IDLE[threads])
    assert taken[60:].count(1) <= 6


def test_long_steps_of_one_thread_are_tried_once_in_a_while():
    """Of 16 cores, one takes 16 times as long for a step of 3 seconds."""
    torch.set_num_threads(16)
    steps = []
    choice = ThreadChoice(config(steps=None, minutes=10.0))
    while sum(steps) < 3600:
        seconds = 3.0 if torch.get_num_threads() == 16 else 48.0
        steps.append(seconds)
        choice.step(1000, seconds)
    choice.close()
    assert steps.count(48.0) in (2, 3)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [({"steps": None}, True), ({"steps": None, "threads": 2}, False), ({"steps": 10}, False)],
)
def test_only_runs_by_the_clock_choose_and_all_leave_torch_as_it_was(tmp_path, monkeypatch, settings, changes):
    monkeypatch.setattr("fastformer.apps.train.thread_choice._TRIAL", 0.0)
    seen, ticks = set(), itertools.count()

    def loss(model, batch):
        seen.add(torch.get_num_threads())
        return summed_loss(model, batch)

    trainer(tmp_path, config(minutes=1.0, **settings), loss=loss, clock=lambda: float(next(ticks))).fit()
    assert seen == ({1, 2} if changes else {2})
    assert torch.get_num_threads() == 2
