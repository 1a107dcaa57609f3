"""Read the resources of a compiled kernel from the output of Triton, ptxas and its disassembler; for `codegen`.

`checks/` has a module for each check of one stage of the compilation.

**Serialised wgmma**: ptxas, when it cannot keep several wgmma in flight (too few registers, say), puts a
`WARPGROUP.DEPBAR` behind each `HGMMA`. A wgmma that starts while the one before it in the text is not waited for is a
follower: in the PTX, one `wgmma.mma_async` after another without a `wgmma.wait_group` between; in the machine code the
same with `HGMMA` and `WARPGROUP.DEPBAR`. Serialised: the machine code has less than half of the share of followers that
the PTX has. This agreed with ptxas's own note "wgmma.mma_async instructions are serialized" on every kernel tried;
`tests/benchmarks/test_codegen.py` compares the two.

**Blocks (CTAs) per multiprocessor** is the smallest of
- registers: 65536 / (registers a thread, rounded up to 8, x 32) warps, rounded down to 4, / warps of a block;
- shared memory of a multiprocessor / (shared memory of the block + 1 KiB that the system takes, rounded up to 128);
- threads of a multiprocessor / threads of a block; the hardware's number of blocks;
- sm_100: 512 columns of tensor memory / those that the block allocates.
"""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.codegen.checks.fences import unfenced
from benchmarks.codegen.checks.layouts import replication
from benchmarks.codegen.checks.loops import Loop, loop_figures


class Architecture(NamedTuple):
    """A GPU of an architecture; numbers per multiprocessor are from the CUDA C++ Programming Guide's tables."""

    gpu: str
    multiprocessors: int
    shared_of_block: int  # bytes
    shared: int  # bytes of a multiprocessor
    threads: int
    blocks: int


ARCHITECTURES = {
    80: Architecture("A100", 108, 163 << 10, 164 << 10, 2048, 32),
    86: Architecture("RTX 3090", 82, 99 << 10, 100 << 10, 1536, 16),
    89: Architecture("RTX 4090", 128, 99 << 10, 100 << 10, 1536, 24),
    90: Architecture("H200", 132, 227 << 10, 228 << 10, 2048, 32),
    100: Architecture("B200", 148, 227 << 10, 228 << 10, 2048, 32),
    120: Architecture("RTX 5090", 170, 99 << 10, 100 << 10, 1536, 24),
}


class Resources(NamedTuple):
    """Resources of a kernel. `wgmma` counts HGMMA on sm_90 and tcgen05.mma on sm_100."""

    registers: int
    stack: int  # bytes
    shared: int  # bytes
    ctas: int  # per multiprocessor
    wgmma: int
    serialised: bool
    other_dots: int  # on sm_90, products of tiles of 16 bits or tf32 that are not wgmma
    async_copies: int  # cp.async and TMA instructions in the PTX
    replication: float = 1.0  # how many times each element of a product is computed
    unfenced: int = 0  # on sm_90 and sm_100, products without a fence after what was written for them
    loops: tuple[Loop, ...] = ()  # of the kernels of `loops.TILES`, on sm_80 and sm_90

    def entry(self) -> dict[str, Any]:
        """Return the entry of the budget file."""
        return self._asdict() | {"loops": [loop._asdict() for loop in self.loops]}

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Resources":
        """Read an entry of the budget file."""
        figures = {name: entry[name] for name in cls._fields if name in entry}
        return cls(**figures | {"loops": tuple(Loop(**loop) for loop in entry.get("loops", ()))})


def blocks_per_multiprocessor(arch: int, registers: int, shared: int, threads: int, tensor_columns: int = 0) -> int:
    """Return how many blocks are resident at once, by the formula at the top of this file."""
    gpu = ARCHITECTURES[arch]
    warps = -(-threads // 32)
    limits = [
        (65536 // (-(-registers // 8) * 8 * 32)) // 4 * 4 // warps,
        gpu.shared // (-(-(shared + 1024) // 128) * 128),
        gpu.threads // threads,
        gpu.blocks,
    ]
    if tensor_columns:
        limits.append(512 // tensor_columns)
    return min(limits)


def followers(text: str, start: str, wait: str) -> tuple[int, int]:
    """Count the matches of `start`, and those that follow another one without a match of `wait` between."""
    count = following = 0
    waited = True
    for match in re.finditer(f"({start})|{wait}", text):
        if match[1]:
            count, following = count + 1, following + (not waited)
        waited = not match[1]
    return count, following


def is_serialised(ptx: str, sass: str) -> bool:
    """Return whether ptxas made the wgmma of a kernel wait for one another, by the rule at the top of this file."""
    in_ptx, following_in_ptx = followers(ptx, r"\bwgmma\.mma_async", r"\bwgmma\.wait_group")
    in_sass, following_in_sass = followers(sass, r"\bHGMMA\b", r"\bWARPGROUP\.DEPBAR")
    return 2 * following_in_sass * in_ptx < following_in_ptx * in_sass


def read(compiled: Any, arch: int, tile: int) -> Resources:
    """Read a compiled kernel with the tools of Triton's wheel; `tile` as in `loop_figures`, 0 for no figures."""
    import triton

    cubin = next(path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))

    def tool(*command: str) -> str:
        folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        return subprocess.run([folder / command[0], *command[1:]], check=True, capture_output=True, text=True).stdout

    usage = tool("cuobjdump", "-res-usage", cubin)
    registers, stack = (int(re.findall(rf"\b{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    of_loops = tile > 0 and arch in (80, 90)
    sass = tool("nvdisasm", "-c", cubin) if of_loops or "wgmma.mma_async" in ptx else ""
    wgmma, serialised, other_dots = len(re.findall(r"\btcgen05\.mma\b", ptx)), False, 0
    if arch == 90:
        # A tt.dot in TTGIR becomes mma.sync, at half of the rate of wgmma or less.
        not_wgmma = r"\btt\.dot\b.*(?:inputPrecision = tf32|: tensor<[\dx]+x(?:bf16|f16)\b)"
        other_dots = len(re.findall(not_wgmma, ttgir))
        if "wgmma.mma_async" in ptx:
            wgmma, serialised = len(re.findall(r"\bHGMMA\b", sass)), is_serialised(ptx, sass)
    shared = compiled.metadata.shared
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    return Resources(
        registers,
        stack,
        shared,
        blocks_per_multiprocessor(arch, registers, shared, threads, columns),
        wgmma,
        serialised,
        other_dots,
        len(re.findall(r"\bcp\.async\.(?:ca|cg|bulk\.tensor)\b", ptx)),
        replication(ttgir),
        unfenced(ptx),
        tuple(loop_figures(ttgir, ptx, sass, tile, threads // 32)) if of_loops else (),
    )
