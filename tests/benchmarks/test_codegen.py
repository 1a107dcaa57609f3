"""`benchmarks.codegen` catches the faults of `codegen_faults`, and holds results to the limits and to the budget."""

import argparse
import ast
import importlib.metadata
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.codegen import __main__ as command
from benchmarks.codegen.budget import BUDGET, broken_limits, dump
from benchmarks.codegen.checks.loops import Loop
from benchmarks.codegen.compilation import Job, Row
from benchmarks.codegen.reader import Resources
from tests.benchmarks.conftest import FAULTS, needs_triton, run
from tests.support.python import ROOT, python


@needs_triton
@pytest.mark.slow
def test_every_fault_is_reported_and_nothing_else(faults):
    assert faults.returncode == 1, faults.stderr
    actual = faults.stdout.split("Broken limits:\n")[1].split("\n\n")[0].splitlines()
    expected = [
        r"faults/raises on sm_90: the launcher raised ValueError: no such tile",
        r"crash/crash \| crash.crash_kernel \| sm_90: does not compile: the compiler crashed",
        r"faults/replicated \| .* \| sm_90: its products are computed 1.5 times",
        r"faults/serialised \| .* \| sm_90: \d+ bytes of stack: it spills",
        r"faults/serialised \| .* \| sm_90: its 32 wgmma are serialised",
        r"faults/no power of two \| .* \| sm_90: does not compile: .*power of 2.*",
        r"faults/spills \| .* \| sm_90: \d+ bytes of stack: it spills",
        r"faults/shared memory \| .* \| sm_90: 327680 bytes of shared memory, and a block gets at most 232448",
        r"faults/too few rows for wgmma \| .* \| sm_90: 1 products of 16 bits or tf32 are not wgmma",
    ]
    assert len(actual) == len(expected), faults.stdout
    for pattern, line in zip(expected, actual, strict=True):
        assert re.fullmatch(pattern, line.strip())
    assert "10/10 compiled" in faults.stderr  # twelve cases: one raises, and two ask for the same kernel


@needs_triton
@pytest.mark.slow
def test_table_has_the_numbers_of_a_sound_kernel(faults):
    lines = faults.stdout.splitlines()
    header = next(line for line in lines if line.startswith("kernel  "))
    sound = next(line for line in lines if "faults/sound  " in line)
    row = dict(zip(re.split(r" {2,}", header), re.split(r" {2,}", sound), strict=True))
    assert row["arch"] == "sm_90"
    assert row["stack"] == "0"
    assert row["shared"] == str(2 * 2 * 64 * 64 * 2)  # two stages of two tiles in bfloat16
    assert row["CTAs/SM"] == "6"  # 228 KiB / (32 + 1) KiB
    assert row["wgmma"] == str(64 // 16)  # one for 16 of the inner dimension
    assert row["serialised"] == "no"
    assert int(row["async"]) > 0
    assert row["options"] == "M=64 N=64 BLOCK_K=64 num_warps=4 num_stages=2"


@needs_triton
@pytest.mark.slow
def test_serialised_means_what_ptxas_says(faults):
    rows = [line for line in faults.stdout.splitlines() if line.startswith("faults.")]
    ours = [line.split()[0].rsplit(".", 1)[1] for line in rows if "SERIALISED" in line]
    assert ours == re.findall(r"wgmma.mma_async instructions are serialized .* function '(\w+)'", faults.stdout)
    assert ours == ["attention_kernel"]


@needs_triton
@pytest.mark.slow
def test_the_kernels_keep_to_the_budget():
    """The budget lists exactly what the launchers choose, every fingerprint is recorded, every row is within limits.

    With a Triton that has no budget everything is compiled here, in minutes.
    """
    ran = run()
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert " 0 broken limits" in ran.stdout
    version = importlib.metadata.version("triton")
    if version in json.loads(BUDGET.read_text())["triton"]:
        assert " 0 broken limits, 0 differences to the budget" in ran.stdout
        assert "compiled:" not in ran.stderr


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_amd(tmp_path):
    """By Triton's own backend. The norms' backward has an option of NVIDIA's alone."""
    code = """if True:
        from benchmarks.codegen.compilation import compile_job, find_cases, record
        names = "layer_norm/N 1024 no parameters backward", "attention/forward K 64 T 100 bfloat16 light"
        cases = [case for case in find_cases("benchmarks.codegen.cases") if case[0] in names]
        for arch in ("gfx942", "gfx1201"):
            rows, faults = record(cases, arch)
            assert len(rows) >= len(names) and not faults, faults
            print(*[compile_job(row.job).stack for row in rows])
    """
    actual = python("-c", code, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET=None)
    assert actual.returncode == 0, actual.stderr
    assert set(actual.stdout.split()) == {"0"}


@needs_triton
@pytest.mark.slow
def test_changed_kernels_are_compiled_again_and_their_faults_reported(faults, tmp_path):
    """Against the budget of the sound kernels: a helper that spills now, a launcher that asks for too much memory."""
    copy = shutil.copytree(FAULTS / "codegen_faults", tmp_path / "codegen_faults")
    text = (copy / "faults.py").read_text()
    for old, new in (
        ("return x - tl.sum(x)", "return x - tl.sum(tl.sort(x)) + tl.cumsum(x)"),
        ('"sound", _product(64, 64, 64)', '"sound", _product(64, 64, 64, num_stages=30)'),
    ):
        assert old in text
        text = text.replace(old, new)
    (copy / "faults.py").write_text("\n\n" + text)
    budget = Path(faults.args[faults.args.index("--budget") + 1])
    ran = run("--cases", "codegen_faults", "--arch", "90", "--only", "sound", "--budget", str(budget), path=tmp_path)
    assert "3 compilations for 12 cases, 1 of them recorded" in ran.stderr
    assert "2/2 compiled" in ran.stderr
    assert ran.returncode == 1
    assert [line for line in ran.stdout.splitlines() if "shared memory, and a block gets at most" in line] == [
        "  faults/sound | faults.product_kernel | sm_90: 491520 bytes of shared memory, and a block gets at most 232448"
    ]
    assert re.search(r"\n  faults/sound sum \| faults.normalise_kernel \| sm_90: registers \d+ -> \d+\n", ran.stdout)
    assert "\n  2 rows were recorded from other sources" in ran.stdout
    assert "3 compilations: 1 broken limits" in ran.stdout


def configurations(rows: dict[str, Any]) -> dict[str, str]:
    return {name: entry["configuration"] for name, entry in rows.items()}


def test_budget_has_every_kernel():
    launched = set()
    for path in (ROOT / "kernels" / "fastformer_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="launch"), args=[ast.Name(id=kernel), *_]):
                    launched.add(kernel)
    assert len(launched) > 20
    rows = json.loads(BUDGET.read_text())["triton"]
    for version in rows:
        assert configurations(rows[version]) == configurations(next(iter(rows.values())))
        listed = {name.split(" | ")[1].rsplit(".", 1)[1] for name in rows[version]}
        assert launched <= listed, f"no case of benchmarks/codegen/cases launches {sorted(launched - listed)}"


# Limits and budget


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
    message = "3 products may read what was written without a fence.proxy.async since"
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
