"""Sharded checkpoints of one process; those of two are in test_train_distributed.py."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fastformer.apps.train import Checkpoint, CheckpointError, CheckpointFolder, Processes
from fastformer.apps.train.saving import CheckpointWriter
from fastformer.apps.train.shards import Shards, write_shards
from fastformer.apps.train.update import Update
from tests.apps.train.test_train_checkpoints import Tied, flip_a_byte, posix_only, truncate
from tests.support.python import python
from tests.support.train_task import config, network, trainer

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)


def saved(folder: Path, model: nn.Module, *steps: int, architecture: object = None) -> CheckpointFolder:
    checkpoints = CheckpointFolder(folder)
    processes = Processes()
    update = Update(model, lambda model, batch: batch, config(), processes)
    for p in update.parameters:
        p.grad = torch.randn_like(p)
    update.apply(torch.ones(()), 0.1)
    for step in steps:
        CheckpointWriter(checkpoints, model, update, processes, architecture).save(
            step, {"step": step}, {"loss": 2.0}, sharded=True
        )
    return checkpoints


def test_weights_and_optimizer_come_back_with_tied_parameters_stored_once(tmp_path: Path) -> None:
    model = Tied(width=512)
    checkpoint = saved(tmp_path, model, 3, architecture={"width": 512}).open()
    assert checkpoint.is_sharded
    assert checkpoint.metrics == {"loss": 2.0}
    assert checkpoint.copies == {"output.weight": "embedding.weight"}
    (file,) = (tmp_path / "step-3" / "shards").iterdir()
    held = 6 * 512 + 4 * 512 + 2 * (6 * 512 + 2 * 512)  # weights and buffers, and two moments of the parameters
    assert held * 4 < file.stat().st_size < held * 4 + 4096
    assert checkpoint.parameters() == 6 * 512 + 4 * 512 + 1

    for name, tensor in checkpoint.weights().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
        assert tensor.dtype == model.state_dict()[name].dtype, name
    assert set(checkpoint.weights()) == set(model.state_dict())
    other = Tied(width=512)
    checkpoint.load_into(other, {"width": 512})
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    untied = Tied(width=512)
    untied.output.weight = nn.Parameter(torch.zeros(6, 512))
    checkpoint.load_into(untied)
    assert torch.equal(untied.output.weight, model.output.weight)
    assert torch.equal(untied.embedding.weight, model.output.weight)

    assert checkpoint.state() == {"step": 3}
    parameters = [p for dim in (2, 1) for p in model.parameters() if p.dim() == dim]
    moments = checkpoint.optimizer_state(parameters, "adamw")[0]
    assert moments["exp_avg"].shape == (6, 512)
    assert moments["exp_avg"].abs().max() > 0
    assert moments["step"] == 1


def test_a_sharded_run_equals_the_other_and_either_goes_on_from_the_other(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", config(average=2)).fit()
    for name, sharded in (("sharded", True), ("from-whole", True), ("to-whole", False)):
        first = config(average=2, steps=10, sharded_checkpoints=name != "from-whole")
        trainer(tmp_path / name, first).fit()
        again = trainer(
            tmp_path / name, config(average=2, sharded_checkpoints=sharded, steps=20), model=network(seed=8)
        )
        again.resume()
        assert again.fit().metrics == whole.metrics
        last = CheckpointFolder(tmp_path / name / "checkpoints").open()
        assert last.is_sharded == sharded
        for step in ("step-20", "average"):
            expected = Checkpoint.open(tmp_path / "whole" / "checkpoints" / step).weights()
            found = Checkpoint.open(tmp_path / name / "checkpoints" / step).weights()
            assert all(torch.equal(found[key], expected[key]) for key in expected), (name, step)


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing", "extra", "header", "offsets", "copies"])
def test_damage_is_named_and_the_previous_checkpoint_loads(tmp_path: Path, damage: str) -> None:
    folder = saved(tmp_path, Tied(), 1, 2)
    (file,) = (tmp_path / "step-2" / "shards").iterdir()
    if damage == "bit":
        flip_a_byte(file)
        message = rf"{file}: is damaged: its content is not what was saved \(SHA-256 differs\)"
    elif damage == "truncated":
        truncate(file)
        message = rf"{file}: is damaged: it has [\d,]+ bytes instead of [\d,]+"
    elif damage == "missing":
        file.unlink()
        message = rf"{file}: is missing"
    elif damage == "extra":
        shutil.copy(file, file.with_name("more.safetensors"))
        message = r"more.safetensors: does not belong to this checkpoint"
    else:  # what only somebody who knows the format can write
        if damage == "copies":
            meta = json.loads((tmp_path / "step-2" / "meta.json").read_text())
            meta["copies"] = {"output.weight": "elsewhere"}
        else:
            content = file.read_bytes()
            content = b"\xff" * 8 + content[8:] if damage == "header" else content.replace(b"saved_off", b"other_off")
            file.write_bytes(content)
            from fastformer.apps.train.checkpoint import file_facts

            meta = json.loads((tmp_path / "step-2" / "meta.json").read_text())
            meta["files"][f"shards/{file.name}"] = file_facts(file)
        (tmp_path / "step-2" / "meta.json").write_text(json.dumps(meta))
        message = r"meta.json: is damaged: copies names elsewhere" if damage == "copies" else r"shards: is damaged \("
    with pytest.raises(CheckpointError, match=message) as raised:
        Checkpoint.open(tmp_path / "step-2").load_into(Tied())
    assert "\n" not in str(raised.value)
    if damage in ("bit", "truncated", "missing"):
        with pytest.raises(CheckpointError, match=r"the previous good checkpoint is .*step-1$"):
            folder.open()
        assert folder.open(fallback=True).step == 1
    Checkpoint.open(tmp_path / "step-1").load_into(Tied())


PARTS = {
    "a gap": [([0, 0], [1, 3]), ([3, 0], [1, 3])],
    "no begin": [([2, 0], [2, 3])],
    "one twice": [([0, 0], [2, 3]), ([1, 0], [3, 3])],
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_are_all_of_a_tensor(tmp_path: Path, kind: str) -> None:
    """Numbers that no part holds stayed what the model, or the memory, had before."""
    for number, (begin, shape) in enumerate(PARTS[kind]):
        places = json.dumps({"x": {"saved_offsets": begin}})
        save_file({"x": torch.ones(shape)}, tmp_path / f"{number}.safetensors", {"DCP_SHARDING_INFO": places})
    with pytest.raises(CheckpointError, match=r"the parts of x are not the whole of it"):
        Shards(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float16, torch.float8_e4m3fn])
def test_parts_are_of_one_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """That of the first was compared with the model's; the others were cast, whatever they were."""
    for number, each in enumerate((torch.float32, dtype)):
        places = json.dumps({"x": {"saved_offsets": [2 * number, 0]}})
        part = torch.ones(2, 3).to(each)
        save_file({"x": part}, tmp_path / f"{number}.safetensors", {"DCP_SHARDING_INFO": places})
    with pytest.raises(CheckpointError, match=rf"parts of x are of .*{str(dtype).removeprefix('torch.')}"):
        Shards(tmp_path)


def test_tensors_of_all_kinds_come_back_and_are_converted_on_loading(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"half": torch.randn(3, 5).bfloat16(), "count": torch.tensor(7), "none": torch.empty(0, 2)}
    tensors |= {"base": base, "row": base[1], "turned": base.T}
    write_shards(tmp_path / "shards", tensors)
    shards = Shards(tmp_path / "shards")
    found = shards.read(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    wide = torch.zeros(3, 5)
    shards.read_into({"half": wide})
    assert torch.equal(wide, tensors["half"].float())


def test_what_could_not_be_written_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no\n    such device")

    monkeypatch.setattr("torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter.write_data", broken)
    with pytest.raises(OSError, match=r"^shards: RuntimeError: no such device$"):
        write_shards(tmp_path / "shards", {"x": torch.ones(2)})


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from tests.apps.train.test_train_shards import saved
from torch import nn

model, folder = nn.Linear(100, 300), Path(sys.argv[1])
checkpoints = saved(folder, model, 1)
for limit in (0, 100, 50_000, 120_000, 300_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        saved(folder, model, 2)
        raise SystemExit(f"{limit} was enough")
    except OSError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert message.endswith("the last good checkpoint is " + str(folder / "step-1")), message
    assert "step-2 could not be written" in message and "\\n" not in message, message
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", "step-1"]
assert saved(folder, model, 2).open().step == 2
print("passed")
"""


@pytest.mark.slow
@posix_only
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    run = python("-c", FULL_DISK, tmp_path)
    assert run.stdout.endswith("passed\n"), run.stdout + run.stderr
