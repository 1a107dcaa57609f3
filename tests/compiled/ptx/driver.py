"""A driver for Triton whose launches execute the PTX, on CPU tensors that stand for a GPU's.

The launchers, plans and autograd Functions run as they are. ptxas is left out: the PTX is what is loaded, and what
Triton keeps on disk, so its cache is in a folder of its own, beside the other one.
"""

import hashlib
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.host.null_driver import NullDriver, Utilities, stand_in
from tests.compiled.ptx import text
from tests.compiled.ptx.global_memory import Allocation
from tests.compiled.ptx.machine import Options, launch
from tests.compiled.ptx.program import Program

# Kernels that touch the padding of the rows of a view on purpose, within its storage.
_WHOLE_STORAGE = ("cross_entropy",)


class Session:
    """What is checked, what was launched, and a hook on the PTX."""

    def __init__(self) -> None:
        self.arch = 0  # 0: nothing is compiled
        self.options = Options(races_shared=True, races_global=True)
        self.launches: Counter[str] = Counter()  # by kernel
        self.seconds = 0.0
        self.edit: Callable[[str, str], str] | None = None  # (kernel, PTX) -> PTX, a deliberate fault
        self.programs: dict[tuple[str, int], Program] = {}

    def program(self, function: "Function") -> Program:
        ptx = self.edit(function.name, function.ptx) if self.edit else function.ptx
        key = (hashlib.sha256(ptx.encode()).hexdigest(), function.shared)
        if key not in self.programs:
            self.programs[key] = Program(text.read(ptx, function.name), function.shared)
        return self.programs[key]

    def summary(self) -> str:
        launches, kernels = sum(self.launches.values()), len(self.launches)
        return f"sm_{self.arch}: {launches} launches of {kernels} kernels, {self.seconds:.0f} s in them"


session = Session()


class Function:
    """A loaded kernel."""

    def __init__(self, name: str, ptx: str, shared: int) -> None:
        self.name, self.ptx, self.shared = name, ptx, shared


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for v in value:
            yield from _flat(v)
    else:
        yield value


def bits(value: Any, kind: str) -> int:
    """The bits of an argument, as its type in Triton's signature wants them."""
    if kind.startswith("*"):
        return 0 if value is None else int(value.data_ptr())
    if kind == "fp32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if kind == "fp64":
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    return int(value) & ((1 << max(8, int(kind.lstrip("iu")))) - 1)


def allocations_of(tensors: list[torch.Tensor], exact: bool) -> list[Allocation]:
    """The storages of the tensors, and if `exact` which of their bytes the tensors cover."""
    actual: dict[int, Allocation] = {}
    for x in tensors:
        storage = x.untyped_storage()
        if storage.nbytes() == 0:
            continue
        a = actual.get(storage.data_ptr())
        if a is None:
            a = actual[storage.data_ptr()] = Allocation(
                storage.data_ptr(), storage.nbytes(), f"{tuple(x.shape)} {x.dtype}"
            )
            if exact:
                a.allowed = np.zeros(a.length, np.uint8)
        if exact and x.numel():
            size, first = x.element_size(), a.start - a.base
            marks = torch.from_numpy(a.allowed[first : first + storage.nbytes()])
            shape, strides = (*x.shape, size), (*(s * size for s in x.stride()), 1)
            torch.as_strided(marks, shape, strides, x.storage_offset() * size).fill_(1)
    return list(actual.values())


class _Launcher:
    """In place of Triton's C function."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature = tuple(source.signature.values())

    def __call__(self, x: int, y: int, z: int, stream: int, function: Function, *others: Any) -> None:
        """Run a grid. others: packed and other metadata, hooks, and the arguments of the kernel."""
        args = others[4:]
        if x * y * z == 0:
            return
        program = session.program(function)
        given = [(v, k) for v, k in zip(_flat(args), _flat(self.signature), strict=True) if k != "constexpr"]
        values = [bits(v, k) for v, k in given]
        values += [0] * (len(program.kernel.params) - len(values))  # scratch and profiler memory, which is not used
        tensors = [v for v, _ in given if isinstance(v, torch.Tensor)]
        allocations = allocations_of(tensors, not function.name.startswith(_WHOLE_STORAGE))
        start = time.perf_counter()
        launch(program, (x, y, z), values, allocations, session.options)
        session.launches[function.name] += 1
        session.seconds += time.perf_counter() - start


class _Utilities(Utilities):
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        function = Function(name, kernel.decode() if isinstance(kernel, bytes) else kernel, shared)
        return function, function, 32, 0, 1024


class PtxDriver(NullDriver):
    launcher_cls = _Launcher

    def __init__(self, arch: int) -> None:
        super().__init__(arch)
        self.utils = _Utilities(arch)


def _without_ptxas() -> None:
    """Have Triton end its compilations with the PTX."""
    from triton.backends.nvidia.compiler import CUDABackend

    begin, add_stages = CUDABackend.__init__, CUDABackend.add_stages

    def begin_with_ptx(self: Any, target: Any) -> None:
        begin(self, target)
        self.binary_ext = "ptx"

    def add_stages_to_ptx(self: Any, stages: dict[str, Any], *args: Any) -> None:
        add_stages(self, stages, *args)
        stages.pop("cubin", None)

    CUDABackend.__init__, CUDABackend.add_stages = begin_with_ptx, add_stages_to_ptx


def install(arch: int) -> Session:
    """Compile all kernels for sm_{arch} from here on, and execute them; once a process.

    Raises:
        RuntimeError: Triton's interpreter is on, or another architecture is installed.
    """
    from triton import knobs

    if session.arch:
        raise RuntimeError(f"sm_{session.arch} is installed")
    os.environ["TRITON_CACHE_DIR"] = f"{knobs.cache.dir.rstrip('/')}-ptx"
    stand_in(PtxDriver(arch))
    _without_ptxas()
    session.arch = arch
    return session
