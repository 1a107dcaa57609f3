"""`benchmarks.codegen.checks` on texts of a sound kernel, and on the same with a fault put in."""

import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.codegen.budget import BUDGET, read_budget
from benchmarks.codegen.checks.fences import unfenced
from benchmarks.codegen.checks.flow import blocks, inner_loops
from benchmarks.codegen.checks.layouts import Product, products, replication, steps
from benchmarks.codegen.checks.loops import TILES, Loop, loop_figures, mma_cycles, tile_of
from tests.support.codegen import needs_triton, tool


class Compiled(NamedTuple):
    """A kernel's text in each stage."""

    ttgir: str
    ptx: str
    sass: str


@pytest.fixture(scope="module")
def kernels(faults) -> dict[int, Compiled]:
    """The attention kernel of `codegen_faults` on sm_90, 64 rows of head size 128, by its number of warps."""
    folder = Path(faults.args[faults.args.index("--budget") + 1]).parent
    by_warps = {}
    for cubin in folder.glob("*/attention_kernel.cubin"):
        ttgir = cubin.with_suffix(".ttgir").read_text()
        if "tensor<64x128xf32" in ttgir:  # the one that is serialised has 128 rows
            sass = subprocess.run([tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
            warps = json.loads(cubin.with_suffix(".json").read_text())["num_warps"]
            by_warps[warps] = Compiled(ttgir, cubin.with_suffix(".ptx").read_text(), sass)
    assert sorted(by_warps) == [4, 8]
    return by_warps


def without(text: str, pattern: str, number: int) -> str:
    """Take one of the lines that match out of a text."""
    lines = text.splitlines()
    del lines[[place for place, line in enumerate(lines) if re.search(pattern, line)][number]]
    return "\n".join(lines)


NESTED = """
    mov.u32 %r1, 0;
$outer:    // a comment; with a semicolon
    add.s32 %r1, %r1, 1;
$inner:
    @%p1 bra $inner;
    fence.proxy.async.shared::cta;
    @%p2 bra $outer;
    ret;
$behind:
    bra.uni $behind;
"""


def test_blocks_end_at_branches_and_only_innermost_loops_that_are_reached_count():
    code = blocks(NESTED)
    assert [each.successors for each in code] == [[1], [2], [3, 2], [4, 1], [], [5]]
    assert code[3].instructions == ["fence.proxy.async.shared::cta", "@%p2 bra $outer"]
    assert inner_loops(code) == [{2}]


def test_a_head_behind_its_end():
    text = "bra $HEAD;\n$TAIL:\nadd.s32 %r1, %r1, 1;\nbra $HEAD;\n$HEAD:\nmov.b32 %r2, %r1;\n@%p1 bra $TAIL;\nret;\n"
    assert inner_loops(blocks(text)) == [{1, 2}]


def test_a_branch_back_to_the_middle_of_straight_code_is_no_loop_of_its_own():
    """What ptxas puts out of line, behind the kernel's end, returns to where it came from."""
    sass = """
.L_1:
        /*0000*/ @P0 BRA `(.L_3) ;
.L_2:
        /*0010*/ MUFU.EX2 R0, R0 ;
        /*0020*/ @P1 BRA `(.L_1) ;
        /*0030*/ EXIT ;
.L_3:
        /*0040*/ MUFU.RCP R0, R0 ;
        /*0050*/ BRA `(.L_2) ;
"""
    assert inner_loops(blocks(sass)) == [{0, 1, 3}]


LAYOUTS = """#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [4, 8], warpsPerCTA = [8, 1]}>
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = [16, 32, 16]}>
#mma1 = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 2], instrShape = [16, 64, 16]}>
#mma2 = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [2, 4], instrShape = [16, 8]}>
"""


@pytest.mark.parametrize(
    ("layout", "shape", "times"),
    [
        ("#mma", (64, 64), 2.0),  # 8 warps of 16 rows, 64 of them
        ("#mma", (128, 64), 1.0),
        ("#mma1", (64, 128), 1.0),
        ("#mma1", (64, 64), 2.0),  # 2 warps of 64 columns
        ("#mma2", (16, 16), 4.0),
        ("#mma2", (32, 32), 1.0),
        ("#blocked", (16, 16), 4.0),  # 32 x 32
    ],
)
def test_replication_is_warps_beyond_the_result(layout, shape, times):
    m, n = shape
    dot = f"tt.dot %a, %b, %c : tensor<{m}x128xbf16, #x> * tensor<128x{n}xbf16, #y> -> tensor<{m}x{n}xf32, {layout}>"
    assert products(f"{LAYOUTS}    %1 = {dot} loc(#loc)\n") == [Product(m * n * 128, times, 4)]


def test_of_a_kernel_with_loops_their_products_count():
    once = (
        "%1 = ttng.warp_group_dot %a, %b, %c : !ttg.memdesc<64x32xbf16, #s> * !x -> tensor<64x64xf32, #mma> loc(#loc)"
    )
    assert replication(f"{LAYOUTS}    {once}\n") == 2.0
    assert replication(f"{LAYOUTS}    {once}\n      {once.replace('#mma', '#mma1').replace('x64x', 'x128x')}\n") == 1.0
    assert replication(LAYOUTS) == 1.0


def test_steps_are_of_the_innermost_loops_with_exponentials():
    ttgir = """
    %c64_i32 = arith.constant 64 : i32 loc(#loc)
    %c1_i32 = arith.constant 1 : i32 loc(#loc)
    %0 = scf.for %i = %a to %b step %c1_i32 -> (i32) : i32 {
      %1 = scf.for %j = %a to %b step %c64_i32 iter_args(%x = %y) -> (i32) : i32 {
        %2 = math.exp2 %x : tensor<64xf32, #l> loc(#loc)
        %3 = math.exp2 %x : tensor<64xf32, #l> loc(#loc)
      } loc(#loc)
    } loc(#loc)
    %4 = scf.for %k = %a to %b step %rows -> (i32) : i32 {
      %5 = math.exp2 %x : tensor<64xf32, #l> loc(#loc)
    } loc(#loc)
    %6 = scf.for %k = %a to %b step %c64_i32 -> (i32) : i32 {
    } loc(#loc)
    %7 = math.exp2 %x : tensor<64xf32, #l> loc(#loc)
"""
    assert steps(ttgir) == [64, 1]


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
def test_a_product_after_a_write_needs_a_fence(between, count):
    lines = "\n".join(f"    {line.strip()};" for line in between.split(";") if line.strip())
    assert (
        unfenced(f"{lines}\n    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r1}}, %rd1, %rd2;\n") == count
    )


@needs_triton
def test_each_wait_for_copies_gets_the_fence_that_triton_3_6_leaves_out():
    from fastformer_kernels.host.fences import add_fences

    copied = "\tcp.async.wait_group \t2;\n\tbar.sync 0;\n\tcp.async.wait_all;\n"
    ptx = f"{copied}\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r1}}, %rd1, %rd2;\n"
    assert unfenced(ptx) == 1
    assert unfenced(add_fences(ptx)) == 0
    assert add_fences(ptx).count("fence.proxy.async.shared::cta;") == 2
    assert add_fences(copied) == copied  # no wgmma


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


@pytest.mark.parametrize(
    ("instruction", "cycles"),
    [
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24", 64 * 64 * 16 / 2048),
        ("HGMMA.64x64x8.F32.TF32 R24, R4, gdesc[UR8], R24", 64 * 64 * 8 / 1024),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 4 * 16 * 8 * 16 / 1024),
        ("HMMA.1688.F32.TF32 R4, R8, R12, R4", 4 * 16 * 8 * 8 / 512),
        ("HFMA2.MMA R4, -RZ, RZ, 0, 0", 0.0),
    ],
)
def test_cycles_of_tensor_cores(instruction, cycles):
    assert mma_cycles(instruction, warps=4) == cycles
    assert mma_cycles(instruction, warps=8) == 2 * cycles


TTGIR = "    %c2 = arith.constant 2 : i32\n    %0 = scf.for %i = %a to %b step %c2 {\n      math.exp2\n    }\n"
PTX = "$loop:\n    ex2.approx.ftz.f32 %f1, %f1;\n    @%p1 bra $loop;\n"
SASS = ".L_1:\n  MUFU.EX2 R0, R0 ;\n  MUFU.EX2 R1, R1 ;\n  FADD R0, R0, R1 ;\n  @P0 BRA `(.L_1) ;\n  NOP ;\n"


def test_unrolled_iterations_are_as_many_elements():
    """Triton takes two steps of 256 elements in an iteration, and ptxas two of these."""
    assert loop_figures(TTGIR, PTX, SASS, tile=256, warps=4) == [
        Loop(instructions=4 * 4 * 4.0, exponentials=2 * 4 * 32 / 1024, mma_cycles=0.0)
    ]


def test_stages_without_the_same_loops_are_no_figure():
    with pytest.raises(ValueError, match="loops with exponentials: 1 in TTGIR, 0 in PTX, 1 in SASS"):
        loop_figures(TTGIR, "ret;", SASS, tile=256, warps=4)
    exponential = PTX.splitlines(keepends=True)[1]
    with pytest.raises(ValueError, match="a loop takes 2 exponentials in PTX, 3 in SASS"):
        loop_figures(TTGIR, PTX.replace(exponential, 2 * exponential), SASS.replace("FADD", "MUFU.EX2"), 256, 4)


def test_every_kernel_with_a_tile_has_figures_on_both_architectures():
    assert tile_of("_attention", {"BLOCK_T": 128, "BLOCK_S": 64, "K": 64}) == 8192
    assert tile_of("another", {}) == 0
    for rows in read_budget(BUDGET)["triton"].values():
        for kernel in TILES:
            for arch in (80, 90):
                loops = [entry["loops"] for name, entry in rows.items() if name.endswith(f".{kernel} | sm_{arch}")]
                assert loops
                assert all(loops), f"{kernel} has no loops on sm_{arch}"
