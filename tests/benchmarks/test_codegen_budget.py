"""Results of compilations are held to the limits, and to the budget of their Triton version."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.codegen import __main__ as command
from benchmarks.codegen.budget import broken_limits, dump
from benchmarks.codegen.checks.loops import Loop
from benchmarks.codegen.compilation import Job, Row
from benchmarks.codegen.reader import Resources

LOOP = Loop(instructions=1600.0, exponentials=1.0625, mma_cycles=256.0)
GOOD = Resources(100, 0, 4096, 4, 16, False, 0, 8, loops=(LOOP, LOOP))


def row(case: str, configuration: str = "BLOCK=64") -> Row:
    return Row("norm.kernel", case, configuration, Job(90, "norm", "kernel", {}, {}, {}, {}), {case})


def report(folder: Path, results: dict[str, Resources | str], capsys, **changed) -> tuple[int, str]:
    """Judge results, by case, of Triton 3.7.1."""
    settings = {"version": "3.7.1", "update": False, "only": "", "configuration": "BLOCK=64", "key": "1a"} | changed
    rows = [row(case, settings["configuration"])._replace(key=settings["key"]) for case in results]
    options = argparse.Namespace(budget=folder / "budget.json", arch=[90], **settings)
    by_name = {each.name: result for each, result in zip(rows, results.values(), strict=True)}
    status = command.report(rows, by_name, [], options.version, options)
    return status, capsys.readouterr().out


@pytest.fixture
def budget(tmp_path, capsys) -> Path:
    """A folder with the budget of two cases."""
    status, _ = report(tmp_path, {"a": GOOD, "b": GOOD}, capsys, update=True)
    assert status == 0
    return tmp_path


def exempt(folder: Path, **exception: str) -> None:
    contents = json.loads((folder / "budget.json").read_text())
    contents["exceptions"] = [{"rows": "b | *", **exception}]
    (folder / "budget.json").write_text(dump(contents))


def test_budget_file_has_one_line_a_row(budget, capsys):
    assert report(budget, {"a": GOOD, "b": GOOD}, capsys)[0] == 0
    text = (budget / "budget.json").read_text()
    assert sum("norm.kernel" in line for line in text.splitlines()) == 2
    assert list(json.loads(text)["triton"]) == ["3.7.1"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"registers": 111}, "registers 100 -> 111"),
        ({"ctas": 3}, "CTAs/SM 4 -> 3"),
        ({"shared": 4097}, "shared memory 4096 -> 4097"),
        ({"async_copies": 0}, "asynchronous copies 8 -> 0"),
        ({"loops": ()}, "loops 2 -> 0"),
        ({"loops": (LOOP, LOOP._replace(instructions=1650.0))}, "loop 2: instructions 1600 -> 1650 for 4,096 elements"),
        ({"loops": (LOOP._replace(exponentials=1.07), LOOP)}, "loop 1: exponentials 1.0625 -> 1.07 for an element"),
        (
            {"loops": (LOOP._replace(mma_cycles=257.0), LOOP)},
            "loop 1: tensor core cycles 256 -> 257 for 4,096 elements",
        ),
    ],
)
def test_worse_than_the_budget_fails_for_its_triton_alone(budget, capsys, changed, message):
    results = {"a": GOOD, "b": GOOD._replace(**changed)}
    status, text = report(budget, results, capsys)
    assert status == 1
    assert f"b | norm.kernel | sm_90: {message}" in text
    status, text = report(budget, results, capsys, version="3.9.0")
    assert status == 0
    assert "There is no budget of Triton 3.9.0: only the limits hold" in text


def test_work_that_is_known_to_be_replicated_must_not_be_more(budget, capsys):
    """The limit has exceptions; of what they cover the budget keeps how many times it is."""
    once, twice = ({"a": GOOD, "b": GOOD._replace(replication=times)} for times in (1.5, 2.0))
    assert "b | norm.kernel | sm_90: its products are computed 1.5 times" in report(budget, once, capsys)[1]
    exempt(budget, limit="replicated", reason="64 rows")
    assert report(budget, once, capsys)[0] == 1  # 1.0 in the budget
    assert report(budget, once, capsys, update=True)[0] == 0
    assert report(budget, once, capsys)[0] == 0
    status, text = report(budget, twice, capsys)
    assert status == 1
    assert "b | norm.kernel | sm_90: products computed 1.5 -> 2.0 times" in text
    assert report(budget, twice, capsys, version="3.9.0")[0] == 0


def test_a_tenth_more_registers_and_a_few_instructions_are_no_difference(budget, capsys):
    loops = (LOOP, LOOP._replace(instructions=1640.0))
    status, text = report(budget, {"a": GOOD, "b": GOOD._replace(registers=110, loops=loops)}, capsys)
    assert (status, "0 differences" in text) == (0, True)


def test_rows_that_are_new_gone_or_configured_otherwise_fail(budget, capsys):
    status, text = report(budget, {"b": GOOD, "c": GOOD}, capsys)
    assert status == 1
    assert "a | norm.kernel | sm_90: in the budget, and no case asks for it" in text
    assert "c | norm.kernel | sm_90: not in the budget" in text
    status, text = report(budget, {"a": GOOD, "b": GOOD}, capsys, configuration="BLOCK=32")
    assert status == 1
    assert "was configured as BLOCK=64, now as BLOCK=32" in text


def test_rows_recorded_from_other_sources_fail(budget, capsys):
    results = {"a": GOOD, "b": GOOD}
    status, text = report(budget, results, capsys, key="2b")
    assert status == 1
    assert "2 rows were recorded from other sources or by another ptxas, such as a | norm.kernel | sm_90" in text
    assert report(budget, results, capsys, key="2b", update=True)[0] == 0
    assert report(budget, results, capsys, key="2b")[0] == 0


def test_update_keeps_other_rows_and_other_versions(budget, capsys):
    assert report(budget, {"b": GOOD._replace(registers=50)}, capsys, only="b |", update=True)[0] == 0
    entries = json.loads((budget / "budget.json").read_text())["triton"]["3.7.1"]
    assert [value["registers"] for value in entries.values()] == [100, 50]
    assert report(budget, {"a": GOOD}, capsys, version="3.10.0", update=True)[0] == 0
    assert report(budget, {"a": GOOD, "b": GOOD._replace(registers=50)}, capsys)[0] == 0


def test_a_missing_fence_breaks_a_limit():
    """The other limits: `codegen_faults`."""
    message = "3 wgmma may read what was written without a fence.proxy.async since"
    assert list(broken_limits(90, GOOD)) == []
    assert list(broken_limits(90, GOOD._replace(unfenced=3))) == [("fences", message)]


def test_limits_fail_whatever_the_triton_unless_exempt(budget, capsys):
    results = {"a": GOOD, "b": GOOD._replace(stack=8)}
    status, text = report(budget, results, capsys, version="3.9.0")
    assert status == 1
    assert "b | norm.kernel | sm_90: 8 bytes of stack: it spills" in text
    exempt(budget, limit="stack", reason="a known fault", triton="3.9.*")
    status, text = report(budget, results, capsys, version="3.9.0")
    assert status == 0
    assert "8 bytes of stack: it spills (a known fault)" in text
    assert report(budget, results, capsys)[0] == 1  # the exception is for 3.9 only
    assert report(budget, {"a": GOOD._replace(stack=8)}, capsys, version="3.9.0")[0] == 1
