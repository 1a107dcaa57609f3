"""The sweep over attention's tiles: which it tries, and that it reports what is wrong or fails as that."""

import json
import math
import time

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import tuning
from benchmarks.harness.clock import Stopwatch
from fastformer_kernels.attention import tiles

CPU = torch.device("cpu")


def measure(call, options, minutes=1.0):
    case = tuning.Case("kernel", "shape", lambda device: call, options)
    return list(tuning.measure(case, Stopwatch(CPU), time.monotonic() + 60 * minutes, tiny=False))


def test_similar_tiles_are_one_step_away_within_the_limits():
    chosen = {"BLOCK_T": 256, "BLOCK_S": 32, "num_warps": 4, "num_stages": 1}
    changes = [{k: v for k, v in config.items() if v != chosen[k]} for config in tuning.similar_tiles(chosen)]
    one_number = [{"BLOCK_T": 128}, {"BLOCK_S": 16}, {"BLOCK_S": 64}, {"num_warps": 2}, {"num_warps": 8}]
    with_warps = [{"BLOCK_T": 128, "num_warps": 2}, {"BLOCK_S": 16, "num_warps": 2}, {"BLOCK_S": 64, "num_warps": 8}]
    assert changes == [*one_number, {"num_stages": 2}, *with_warps, {"BLOCK_T": 128, "BLOCK_S": 64}]


def test_what_is_wrong_or_fails_is_no_figure(monkeypatch):
    monkeypatch.setattr(tuning, "time_pair", lambda watch, base, other: (1.0, 2.0))

    def call(n):
        if n == 2:
            raise RuntimeError("out of resource: shared memory\nand more")
        return [torch.tensor([1.0 if n != 3 else 1.5]), torch.tensor([math.nan if n == 4 else 0.0])]

    trials = measure(call, tuple({"n": n} for n in range(5)))
    assert [(trial.config["n"], trial.status, trial.ratio) for trial in trials] == [
        (1, "measured", 2.0),
        (2, "RuntimeError: out of resource: shared memory", None),
        (3, "ValueError: wrong: off by 5.0e-01", None),
        (4, "ValueError: wrong: off by nan", None),
    ]
    assert [trial.status for trial in measure(call, ({"n": 1}, {"n": 1}), minutes=-1)] == ["TimeoutError: no time left"]


def test_the_library_takes_tiles_that_were_measured_to_be_faster(monkeypatch, tmp_path):
    """And the tables' for calls of another length class, GPU or option."""
    call = tiles.Call("forward", "sm_90", "16", 64, 1024, frozenset())
    chosen, best = dict(tiles.choose(call)), {"BLOCK_T": 64, "BLOCK_S": 64, "num_warps": 4, "num_stages": 5}
    trials = [
        tuning.Trial("a", "x", chosen, config, "measured", 1e-3, ratio, call.key)
        for config, ratio in ((best, 1.2), (chosen, 1.1), ({}, None))
    ]
    assert tuning.faster_tiles(trials) == {call.key: best}
    assert tuning.faster_tiles([tuning.Trial("a", "x", chosen, best, "measured", 1e-3, 1.02, call.key)]) == {}
    monkeypatch.setattr(tiles, "MEASURED", tmp_path / "tiles.json")
    tiles.MEASURED.write_text(json.dumps(tuning.faster_tiles(trials)))
    others = [call._replace(queries=511), call._replace(architecture="sm_86"), call._replace(features={"dropout"})]
    others = [call._replace(features=frozenset(call.features)) for call in others]
    before = [tiles.choose(other) for other in others]
    for cached in (tiles.measured, tiles.choose):
        monkeypatch.setattr(tiles, cached.__name__, cached.__wrapped__)
    assert tiles.choose(call) == tiles.choose(call._replace(queries=5000)) == best
    assert [tiles.choose(other) for other in others] == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_a_dry_run_tries_every_tile_and_times_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "tuning.jsonl"
    assert tuning.main(["--dry-run", "--only", "attention forward", "--out", str(out)]) == 0
    head, *rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert head["machine"]["commit"] == "0123456"
    trials = [row["tuning"] for row in rows]
    assert [trial["config"] for trial in trials] == tuning.similar_tiles(trials[0]["chosen"])
    assert {(trial["status"], trial["ratio"]) for trial in trials} == {("dry run", None)}
