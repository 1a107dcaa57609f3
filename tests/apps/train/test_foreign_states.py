"""States that this run did not write: damaged, or of another run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.apps.train import CheckpointError, read_weights, write_weights
from fastformer.apps.train.checkpoint import META, OPTIMIZER, STATE, file_facts
from tests.support.train_task import config, network, trainer


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 5 steps."""
    folder = tmp_path_factory.mktemp("started")
    trainer(folder, config(steps=5)).fit()
    return folder


@pytest.fixture
def checkpoint(started: Path, tmp_path: Path) -> Path:
    """The checkpoint of a copy."""
    return shutil.copytree(started, tmp_path / "run") / "checkpoints" / "step-5"


def rehash(checkpoint: Path) -> None:
    """Let meta.json state what the files are now."""
    meta = json.loads((checkpoint / META).read_text())
    meta["files"] = {path.name: file_facts(path) for path in checkpoint.iterdir() if path.name != META}
    (checkpoint / META).write_text(json.dumps(meta))


def resume(checkpoint: Path) -> Any:
    made = trainer(checkpoint.parents[1], config(steps=12), model=network(seed=77))
    made.resume()
    return made


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("position", "step", 3),
        ("position", "step", -1),
        ("position", "batch", 1.5),
        ("position", "seconds", "1"),
        ("position", "unknown", 1),
        ("position", "validation_due", 1),
        ("position", "best_value", [1]),
        ("schedule", "scale", None),
        ("sums", "loss", "nan"),
        ("sums", "tokens", True),
    ],
)
def test_values_of_another_kind_are_refused_in_one_line(checkpoint: Path, section: str, name: str, value: Any) -> None:
    state = json.loads((checkpoint / STATE).read_text())
    state[section][name] = value
    (checkpoint / STATE).write_text(json.dumps(state))
    rehash(checkpoint)
    with pytest.raises(CheckpointError, match=r"not a state of this run|its state is of step 3") as caught:
        resume(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("python", [3, [1], None]),
        ("python", None),
        ("numpy", ["MT19937", [0] * 624, 2**30, 0, 0.0]),
        ("numpy", ["MT19937", [2**40] * 624, 0, 0, 0.0]),
        ("torch", "ff"),
        ("torch", "no digits"),
        ("cuda", None),
    ],
)
def test_states_of_no_generator_are_refused_in_one_line(checkpoint: Path, name: str, value: Any) -> None:
    state = json.loads((checkpoint / STATE).read_text())
    state["random"][0][name] = value
    (checkpoint / STATE).write_text(json.dumps(state))
    rehash(checkpoint)
    with pytest.raises(CheckpointError, match="not a state of this run"):
        resume(checkpoint)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"[" * 10**5, b"\xff"])
def test_another_file_is_refused_in_one_line(checkpoint: Path, content: bytes) -> None:
    (checkpoint / STATE).write_bytes(content)
    rehash(checkpoint)
    with pytest.raises(CheckpointError, match=r"state\.json: is damaged|not a state of this run"):
        resume(checkpoint)


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: x for key, x in tensors.items() if key != name}


CHANGES = {
    "shape": (lambda x: {**x, "0.exp_avg": torch.zeros(3, 3)}, r"holds 0\.exp_avg of shape \[3, 3\], but"),
    "larger": (lambda x: {**x, "0.exp_avg": torch.zeros(16, 600)}, r"holds 0\.exp_avg of shape \[16, 600\], but"),
    "dtype": (lambda x: {**x, "0.exp_avg": torch.zeros(16, 6, dtype=torch.int32)}, r"0\.exp_avg of torch\.int32, but"),
    "missing": (lambda x: without(x, "1.exp_avg_sq"), r"does not hold 1\.exp_avg_sq"),
    "unknown": (lambda x: {**x, "9.step": torch.zeros(())}, r"holds 9\.step, which this model does not have"),
    "no number": (lambda x: {**x, "x.step": torch.zeros(())}, r"holds x\.step, which this model does not have"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_of_another_optimizer_are_refused_before_torch_gets_them(checkpoint: Path, name: str) -> None:
    """torch compares no shapes, and its kernels would write beyond the memory of a smaller tensor."""
    change, message = CHANGES[name]
    write_weights(checkpoint / OPTIMIZER, change(read_weights(checkpoint / OPTIMIZER)))
    rehash(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        resume(checkpoint)
