"""A training state of a stranger, whose hash is right, ends in one line, without a crash and without its memory."""

import io
import json
import pickle
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.apps.train import CheckpointError
from fastformer.apps.train.checkpoint_files import STATE, file_facts, write_state
from fastformer.apps.train.states import MOMENTS
from tests.support.train_task import config, trainer

JUNK: list[Any] = [
    None, -1, 2**70, float("nan"), float("inf"), "x" * 99, b"x", (), [], {}, {"a": 1}, [[[[1]]]], True,
    torch.zeros(3), torch.zeros(0), torch.zeros((), dtype=torch.complex64), torch.zeros(2, 2).to_sparse(),
    torch.zeros(1).expand(2**40), torch.empty(2**50, device="meta"), torch.nn.Parameter(torch.zeros(2)),
]  # fmt: skip


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a nested state, but of long tuples of numbers the first alone."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list | tuple) and value:
        for index in range(len(value) if len(value) < 6 else 1):
            yield from paths(value[index], (*path, index))


def replaced(value: Any, path: tuple[Any, ...], new: Callable[[Any], Any]) -> Any:
    """A copy with another value at a place."""
    if not path:
        return new(value)
    if isinstance(value, dict):
        return {key: replaced(x, path[1:], new) if key == path[0] else x for key, x in value.items()}
    return type(value)(replaced(x, path[1:], new) if i == path[0] else x for i, x in enumerate(value))


def without(value: Any, path: tuple[Any, ...]) -> Any:
    return replaced(value, path[:-1], lambda found: {k: x for k, x in found.items() if k != path[-1]})


def run(folder: Path, optimizer: str) -> Path:
    precision = {"lr": 0.01} if optimizer == "sgd" else {}
    trainer(folder, config(steps=4, validate_every=4, optimizer=optimizer, **precision)).fit()
    return folder / "checkpoints" / "step-4"


def put(checkpoint: Path, content: bytes | Any) -> None:
    """Another state, and its hash."""
    path = checkpoint / STATE
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        write_state(path, content)
    else:
        torch.save(content, path)
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["files"][STATE] = file_facts(path)
    (checkpoint / "meta.json").write_text(json.dumps(meta))


def resumed(checkpoint: Path, optimizer: str) -> None:
    trainer(checkpoint.parent.parent, config(steps=6, optimizer=optimizer)).resume()


def refused(checkpoint: Path, optimizer: str, what: object) -> str:
    with pytest.raises(CheckpointError) as found:
        resumed(checkpoint, optimizer)
    message = str(found.value)
    assert "\n" not in message, what
    assert len(message) < 600, what
    return message


@pytest.mark.parametrize("optimizer", MOMENTS)
def test_foreign_entries_at_every_place_are_refused(tmp_path: Path, optimizer: str) -> None:
    checkpoint = run(tmp_path, optimizer)
    state = torch.load(checkpoint / STATE, weights_only=True)
    # The settings of groups are the configuration's; the second of two numbers is compared by other tests.
    places = [path for path in paths(state) if path[:2] != ("optimizer", "param_groups") or path[-1] == "params"]
    may_miss = {"metric", "scaler", "random_of_others", "epoch_loss", "epoch_tokens", "skips", "momentum_buffer"}
    count = 0
    for number, path in enumerate(places):
        for junk in (JUNK[number % len(JUNK)], JUNK[(number + 7) % len(JUNK)]):
            if fits(path, junk):
                continue
            put(checkpoint, replaced(state, path, lambda _, junk=junk: junk))
            refused(checkpoint, optimizer, (path, junk))
            count += 1
        if path and isinstance(path[-1], str) and path[-1] not in may_miss and path[0] != "scaler":
            put(checkpoint, without(state, path))
            refused(checkpoint, optimizer, path)
            count += 1
    assert count > 60
    put(checkpoint, state)
    resumed(checkpoint, optimizer)


def fits(path: tuple[Any, ...], junk: Any) -> bool:
    """Whether this run could have written it."""
    last = path[-1] if path else None
    if isinstance(junk, Tensor | bytes | tuple):
        return False
    return (
        (junk == {} and path in ((), ("scaler",), ("optimizer", "state")) and path != ())
        or (junk == {} and path[:2] == ("optimizer", "state"))
        or (junk == [] and last in ("random_of_others", "cuda"))
        or (junk is None and last in ("decay_start", "best_value", "momentum_buffer"))
        or (junk is None and path in (("random", "python", 2),))
        or (
            isinstance(junk, int | float)
            and abs(junk) < 9
            and last in ("decay_start", "seconds", "best_value", "best_loss")
        )
        or (junk == float("inf") and last in ("best_loss", "best_value"))
        or (junk == -1 and path in (("random", "python", 2), ("random", "numpy", 4)))
    )


OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda state: b"",
    "text": lambda state: b"not a state",
    "a list": lambda state: [state],
    "None": lambda state: None,
    "a tensor": lambda state: torch.zeros(3),
    "a pickle of code": lambda state: pickle.dumps(print),
    "the old format": lambda state: _old(state),
    "cut off": lambda state: _bytes(state)[:-100],
    "without an end": lambda state: _bytes(state)[:1000],
    "compressed": lambda state: _compressed(_bytes({**state, "zeros": torch.zeros(1 << 22)})),
    "nested": lambda state: {**state, "position": _nested(300)},
    "numpy reads beyond its words": lambda state: replaced(state, ("random", "numpy", 2), lambda _: 2**30),
    "a negative step": lambda state: replaced(state, ("optimizer", "state", 0, "step"), lambda _: torch.tensor(-1.0)),
    "a step that is none": lambda state: replaced(
        state, ("optimizer", "state", 0, "step"), lambda _: torch.tensor(float("nan"))
    ),
    "sums that are none": lambda state: replaced(state, ("sums", "loss"), lambda _: torch.tensor(float("nan"))),
    "another step": lambda state: replaced(state, ("position", "step"), lambda _: 3),
    "words that torch cannot take": lambda state: replaced(state, ("random", "torch"), lambda x: x * 0 + 255),
    "fewer parameters": lambda state: replaced(state, ("optimizer", "param_groups"), lambda groups: groups[:1]),
    "parameters twice": lambda state: replaced(
        state, ("optimizer", "param_groups"), lambda groups: [groups[0], groups[0]]
    ),
}


def _bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _old(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _compressed(archive: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for each in old.infolist():
            new.writestr(each.filename, old.read(each))
    return file.getvalue()


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"step": value}
    return value


@pytest.mark.parametrize("kind", OTHERS)
def test_foreign_files_are_refused(tmp_path: Path, kind: str) -> None:
    checkpoint = run(tmp_path, "adamw")
    state = torch.load(checkpoint / STATE, weights_only=True)
    put(checkpoint, OTHERS[kind](state))
    before = torch.get_rng_state()
    refused(checkpoint, "adamw", kind)
    trainer(tmp_path / "other", config())  # seeds
    assert before.shape == torch.get_rng_state().shape


def test_moments_that_overlap_are_copied(tmp_path: Path) -> None:
    one, other = run(tmp_path / "one", "adamw"), tmp_path / "other" / "checkpoints" / "step-4"
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    state = torch.load(one / STATE, weights_only=True)
    names = ("optimizer", "state", 0)
    moment = torch.zeros(1).expand(state["optimizer"]["state"][0]["exp_avg"].shape)
    overlapping = replaced(state, names, lambda each: {**each, "exp_avg": moment, "exp_avg_sq": moment})
    apart = replaced(state, names, lambda each: {**each, "exp_avg": moment.clone(), "exp_avg_sq": moment.clone()})
    put(one, apart)
    put(other, overlapping)
    results = []
    for folder in ("one", "other"):
        again = trainer(tmp_path / folder, config(steps=8))
        again.resume()
        again.fit()
        results.append(again.model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
@pytest.mark.slow
def test_a_small_state_that_claims_much_takes_no_memory(tmp_path: Path) -> None:
    checkpoint = run(tmp_path, "adamw")
    state = torch.load(checkpoint / STATE, weights_only=True)
    put(checkpoint, replaced(state, ("optimizer", "state", 0, "exp_avg"), lambda x: torch.zeros(1).expand(6 * 10**9)))
    code = (
        "import sys, pathlib; from tests.apps.train.test_foreign_states import resumed; "
        "resumed(pathlib.Path(sys.argv[1]), 'adamw')"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)],
        cwd=Path(__file__).resolve().parents[3],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "CheckpointError" in done.stderr.splitlines()[-1]
    assert "exp_avg must be of shape" in done.stderr.splitlines()[-1]
