"""The sweep over tiles: which configurations it tries, and that it reports what is wrong or fails as that."""

import json
import math
import time
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.harness.clock import Stopwatch
from benchmarks.tuning import __main__ as tuning
from benchmarks.tuning.cases import Axis, Site, TunedKernel, _grid, find_cases, neighbours
from fastformer_kernels.attention import tiles
from fastformer_kernels.embedding import kernels as embedding

CPU = torch.device("cpu")


class FakeWatch(Stopwatch):
    """Says that a call takes what it returns."""

    def __call__(self, run, calls=1):
        return run()[0].item()


def sweep(minutes=1.0, tiny=False):
    return tuning.Sweep(FakeWatch(CPU), time.monotonic() + 60 * minutes, tiny=tiny)


def results(options, call, **settings):
    """The results of a case whose configurations are the call's arguments."""
    case = TunedKernel("kernel", "shape", lambda device: call, options=options)
    return list(sweep(**settings).case(case, call, case.chosen(call), case.others(options[0])))


def test_similar_tiles_are_one_step_away_within_the_limits():
    axes = (Axis("BLOCK_T", 16, 64), Axis("num_warps", 1, 8), Axis("num_stages", 1, 3, adds=True), Axis("absent", 1, 2))
    chosen = {"BLOCK_T": 64, "num_warps": 4, "num_stages": 1, "BLOCK_K": 128}
    changes = [{k: v for k, v in config.items() if v != chosen[k]} for config in neighbours(chosen, axes)]
    assert changes == [
        {"BLOCK_T": 32},
        {"num_warps": 2},
        {"num_warps": 8},
        {"num_stages": 2},
        {"BLOCK_T": 32, "num_warps": 2},
    ]


def test_similar_tiles_exchange_one_block_size_for_the_other():
    axes = (Axis("BLOCK_M", 1, 64), Axis("BLOCK_N", 16, 64))
    found = neighbours({"BLOCK_M": 4, "BLOCK_N": 32}, axes)
    assert {"BLOCK_M": 8, "BLOCK_N": 16} in found
    assert {"BLOCK_M": 2, "BLOCK_N": 64} in found
    assert len(found) == 6


def test_a_site_is_put_back_whatever_happens():
    module = ModuleType("module")
    module.tile = original = lambda n: {"BLOCK": n, "num_warps": 4}
    site = Site(module, "tile")
    with site.replaced({"num_warps": 8}) as seen:
        assert module.tile(16) == {"BLOCK": 16, "num_warps": 8}
    assert module.tile is original
    assert seen == [{"BLOCK": 16, "num_warps": 4}]

    def fail(**config):
        with site.replaced(config):
            raise RuntimeError("out of resource")

    with pytest.raises(RuntimeError, match="out of resource"):
        fail(num_warps=8)
    assert module.tile is original


def test_a_grid_never_has_more_programs_than_tiles():
    module = ModuleType("module")
    module.backward_tile = lambda x: ((10, 2), {"BLOCK_M": 4, "num_warps": 4})
    site, x = _grid(module), torch.empty(80, 8)
    with site.replaced({}) as seen:
        module.backward_tile(x)
    assert seen == [{"programs": 10, "BLOCK_M": 4, "num_warps": 4}]
    with site.replaced({**seen[0], "BLOCK_M": 16}):
        assert module.backward_tile(x) == ((5, 2), {"BLOCK_M": 16, "num_warps": 4})
    with site.replaced({**seen[0], "programs": 20}):
        assert module.backward_tile(x) == ((20, 2), {"BLOCK_M": 4, "num_warps": 4})


def test_the_kernels_see_the_configuration_that_is_tried(monkeypatch):
    launched = []

    class Kernel:
        def run(self, *args, grid, warmup, **options):
            launched.append(options)

    monkeypatch.setattr(embedding, "embedding_kernel", Kernel())
    case = next(case for case in find_cases(tiny=True) if case.kernel == "embedding")
    call = case.prepare(CPU)
    chosen = case.chosen(call)
    assert launched.pop().items() >= chosen.items()
    for config in case.others(chosen):
        case.run(call, config)
        assert config != chosen
        assert launched.pop().items() >= config.items()


def test_what_is_wrong_or_fails_is_no_figure(monkeypatch):
    monkeypatch.setattr(tuning.Sweep, "time_pair", lambda self, base, other: (1.0, 2.0))

    def call(n):
        if n == 2:
            raise ValueError("out of resource: shared memory\nand more")
        return [torch.tensor([1.0 if n != 3 else 1.5]), torch.tensor([math.nan if n == 4 else 0.0])]

    found = results(tuple({"n": n} for n in range(5)), call)
    assert [(result.config["n"], result.status) for result in found] == [
        (1, "measured"),
        (2, "fails: ValueError: out of resource: shared memory"),
        (3, "wrong: off by 5.0e-01"),
        (4, "wrong: off by nan"),
    ]
    assert [result.ratio for result in found] == [2.0, None, None, None]


def test_the_ratio_says_how_much_faster_the_neighbour_is(monkeypatch):
    monkeypatch.setattr(tuning, "_compare", lambda *_: None)
    (found,) = results(({"n": 8}, {"n": 2}), lambda n: [torch.tensor([float(n)])])
    assert (found.seconds, found.ratio) == (2.0, 4.0)


def test_a_case_whose_own_configuration_fails_does_not_end_the_sweep():
    def prepare(device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    good = TunedKernel("good", "shape", lambda device: lambda n: [torch.ones(1)], options=({"n": 1}, {"n": 2}))
    bad = TunedKernel("bad", "shape", prepare, options=good.options)
    found = list(sweep(tiny=True).run([(0, bad), (1, good)]))
    assert {(result.kernel, result.status) for result in found} == {
        ("bad", "fails: OutOfMemoryError: CUDA out of memory. Tried"),
        ("good", "dry run"),
    }
    late = sweep(minutes=-1).run([(0, bad), (1, good)])
    assert [(result.kernel, result.status) for result in late] == [("bad", "no time left"), ("good", "no time left")]


def test_late_configurations_have_no_figures():
    (late,) = results(({"n": 1}, {"n": 1}), lambda n: [torch.ones(1)], minutes=-1)
    assert (late.status, late.ratio) == ("no time left", None)


def test_the_table_names_what_is_faster_than_the_choice():
    chosen = {"BLOCK": 32, "num_warps": 4}
    rows = [
        tuning.Trial("a", "x", chosen, {"BLOCK": 64, "num_warps": 4}, "measured", 1e-3, 1.25),
        tuning.Trial("a", "x", chosen, {"BLOCK": 16, "num_warps": 4}, "measured", 1e-3, 1.10),
        tuning.Trial("a", "x", chosen, {"BLOCK": 32, "num_warps": 8}, "fails: no", None, None),
        tuning.Trial("b", "x", chosen, {"BLOCK": 64, "num_warps": 4}, "measured", 1e-3, 0.9),
        tuning.Trial("c", "x", chosen, {"BLOCK": 64, "num_warps": 4}, "dry run", None, None),
    ]
    cells = [[cell for cell in line.split("  ") if cell] for line in tuning.table(rows)[1:]]
    cells = [[cell.strip() for cell in line] for line in cells]
    assert cells == [
        ["a", "x", "BLOCK 32, num_warps 4", "BLOCK 64", "1.25", "1"],
        ["b", "x", "BLOCK 32, num_warps 4", "chosen", "0.90", "0"],
        ["c", "x", "BLOCK 32, num_warps 4", "-", "-", "1"],
    ]


def test_the_library_takes_tiles_that_were_measured_to_be_faster(monkeypatch, tmp_path):
    """And the tables' for calls of another length class, GPU or option."""
    call = tiles.Call("forward", "sm_90", "16", 64, 1024, frozenset())
    chosen, best = tiles.choose(call), {"BLOCK_T": 64, "BLOCK_S": 64, "num_warps": 4, "num_stages": 5}
    trials = [
        tuning.Trial("a", "x", chosen, config, "measured", 1e-3, ratio, call.key)
        for config, ratio in ((best, 1.2), (chosen, 1.1), ({}, None))
    ]
    assert tuning.faster_tiles([*trials, trials[0].__class__("b", "x", chosen, best, "measured", 1e-3, 1.5)]) == {
        call.key: best
    }
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dry-run", "--minutes", "0"], "--minutes must be a number above 0, not 0"),
        (["--dry-run", "--minutes", "nan"], "--minutes must be a number above 0, not nan"),
        (["--dry-run"], "FASTFORMER_COMMIT: the commit is ''; needed are 7 to 40"),
        (["--dry-run", "--only", "nothing"], "no kernel has that name; known are RMS norm backward, "),
    ],
)
def test_bad_arguments_end_with_one_line_and_code_2(argv, message, refused, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("FASTFORMER_COMMIT", "")
    assert message in refused(tuning.main, *argv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_a_dry_run_writes_every_result_and_no_figure(tmp_path, capsys):
    out = tmp_path / "tuning.jsonl"
    assert tuning.main(["--dry-run", "--only", "embedding*", "--out", str(out)]) == 0
    head, *rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert head["format"] == tuning.FORMAT
    assert len(rows) == 2 * tuning.DRY_NEIGHBOURS
    assert {row["tuning"]["status"] for row in rows} == {"dry run"}
    assert all(row["tuning"]["ratio"] is row["tuning"]["seconds"] is None for row in rows)
    assert "Nothing was timed" in capsys.readouterr().out
