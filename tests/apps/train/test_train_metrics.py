"""The stream of records: the two files agree, survive a crash, and go on where a resumed run does."""

import csv
import sys

import pytest
import torch

from fastformer.apps.train import MetricsLog, read_metrics
from fastformer.apps.train.metrics import RunningSums


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


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ValueError, match=r"tensorboard=True needs TensorBoard: pip install 'fastformer\[tensorboard\]'"
    ):
        MetricsLog(tmp_path, tensorboard=True)


def test_running_sums_are_means_over_tokens_and_leave_pauses_out():
    sums = RunningSums(torch.device("cpu"))
    sums.start(100.0)
    sums.add(torch.tensor(30.0), torch.tensor(1.0), tokens=10, rate=0.1)
    sums.add(torch.tensor(10.0), torch.tensor(3.0), tokens=30, rate=0.2)
    sums.pause(6.0)
    assert sums.take(108.0) == {"loss": 1.0, "gradient_norm": 2.0, "lr": 0.2, "tokens_per_second": 20.0}
    sums.add(torch.tensor(5.0), torch.tensor(1.0), tokens=5, rate=0.1)
    again = RunningSums(torch.device("cpu"))
    again.load_state_dict(sums.state_dict(109.0))
    again.start(500.0)
    again.add(torch.tensor(7.0), torch.tensor(2.0), tokens=1, rate=0.1)
    assert again.take(501.0) == {"loss": 2.0, "gradient_norm": 1.5, "lr": 0.1, "tokens_per_second": 3.0}


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (1.0, float("inf")), (float("-inf"), float("inf"))])
def test_running_sums_notice_what_is_not_finite(loss, norm):
    sums = RunningSums(torch.device("cpu"))
    sums.add(torch.tensor(1.0), torch.tensor(1.0), 1, 0.1)
    assert sums.finite()
    sums.add(torch.tensor(loss), torch.tensor(norm), 1, 0.1)
    assert not sums.finite()
