"""Processes that train one model, started by torchrun: their ranks, shares of batches and common decisions.

Every process goes through the same batches and takes its share of the sentences of each. The loss of a step is the sum
over all shares, divided by the tokens of all, so the gradient is that of one process, however unequal the shares are.
What follows from the data alone is computed everywhere and never sent; what follows from the clock, from signals or
from validation is decided by process 0 and sent to the others. `parallel.py` distributes the model itself.

Gradients go over torch's default group (NCCL between GPUs, gloo between CPUs), on which a process that does not answer
for `TIMEOUT` ends the run. Decisions go over a gloo group, which does not wait for a GPU. There, the other processes
wait as long as one of them reads data, learns a vocabulary, validates or saves.
"""

import atexit
import functools
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Between two steps, processes differ by the length of a batch and by what one of them compiles.
TIMEOUT = timedelta(seconds=60)
_PATIENCE = timedelta(days=7)
# gloo's threads release Python objects, and wait for the GIL to do so. A process that ends meanwhile is aborted by C++;
# one that ends the threads while it holds the GIL, as torch does if a model is freed last, hangs (torch 2.13).
_GRACE = 0.2  # seconds

Value = TypeVar("Value")


class ProcessError(RuntimeError):
    """Another process failed, or was not joined; `reported`: it has printed the cause itself."""

    def __init__(self, message: str, reported: bool = False) -> None:
        super().__init__(message)
        self.reported = reported


class Processes:
    """The processes that train one model: `rank` of `world`. Without arguments, it is one process alone.

    Use `Processes.current()`. All processes must call the same methods in the same order. Whether they call one must
    not depend on files, which process 0 may change before another process reads them.
    """

    def __init__(self, rank: int = 0, world: int = 1, control: Any = None) -> None:
        self.rank, self.world = rank, world
        self.control = control  # the group for decisions and for objects on the CPU

    @classmethod
    def current(cls) -> "Processes":
        """Return the processes of torch's default group; one alone if there is none.

        Raises ProcessError if torchrun started several that were not joined: each would train a model of its own.
        """
        if dist.is_available() and dist.is_initialized():
            return _joined(dist.group.WORLD) if dist.get_world_size() > 1 else cls()
        if _launched():
            raise ProcessError(
                "torchrun started several processes: train within `fastformer.apps.train.join_processes`"
            )
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this is the process that validates, writes and shows."""
        return self.rank == 0

    def on_main(self, function: Callable[[], Value]) -> Value:
        """Run a function in process 0 only, and return its result, a small value, in all processes.

        If it raises, all processes raise: the others a ProcessError.
        """
        if self.world == 1:
            return function()
        answer: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_main:
            try:
                answer[0] = function()
            except Exception as error:
                failure, answer[1] = error, f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(answer, src=0, group=self.control)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            raise ProcessError(f"process 0 failed: {answer[1]}", reported=True)
        result: Value = answer[0]
        return result

    def agree(self, decisions: Sequence[float], stop: bool) -> tuple[list[float], bool]:
        """Return the decisions of process 0, as numbers, and whether any process was asked to stop."""
        if self.world == 1:
            return list(decisions), stop
        votes = torch.tensor([*(d if self.is_main else 0.0 for d in decisions), float(stop)], dtype=torch.float64)
        work = dist.all_reduce(votes, group=self.control, async_op=True)
        assert work is not None
        work.wait(TIMEOUT)
        *numbers, stops = votes.tolist()
        return numbers, bool(stops)

    def wait(self) -> None:
        """Wait until all processes have called this, however long one of them reads its data."""
        if self.world > 1:
            dist.barrier(group=self.control)

    def sum(self, x: Tensor) -> None:
        """Sum a tensor over all processes, in place; does not wait for a GPU."""
        if self.world > 1:
            dist.all_reduce(x)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes in process 0, an empty list in the others."""
        if self.world == 1:
            return [value]
        values: list[Any] | None = [None] * self.world if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self.control)
        return values or []

    def share(self, batch: Any) -> tuple[Any, bool]:
        """Return this process's share of a batch, and whether it counts.

        A process without a sentence gets the share of another process, which does not count, because all processes must
        gather parameters and exchange gradients equally often. Raises TypeError if the batch cannot be shared.
        """
        if self.world == 1:
            return batch, True
        if not hasattr(batch, "share"):
            raise TypeError(
                f"batches: {type(batch).__name__} has no method share(rank, world), which {self.world} processes need"
            )
        shares = (batch.share(rank, self.world) for rank in (self.rank, *range(self.world)))
        own = next(shares)
        return (own, True) if own is not None else (next((x for x in shares if x is not None), batch), False)

    def seed(self, seed: int, step: int = 0) -> int:
        """Return the seed of this process's generators: `seed` in process 0, a different one in each other process."""
        return seed if self.is_main else int(np.random.SeedSequence((seed, self.rank, step)).generate_state(1)[0])


@functools.cache  # which keeps the groups, so that no thread of theirs is waited for
def _joined(group: Any) -> Processes:
    """Return the processes of torch's default group."""
    return Processes(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_PATIENCE))


def _launched() -> bool:
    """Return whether torchrun, or another launcher that sets its variables, started several processes."""
    return all(name in os.environ for name in ("RANK", "MASTER_ADDR")) and os.environ.get("WORLD_SIZE", "1") != "1"


def local_device(device: str) -> str:
    """Return the device of this process: under torchrun, "cuda" is the GPU of its number on this machine (LOCAL_RANK).

    Raises ValueError if one GPU was named for several processes, or there are fewer GPUs than processes.
    """
    if not _launched() or torch.device(device).type != "cuda":
        return device
    if torch.device(device).index is not None:
        raise ValueError(f"device {device!r} is one GPU, but torchrun started several processes; give device 'cuda'")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"process {index} of this machine has no own GPU: torch sees {count}; start fewer processes")
    return f"cuda:{index}"


@contextmanager
def join_processes(device: torch.device | str = "cpu") -> Iterator[Processes]:
    """Connect the processes that torchrun started, for the block; without torchrun, it is one process alone.

    device: of this process. NCCL connects GPUs, gloo CPUs.
    """
    if not _launched():
        yield Processes()
        return
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    yield Processes.current()
    # Not after an error: the others may be at any point, and the end of this process closes its connections.
    dist.destroy_process_group()
    time.sleep(_GRACE)


@contextmanager
def exit_without_shutdown() -> Iterator[None]:
    """Exit through os._exit after the block if there are several processes: gloo's threads can hang at shutdown."""
    if not _launched():
        yield
        return
    status = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def describe_process() -> str:
    """Return the name of this process for messages: empty in a process alone and in process 0."""
    rank = os.environ.get("RANK", "0") if _launched() else "0"
    return "" if rank == "0" else f"process {rank} on {socket.gethostname()}: "
