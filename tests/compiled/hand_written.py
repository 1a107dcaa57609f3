"""Run PTX that is written by hand: the executor's own tests need neither Triton nor a kernel."""

import re
import struct
from typing import Any

import numpy as np
import pytest

from tests.compiled.ptx import text
from tests.compiled.ptx.global_memory import Allocation
from tests.compiled.ptx.machine import KernelFault, Options, launch
from tests.compiled.ptx.program import Program

_HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 global_smem[];\n"
_REGISTERS = ".reg .pred %p<20>;\n.reg .b16 %rs<20>;\n.reg .b32 %r<200>;\n.reg .b64 %rd<60>;\n"
_KINDS = {16: ("b16", "%rs", np.uint16), 32: ("b32", "%r", np.uint32), 64: ("b64", "%rd", np.uint64)}
# %rd11: the thread's own four bytes of the first array; %r7: its own of shared memory, which begins at %r6.
OWN = """mul.wide.u32 %rd10, %r0, 4;
add.s64 %rd11, %rd0, %rd10;
shl.b32 %r5, %r0, 2;
mov.b32 %r6, global_smem;
add.s32 %r7, %r6, %r5;
"""


def run(body: str, arrays: list[Any], threads: int = 32, grid: int = 1, shared: int = 4096, **options: Any) -> None:
    """Run a kernel on arrays, which it gets as pointers in %rd0, %rd1, …; %r0 is the thread."""
    params = ",\n".join(f".param .u64 k_param_{i}" for i in range(len(arrays)))
    loads = "".join(f"ld.param.b64 %rd{i}, [k_param_{i}];\n" for i in range(len(arrays)))
    begin = f"{_HEAD}.visible .entry k({params})\n.reqntid {threads}\n{{\n{_REGISTERS}{loads}mov.u32 %r0, %tid.x;\n"
    program = Program(text.read(f"{begin}{body}\nret;\n}}\n"), shared)
    allocations = [Allocation(a.ctypes.data, a.nbytes, str(i)) for i, a in enumerate(arrays)]
    launch(program, (grid, 1, 1), [a.ctypes.data for a in arrays], allocations, Options(**options))


def refused(kind: str, body: str, arrays: list[Any], **options: Any) -> None:
    with pytest.raises(KernelFault, match=kind):
        run(body, arrays, **options)


def aligned(values: Any, dtype: Any) -> Any:
    """An array that begins at a multiple of 128 bytes."""
    values = np.asarray(values, dtype)
    space = np.zeros(values.nbytes + 128, np.uint8)
    start = -space.ctypes.data % 128
    out = space[start : start + values.nbytes].view(dtype).reshape(values.shape)
    out[...] = values
    return out


def elementwise(line: str, widths: list[int], out: int, *values: list[int]) -> list[int]:
    """Run `line`, with D for the result and A, B, C for the operands, on columns of values, one a thread."""
    count = len(values[0])
    threads = -(-count // 32) * 32
    arrays = [aligned([*v, *[1] * (threads - count)], _KINDS[w][2]) for v, w in zip(values, widths, strict=True)]
    result = aligned([0] * threads, _KINDS[out][2])
    names = {"ABC"[i]: f"{_KINDS[w][1]}{10 + i}" for i, w in enumerate(widths)} | {"D": f"{_KINDS[out][1]}15"}

    def place(i: int, width: int) -> str:
        return f"mul.wide.u32 %rd40, %r0, {width // 8};\nadd.s64 %rd41, %rd{i}, %rd40;\n"

    body = "".join(f"{place(i, w)}ld.global.{_KINDS[w][0]} {names['ABC'[i]]}, [%rd41];\n" for i, w in enumerate(widths))
    body += re.sub(r"\b([ABCD])\b", lambda match: names[match[1]], line)
    body += f"\n{place(len(arrays), out)}st.global.{_KINDS[out][0]} [%rd41], {names['D']};\n"
    run(body, [*arrays, result], threads)
    return [int(x) for x in result[:count]]


def f32(x: float) -> int:
    """The bits of a float."""
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def as_f32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])


def signed(x: int, width: int) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def bf16(x: float) -> int:
    """The bits of a float that is a bf16."""
    return f32(float(x)) >> 16


def f16(x: float) -> int:
    return int(np.float16(x).view(np.uint16))
