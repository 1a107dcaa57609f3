"""What each kernel moves to and from memory, counted as its compiled code runs: sectors and bank conflicts.

    python -m tests.compiled.traffic --arch 90                # a table, the worst lines of the sources; 1 if bad
    python -m tests.compiled.traffic --arch 90 --update       # write what was found to traffic.json
    python -m tests.compiled.traffic --arch 90 --rows 4096 --only "layer_norm 512 bf16"     # of real size

For each kernel of a call: sectors of global memory over the least that the bytes of each warp's request take, bytes of
such a request (of 512 at most: 16 a thread), and wavefronts of shared memory over those without bank conflicts, with
ldmatrix, stmatrix and cp.async; after these all its sectors and all its wavefronts. What wgmma reads is not in it: that
is the tensor core's own way. Counts, no times: a sector may come from L1, and what a conflict costs depends on what
else the warps wait for.

It is no part of `benchmarks/codegen`: a count needs a run, and nothing there imports from the tests. traffic.json is
what one Triton made; with that one, figures that are worse fail (`make traffic`; some cases in CI, test_traffic.py).
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastformer import functional
from tests.compiled.ptx.driver import Session
from tests.compiled.ptx.machine import Options, Traffic

RECORD = Path(__file__).with_name("traffic.json")
Figures = tuple[float, float, float]  # sectors over needed, bytes of a request, wavefronts over needed
NAMES = "sectors over needed", "bytes of a request", "wavefronts over needed"
WORSE = 1, -1, 1  # the sign of a change for the worse
Call = Callable[[], Tensor]
ROWS = 32  # of norms and feed-forward: a ratio needs no more


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def heads(B: int, T: int, H: int, K: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v as views of one projection."""
    return list(leaf(B, T, 3 * H, K, dtype=dtype).transpose(1, 2).split(H, 1))


def attend(K: int, dtype: torch.dtype, T: int, **options: Any) -> Tensor:
    return functional.attention(*heads(1, T, 1, K, dtype), causal=True, **options)


def decode() -> Tensor:
    q, k, v = heads(1, 200, 2, 64, torch.bfloat16)
    with torch.no_grad():
        return functional.attention(q[:, :, -1:], k, v)


def norm(op: str, N: int, dtype: torch.dtype) -> Tensor:
    x, y, w, b = (leaf(*shape, dtype=dtype) for shape in ((ROWS, N), (ROWS, N), (N,), (N,)))
    parameters = (w,) if "rms" in op else (w, b)
    if op.startswith("dropout_add"):
        return getattr(functional, op)(x, y, N, *parameters, dropout_p=0.1)[0]
    return getattr(functional, op)(x, N, *parameters)


def feed_forward(activation: Any, F: int, dtype: torch.dtype) -> Tensor:
    wide = 2 * F if "glu" in activation else F
    given = [leaf(*shape, dtype=dtype) for shape in ((ROWS, 64), (wide, 64), (wide,), (64, F), (64,))]
    return functional.feed_forward(*given, activation=activation, dropout_p=0.1)


def embed(D: int, dtype: torch.dtype) -> Tensor:
    ids = torch.arange(64) * 7 % 50
    return functional.embedding(ids, leaf(50, D, dtype=dtype), leaf(64, D, dtype=dtype), ids, dropout_p=0.1)


def turn(K: int, dtype: torch.dtype) -> Tensor:
    cos, sin = torch.randn(2, 64, K // 2)
    return functional.rotary(leaf(64, 12, K, dtype=dtype)[:, :8], torch.arange(64), cos, sin)


def loss(V: int, dtype: torch.dtype) -> Tensor:
    target = torch.arange(16) * 7 % V
    given = leaf(16, 64, dtype=dtype), leaf(V, 64, dtype=dtype), target, leaf(V, dtype=dtype)
    return functional.linear_cross_entropy(*given, label_smoothing=0.1)


def _cases() -> Iterator[tuple[str, Call]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for K in (64, 128, 256):
        yield f"attention {K} bf16", partial(attend, K, bf16, 512)
        yield f"attention {K} fp32", partial(attend, K, fp32, 64)
    yield "attention 64 bf16 dropout", partial(attend, 64, bf16, 512, dropout_p=0.1)
    yield "attention 64 bf16 decoding", decode
    for op in ("layer_norm", "rms_norm", "dropout_add_layer_norm", "dropout_add_rms_norm"):
        yield f"{op} 512 bf16", partial(norm, op, 512, bf16)
        yield f"{op} 512 fp32", partial(norm, op, 512, fp32)
    for N in (1000, 4096, 8200):  # masked, long, in two passes
        yield f"layer_norm {N} bf16", partial(norm, "layer_norm", N, bf16)
    for activation, F in (("relu", 2048), ("gelu", 2048), ("gelu", 1000), ("swiglu", 2048)):
        yield f"feed_forward {activation} {F} bf16", partial(feed_forward, activation, F, bf16)
    for dtype, name in ((bf16, "bf16"), (fp32, "fp32")):
        yield f"embedding 512 {name}", partial(embed, 512, dtype)
        yield f"rotary 64 {name}", partial(turn, 64, dtype)
        yield f"linear_cross_entropy 4096 {name}", partial(loss, 4096, dtype)
    yield "feed_forward gelu 2048 fp32", partial(feed_forward, "gelu", 2048, fp32)
    yield "linear_cross_entropy 1001 bf16", partial(loss, 1001, bf16)


CASES = dict(_cases())


class Place(NamedTuple):
    """A line of a source, of a kernel of a case."""

    kernel: str
    space: str
    source: str


def measure(session: Session, call: Call) -> dict[Place, Traffic]:
    """Run a call, and its backward pass if it has one; count what each source line's accesses take."""
    before, session.options = session.options, Options(memory_traffic=True)
    session.reports.clear()
    torch.manual_seed(0)  # erf branches where its argument is large, so that numbers decide on sectors
    try:
        result = call()
        if result.requires_grad:
            result.backward(torch.randn_like(result))
    finally:
        session.options = before
    found: dict[Place, Traffic] = {}
    for report in session.reports:
        for (space, _, source), traffic in report.traffic.items():
            place = Place(report.name, space, source)
            found[place] = found.get(place, Traffic()) + traffic
    return found


def total(found: dict[Place, Traffic], kernel: str, space: str) -> Traffic:
    """All of a kernel's accesses to global or shared memory."""
    return sum((t for p, t in found.items() if (p.kernel, p.space) == (kernel, space)), Traffic())


def figures(found: dict[Place, Traffic]) -> dict[str, Figures]:
    """The figures of each kernel."""
    table = {}
    for kernel in sorted({place.kernel for place in found}):
        outside, inside = (total(found, kernel, space) for space in ("global", "shared"))
        request = round(outside.bytes / max(outside.requests, 1), 1)
        table[kernel] = round(outside.ratio, 3), request, round(inside.ratio, 3)
    return table


def worse(found: dict[str, Figures], recorded: dict[str, Figures]) -> Iterator[str]:
    """Yield which kernels are new or gone, and which figures are worse than recorded."""
    for kernel in sorted(found.keys() ^ recorded.keys()):
        yield f"{kernel}: {'not recorded' if kernel in found else 'recorded, and not launched'}"
    for kernel in sorted(found.keys() & recorded.keys()):
        for name, now, then, sign in zip(NAMES, found[kernel], recorded[kernel], WORSE, strict=True):
            if sign * now > sign * then:
                yield f"{kernel}: {name} {then} -> {now}"


def read(arch: int) -> dict[str, dict[str, Figures]]:
    """What is recorded for this Triton, by case and kernel; empty for another."""
    found = json.loads(RECORD.read_text()).get(triton.__version__, {}).get(f"sm_{arch}", {})
    return {name: {kernel: tuple(each) for kernel, each in case.items()} for name, case in found.items()}


def write(arch: int, found: dict[str, dict[str, Figures]]) -> None:
    """Record the figures of all cases; a line a kernel."""
    records = json.loads(RECORD.read_text())
    records.setdefault(triton.__version__, {})[f"sm_{arch}"] = found
    text = json.dumps(records, indent=1)
    RECORD.write_text(re.sub(r"\[\s*(\S+)\s+(\S+)\s+(\S+)\s*\]", r"[\1 \2 \3]", text) + "\n")


def main() -> int:
    """Run the command; return its exit status: 1 if a figure is worse than recorded."""
    parser = argparse.ArgumentParser(
        "python -m tests.compiled.traffic", description="Count sectors and bank conflicts."
    )
    parser.add_argument("--arch", type=int, choices=(80, 90), required=True)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains the text")
    parser.add_argument("--rows", type=int, help="rows of norms and feed-forward; nothing is compared or recorded")
    parser.add_argument("--update", action="store_true", help="write what was found to traffic.json")
    options = parser.parse_args()
    global ROWS
    ROWS = options.rows or ROWS

    os.environ["TRITON_INTERPRET"] = "0"  # read when kernels are defined
    import fastformer
    from tests.compiled.ptx import driver

    session = driver.install(options.arch)
    places: list[tuple[int, str, Place, Traffic]] = []
    table: dict[str, dict[str, Figures]] = {}
    for name, call in CASES.items():
        if options.only in name:
            with fastformer.backend("triton"):
                found = measure(session, call)
            table[name] = figures(found)
            for kernel, (sectors, request, wavefronts) in table[name].items():
                taken = [total(found, kernel, space).taken for space in ("global", "shared")]
                line = f"{name:31} {kernel:38} {sectors:6.3f} {request:6.1f} {wavefronts:7.3f}"
                print(f"{line} {taken[0]:9} {taken[1]:9}", flush=True)
            places += [(t.taken - t.needed, name, place, t) for place, t in found.items()]
    print("\nThe most sectors and wavefronts that were not needed:")
    for extra, name, place, traffic in sorted(places, key=lambda each: -each[0])[:20]:
        print(f"{extra:8} {place.space:6} {traffic.ratio:5.2f}  {name}, {place.kernel}, {place.source}")
    recorded = read(options.arch)
    if options.rows:
        return 0
    if options.update:
        write(options.arch, recorded | table)
        return 0
    bad = [f"{name}: {text}" for name in table for text in worse(table[name], recorded.get(name, {}))]
    print(*(["\nWorse than recorded:", *bad] if bad else ["\nNothing is worse than recorded"]), sep="\n  ")
    return int(bool(bad and recorded))  # of another Triton nothing is recorded


if __name__ == "__main__":
    sys.exit(main())
