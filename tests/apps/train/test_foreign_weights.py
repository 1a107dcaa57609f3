"""Weights of a stranger: what they are is compared with the model before any number of them is copied."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fastformer.apps.export import export_safetensors, load_safetensors
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import CheckpointError, CheckpointFolder, average_checkpoints, put_weights, write_weights
from fastformer.apps.train.checkpoint import META, WEIGHTS, file_facts
from tests.support import train_task

FOREIGN = (torch.int8, torch.uint8, torch.bool, torch.int64, torch.uint64, torch.complex64, torch.float8_e4m3fn)
OF_OTHER_WIDTHS = (torch.float16, torch.bfloat16, torch.float64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))  # the norm counts its batches in int64


def with_dtype(weights: dict[str, Tensor], name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: x.to(dtype) if key == name else x for key, x in weights.items()}


def saved(folder: Path, weights: dict[str, Tensor]) -> CheckpointFolder:
    checkpoints = CheckpointFolder(folder)
    checkpoints.save(1, weights, {})
    return checkpoints


@pytest.mark.parametrize("dtype", FOREIGN)
def test_weights_of_a_foreign_dtype_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    model = network()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    # A first tensor that fits must not be copied before the second is refused.
    changed = {name: x + 1 for name, x in before.items()}
    checkpoints = saved(tmp_path, with_dtype(changed, "0.bias", dtype))
    with pytest.raises(CheckpointError, match=rf"holds 0\.bias of {dtype}, but this model's is torch.float32"):
        checkpoints.open().load_into(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("dtype", OF_OTHER_WIDTHS)
def test_floating_weights_of_another_width_load(tmp_path: Path, dtype: torch.dtype) -> None:
    model, other = network(), network()
    weights = {name: x.to(dtype) if x.is_floating_point() else x for name, x in model.state_dict().items()}
    saved(tmp_path, weights).open().load_into(other)
    for name, x in other.state_dict().items():
        assert torch.equal(x, weights[name].to(x.dtype)), name


def test_a_count_must_stay_a_count() -> None:
    model = network()
    with pytest.raises(CheckpointError, match=r"holds 1\.num_batches_tracked of torch\.float32, but"):
        put_weights(model, with_dtype(model.state_dict(), "1.num_batches_tracked", torch.float32), "there")


def test_an_average_is_of_one_dtype(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step, dtype in ((1, torch.float32), (2, torch.int32), (3, torch.bfloat16)):
        checkpoints.save(step, {"w": torch.ones(2, dtype=dtype)}, {})
    with pytest.raises(CheckpointError, match=r"step-2: holds w of torch.int32"):
        average_checkpoints(checkpoints.paths())
    (tmp_path / "step-2").rename(tmp_path / "gone")
    assert average_checkpoints(checkpoints.paths())["w"].dtype == torch.bfloat16


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    tokenizer = WordTokenizer.from_lines(["a small text", "of two lines"] * 2)
    ids = {name: getattr(tokenizer, name) for name in ("pad_id", "bos_id", "eos_id")}
    config = LanguageConfig(vocabulary=tokenizer.size, d_model=8, heads=2, layers=1, feed_forward=8, **ids)
    folder = tmp_path / "model"
    export_safetensors(folder, LanguageModel(config), [tokenizer])
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(exported: Path, value: float) -> None:
    model = load_safetensors(exported)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    name = next(name for name in weights if name.endswith("linear2.weight"))
    weights[name][3, 0] = value
    write_weights(exported / "model.safetensors", weights)
    with pytest.raises(CheckpointError, match=rf"{name} holds NaN or infinity"):
        load_safetensors(exported)


def test_tied_weights_of_a_checkpoint_are_one_thing(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.ModuleDict({"first": first, "second": second})
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    saved(tmp_path / "equal", weights).open().load_into(model)
    weights["second.weight"] = weights["second.weight"] + 1
    with pytest.raises(CheckpointError, match=r"different numbers as first.weight and second.weight"):
        saved(tmp_path / "different", weights).open().load_into(model)


def test_training_goes_on_from_numbers_only(tmp_path: Path) -> None:
    train_task.trainer(tmp_path, train_task.config(steps=2)).fit()
    checkpoint = CheckpointFolder(tmp_path / "checkpoints").open()
    weights = {name: x.clone() for name, x in checkpoint.weights().items()}
    name = next(iter(weights))
    weights[name].view(-1)[0] = float("nan")
    write_weights(checkpoint.path / WEIGHTS, weights)
    meta = json.loads((checkpoint.path / META).read_text())
    meta["files"][WEIGHTS] = file_facts(checkpoint.path / WEIGHTS)
    (checkpoint.path / META).write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=rf"{name} holds NaN or infinity"):
        train_task.trainer(tmp_path, train_task.config(steps=4)).resume()


@pytest.mark.parametrize("dtype", ["complex64", "int8", "nn", 3, "float64"])
def test_an_exported_model_states_a_dtype_that_can_be_exported(exported: Path, dtype: object) -> None:
    path = exported / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"float32"', f'"{dtype}"' if isinstance(dtype, str) else str(dtype)))
    with pytest.raises(CheckpointError, match="dtype must be one of float32, float16, bfloat16"):
        load_safetensors(exported)
