"""Are the detectors right about our own kernels? One fault at a time, each found by its kind and at its source line.

What is left out of the PTX is what Triton puts there. What is changed in the source is what a person gets wrong, such
as two blocks on one row, whose numbers are right in Triton's interpreter, which runs one block after the other.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastformer.functional import attention, layer_norm
from tests.compiled.ptx.driver import session
from tests.compiled.ptx.machine import KernelFault
from tests.support.fused_op import needs_compiled

pytestmark = [needs_compiled, pytest.mark.usefixtures("triton_backend")]
KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "fastformer_kernels"


@contextmanager
def edited(kernel: str, pattern: str, number: int) -> Iterator[None]:
    """Leave out the line with match `number` of a pattern, of one kernel's PTX; IndexError: there are fewer."""

    def edit(name: str, ptx: str) -> str:
        if name != kernel:
            return ptx
        match = [*re.finditer(rf"^[^\n]*{pattern}[^\n]*$", ptx, re.MULTILINE)][number]
        return ptx[: match.start()] + ptx[match.end() :]

    session.edit = edit
    try:
        yield
    finally:
        session.edit = None


def finding(call: Any) -> str | None:
    """What is wrong with the kernels of a call."""
    try:
        call()
    except KernelFault as fault:
        return str(fault)
    return None


def missed(call: Any, kernel: str, pattern: str, kind: str) -> str:
    """Leave out the matches one by one, until one is missed, by that kind of finding; return the finding.

    Not each is needed: Triton places some more than that.
    """
    assert finding(call) is None
    for number in range(100):
        try:
            with edited(kernel, pattern, number):
                actual = finding(call)
        except IndexError:
            pytest.fail(f"{number} times {pattern} in {kernel}: none is missed")
        if actual:
            assert actual.startswith(f"{kernel}: ")
            assert re.search(kind, actual), actual
            return actual
    raise AssertionError("more than 100")


def source_lines(found: str) -> list[str]:
    """The lines of our kernels that a finding names: the innermost first, then who calls it."""
    files = {path.name: path for path in KERNELS.rglob("*.py") if path.name != "kernels.py"}
    places = re.findall(r"(\w+\.py):(\d+):\d+", found.split("[", 1)[1].split("]: ")[0])
    return [files[name].read_text().splitlines()[int(line) - 1].strip() for name, line in places if name in files]


def change(monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str, old: str, new: str) -> None:
    """Compile a function of a kernel's module from another source, of as many lines, in this test."""
    jitted = getattr(module, function)
    assert jitted.src.count(old) == 1
    assert old.count("\n") == new.count("\n")
    monkeypatch.setattr(jitted, "_src", jitted.src.replace(old, new))


def forget() -> None:
    """Have Triton and our launchers look at the sources again."""
    from triton.runtime.jit import JITFunction

    from fastformer_kernels.host import launch, plan

    launch._compiled.clear()
    plan.forget()
    for name, module in list(sys.modules.items()):
        if name.startswith("fastformer_kernels"):
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.hash = None
                    value.device_caches.clear()


def attend() -> None:
    q, k, v = (torch.randn(1, 1, 80, 64, dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v, causal=True)


def attend_and_back() -> None:
    leaves = [torch.randn(1, 1, 80, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    attention(*leaves, causal=True).sum().backward()


def normalise() -> None:
    x, weight = torch.randn(70, 200, requires_grad=True), torch.randn(200, requires_grad=True)
    layer_norm(x, 200, weight).sum().backward()


# A line of the PTX, and how it is missed.
BARRIER = r"\bbar\.sync\b", "race of warps"
COPY = r"\bcp\.async\.wait_group\b", r"shared memory (read|written|copied to) while a copy to it is under way"
WAIT = r"\bwgmma\.wait_group\b", "register in flight|under way|nobody waited for"
REGISTERS = r"\bwgmma\.fence\b", "no wgmma.fence|register written since wgmma.fence"
SHARED = r"\bfence\.proxy\.async\b", "no fence.proxy.async"
LEFT_OUT = {
    "barrier of a norm": (normalise, "norm_backward_kernel", BARRIER),
    "barrier of attention": (attend, "_attention", BARRIER),
    "barrier of dQ": (attend_and_back, "_attention_queries", BARRIER),
    "cp.async of a norm": (normalise, "norm_backward_kernel", COPY),
    "cp.async of attention": (attend, "_attention", COPY),
    "cp.async of dQ": (attend_and_back, "_attention_queries", COPY),
    "wgmma of attention, wait": (attend, "_attention", WAIT),
    "wgmma of attention, fence of registers": (attend, "_attention", REGISTERS),
    "wgmma of attention, fence of shared memory": (attend, "_attention", SHARED),
    "wgmma of dK and dV, wait": (attend_and_back, "_attention_keys_values", WAIT),
    "wgmma of dK and dV, fence of registers": (attend_and_back, "_attention_keys_values", REGISTERS),
    "wgmma of dK and dV, fence of shared memory": (attend_and_back, "_attention_keys_values", SHARED),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_missed(name):
    if name.startswith("wgmma") and session.arch != 90:
        pytest.skip("wgmma is of sm_90")
    call, kernel, (pattern, kind) = LEFT_OUT[name]
    actual = missed(call, kernel, pattern, kind)
    assert any("tl." in line or "fold(" in line or "_dots(" in line for line in source_lines(actual)), actual


@pytest.fixture
def sources() -> Iterator[None]:
    """Other sources are compiled anew, and so are the right ones after them."""
    forget()
    yield
    forget()


def normalise_part() -> None:
    """16 columns of rows of 20 in fp16, which begin at multiples of 8 bytes."""
    layer_norm(torch.randn(70, 20).half()[:, :16], 16)


NORM, FORWARD = "norms.short_rows", "norm_forward_kernel"
WRONG_SOURCE = [
    pytest.param(
        normalise_part, "norms.rows", "load_tile",
        "starts * stride * ALIGN", "tl.multiple_of(starts * stride, [8, 8]) * ALIGN",
        r"misaligned \(16 bytes\)", "return tl.load(ptr + starts * stride * ALIGN + cols, mask, other=0.0)",
        id="alignment hint",
    ),
    pytest.param(
        normalise, NORM, FORWARD, "rstd, rows < M)", "rstd, rows <= M)",
        "outside all (allocations|tensors)", "tl.store(rstd_ptr + rows, rstd, rows < M)", id="index off by one",
    ),
    pytest.param(
        normalise, NORM, FORWARD, "rows = tl.program_id(0) * BLOCK_M", "rows = tl.program_id(0) * (BLOCK_M - 1)",
        "race of blocks", "tl.store(y_ptr + starts * N + cols, y, mask)", id="two blocks on a row",
    ),
    pytest.param(
        attend, "attention.forward", "_attention", "end_row = last_query if PACKED else T", "end_row = T + 16",
        "outside all|race of blocks", "tl.store(out_ptr + rows", id="rows of the next head",
    ),
]  # fmt: skip


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(("call", "module", "function", "old", "new", "kind", "line"), WRONG_SOURCE)
def test_what_is_wrong_in_a_source_is_seen(monkeypatch, call, module, function, old, new, kind, line):
    assert finding(call) is None
    forget()
    change(monkeypatch, import_module(f"fastformer_kernels.{module}"), function, old, new)
    actual = finding(call)
    assert actual is not None
    assert re.search(kind, actual), actual
    assert any(line in each for each in source_lines(actual)), actual
