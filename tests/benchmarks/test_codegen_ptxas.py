"""`benchmarks.codegen --ptxas`: the limits hold with another assembler than the one in Triton's wheel."""

import re

import pytest

from tests.support.codegen import needs_triton, run, tool
from tests.support.python import ROOT


@needs_triton
@pytest.mark.long
@pytest.mark.slow
def test_another_ptxas_is_held_to_the_limits_and_not_to_the_budget(tmp_path):
    """Triton's own under another version, against a budget of half of the registers."""
    other, file = tmp_path / "ptxas", tmp_path / "budget.json"
    other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release 12.7, V12.7.1" || exec {tool("ptxas")} "$@"\n')
    other.chmod(0o755)
    given = ["--cases", "codegen_faults", "--arch", "90", "--budget", str(file)]
    assert run(*given, "--only", "faults/sound sum", "--update", TRITON_CACHE_DIR=str(tmp_path)).returncode == 0
    file.write_text(re.sub(r'"registers": \d+', '"registers": 1', file.read_text()))

    sound = run(*given, "--only", "faults/sound sum", "--ptxas", str(other), TRITON_CACHE_DIR=str(tmp_path))
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "with ptxas 12.7: 1 compilations for 12 cases, 0 of them recorded" in sound.stderr
    assert "which is another version: no failure" in sound.stdout
    assert re.search(r"sound sum \| .*: registers 1 -> \d+", sound.stdout)
    spills = run(*given, "--only", "faults/spills", "--ptxas", str(other), TRITON_CACHE_DIR=str(tmp_path))
    assert spills.returncode == 1
    assert "it spills" in spills.stdout


@needs_triton
@pytest.mark.slow
def test_the_ptxas_of_the_package_index_meets_the_limits():
    """With kernels of every kind of loop; `make ptxas-13.5.37` installs it, and compiles all."""
    found = sorted(ROOT.glob(".ptxas/*/nvidia/cu*/bin/ptxas"))
    if not found:
        pytest.skip("no second ptxas is installed: make ptxas-13.5.37")
    ran = run("--ptxas", str(found[-1]), "--arch", "90", "--only", "K 64 T 1024 bfloat16 light")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert " 0 broken limits" in ran.stdout
