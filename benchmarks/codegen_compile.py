"""Record what launchers would launch on a GPU that is not there, compile it, and read the result; for `codegen`.

The launchers run on meta tensors, with the facts of the other GPU in `launch.assumed` and a driver that knows only its
architecture. Triton's hook before a compilation records it and stops it. Each distinct compilation then goes to one of
a few processes, where Triton compiles it for that architecture and the tools in its wheel take the result apart.

**Serialised wgmma**: ptxas, when it cannot keep several wgmma in flight (too few registers, say), puts a
`WARPGROUP.DEPBAR` behind each `HGMMA`. A wgmma that starts while the one before it in the text is not waited for is a
follower: in the PTX, one `wgmma.mma_async` after another without a `wgmma.wait_group` between; in the machine code the
same with `HGMMA` and `WARPGROUP.DEPBAR`. Serialised: the machine code has less than half of the share of followers that
the PTX has. This agreed with ptxas's own note "wgmma.mma_async instructions are serialized" on every kernel tried;
`tests/test_codegen.py` compares the two.

**Blocks (CTAs) per multiprocessor** is the smallest of
- registers: 65536 / (registers a thread, rounded up to 8, x 32) warps, rounded down to 4, / warps of a block;
- shared memory of a multiprocessor / (shared memory of the block + 1 KiB that the system takes, rounded up to 128);
- threads of a multiprocessor / threads of a block; the hardware's number of blocks;
- sm_100: 512 columns of tensor memory / those that the block allocates.
"""

import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

Cases = list[tuple[str, Callable[[], object]]]


class Architecture(NamedTuple):
    """A GPU of that architecture; what is per multiprocessor is from the CUDA C++ Programming Guide's tables."""

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


class Job(NamedTuple):
    """One compilation, in a form that goes to another process."""

    arch: int
    module: str
    function: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]


class Row(NamedTuple):
    """A compilation with its place in the table: the first case that asks for it names it."""

    kernel: str
    case: str
    configuration: str
    job: Job
    cases: set[str]  # all that ask for it

    @property
    def name(self) -> str:
        return f"{self.case} | {self.kernel} | sm_{self.job.arch}"


class Resources(NamedTuple):
    """What a kernel takes. `wgmma` counts HGMMA on sm_90 and tcgen05.mma on sm_100."""

    registers: int
    stack: int  # bytes
    shared: int  # bytes
    ctas: int  # per multiprocessor
    wgmma: int
    serialised: bool
    other_dots: int  # on sm_90, products of tiles of 16 bits or tf32 that are not wgmma
    async_copies: int  # cp.async and TMA instructions in the PTX


class Driver:
    """Stands in for a GPU's driver: enough for a launcher to bind arguments and options."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps what it knows by device: each architecture is one

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def find_cases(package: str) -> tuple[Cases, list[str]]:
    """Return the cases of all modules of a package, named `module/case`, and what went wrong."""
    cases: dict[str, Callable[[], object]] = {}
    faults: list[str] = []
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        try:
            for name, call in importlib.import_module(f"{package}.{info.name}").cases():
                if (full := f"{info.name}/{name}") in cases:
                    faults.append(f"{full}: two cases have this name")
                cases[full] = call
        except Exception as error:
            faults.append(f"{info.name}: its cases cannot be listed: {type(error).__name__}: {error}")
    return list(cases.items()), faults


def record(cases: Cases, arch: int) -> tuple[list[Row], list[str]]:
    """Run the launchers as on a GPU of that architecture; return the distinct compilations, and what went wrong."""
    import triton

    from fastformer_kernels import launch

    rows: dict[str, Row] = {}
    names: set[str] = set()
    faults: list[str] = []
    case = ""

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Take the place of a compilation (`triton.knobs.runtime.jit_cache_hook`): True stops it."""
        if compile["specialization_data"] in rows:
            rows[compile["specialization_data"]].cases.add(case)
            return True
        options = json.loads(compile["specialization_data"])["options"]
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        job = Job(arch, fn.module, fn.name, compile["signature"], compile["constants"], compile["configs"][0], options)
        parameters = fn.jit_function.params
        chosen = {p.name: compile["constants"].get((p.num,)) for p in parameters if p.is_constexpr}
        chosen |= {name: options[name] for name in ("num_warps", "num_stages", "maxnreg")}
        configuration = " ".join(f"{name}={value}" for name, value in chosen.items() if value is not None)
        kernel = f"{fn.module.rsplit('.', 1)[-1]}.{fn.name}"
        row = Row(kernel, case, configuration, job, {case})
        number = 1
        while row.name in names:  # a case may launch a kernel in several configurations
            number += 1
            row = row._replace(case=f"{case} ({number})")
        names.add(row.name)
        rows[compile["specialization_data"]] = row
        return True

    found = ARCHITECTURES[arch]
    launch.assumed = launch.Device(arch, found.multiprocessors, found.shared_of_block)
    triton.runtime.driver.set_active(Driver(arch))
    triton.knobs.runtime.jit_cache_hook = hook
    for case, call in cases:
        try:
            call()
        except Exception as error:
            faults.append(f"{case} on sm_{arch}: the launcher raised {type(error).__name__}: {error}")
    triton.knobs.runtime.jit_cache_hook = None
    return list(rows.values()), faults


def blocks_per_multiprocessor(arch: int, registers: int, shared: int, threads: int, tensor_columns: int = 0) -> int:
    """Return how many blocks are resident at once, by the formula at the top of this file."""
    has = ARCHITECTURES[arch]
    warps = -(-threads // 32)
    limits = [
        (65536 // (-(-registers // 8) * 8 * 32)) // 4 * 4 // warps,
        has.shared // (-(-(shared + 1024) // 128) * 128),
        has.threads // threads,
        has.blocks,
    ]
    if tensor_columns:
        limits.append(512 // tensor_columns)
    return min(limits)


def followers(text: str, start: str, wait: str) -> tuple[int, int]:
    """Count what matches `start`, and how many of them follow another without a match of `wait` between."""
    count = following = 0
    waited = True
    for match in re.finditer(f"({start})|{wait}", text):
        if match[1]:
            count, following = count + 1, following + (not waited)
        waited = not match[1]
    return count, following


def is_serialised(ptx: str, sass: str) -> bool:
    """Whether ptxas made the wgmma of a kernel wait for one another, by the rule at the top of this file."""
    asked, asked_following = followers(ptx, r"\bwgmma\.mma_async", r"\bwgmma\.wait_group")
    found, found_following = followers(sass, r"\bHGMMA\b", r"\bWARPGROUP\.DEPBAR")
    return 2 * found_following * asked < asked_following * found


def compile_job(job: Job) -> Resources:
    """Compile and read the result; raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(job.module), job.function)
    while not isinstance(function, triton.JITFunction):
        function = function.fn
    source = ASTSource(function, job.signature, job.constants, job.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", job.arch, 32), options=job.options)
    cubin = next(path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))

    def tool(*command: str) -> str:
        folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        return subprocess.run([folder / command[0], *command[1:]], check=True, capture_output=True, text=True).stdout

    usage = tool("cuobjdump", "-res-usage", cubin)
    registers, stack = (int(re.findall(rf"\b{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    ptx = compiled.asm["ptx"]
    threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    wgmma, serialised, other_dots = len(re.findall(r"\btcgen05\.mma\b", ptx)), False, 0
    if job.arch == 90:
        # What Triton leaves as tt.dot is no wgmma but mma.sync, at half of the rate or less.
        asked = r"\btt\.dot\b.*(?:inputPrecision = tf32|: tensor<[\dx]+x(?:bf16|f16)\b)"
        other_dots = len(re.findall(asked, compiled.asm["ttgir"]))
        if "wgmma.mma_async" in ptx:
            sass = tool("nvdisasm", "-c", cubin)
            wgmma, serialised = len(re.findall(r"\bHGMMA\b", sass)), is_serialised(ptx, sass)
    shared = compiled.metadata.shared
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    return Resources(
        registers,
        stack,
        shared,
        blocks_per_multiprocessor(job.arch, registers, shared, threads, columns),
        wgmma,
        serialised,
        other_dots,
        len(re.findall(r"\bcp\.async\.(?:ca|cg|bulk\.tensor)\b", ptx)),
    )


def end_with_parent() -> None:
    """Let this process end when the one that started it has: killed, that one cannot say so."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def compile_all(
    rows: list[Row], processes: int, tell: Callable[[Row, Resources | str], None]
) -> dict[str, Resources | str]:
    """Compile every row; for each the resources, or why there are none.

    `tell` gets each result as soon as it is there; how far it is goes to stderr.
    """
    start = shown = time.monotonic()
    done = 0
    lock = threading.Lock()
    own = threading.local()
    pools: list[ProcessPoolExecutor] = []

    def compile_row(row: Row) -> tuple[str, Resources | str]:
        nonlocal shown, done
        if getattr(own, "pool", None) is None:
            # One process to a thread: if the compiler crashes, that is this row's result, and no other row's.
            own.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)
            pools.append(own.pool)
        result: Resources | str
        try:
            result = own.pool.submit(compile_job, row.job).result()
        except BrokenProcessPool:
            own.pool, result = None, "the compiler crashed"
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            result = f"{type(error).__name__}: {' '.join(lines[-1].split())[:300]}"
        with lock:
            done += 1
            tell(row, result)
            if time.monotonic() - shown > 5 or done == len(rows):
                shown = time.monotonic()
                print(f"{done}/{len(rows)} compiled, {shown - start:.0f} s: {row.name}", file=sys.stderr, flush=True)
        return row.name, result

    with ThreadPoolExecutor(processes) as threads:
        results = dict(threads.map(compile_row, rows))
    for pool in pools:
        pool.shutdown()
    return results
