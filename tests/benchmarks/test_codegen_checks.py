"""`benchmarks.codegen.checks` on texts of a sound kernel, and on the same with a fault put in."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from benchmarks.codegen.budget import BUDGET, read_budget
from benchmarks.codegen.checks.fences import unfenced
from benchmarks.codegen.checks.layouts import replication
from benchmarks.codegen.checks.loops import TILES, loop_figures, tile_of
from tests.benchmarks.conftest import TRITON, needs_triton
from tests.support.python import python


class Compiled(NamedTuple):
    """A kernel's text in each stage."""

    ttgir: str
    ptx: str
    sass: str


@pytest.fixture(scope="module")
def kernels(faults) -> dict[int, Compiled]:
    """The attention kernel of `codegen_faults` on sm_90, 64 rows of head size 128, by its number of warps."""
    folder = Path(faults.args[faults.args.index("--budget") + 1]).parent
    nvdisasm = Path(TRITON.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    by_warps = {}
    for cubin in folder.glob("*/attention_kernel.cubin"):
        ttgir = cubin.with_suffix(".ttgir").read_text()
        if "tensor<64x128xf32" in ttgir:  # the one that is serialised has 128 rows
            sass = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
            warps = json.loads(cubin.with_suffix(".json").read_text())["num_warps"]
            by_warps[warps] = Compiled(ttgir, cubin.with_suffix(".ptx").read_text(), sass)
    assert sorted(by_warps) == [4, 8]
    return by_warps


def without(text: str, pattern: str, number: int) -> str:
    """Take one of the lines that match out of a text."""
    lines = text.splitlines()
    del lines[[place for place, line in enumerate(lines) if re.search(pattern, line)][number]]
    return "\n".join(lines)


PRODUCTS = pytest.mark.parametrize(
    "product",
    [
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2;",
        "@%p3 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p1;",
    ],
)


@pytest.mark.parametrize(
    ("between", "count"),
    [
        ("", 0),
        ("cp.async.wait_group 2; bar.sync 0;", 1),
        ("cp.async.wait_group 2; bar.sync 0; fence.proxy.async.shared::cta;", 0),
        ("fence.proxy.async.shared::cta; cp.async.wait_all;", 1),
        ("st.shared.v4.b32 [ %r1 + 0 ], { %r2, %r3, %r4, %r5 };", 1),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2, %r3, %r4, %r5};", 1),
        ("st.shared.b32 [ %r1 + 0 ], %r2; bar.sync 0; ld.shared.b32 %r2, [ %r1 + 4 ];", 0),  # what is read back
        ("cp.async.wait_group 0; ld.shared.b32 %r2, [ %r1 + 4 ];", 1),
    ],
)
@PRODUCTS
def test_a_product_after_a_write_needs_a_fence(between, count, product):
    lines = "\n".join(f"    {line.strip()};" for line in between.split(";") if line.strip())
    assert unfenced(f"{lines}\n    {product}\n") == count


@needs_triton
@PRODUCTS
def test_each_wait_for_copies_gets_the_fence_that_triton_leaves_out(product):
    from fastformer_kernels.host.fences import add_fences

    copied = "\tcp.async.wait_group \t2;\n\tbar.sync 0;\n\tcp.async.wait_all;\n"
    ptx = f"{copied}\t{product}\n"
    assert unfenced(ptx) == 1
    assert unfenced(add_fences(ptx)) == 0
    assert add_fences(ptx).count("fence.proxy.async.shared::cta;") == 2
    assert add_fences(copied) == copied  # no product


@needs_triton
@pytest.mark.slow
def test_the_products_of_attentions_backward_are_fenced_on_sm_100(tmp_path):
    """Triton 3.6 to 3.8 leave 8 fences out of each kernel."""
    code = """if True:
        from benchmarks.codegen.compilation import compile_job, find_cases, record
        name = "attention/backward K 64 T 1024 bfloat16 light"
        rows, faults = record([case for case in find_cases("benchmarks.codegen.cases") if case[0] == name], 100)
        print(*[(resources := compile_job(row.job)).wgmma > 0 and resources.unfenced for row in rows], *faults)
    """
    actual = python("-c", code, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET=None)
    assert actual.stdout == "0 0\n", actual.stderr


@needs_triton
def test_fences_are_for_the_gpus_that_lack_them(monkeypatch):
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from fastformer_kernels.host import fences

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    monkeypatch.setattr(fences, "_LACKING", ("sm_100",))
    for number, (target, gets_fences) in enumerate(
        [
            (GPUTarget("cuda", 90, 32), False),
            (GPUTarget("cuda", 120, 32), False),
            (GPUTarget("hip", "gfx942", 64), False),
            (GPUTarget("cuda", 100, 32), True),
            (GPUTarget("cuda", 103, 32), True),
        ]
    ):
        monkeypatch.setattr(
            fences, "driver", SimpleNamespace(active=SimpleNamespace(get_current_target=lambda t=target: t))
        )
        assert bool(fences.options_of.__wrapped__(number)) == gets_fences
        assert (knobs.runtime.add_stages_inspection_hook is not None) == gets_fences
    assert fences.change_stages() == ("", "")  # as Triton calls the hook from 3.7 on, for keys of kernels


def test_a_write_counts_around_a_loop():
    text = "$loop:\n    wgmma.mma_async.sync.aligned {{%r1}}, %rd1, %rd2;\n    {};\n    @%p1 bra $loop;\n"
    assert unfenced(text.format("cp.async.wait_group 0")) == 1
    assert unfenced(text.format("cp.async.wait_group 0;\n    fence.proxy.async.shared::cta")) == 0


@needs_triton
@pytest.mark.slow
def test_a_fence_taken_away_is_missed(kernels):
    ptx = kernels[4].ptx
    fences = len(re.findall(r"^\s*fence\.proxy\.async", ptx, re.MULTILINE))
    assert fences > 0
    assert unfenced(ptx) == 0
    assert any(unfenced(without(ptx, r"^\s*fence\.proxy\.async", number)) for number in range(fences))
    assert unfenced(re.sub(r"fence\.proxy\.async[^;]*;", "", ptx)) == ptx.count("wgmma.mma_async")


@needs_triton
@pytest.mark.slow
def test_loops_cost_what_the_formula_says(kernels):
    """A score is one exponential and 128 + 128 multiply-adds; twice the warps do the first product twice."""
    (loop,) = loop_figures(*kernels[4], tile=64, warps=4)
    assert (loop.exponentials, loop.mma_cycles) == (1.0, 4096 * 256 / 2048)
    (twice,) = loop_figures(*kernels[8], tile=64, warps=8)
    assert (twice.exponentials, twice.mma_cycles) == (2.0, 4096 * (2 * 128 + 128) / 2048)
    assert twice.instructions > 1.5 * loop.instructions
    assert (replication(kernels[4].ttgir), replication(kernels[8].ttgir)) == (1.0, 1.5)


def test_every_kernel_with_a_tile_has_figures_on_both_architectures():
    assert tile_of("_attention", {"BLOCK_T": 128, "BLOCK_S": 64, "K": 64}) == 8192
    assert tile_of("another", {}) == 0
    for rows in read_budget(BUDGET)["triton"].values():
        for kernel in TILES:
            for arch in (80, 90):
                loops = [entry["loops"] for name, entry in rows.items() if name.endswith(f".{kernel} | sm_{arch}")]
                assert loops
                assert all(loops), f"{kernel} has no loops on sm_{arch}"
