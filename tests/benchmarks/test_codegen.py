"""`benchmarks.codegen` catches the faults of `codegen_faults`; the committed budget lists every configuration."""

import ast
import importlib.metadata
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.codegen.budget import BUDGET
from tests.support.codegen import FAULTS, needs_triton, run
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "75"), "--arch 75: known are 80, 86, 89, 90, 100, 120"),
        pytest.param(
            ("--cases", "codegen_faults", "--only", "nothing like it"),
            "no kernel and no case contains 'nothing like it'; codegen_faults has 12 cases",
            marks=needs_triton,
        ),
        ((), "it needs Triton: pip install 'fastformer[triton]'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, message, tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('not here')")
    ran = run(*arguments) if arguments else run(path=tmp_path)
    assert ran.returncode == 2
    assert message in ran.stderr
