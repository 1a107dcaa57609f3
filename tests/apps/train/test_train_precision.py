"""Training in fp16 with loss scaling: an overflow skips its step, and too many of them end the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastformer.apps.train import CheckpointFolder, DivergedError, read_metrics
from tests.support.train_task import Overflow, Rows, config, network, summed_loss, trainer


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
    path = folder / "checkpoints" / f"step-{step}"
    return CheckpointFolder(folder / "checkpoints").open(path).weights()


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder) if record["kind"] == kind]


def test_it_learns_what_fp32_learns_in_fp16(tmp_path: Path) -> None:
    seen = []

    def watched(model: nn.Module, batch: Rows) -> Tensor:
        logits = model(batch.inputs)
        seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits.float(), batch.labels, reduction="sum")

    settings = {"steps": 40, "validate_every": 20}
    half = trainer(
        tmp_path / "fp16", config(**settings, precision="fp16"), loss=watched, model=network(dropout=0.0)
    ).fit()
    single = trainer(tmp_path / "fp32", config(**settings), model=network(dropout=0.0)).fit()
    assert set(seen) == {torch.float16}
    assert half.metrics["loss"] == pytest.approx(single.metrics["loss"], rel=0.02)
    assert half.metrics["loss"] != single.metrics["loss"]
    for ours, theirs in zip(records(tmp_path / "fp16"), records(tmp_path / "fp32"), strict=True):
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=0.05)  # before scaling
        assert (ours["skipped_steps"], ours["loss_scale"]) == (0, 65536.0)
        assert "skipped_steps" not in theirs
        assert "loss_scale" not in theirs


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
