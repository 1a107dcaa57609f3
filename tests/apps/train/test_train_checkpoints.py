"""Checkpoints: what is saved comes back, and no crash, full disk or damaged file costs more than the newest one."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastformer.apps.train import (
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    average_checkpoints,
    find_checkpoint,
    put_weights,
    read_weights,
    write_weights,
)
from fastformer.apps.train.checkpoint import META, OPTIMIZER, STATE, WEIGHTS
from tests.support.python import python
from tests.support.train_task import config, network, trainer

posix_only = pytest.mark.skipif(os.name != "posix", reason="needs fork, SIGKILL and resource limits")


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, width)
        self.output = nn.Linear(width, 6, bias=False)
        self.output.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(width)  # has an integer buffer, and a scalar one


def saved(folder: Path, *steps: int, keep: int = 3) -> CheckpointFolder:
    checkpoints = CheckpointFolder(folder, keep)
    for step in steps:
        checkpoints.save(step, {"w": torch.full((5,), float(step))}, {"step": step}, {"width": 5})
    return checkpoints


def names(checkpoints: CheckpointFolder) -> list[str]:
    return [path.name for path in checkpoints.paths()]


def test_saved_weights_state_and_metrics_come_back(tmp_path):
    model = Tied(width=512)
    state = {"list": [1, 2.5, None, float("inf")], "nested": {"step": 3}}
    parameters = [torch.zeros(2, 3), torch.zeros(4)]
    optimizer = {1: {"step": torch.tensor(2.0), "exp_avg": torch.randn(4), "exp_avg_sq": torch.rand(4)}}
    path = CheckpointFolder(tmp_path).save(
        7, model.state_dict(), {**state, "optimizer": optimizer}, {"width": 512, "pair": (1, 2)}, {"loss": 1.5}
    )
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.step, checkpoint.metrics) == (7, {"loss": 1.5})
    assert checkpoint.config == {"width": 512, "pair": [1, 2]}
    assert checkpoint.state() == state
    loaded = checkpoint.optimizer_state(parameters, "adamw")
    assert loaded.keys() == {1}
    assert all(torch.equal(loaded[1][name], x) for name, x in optimizer[1].items())
    other = Tied(width=512)
    checkpoint.load_into(other, {"width": 512, "pair": (1, 2)})
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.output.weight is other.embedding.weight
    assert (path / "model.safetensors").stat().st_size < 1.9 * 6 * 512 * 4 + 4 * 512 * 4  # tied ones are stored once


def test_overlapping_and_strided_tensors_are_stored_as_they_are(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    weights = {"base": base, "row": base[1], "turned": base.T}
    write_weights(tmp_path / "w.safetensors", weights)
    loaded = read_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_equal_weights_are_equal_files(tmp_path):
    weights = dict.fromkeys("öabcdefg", torch.arange(3.0))  # tied: named in the header, whose order safetensors draws
    files = [tmp_path / f"{i}.safetensors" for i in range(5)]
    for path in files:
        write_weights(path, weights)
    assert len({path.read_bytes() for path in files}) == 1
    assert read_weights(files[0]).keys() == weights.keys()


def test_the_last_k_checkpoints_and_the_best_stay(tmp_path):
    checkpoints = saved(tmp_path, 1, keep=2)
    checkpoints.mark_best(tmp_path / "step-1", 0.5)
    for step in (2, 3, 10):
        checkpoints.save(step, {"w": torch.ones(1)}, {})
    assert names(checkpoints) == ["step-1", "step-3", "step-10"]
    assert (checkpoints.best(), checkpoints.last()) == (tmp_path / "step-1", tmp_path / "step-10")
    checkpoints.save(11, {"w": torch.ones(1)}, {}, best=0.4)
    assert names(checkpoints) == ["step-10", "step-11"]
    assert checkpoints.best_value() == 0.4


def test_without_an_index_the_folders_are_listed(tmp_path):
    checkpoints = saved(tmp_path, 9, 10)
    for damage in ("", "null", "{}", '{"kept": ["../x"], "best": null}'):
        (tmp_path / "index.json").write_text(damage)
        assert names(checkpoints) == ["step-9", "step-10"]
    (tmp_path / "index.json").unlink()
    assert checkpoints.open().step == 10


@pytest.mark.parametrize("which", ["best", "last", "average"])
def test_the_best_the_last_and_the_average_are_found(tmp_path, which):
    checkpoints = saved(tmp_path / "run" / "checkpoints", 1, 2)
    checkpoints.mark_best(checkpoints.folder / "step-1", 3.0)
    checkpoints.save(2, {"w": torch.ones(5)}, None)
    name = {"best": "step-1", "last": "step-2", "average": "average"}[which]
    assert find_checkpoint(tmp_path / "run", which).name == name
    with pytest.raises(CheckpointError, match=f"holds no {which} checkpoint"):
        find_checkpoint(tmp_path, which)


def test_a_best_checkpoint_that_is_gone_is_named_and_the_last_not_taken_for_it(tmp_path):
    """A copy of a run may lack it, and somebody may have made room on the disk."""
    checkpoints = saved(tmp_path / "run" / "checkpoints", 1, 2)
    checkpoints.mark_best(checkpoints.folder / "step-1", 0.5)
    shutil.rmtree(checkpoints.folder / "step-1")
    with pytest.raises(CheckpointError, match="holds no best checkpoint; it has step-2"):
        find_checkpoint(tmp_path / "run")
    assert find_checkpoint(tmp_path / "run", "last").name == "step-2"
    saved(checkpoints.folder, 3)  # training goes on
    checkpoints.mark_best(checkpoints.last(), 0.4)
    assert find_checkpoint(tmp_path / "run").name == "step-3"


def test_another_architecture_is_named_by_its_first_differing_setting(tmp_path):
    model = Tied()
    path = CheckpointFolder(tmp_path).save(1, model.state_dict(), {}, {"d_model": 4, "heads": 2, "layers": 6})
    checkpoint = Checkpoint.open(path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    smaller = Tied()
    del smaller.output
    for target, architecture, message in (
        (model, {"d_model": 4, "heads": 8, "layers": 3}, r"another architecture: it has heads=2, this model 8$"),
        (model, {"d_model": 4, "heads": 2}, r"it has layers=6, this model nothing$"),
        (Tied(width=8), None, r"holds embedding.weight of shape \[6, 4\], but this model's is \[6, 8\]"),
        (nn.Linear(4, 6), None, r"does not hold weight, which this model has"),
        (smaller, None, r"holds output.weight, which this model does not have"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load_into(target, architecture)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_average_is_the_mean_in_double_precision_and_keeps_dtypes(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    values = [torch.tensor([1.0, 1e8, 3.0]), torch.tensor([2.0, 1.0, 3.0]), torch.tensor([6.0, -1e8, 3.0])]
    paths = [
        checkpoints.save(step, {"w": value, "tied": value, "n": torch.tensor(step), "h": value[:1].half()}, {})
        for step, value in enumerate(values)
    ]
    average = average_checkpoints(paths)
    for name in ("w", "tied"):
        assert torch.equal(average[name], torch.tensor([3.0, 1 / 3, 3.0]))
    assert average["n"].item() == 2
    assert average["h"].dtype == torch.float16
    checkpoints.save(
        9, {"w": torch.ones(2), "tied": torch.ones(3), "n": torch.tensor(1), "h": torch.ones(1).half()}, {}
    )
    with pytest.raises(CheckpointError, match=r"w of shape \[2\], but this model's is \[3\]"):
        average_checkpoints([paths[1], tmp_path / "step-9"])
    with pytest.raises(ValueError, match="paths is empty"):
        average_checkpoints([])


def test_every_file_is_on_the_disk_before_a_name_points_to_it(tmp_path, monkeypatch):
    """For a machine that loses power: files and folders are flushed before the index names them, and it after that."""
    CheckpointFolder(tmp_path).save(1, {"w": torch.ones(2)}, {"optimizer": {}})
    flushed, renamed, folder = set(), [], tmp_path.stat().st_ino
    fsync, replace = os.fsync, os.replace

    def flush(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def move(source, target):
        pointed_to = [Path(source), *Path(source).glob("*")]
        if Path(target).name == "index.json":
            pointed_to += [tmp_path, tmp_path / "step-2", *(tmp_path / "step-2").iterdir()]
        missing = [path.name for path in pointed_to if path.stat().st_ino not in flushed]
        assert not missing, f"{source} is renamed before {missing} are on the disk"
        flushed.discard(folder)
        renamed.append(Path(target).name)
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", move)
    CheckpointFolder(tmp_path).save(2, {"w": torch.ones(2)}, {"optimizer": {}})
    assert renamed == ["step-2", "index.json"]
    assert folder in flushed


FULL_DISK = """
import resource, sys, torch
from fastformer.apps.train import CheckpointFolder
checkpoints = CheckpointFolder(sys.argv[1])
weights, state = {"w": torch.randn(300, 100)}, {"optimizer": {0: {"x": torch.randn(400, 100)}}}
checkpoints.save(1, weights, state, best=1.0)
index = (checkpoints.folder / "index.json").read_bytes()
for limit in [0, 30, 100_000, 119_000, 121_000, 140_000, 150_000, 160_000]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        checkpoints.save(2, weights, state)
        raise SystemExit(f"{limit} was enough")
    except OSError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert message.endswith("the last good checkpoint is " + str(checkpoints.folder / "step-1")), message
    assert "step-2 could not be written" in message and "File too large" in message and "\\n" not in message, message
    assert checkpoints.open().step == 1
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["index.json", "step-1"]
    assert (checkpoints.folder / "index.json").read_bytes() == index
assert checkpoints.save(2, weights, state).name == "step-2" and checkpoints.open().step == 2
print("passed")
"""


@pytest.mark.slow
@posix_only
def test_a_disk_that_is_full_at_any_point_leaves_the_previous_checkpoint(tmp_path):
    """Really failing writes: the system refuses to let any file grow beyond a limit."""
    run = python("-c", FULL_DISK, tmp_path)
    assert run.stdout.endswith("passed\n"), run.stdout + run.stderr


KILL = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from fastformer.apps.train import Checkpoint, CheckpointFolder
from fastformer.apps.train import checkpoint_folder as module

root, size = Path(sys.argv[1]), 30_000

def save(folder, step):
    value = float(step)
    tensor = torch.full((size,), value)
    state = {"step": step, "optimizer": {0: {"momentum_buffer": tensor}}}
    folder.save(step, {"w": tensor}, state, best=value)

def check(path, least):
    folder = CheckpointFolder(path, keep=2)
    checkpoint = folder.open()
    step = checkpoint.step
    assert step >= least, (step, least)
    moments = checkpoint.optimizer_state([torch.empty(size)], "sgd")[0]["momentum_buffer"]
    assert bool((checkpoint.weights()["w"] == step).all()) and bool((moments == step).all())
    assert checkpoint.state() == {"step": step}
    assert folder.best() is not None and folder.best_value() == Checkpoint.open(folder.best()).step
    save(folder, step + 1)
    assert folder.open().step == step + 1
    left = {path.name for path in folder.folder.iterdir()} - {"index.json", ".index.json.tmp"}
    assert all(name.startswith("step-") for name in left) and len(left) <= 3, left

# Before every single operation that changes what is on the disk, in a save, in one that replaces, and in pruning.
for number in range(1, 200):
    def body(folder):
        calls = 0
        def dying(function):
            def call(*arguments, **keywords):
                nonlocal calls
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **keywords)
            return call
        for owner, name in [(os, "fsync"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "rmdir"),
                            (shutil, "rmtree"), (module, "write_weights"), (os, "mkdir")]:
            setattr(owner, name, dying(getattr(owner, name)))
        save(folder, 3)
        save(folder, 3)
    path = root / f"point-{number}"
    for step in (1, 2):
        save(CheckpointFolder(path, keep=2), step)
    child = os.fork()
    if child == 0:
        body(CheckpointFolder(path, keep=2))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    check(path, 2)
    shutil.rmtree(path)
    if status == 0:
        break
assert 20 < number < 199, number
print("passed", number)
"""


@pytest.mark.slow
@posix_only
def test_kill_9_at_any_point_of_a_save_leaves_a_checkpoint_that_loads(tmp_path):
    run = python("-c", KILL, tmp_path, OMP_NUM_THREADS="1")
    assert run.stdout.startswith("passed"), run.stdout + run.stderr


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
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer(checkpoint.parents[1], config(steps=12), model=network(seed=77)).resume()
    assert "\n" not in str(caught.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize("damage", [truncate, Path.unlink], ids=["truncated", "missing"])
@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE, META])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_loads(
    checkpoint: Path, name: str, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(checkpoint, checkpoint.with_name("step-5-2"))
    index = json.loads((checkpoint.parent / "index.json").read_text())
    (checkpoint.parent / "index.json").write_text(json.dumps({**index, "kept": ["step-5-2", "step-5"]}))
    damage(checkpoint / name)
    assert_refused(checkpoint, rf"step-5/{re.escape(name)}: |step-5: holds weights only")
    shutil.rmtree(checkpoint)
    assert CheckpointFolder(checkpoint.parent).open().state()["position"]["step"] == 5


def state_with(section: str, name: str, value: Any) -> Callable[[dict[str, Any]], bytes]:
    def changed(state: dict[str, Any]) -> bytes:
        (state["random"][0] if section == "random" else state[section])[name] = value
        return json.dumps(state).encode()

    return changed


@pytest.mark.parametrize(
    "change",
    [
        state_with("position", "epoch", None),
        state_with("schedule", "scale", "large"),
        state_with("sums", "loss", "nan"),
        state_with("random", "python", [3, [1], None]),
        state_with("random", "numpy", ["MT19937", [0] * 624, 2**30, 0, 0.0]),
        state_with("random", "torch", "ff"),
        state_with("random", "cuda", None),
        *(lambda state, content=content: content for content in (b"", b"[]", b"{}", b"[" * 10**5, b"\xff")),
    ],
)
def test_a_state_of_another_kind_is_refused_in_one_line(checkpoint: Path, change: Callable[..., bytes]) -> None:
    (checkpoint / STATE).write_bytes(change(json.loads((checkpoint / STATE).read_text())))
    assert_refused(checkpoint, r"not a state of this run|state\.json: is damaged")


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
