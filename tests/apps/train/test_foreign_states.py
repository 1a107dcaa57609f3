"""A training state of a stranger, whose hash is right, ends in one line, without a crash and without its memory."""

import resource
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

from fastformer.apps.train import CheckpointError
from fastformer.apps.train.checkpoint import STATE
from fastformer.apps.train.states import MOMENTS
from tests.support.foreign_states import JUNK, OTHERS, compared, fits, needed, paths, put, replaced, without
from tests.support.train_task import config, trainer


def run(folder: Path, optimizer: str) -> Path:
    precision = {"lr": 0.01} if optimizer == "sgd" else {}
    trainer(folder, config(steps=4, validate_every=4, optimizer=optimizer, **precision)).fit()
    return folder / "checkpoints" / "step-4"


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
    places = [path for path in paths(state) if compared(path)]  # the second of two numbers by other tests
    count = 0
    for number, path in enumerate(places):
        for junk in (JUNK[number % len(JUNK)], JUNK[(number + 7) % len(JUNK)]):
            if fits(path, junk):
                continue
            put(checkpoint, replaced(state, path, lambda _, junk=junk: junk))
            refused(checkpoint, optimizer, (path, junk))
            count += 1
        if needed(path):
            put(checkpoint, without(state, path))
            refused(checkpoint, optimizer, path)
            count += 1
    assert count > 60
    put(checkpoint, state)
    resumed(checkpoint, optimizer)


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
        timeout=600,
    )
    assert done.returncode == 1
    assert "CheckpointError" in done.stderr.splitlines()[-1]
    assert "exp_avg must be of shape" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("depth", [0, 16])
def test_the_optimisers_name_is_looked_at_before_what_hangs_on_it(tmp_path: Path, depth: int) -> None:
    """Where it came later in the file, any name was believed; one of lists in lists, twice each, took for ever."""
    checkpoint = run(tmp_path, "adamw")
    state = torch.load(checkpoint / STATE, weights_only=True)
    name: list[object] = ["x"]
    for _ in range(depth):
        name = [name, name]
    rest = {key: value for key, value in state.items() if key not in ("optimizer", "optimizer_name")}
    for foreign in (name, "lion", 5, None):
        put(checkpoint, {"optimizer": state["optimizer"], **rest, "optimizer_name": foreign})
        assert "optimizer_name must be one of adamw" in refused(checkpoint, "adamw", foreign)


def test_one_thing_named_often_takes_neither_memory_nor_time(tmp_path: Path) -> None:
    """A pickle names what it holds again in two bytes: 400 KB of it took all memory, 2 MB some minutes."""
    checkpoint = run(tmp_path, "adamw")
    state = torch.load(checkpoint / STATE, weights_only=True)
    (group, *_) = state["optimizer"]["param_groups"]
    many = [{**group, "params": list(range(100_000))}] * 300
    put(checkpoint, replaced(state, ("optimizer", "param_groups"), lambda _: many))
    tracemalloc.start()
    message = refused(checkpoint, "adamw", "groups")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "optimizer is of 30000000 parameters" in message
    assert most < 1 << 26
    put(checkpoint, {**state, "random_of_others": [state["random"]] * 100_000})
    assert "random_of_others must be a list of at most 16,384" in refused(checkpoint, "adamw", "generators")
