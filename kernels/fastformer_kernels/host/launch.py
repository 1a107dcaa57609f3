"""What every launcher needs on the host: the launch itself, the device guard, and the facts of the device."""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from fastformer_kernels.host.architecture import architecture_of

# Fused multiply-add, which Triton 3.10 turns off unless asked for; every version from 3.6 on takes the option.
_ENABLE_FP_FUSION = True
# Those whose binder `launch` calls by itself; tests/kernels/test_plan.py holds the one that is installed to it.
_BINDS = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
_LEVELS = 1 << 16  # of a probability to drop
_compiled: dict[tuple[Any, ...], Any] = {}
_NOTHING = nullcontext()


class Launch(NamedTuple):
    """A launch that happened."""

    compiled: Any  # None where it cannot be repeated
    grid: tuple[int, int, int]
    values: list[Any]  # of all parameters of the kernel, in order


class Watch:
    """What one call of a launcher did: its launches, what it allocated, and views that begin where a tensor does."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.allocated: list[Tensor] = []
        self.aliases: list[tuple[Tensor, Tensor]] = []


class _Watching(threading.local):
    def __init__(self) -> None:
        self.watch: Watch | None = None


_watching = _Watching()


class Device(NamedTuple):
    """What tile sizes and grids depend on."""

    target: str  # what kernels are compiled for, such as "sm_90" or "gfx942"
    multiprocessors: int
    shared_memory: int  # bytes that one block can get
    cache: int = 50 << 20  # bytes of L2

    @property
    def architecture(self) -> str:
        """Return the class of GPUs that this one belongs to."""
        found = architecture_of(self.target)
        assert found is not None, f"no kernel is known to run on {self.target}"
        return found

    @property
    def is_amd(self) -> bool:
        """Return whether Triton compiles for it with AMD's backend."""
        return self.target.startswith("gfx")

    @property
    def generation(self) -> int:
        """Return the generation of NVIDIA's matrix units: 8 (mma.sync), 9 (wgmma) or 10 (tcgen05); 8 for AMD's GPUs."""
        return {"sm_90": 9, "sm_100": 10}.get(self.architecture, 8)


# Where no GPU is asked: the interpreter, and meta tensors; `benchmarks.codegen` puts other GPUs here. It is an H200's.
assumed = Device("sm_90", 132, 227 << 10)


@cache
def _properties(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        target, shared = found.gcnArchName.partition(":")[0], found.shared_memory_per_block
    else:
        target, shared = f"sm_{found.major}{found.minor}", found.shared_memory_per_block_optin
    return Device(target, found.multi_processor_count, shared, found.L2_cache_size)


def device_of(x: Tensor) -> Device:
    """Return the facts of the GPU that `x` is on."""
    return _properties(x.get_device()) if x.is_cuda else assumed


@cache
def _devices() -> int:
    return torch.cuda.device_count()


def guard(x: Tensor) -> Any:
    """Make the device of `x` the current one inside a `with` block; does nothing where there is no choice."""
    return torch.cuda.device_of(x) if _devices() > 1 else _NOTHING


def precision(x: Tensor) -> str:
    """Return the input precision of `tl.dot` for tensors like `x`: that of torch's own matrix products.

    16 bits have one only, and so has fp32 on AMD's GPUs, of which one alone has tf32.
    """
    # torch.backends.cuda.matmul.fp32_precision asks this, 2 us later
    tf32 = x.dtype == torch.float32 and torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    return "tf32" if tf32 and not device_of(x).is_amd else "ieee"


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. `triton.cdiv` costs a host 5 us a call, half of a launch."""
    return -(-a // b)


def power_of_two(n: int, at_least: int = 1) -> int:
    """Return the smallest power of two that is not below `n` or `at_least`."""
    return max(1 << max(n - 1, 0).bit_length(), at_least)


def threshold_and_scale(p: float) -> tuple[int, float]:
    """Return what a dropout probability is in the kernels: numbers below the threshold drop; the rest are scaled."""
    if p >= 1.0:
        return _LEVELS, 0.0
    threshold = min(round(p * _LEVELS), _LEVELS - 1)
    return threshold, _LEVELS / (_LEVELS - threshold)


def inner_contiguous(x: Tensor) -> Tensor:
    """Return `x`, copied only if neighbours of its last dimension are not neighbours in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def kernel(*fixed: str, anywhere: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return `triton.jit` for a kernel that is compiled once for its constants, whatever the batches are.

    Triton compiles again where an integer is 1, a multiple of 16, or neither, and where an address is a multiple of 16
    bytes or not: for seconds, at the first batch of such a length, which may be in the middle of training. So here it
    looks at what is named, and at no other integer.

    Args:
        fixed: integers that the model decides on, never the batch.
        anywhere: pointers to what is looked up number by number, which may be a part of any tensor.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        given = [p for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
        sizes = [p.name for p in given if not p.name.endswith("_ptr") and p.name not in fixed]
        return triton.jit(function, do_not_specialize=sizes, do_not_specialize_on_alignment=[*anywhere])

    return decorate


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Do what `kernel[grid](*args, **options)` does, with fused multiply-add; return the compiled kernel.

    A launch is written on one line: what would not fit is grouped before it, in the kernel's order, as `tensors`,
    `strides`, `sizes`, `scalars`, and `constants`, which with the tile are what the kernel is compiled for.

    Triton binds the arguments, which says how each is specialised; then it writes all options out as text to find what
    it compiled for that, and compares every constant that the kernel takes from its module with its former value. This
    keeps what was found, by kernel, device, specialisation and options; our constants do not change. One core, in
    microseconds: `_attention` (59 arguments) 28 -> 23, `_attention_queries` (68) 44 -> 26, layer norm (14) 10 -> 8.
    """
    options["enable_fp_fusion"] = _ENABLE_FP_FUSION
    watch = _watching.watch
    if not _BINDS or not isinstance(kernel, triton.JITFunction):  # the interpreter has functions of its own
        if watch is not None:
            watch.launches.append(Launch(None, (*grid, 1, 1)[:3], []))
        return kernel[grid](*args, **options)
    device = driver.active.get_current_device()
    bound, specialization, others = kernel.device_caches[device][-1](*args, **options)
    key = (kernel.fn, device, *specialization, *others.items())
    found = _compiled.get(key)
    if found is None:
        found = kernel[grid](*args, **options)
        if found is not None:  # a hook may stop the compilation
            _compiled[key] = found
    else:
        _start(found, (*grid, 1, 1)[:3], driver.active.get_current_stream(device), bound.values())
    if watch is not None:
        watch.launches.append(Launch(found, (*grid, 1, 1)[:3], list(bound.values())))
    return found


def _start(compiled: Any, grid: tuple[int, int, int], stream: int, values: Iterable[Any]) -> None:
    """Launch what was compiled."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if any(getattr(hook, "calls", hook) for hook in hooks):
        compiled[grid](*values)  # profilers that hook launches want to be told about them
    else:
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def repeat(launched: list[Launch]) -> None:
    """Launch once more, each with its values."""
    device = driver.active.get_current_device()
    stream = driver.active.get_current_stream(device)
    for compiled, grid, values in launched:
        _start(compiled, grid, stream, values)


@contextmanager
def watched() -> Iterator[Watch]:
    """Note what this thread does inside the `with` block."""
    before, _watching.watch = _watching.watch, Watch()
    try:
        yield _watching.watch
    finally:
        _watching.watch = before


def noted(x: Tensor) -> Tensor:
    """Return x, which was just allocated and has no contents: what a plan allocates again.

    Nothing may be written into x but by launches. A tensor that was not noted ends any plan.
    """
    if _watching.watch is not None:
        _watching.watch.allocated.append(x)
    return x


def as_bytes(x: Tensor) -> Tensor:
    """View bool as uint8, which kernels can load."""
    view = x.view(torch.uint8)
    if _watching.watch is not None:
        _watching.watch.aliases.append((view, x))  # a launch takes an address, whatever the tensor's dtype
    return view
