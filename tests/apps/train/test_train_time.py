"""What the clock decides: the end of a budget in minutes, the size of a validation, and saves by time."""

import pytest

from fastformer.apps.train import CheckpointFolder, Validation, read_metrics
from tests.apps.train.test_train_resume import assert_equal, final, records
from tests.support.train_task import Clock, Source, config, network, summed_loss, trainer

SIZE = 100  # held-out examples


def held_out(clock, seconds):
    """A validation that takes so many seconds for each example."""

    def score(model, indices):
        clock.takes(seconds * len(indices), len)(indices)
        return {"loss": float(len(indices))}

    return Validation(SIZE, score)


# Seconds of a step and of an example, when all becomes slower and how much, steps between validations.
CASES = {
    "validation in time": (1.0, 0.01, None, 1.0, 20),
    "validation too long": (1.0, 5.0, None, 1.0, 20),
    "first validation after the end": (1.0, 1.0, None, 1.0, 10**6),
    "busy from the middle on": (1.0, 1.0, 250.0, 3.0, 10**6),
    "busy after the first validation": (0.5, 1.0, 200.0, 3.0, 200),
    "long steps": (45.0, 1.0, None, 1.0, 10**6),
    "the average is validated too": (1.0, 1.0, None, 1.0, 10**6),
}


@pytest.mark.parametrize("case", CASES)
def test_a_budget_in_minutes_ends_in_time_with_all_validations(tmp_path, capsys, case):
    step, example, slow_from, factor, every = CASES[case]
    clock, minutes = Clock(), 10.0
    average = 2 if "average" in case else 1

    def loss(model, batch):
        if slow_from is not None and clock.now - 1000 >= slow_from:
            clock.slower = factor
        return summed_loss(model, batch)

    settings = config(steps=None, minutes=minutes, validate_every=every, average=average, save_minutes=1.0)
    run = trainer(
        tmp_path,
        settings,
        loss=clock.takes(step, loss),
        validate=held_out(clock, example),
        clock=clock,
        show=True,
    )
    result = run.fit()
    assert result.reason == "minutes"
    assert 0.9 * 60 * minutes <= clock.now - 1000 <= 1.1 * 60 * minutes
    found = [record for record in read_metrics(tmp_path) if record["kind"] in ("validation", "average")]
    sizes = {int(record["loss"]) for record in found}
    assert len(sizes) == 1  # values that are compared are of the same examples
    (size,) = sizes
    assert size == SIZE or example * size <= 0.1 * 60 * minutes < example * SIZE
    said = f"validation: on {size} of 100, because all would take more than a tenth of --minutes"
    assert (said in capsys.readouterr().err) == (size < SIZE) == ("validated_share" in found[0])


def test_the_speed_is_that_of_steps_alone(tmp_path):
    """Neither validations nor trials of them count, nor saves."""
    clock = Clock()
    settings = config(steps=None, minutes=1.0, log_every=1, validate_every=9, save_minutes=0.05)
    loss, score = clock.takes(2.0, summed_loss), held_out(clock, 0.1)
    trainer(tmp_path, settings, loss=loss, validate=score, clock=clock).fit()
    found = [record["tokens_per_second"] for record in read_metrics(tmp_path) if record["kind"] == "train"]
    tokens = [batch.tokens for epoch in range(5) for batch in Source().epoch(epoch)]
    assert found == pytest.approx([count / 2.0 for count in tokens[: len(found)]])


def test_the_validation_of_a_resumed_run_is_of_the_same_size(tmp_path):
    for minutes in (5.0, 10.0):  # a tenth of the first is 30 seconds
        clock = Clock()
        settings = config(steps=None, minutes=minutes, validate_every=50)
        run = trainer(
            tmp_path, settings, loss=clock.takes(1.0, summed_loss), validate=held_out(clock, 1.0), clock=clock
        )
        if minutes == 10.0:
            run.resume()
        run.fit()
    found = [record["loss"] for record in read_metrics(tmp_path) if record["kind"] == "validation"]
    assert set(found) == {30.0}
    assert len(found) > 6


def killed_after(steps):
    """A loss that ends the process, as far as the trainer can tell, in the step after `steps` steps."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) > steps:
            raise KeyboardInterrupt
        return summed_loss(model, batch)

    return loss


@pytest.mark.parametrize("settings", [{"validate_every": None, "epochs": 3}, {"average": 2}, {"schedule": "plateau"}])
@pytest.mark.parametrize("steps", [3, 5, 7, 13])
def test_saving_by_time_changes_no_number_and_a_killed_run_loses_at_most_that(tmp_path, settings, steps):
    settings = config(**{"keep": 2, **settings})
    whole = trainer(tmp_path / "whole", settings).fit()
    often = config(**{**vars(settings), "save_minutes": 0.05})  # at a second a step, every three steps
    clock = Clock()
    loss = clock.takes(1.0, killed_after(steps))
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", often, loss=loss, clock=clock).fit()
    last = CheckpointFolder(tmp_path / "run" / "checkpoints").open()
    assert steps - 3 <= last.step <= steps
    clock = Clock()
    again = trainer(tmp_path / "run", often, model=network(seed=77), loss=clock.takes(1.0, summed_loss), clock=clock)
    again.resume()
    assert again.fit().metrics == whole.metrics
    assert_equal(final(tmp_path / "run", whole.step), final(tmp_path / "whole", whole.step))
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    names = [CheckpointFolder(tmp_path / name / "checkpoints").paths() for name in ("run", "whole")]
    assert [path.name for path in names[0]] == [path.name for path in names[1]]


@pytest.mark.parametrize("settings", [{"validate_every": None, "epochs": 2}, {"schedule": "plateau", "steps": 12}])
def test_a_run_killed_in_its_first_validation_makes_that_validation_again(tmp_path, settings):
    def killed(model):
        raise KeyboardInterrupt

    settings = config(**settings)
    trainer(tmp_path / "whole", settings).fit()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", settings, validate=killed).fit()
    again = trainer(tmp_path / "run", settings, model=network(seed=77))
    assert again.resume().step == (settings.validate_every or 7)
    again.fit()
    assert records(tmp_path / "run") == records(tmp_path / "whole")
