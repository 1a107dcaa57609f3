"""What a kernel compiled by Triton's backend for AMD takes: registers, scratch memory and LDS; for `codegen`.

Triton's wheel links the code object: neither ROCm nor a GPU is needed. Scratch memory holds spilled registers.
Nothing has run on an AMD GPU.
"""

import re
from typing import Any

from benchmarks.codegen.reader import Architecture, Resources

# Compute units, LDS of a block and of a compute unit (of two, on RX GPUs), from AMD's instruction set manuals.
AMD: dict[int | str, Architecture] = {
    "gfx90a": Architecture("MI250", 104, 64 << 10, 64 << 10, 2048, 32),
    "gfx942": Architecture("MI300X", 304, 64 << 10, 64 << 10, 2048, 32),
    "gfx1100": Architecture("RX 7900 XTX", 96, 64 << 10, 128 << 10, 2048, 32),
    "gfx1201": Architecture("RX 9070 XT", 64, 64 << 10, 128 << 10, 2048, 32),
}


def read_amd(compiled: Any) -> Resources:
    """Read what the metadata of the code object says."""
    facts = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"]))
    registers, scratch = int(facts["vgpr_count"]), int(facts["private_segment_fixed_size"])
    return Resources(registers, scratch, compiled.metadata.shared, 1, 0, False, 0, 0)
