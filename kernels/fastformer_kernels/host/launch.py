"""Host code of all launchers: the launch itself, the device guard, and properties of the device."""

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

from fastformer_kernels.host import fences
from fastformer_kernels.host.architecture import WITHOUT_TF32, architecture_of, target_of

# Fused multiply-add, which Triton 3.10 turns off unless requested; every version from 3.6 on takes the option.
_ENABLE_FP_FUSION = True
# Versions whose argument binder `launch` calls directly; tests/kernels/test_plan.py checks the installed version.
_BINDS = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
_LEVELS = 1 << 16  # dropout probabilities are multiples of 1 / _LEVELS
_compiled: dict[tuple[Any, ...], Any] = {}
_NOTHING = nullcontext()


class Launch(NamedTuple):
    """One launch of a kernel."""

    compiled: Any  # None if it cannot be repeated
    grid: tuple[int, int, int]
    values: list[Any]  # of all parameters of the kernel, in order


class LaunchRecord:
    """A record of one call of a launcher: launches, allocated tensors, and (view, tensor) pairs of the same address."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.allocated: list[Tensor] = []
        self.aliases: list[tuple[Tensor, Tensor]] = []


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.record: LaunchRecord | None = None
        self.only_compiles = False


_thread = _ThreadState()


class Device(NamedTuple):
    """Properties of a GPU that tile sizes and grids depend on."""

    target: str  # of compilation, such as "sm_90" or "gfx942"
    multiprocessors: int
    shared_memory: int  # bytes that one block can use
    cache: int = 50 << 20  # bytes of L2

    @property
    def architecture(self) -> str:
        """The class of GPUs that this GPU belongs to."""
        architecture = architecture_of(self.target)
        assert architecture is not None, f"no kernel is known to run on {self.target}"
        return architecture

    @property
    def is_amd(self) -> bool:
        """Whether Triton compiles for this GPU with AMD's backend."""
        return self.target.startswith("gfx")


# For the interpreter and meta tensors: an H200; `benchmarks.codegen` sets other GPUs here.
assumed = Device("sm_90", 132, 227 << 10)


@cache
def _properties(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    is_amd = torch.version.hip is not None
    shared = properties.shared_memory_per_block if is_amd else properties.shared_memory_per_block_optin
    return Device(target_of(index), properties.multi_processor_count, shared, properties.L2_cache_size)


def device_of(x: Tensor) -> Device:
    """Return the properties of the GPU that `x` is on."""
    return _properties(x.get_device()) if x.is_cuda else assumed


@cache
def _devices() -> int:
    return torch.cuda.device_count()


def guard(x: Tensor) -> Any:
    """Make the device of `x` the current one inside a `with` block; does nothing if there is only one GPU."""
    return torch.cuda.device_of(x) if _devices() > 1 else _NOTHING


def precision(x: Tensor) -> str:
    """Return the input precision of `tl.dot` for tensors like `x`: the precision of torch's own matrix products.

    Tensors of 16 bits have one precision only. On some GPUs fp32 is always exact (`architecture.WITHOUT_TF32`).
    """
    # torch.backends.cuda.matmul.fp32_precision calls this, in 2 us more
    tf32 = x.dtype == torch.float32 and torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    return "tf32" if tf32 and device_of(x).architecture not in WITHOUT_TF32 else "ieee"


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. `triton.cdiv` takes 5 us of the host, half as much as a launch."""
    return -(-a // b)


def power_of_two(n: int, at_least: int = 1) -> int:
    """Return the smallest power of two that is not below `n` or `at_least`."""
    return max(1 << max(n - 1, 0).bit_length(), at_least)


def threshold_and_scale(p: float) -> tuple[int, float]:
    """Return threshold and scale of a dropout probability: random numbers below the threshold drop their element."""
    if p >= 1.0:
        return _LEVELS, 0.0
    threshold = min(round(p * _LEVELS), _LEVELS - 1)
    return threshold, _LEVELS / (_LEVELS - threshold)


def inner_contiguous(x: Tensor) -> Tensor:
    """Return `x`, copied only if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def kernel(*fixed: str, anywhere: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return `triton.jit` for a kernel that is compiled once for its constants, for all batches.

    By default Triton compiles a kernel again if an integer becomes 1 or a multiple of 16, or stops being one, and if an
    address becomes a multiple of 16 bytes, or stops being one. That takes seconds at the first batch of such a length,
    perhaps in the middle of training. So kernels are specialised for the named integers only.

    Args:
        fixed: integers that depend on the model, not on the batch.
        anywhere: pointers that may have any alignment, because the kernel reads single numbers.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        arguments = [p for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
        sizes = [p.name for p in arguments if not p.name.endswith("_ptr") and p.name not in fixed]
        return triton.jit(function, do_not_specialize=sizes, do_not_specialize_on_alignment=[*anywhere])

    return decorate


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Run `kernel[grid](*args, **options)` with fused multiply-add; return the compiled kernel.

    Callers group long lists of arguments in the kernel's order: `tensors`, `strides`, `sizes`, `scalars`, and
    `constants`; the kernel is compiled for the constants and the tile.

    Triton binds the arguments, which gives their specialisation. Then it formats all options as text to look up the
    compiled kernel, and compares every global constant of the kernel with its former value. `launch` instead looks
    compiled kernels up by kernel, device, specialisation and options; fastformer's constants do not change. One core,
    in microseconds: `_attention` 28 -> 23, `_attention_queries` 44 -> 26, layer norm 10 -> 8.
    """
    options["enable_fp_fusion"] = _ENABLE_FP_FUSION
    record, only_compiles = _thread.record, _thread.only_compiles
    is_compiled = isinstance(kernel, triton.JITFunction)  # the interpreter has another class
    if fences.ADDED and is_compiled:
        options |= fences.options_of(driver.active.get_current_device())
    if not _BINDS or only_compiles or not is_compiled:
        if record is not None:
            record.launches.append(Launch(None, (*grid, 1, 1)[:3], []))
        return kernel.run(*args, grid=grid, warmup=only_compiles, **options)
    device = driver.active.get_current_device()
    bound, specialization, bound_options = kernel.device_caches[device][-1](*args, **options)
    key = (kernel.fn, device, *specialization, *bound_options.items())
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel[grid](*args, **options)
        if compiled is not None:  # a hook may stop the compilation
            _compiled[key] = compiled
    else:
        _start(compiled, (*grid, 1, 1)[:3], driver.active.get_current_stream(device), bound.values())
    if record is not None:
        record.launches.append(Launch(compiled, (*grid, 1, 1)[:3], list(bound.values())))
    return compiled


def _start(compiled: Any, grid: tuple[int, int, int], stream: int, values: Iterable[Any]) -> None:
    """Launch a compiled kernel."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(before, "calls", before) or getattr(after, "calls", after):
        compiled[grid](*values)  # calls the launch hooks of profilers
    else:
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def repeat(launches: Iterable[tuple[Launch, list[tuple[int, int]]]], slots: list[Any]) -> None:
    """Repeat launches whose values at (index, slot) are those of `slots`."""
    device = driver.active.get_current_device()
    stream = driver.active.get_current_stream(device)
    for (compiled, grid, values), places in launches:
        values = values.copy()
        for place, slot in places:
            values[place] = slots[slot]
        _start(compiled, grid, stream, values)


@contextmanager
def record_launches() -> Iterator[LaunchRecord]:
    """Record launches, allocations and views of this thread inside the `with` block."""
    before, _thread.record = _thread.record, LaunchRecord()
    try:
        yield _thread.record
    finally:
        _thread.record = before


@contextmanager
def only_compiled() -> Iterator[None]:
    """Compile kernels of this thread inside the `with` block and do not start them; their results are zeros."""
    _thread.only_compiles = True
    try:
        yield
    finally:
        _thread.only_compiles = False


def recorded(x: Tensor) -> Tensor:
    """Record a tensor that a launcher has allocated and not filled, so that a plan can allocate it; return the tensor.

    Only launches may write to it. A launcher that uses another tensor of its own has no plan.
    """
    if _thread.record is not None:
        _thread.record.allocated.append(x)
    return x.zero_() if _thread.only_compiles else x


def as_bytes(x: Tensor) -> Tensor:
    """View bool as uint8, which kernels can load."""
    view = x.view(torch.uint8)
    if _thread.record is not None:
        _thread.record.aliases.append((view, x))  # a launch takes the address alone
    return view
