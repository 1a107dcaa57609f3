"""What a process compiles when it runs ops for the first time; a program, so that nothing is compiled yet.

python tests/gpu/gpu_compilations.py OP ...   # seconds of the first call of each op, compilations by kernel; JSON
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch
import triton

import fastformer
from tests.support.fused_calls import CALLS, leaves, tensors
from tests.support.fused_op import DEVICE

# As many as would show: with remainders of 16 and without, on both sides of what tiles depend on.
TOKENS = (1000, 1, 2, 15, 16, 17, 100, 128, 1024, 1001)


def run(op: str, n: int) -> None:
    """Forward and backward."""
    call, inputs = CALLS[op], leaves(op, n, DEVICE, torch.bfloat16)
    outputs = tensors(call.call(call.extra(n, DEVICE), 0.1 if call.dropout else 0.0, *inputs))
    torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs], allow_unused=True)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main(ops: list[str]) -> None:
    """Print the facts."""
    counts: Counter[str] = Counter()
    triton.knobs.runtime.jit_post_compile_hook = lambda **facts: counts.update([facts["fn"].name])
    torch.zeros(1, device=DEVICE)  # what CUDA itself takes to start
    found = {}
    with fastformer.backend("triton"):
        for op in ops:
            counts.clear()
            started = time.perf_counter()
            run(op, TOKENS[0])
            seconds = time.perf_counter() - started
            for n in TOKENS[1:]:
                run(op, n)
            found[op] = {"seconds": seconds, "kernels": dict(counts)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
