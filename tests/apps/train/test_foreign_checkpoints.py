"""Checkpoints that this run did not write: all is compared with the model before a number of it is copied."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastformer.apps.export import export_safetensors, load_safetensors
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import (
    CheckpointError,
    CheckpointFolder,
    put_weights,
    read_weights,
    write_weights,
)
from fastformer.apps.train.checkpoint import META, OPTIMIZER, STATE, WEIGHTS, file_facts
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


def assert_refused(checkpoint: Path, message: str) -> None:
    """Let meta.json state what the files are now, and resume."""
    meta = json.loads((checkpoint / META).read_text())
    meta["files"] = {path.name: file_facts(path) for path in checkpoint.iterdir() if path.name != META}
    (checkpoint / META).write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer(checkpoint.parents[1], config(steps=12), model=network(seed=77)).resume()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("position", "step", 3),
        ("position", "unknown", 1),
        ("sums", "loss", "nan"),
        ("random", "python", [3, [1], None]),
        ("random", "numpy", ["MT19937", [0] * 624, 2**30, 0, 0.0]),
        ("random", "torch", "ff"),
        ("random", "cuda", None),
    ],
)
def test_values_of_another_kind_are_refused_in_one_line(checkpoint: Path, section: str, name: str, value: Any) -> None:
    state = json.loads((checkpoint / STATE).read_text())
    (state["random"][0] if section == "random" else state[section])[name] = value
    (checkpoint / STATE).write_text(json.dumps(state))
    assert_refused(checkpoint, r"not a state of this run|its state is of step 3")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"[" * 10**5, b"\xff"])
def test_another_file_is_refused_in_one_line(checkpoint: Path, content: bytes) -> None:
    (checkpoint / STATE).write_bytes(content)
    assert_refused(checkpoint, r"state\.json: is damaged|not a state of this run")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("0.exp_avg", torch.zeros(3, 3), r"holds 0\.exp_avg of shape \[3, 3\], but"),
        ("0.exp_avg", torch.zeros(16, 6, dtype=torch.int32), r"0\.exp_avg of torch\.int32, but"),
        ("1.exp_avg_sq", None, r"does not hold 1\.exp_avg_sq"),
        ("9.step", torch.zeros(()), r"holds 9\.step, which this model does not have"),
        ("x.step", torch.zeros(()), r"holds x\.step, which this model does not have"),
    ],
)
def test_tensors_of_another_optimizer_are_refused_before_torch_gets_them(
    checkpoint: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    """torch compares no shapes, and its kernels would write beyond the memory of a smaller tensor."""
    tensors = {**read_weights(checkpoint / OPTIMIZER), **({} if tensor is None else {name: tensor})}
    write_weights(checkpoint / OPTIMIZER, {key: x for key, x in tensors.items() if tensor is not None or key != name})
    assert_refused(checkpoint, message)


def test_training_goes_on_from_numbers_only(checkpoint: Path) -> None:
    weights = {name: x.clone() for name, x in read_weights(checkpoint / WEIGHTS).items()}
    weights["0.weight"][0, 0] = float("nan")
    write_weights(checkpoint / WEIGHTS, weights)
    assert_refused(checkpoint, r"0\.weight holds NaN or infinity")


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))  # the norm counts its batches in int64


def with_dtype(weights: dict[str, Tensor], name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: x.to(dtype) if key == name else x for key, x in weights.items()}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_a_foreign_dtype_are_refused_by_name(dtype: torch.dtype) -> None:
    model = normed()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    # A first tensor that fits must not be copied before the second is refused.
    changed = {name: x + 1 for name, x in before.items()}
    with pytest.raises(CheckpointError, match=rf"holds 0\.bias of {dtype}, but this model's is torch.float32"):
        put_weights(model, with_dtype(changed, "0.bias", dtype), "there")
    with pytest.raises(CheckpointError, match=r"holds 1\.num_batches_tracked of torch\.float32, but"):
        put_weights(model, with_dtype(changed, "1.num_batches_tracked", torch.float32), "there")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_weights_of_another_width_load(tmp_path: Path, dtype: torch.dtype) -> None:
    model, other = normed(), normed()
    weights = {name: x.to(dtype) if x.is_floating_point() else x for name, x in model.state_dict().items()}
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, weights, {})
    checkpoints.open().load_into(other)
    for name, x in other.state_dict().items():
        assert torch.equal(x, weights[name].to(x.dtype)), name


def test_tied_weights_of_a_checkpoint_are_one_thing() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.ModuleDict({"first": first, "second": second})
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    put_weights(model, weights, "equal")
    weights["second.weight"] = weights["second.weight"] + 1
    with pytest.raises(CheckpointError, match=r"different numbers as first.weight and second.weight"):
        put_weights(model, weights, "different")


@pytest.mark.parametrize("dtype", ["complex64", "int8", "nn", 3, "float64"])
def test_an_exported_model_states_a_dtype_that_can_be_exported(tmp_path: Path, dtype: object) -> None:
    tokenizer = WordTokenizer.from_lines(["a small text", "of two lines"] * 2)
    config = LanguageConfig(vocabulary=tokenizer.size, d_model=8, heads=2, layers=1, feed_forward=8)
    export_safetensors(tmp_path / "model", LanguageModel(config), [tokenizer])
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('"float32"', f'"{dtype}"' if isinstance(dtype, str) else str(dtype)))
    with pytest.raises(CheckpointError, match="dtype must be one of float32, float16, bfloat16"):
        load_safetensors(tmp_path / "model")
