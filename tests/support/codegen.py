"""Runs `python -m benchmarks.codegen` in a process of its own, where kernels are compiled, not interpreted."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "benchmarks"  # where the package codegen_faults is
TRITON = importlib.util.find_spec("triton")
needs_triton = pytest.mark.skipif(TRITON is None, reason="needs Triton")


def tool(name: str) -> Path:
    """Return one of the programs of Triton's wheel: ptxas, nvdisasm, cuobjdump."""
    assert TRITON is not None
    assert TRITON.origin is not None
    return Path(TRITON.origin).parent / "backends" / "nvidia" / "bin" / name


def python(*arguments: str, path: Path = FAULTS, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(path), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the tool as the tests themselves run, for the interpreter: it must compile all the same."""
    return python("-m", "benchmarks.codegen", *arguments, TRITON_INTERPRET="1", **options)
