"""The stream of records: the two files agree, survive a crash, and go on where a resumed run does."""

import csv
import re

import pytest

from fastformer.apps.train import CheckpointFolder, MetricsLog, Validation, read_metrics
from tests.apps.train.test_train_resume import assert_equal, final, records
from tests.support.train_task import Clock, Source, config, network, summed_loss, trainer


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def as_text(records):
    return [{name: str(value) for name, value in record.items()} for record in records]


def test_json_lines_and_csv_hold_the_same_also_when_columns_are_added(tmp_path):
    log = MetricsLog(tmp_path)
    log.write("train", 1, loss=3.5, lr=1e-3)
    log.write("train", 2, loss=2.5, lr=1e-3)
    log.write("validation", 2, loss=2.25, bleu=0.5, note='with, "quotes"')
    assert log.write("train", 3, loss=2.0) == {"kind": "train", "step": 3, "loss": 2.0}
    log.close()
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 2, 3]
    assert records[2] == {"kind": "validation", "step": 2, "loss": 2.25, "bleu": 0.5, "note": 'with, "quotes"'}
    assert rows(tmp_path) == as_text(records)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_a_resumed_log_cuts_what_came_after_and_a_torn_line(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(1, 6):
        log.write("train", step, loss=float(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert len(read_metrics(tmp_path)) == 5
    resumed = MetricsLog(tmp_path, count=3)
    resumed.write("validation", 4, loss=9.0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 9.0)]
    assert rows(tmp_path) == as_text(read_metrics(tmp_path))
    assert resumed.count == 4


def test_damaged_and_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics.jsonl: there is no such metrics file"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\nnonsense\n{"kind": "train", "step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: is not a JSON record"):
        read_metrics(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own imports
def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, tensorboard=True)
    log.write("train", 1, loss=3.0)
    log.write("train", 2, loss=2.0)
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 3.0), (2, 2.0)]


SIZE = 100  # held-out examples


def held_out(clock, seconds):
    """A validation that takes so many seconds for each example."""

    def score(model, indices):
        clock.takes(seconds * len(indices), len)(indices)
        return {"loss": float(len(indices))}

    return Validation(SIZE, score)


# Seconds of a step and of an example, when all becomes slower and how much, steps between validations.
CASES = {
    "validation in time": (1.0, 0.01, None, 1.0, 30),
    "validation too long": (1.0, 1.0, None, 1.0, 30),
    "first validation after the end": (1.0, 0.2, None, 1.0, 10**6),
    "busy from the middle on": (1.0, 0.2, 50.0, 3.0, 10**6),
    "busy after the first validation": (0.5, 0.2, 40.0, 3.0, 40),
    "long steps": (9.0, 0.2, None, 1.0, 10**6),
    "the average is validated too": (1.0, 0.2, None, 1.0, 10**6),
}


@pytest.mark.parametrize("case", CASES)
def test_a_budget_in_minutes_ends_in_time_with_all_validations(tmp_path, capsys, case):
    step, example, slow_from, factor, every = CASES[case]
    clock, minutes = Clock(), 2.0
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
    actual = [record for record in read_metrics(tmp_path) if record["kind"] in ("validation", "average")]
    sizes = {int(record["loss"]) for record in actual}
    assert len(sizes) == 1  # values that are compared are of the same examples
    (size,) = sizes
    assert size == SIZE or example * size <= 0.1 * 60 * minutes < example * SIZE
    said = f"validation: on {size} of 100, because all would take more than a tenth of --minutes"
    assert (said in capsys.readouterr().err) == (size < SIZE) == ("validated_share" in actual[0])


def timed(folder, step, example=None, show=False, **settings):
    """Return a run in whose time a step takes so many seconds, and a held-out example, if there are any."""
    clock = Clock()
    scores = {} if example is None else {"validate": held_out(clock, example)}
    changes = {"loss": clock.takes(step, summed_loss), "clock": clock, "show": show, **scores}
    return trainer(folder, config(steps=None, **settings), **changes)


def test_a_run_goes_on_after_half_of_a_longer_budget(tmp_path):
    """The cost of a validation is measured in steps, so after the first one of a session."""
    steps = 0
    for minutes in (1.0, 1.3, 1.6):
        run = timed(tmp_path, 1.0, 0.01, minutes=minutes, validate_every=10**6)
        if steps:
            run.resume()
        before, steps = steps, run.fit().step
        assert steps >= before + 15
        assert steps == pytest.approx(60 * minutes, abs=8)


def test_the_time_left_is_that_of_the_budget(tmp_path, capsys):
    timed(tmp_path, 0.5, minutes=1.0, validate_every=10**6, show=True).fit()
    lines = capsys.readouterr().err
    assert re.search(r"epoch 1  step 1 .* left 1:00$", lines, re.MULTILINE)
    assert re.search(r"epoch 3  step 21 .* left 0:50$", lines, re.MULTILINE)
    assert lines.count("mean of training: ") == 6  # at most one in ten seconds


def test_the_speed_is_that_of_steps_alone(tmp_path):
    """Neither validations nor trials of them count, nor saves."""
    timed(tmp_path, 2.0, 0.1, minutes=1.0, log_every=1, validate_every=9, save_minutes=0.05).fit()
    actual = [record["tokens_per_second"] for record in read_metrics(tmp_path) if record["kind"] == "train"]
    tokens = [batch.tokens for epoch in range(5) for batch in Source().epoch(epoch)]
    assert actual == pytest.approx([count / 2.0 for count in tokens[: len(actual)]])


def test_the_validation_of_a_resumed_run_is_of_the_same_size(tmp_path):
    for minutes in (1.0, 2.0):  # a tenth of the first is 6 seconds
        run = timed(tmp_path, 1.0, 0.25, minutes=minutes, validate_every=10)
        if minutes == 2.0:
            run.resume()
        run.fit()
    actual = [record["loss"] for record in read_metrics(tmp_path) if record["kind"] == "validation"]
    assert set(actual) == {24.0}
    assert len(actual) > 6


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
@pytest.mark.parametrize("steps", [5, 13])
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
    often = config(**{**vars(settings), "save_minutes": 1e-9})
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", often, validate=killed).fit()
    again = trainer(tmp_path / "run", settings, model=network(seed=77))
    assert again.resume().step == (7 if settings.validate_every is None else settings.validate_every - 1)
    again.fit()
    assert records(tmp_path / "run") == records(tmp_path / "whole")
