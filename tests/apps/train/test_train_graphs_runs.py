"""Runs whose steps come from CUDA graphs, or from what stands for them on a CPU: metrics, resuming, settings."""

import functools
import warnings

import numpy as np
import pytest

from fastformer.apps.text import Batches, EncodedPairs, Sequences
from fastformer.apps.train import Processes, TrainConfig, Trainer, graphs, read_metrics
from fastformer.apps.train.graphs import GraphedUpdate, new_update
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import translation_loss
from tests.support.recorded_steps import taped
from tests.support.translation_task import IDS, random_batch, random_model

LOSS = functools.partial(translation_loss, label_smoothing=0.1)


@pytest.fixture
def tape(monkeypatch):
    return taped(monkeypatch, graphs)


def pairs(count, seed):
    random = np.random.default_rng(seed)
    sides = [
        Sequences.from_lists([random.integers(4, 17, random.integers(1, 9)).tolist() for _ in range(count)])
        for _ in range(2)
    ]
    return EncodedPairs(*sides, IDS, IDS)


def trainer(folder, **changes):
    given = {"steps": 12, "lr": 0.01, "warmup_steps": 4, "log_every": 1, "validate_every": 4, "batch_tokens": 64}
    model = random_model(1, positions="learned", max_positions=9).double()  # no sentence may be taken for a longer one
    source = Batches(pairs(40, 0), tokens=64)
    valid = Batches(pairs(10, 1), tokens=64, shuffle=False)

    def validate(model):
        found = list(valid.epoch(0))
        return {"loss": sum(float(LOSS(model, b)) for b in found) / sum(b.tokens for b in found)}

    config = TrainConfig(**{**given, **changes})
    return Trainer(model, LOSS, source, config, folder, validate=validate, show=False)


def losses(folder):
    return [(r["kind"], r["step"], r["loss"], r.get("gradient_norm", 0)) for r in read_metrics(folder)]


@pytest.mark.slow
def test_a_run_is_the_eager_one(tape, tmp_path):
    for name, on in (("eager", False), ("graphs", True)):
        trainer(tmp_path / name, cuda_graphs=on).fit()
    assert tape.replayed > 20
    for found, expected in zip(losses(tmp_path / "graphs"), losses(tmp_path / "eager"), strict=True):
        assert found == (*expected[:2], pytest.approx(expected[2], rel=1e-6), pytest.approx(expected[3], rel=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("after", [True, False], ids=["with graphs", "without"])
def test_a_run_is_resumed(tape, tmp_path, after):
    """Bit for bit where both parts have graphs; a run may go on without them."""
    trainer(tmp_path / "whole", cuda_graphs=True).fit()
    trainer(tmp_path / "parts", cuda_graphs=True, steps=5).fit()
    again = trainer(tmp_path / "parts", cuda_graphs=after)
    again.resume()
    again.fit()
    whole, parts = (losses(tmp_path / name) for name in ("whole", "parts"))
    # The first part's last validation stands between, at step 5.
    parts = [record for record in parts if (record[0], record[1]) != ("validation", 5)]
    if after:
        assert parts == whole
    else:
        for found, expected in zip(parts, whole, strict=True):
            assert found == (*expected[:2], pytest.approx(expected[2], rel=1e-6), pytest.approx(expected[3], rel=1e-5))


class TestNewUpdate:
    def test_with_graphs(self, tape):
        assert (
            type(new_update(random_model(), LOSS, TrainConfig(steps=1, cuda_graphs=True), Processes())) is GraphedUpdate
        )

    def test_without(self, tape):
        assert type(new_update(random_model(), LOSS, TrainConfig(steps=1, cuda_graphs=False), Processes())) is Update

    def test_on_a_device_that_has_none(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert type(new_update(random_model(), LOSS, TrainConfig(steps=1, cuda_graphs=True), Processes())) is Update

    def test_several_processes(self, tape):
        with pytest.raises(ValueError, match="cuda_graphs=True is for one process, not for 2"):
            new_update(random_model(), LOSS, TrainConfig(steps=1, cuda_graphs=True), Processes(0, 2))

    def test_fp16(self):
        with pytest.raises(ValueError, match="cuda_graphs=True is for precision fp32 and bf16, not for fp16"):
            TrainConfig(steps=1, cuda_graphs=True, precision="fp16")

    def test_batches_that_do_not_fit(self, tape):
        update = new_update(random_model(), LOSS, TrainConfig(steps=1, cuda_graphs=True), Processes())
        with pytest.raises(TypeError, match="cuda_graphs=True needs batches of packed ids"):
            update.gradients([random_batch([(1, 2), (3, 1)], packed=False)])
