"""Runs `python -m benchmarks.codegen` in a process of its own, where kernels are compiled, not interpreted."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.support.python import ROOT, python

FAULTS = ROOT / "tests" / "benchmarks"  # where the package codegen_faults is
TRITON = importlib.util.find_spec("triton")
needs_triton = pytest.mark.skipif(TRITON is None, reason="needs Triton")


def tool(name: str) -> Path:
    """Return one of the programs of Triton's wheel: ptxas, nvdisasm, cuobjdump."""
    assert TRITON is not None
    assert TRITON.origin is not None
    return Path(TRITON.origin).parent / "backends" / "nvidia" / "bin" / name


def run(*arguments: str, path: Path = FAULTS, **given: str) -> subprocess.CompletedProcess[str]:
    """Run the tool as the tests themselves run, for the interpreter: it must compile all the same."""
    return python("-m", "benchmarks.codegen", *arguments, paths=(path,), TRITON_INTERPRET="1", **given)
