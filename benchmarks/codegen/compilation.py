"""Record what launchers would launch on a GPU of another machine, compile it, and read the result; for `codegen`.

The launchers run on meta tensors, with the facts of the GPU in `launch.assumed` and a driver that knows only its
architecture. Triton's hook before a compilation records and stops it. Each distinct compilation then goes to one of a
few processes, where Triton compiles it for that architecture; `reader.py` reads the result.

A compilation's **fingerprint** is the key of Triton's own cache on disk (the code of the kernel and of all that it
calls, its constants and specialisation, options, settings in the environment, ptxas's version), with Triton's version
and without line numbers, comments and docstrings, and the code that reads the result. Equal fingerprints, equal
resources: `codegen` compiles only what has no record.
"""

import ast
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.codegen import reader
from benchmarks.codegen.checks.loops import tile_of
from benchmarks.codegen.reader import ARCHITECTURES, Architecture, Resources, read

# Compute units, LDS of a block and of a compute unit (of two, on RX GPUs), from AMD's instruction set manuals.
AMD: dict[int | str, Architecture] = {
    "gfx90a": Architecture("MI250", 104, 64 << 10, 64 << 10, 2048, 32),
    "gfx942": Architecture("MI300X", 304, 64 << 10, 64 << 10, 2048, 32),
    "gfx1100": Architecture("RX 7900 XTX", 96, 64 << 10, 128 << 10, 2048, 32),
    "gfx1201": Architecture("RX 9070 XT", 64, 64 << 10, 128 << 10, 2048, 32),
}
GPUS: dict[int | str, Architecture] = dict([*ARCHITECTURES.items(), *AMD.items()])
Cases = list[tuple[str, Callable[[], object]]]


class Job(NamedTuple):
    """One compilation, in a form that goes to another process."""

    arch: int | str  # 90 for sm_90; "gfx942"
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
    key: str = ""  # its fingerprint; empty: none is known

    @property
    def name(self) -> str:
        return f"{self.case} | {self.kernel} | {target_of(self.job.arch)}"


def target_of(arch: int | str) -> str:
    """Return the name of what kernels are compiled for."""
    return arch if isinstance(arch, str) else f"sm_{arch}"


def triton_target(arch: int | str) -> Any:
    """Return the target in Triton's type."""
    from triton.backends.compiler import GPUTarget

    if isinstance(arch, int):
        return GPUTarget("cuda", arch, 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


class Driver:
    """A stand-in for a GPU's driver with which a launcher can bind arguments and options."""

    def __init__(self, arch: int | str) -> None:
        self.arch = arch

    def get_current_device(self) -> int | str:
        return self.arch  # Triton keeps what it knows by device: each architecture is one

    def get_current_stream(self, device: int | str) -> int:
        return 0

    def get_current_target(self) -> Any:
        return triton_target(self.arch)


def find_cases(package: str) -> Cases:
    """Return the cases of the functions `NAME_cases` of a package, named `NAME/case`."""
    cases: dict[str, Callable[[], object]] = {}
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        for function, list_cases in sorted(vars(importlib.import_module(f"{package}.{info.name}")).items()):
            for name, call in list_cases() if function.endswith("_cases") else ():
                full = f"{function.removesuffix('_cases')}/{name}"
                assert full not in cases, f"{full}: two cases have this name"
                cases[full] = call
    return list(cases.items())


def _chosen(function: Any, constants: dict[Any, Any]) -> dict[str, Any]:
    """Return the constants of a kernel by their names."""
    return {p.name: constants.get((p.num,)) for p in function.params if p.is_constexpr}


def record(cases: Cases, arch: int | str) -> tuple[list[Row], list[str]]:
    """Run the launchers as on a GPU of that architecture; return the distinct compilations, and what went wrong."""
    import triton

    from fastformer_kernels.host import launch

    rows: dict[str, Row] = {}
    launches: list[str] = []  # names of rows, without numbers
    faults: list[str] = []
    case = ""

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Take the place of a compilation (`triton.knobs.runtime.jit_cache_hook`): True stops it."""
        if compile["specialization_data"] in rows:
            rows[compile["specialization_data"]].cases.add(case)
            return True
        options = json.loads(compile["specialization_data"])["options"]
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        parameters = len(fn.jit_function.params)  # Triton appends an attribute where stages are changed
        attributes = {path: value for path, value in compile["configs"][0].items() if path[0] < parameters}
        job = Job(arch, fn.module, fn.name, compile["signature"], compile["constants"], attributes, options)
        chosen = _chosen(fn.jit_function, job.constants)
        chosen |= {name: options.get(name) for name in ("num_warps", "num_stages", "maxnreg")}
        configuration = " ".join(f"{name}={value}" for name, value in chosen.items() if value is not None)
        row = Row(f"{fn.module.partition('.')[2]}.{fn.name}", case, configuration, job, {case})
        if number := launches.count(row.name):  # a case may launch a kernel in several configurations
            row = row._replace(case=f"{case} ({number + 1})")
        launches.append(f"{case}{row.name[len(row.case) :]}")
        rows[compile["specialization_data"]] = row
        return True

    gpu = GPUS[arch]
    launch.assumed = launch.Device(target_of(arch), gpu.multiprocessors, gpu.shared_of_block)
    triton.runtime.driver.set_active(Driver(arch))
    triton.knobs.runtime.jit_cache_hook = hook
    for case, call in cases:
        try:
            call()
        except Exception as error:
            faults.append(f"{case} on {target_of(arch)}: the launcher raised {type(error).__name__}: {error}")
    triton.knobs.runtime.jit_cache_hook = None
    return list(rows.values()), faults


def _function(module: str, name: str) -> Any:
    """Return the kernel inside its decorators."""
    import triton

    function = getattr(importlib.import_module(module), name)
    while not isinstance(function, triton.JITFunction):
        function = function.fn
    return function


def source_of(job: Job) -> tuple[Any, Any]:
    """Return the source that Triton compiles, and its target."""
    from triton.compiler import ASTSource

    source = ASTSource(_function(job.module, job.function), job.signature, job.constants, job.attributes)
    return source, triton_target(job.arch)


@cache
def _functions() -> list[Any]:
    """Return all functions for the GPU that are imported, Triton's own too."""
    from triton.runtime.jit import JITCallable

    of_modules = [value for module in list(sys.modules.values()) for value in list(vars(module).values())]
    return [value for value in of_modules if issubclass(type(value), JITCallable)]  # without asking what a proxy is


def _code(text: str) -> str:
    """Return a function's text without comments and docstring, which change nothing in the compiled code."""
    tree = ast.parse(text)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@cache
def _code_key(module: str, function: str) -> str:
    """Return Triton's key of a function's code and of all that it calls; for a process that compiles nothing.

    Line numbers are removed. Hashes and constants of modules that Triton has cached are, too: else the key of a caller
    would depend on which keys were computed before.
    """
    for each in _functions():
        each._unsafe_update_src(_code(each.src))
        each.starting_line_number, each.used_global_vals = 0, {}
    return _function(module, function).cache_key


def fingerprint(job: Job) -> str:
    """Return the hash of what the resources depend on, see the top of this file."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import make_backend

    source, target = source_of(job)
    source.fn.hash = _code_key(job.module, job.function)
    backend = make_backend(target)
    options = backend.parse_options(dict(job.options))
    settings = sorted(get_cache_invalidating_env_vars().items())
    file = Path(reader.__file__)
    reading = [each.read_text() for each in (file, *sorted((file.parent / "checks").glob("*.py")))]
    facts = (triton.__version__, source.hash(), backend.hash(), options.hash(), settings, reading)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def read_amd(compiled: Any) -> Resources:
    """Return what a kernel takes on an AMD GPU: registers, scratch memory (spilled registers) and LDS.

    Triton's wheel links the code object: neither ROCm nor a GPU is needed. Nothing has run on an AMD GPU.
    """
    facts = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"]))
    registers, scratch = int(facts["vgpr_count"]), int(facts["private_segment_fixed_size"])
    return Resources(registers, scratch, compiled.metadata.shared, 1, 0, False, 0, 0)


def compile_job(job: Job) -> Resources:
    """Compile and read the result; raises what Triton raises."""
    import triton

    from fastformer_kernels.host.fences import change_stages

    source, target = source_of(job)
    if job.options.get("ptx_options"):  # the mark of kernels that get fences
        triton.knobs.runtime.add_stages_inspection_hook = change_stages
    compiled = triton.compile(source, target=target, options=job.options)
    if isinstance(job.arch, str):
        return read_amd(compiled)
    return read(compiled, job.arch, tile_of(job.function, _chosen(source.fn, job.constants)))


def end_with_parent() -> None:
    """End this process when its parent does, also if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def compile_all(rows: list[Row], processes: int) -> Iterator[tuple[Row, Resources | str]]:
    """Compile every row; yield in their order the resources of each, or the reason why there are none."""
    own = threading.local()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton"])  # else each process imports them

    def compile_row(row: Row) -> Resources | str:
        if getattr(own, "pool", None) is None:
            # One process to a thread: if the compiler crashes, that is this row's result, and no other row's.
            own.pool = pools.enter_context(ProcessPoolExecutor(1, context, end_with_parent))
        try:
            return own.pool.submit(compile_job, row.job).result()
        except BrokenProcessPool:
            own.pool = None
            return "the compiler crashed"
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {' '.join(lines[-1].split())[:300]}"

    with ExitStack() as pools, ThreadPoolExecutor(processes) as threads:
        yield from zip(rows, threads.map(compile_row, rows), strict=True)
