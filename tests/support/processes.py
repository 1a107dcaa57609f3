"""Processes of one machine for the tests of torch.distributed, started from one server that has torch imported."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed
import torch.multiprocessing

# What DistributedDataParallel imports, and takes seconds to. No module of the tests: the server does not find them.
PRELOADED = ["torch.distributed", "torch._dynamo"]


def start_processes(work: Callable[..., None], arguments: tuple[Any, ...], count: int, join: bool = True) -> Any:
    """Start processes that share imports, which `torch.multiprocessing.spawn` repeats for each."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return torch.multiprocessing.start_processes(work, arguments, count, join, start_method="forkserver")


def two_of_gloo(rank: int, folder: str) -> None:
    """Begin one of two processes of a group, with one thread."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def leave(rank: int, folder: str) -> None:
    """End one of several processes, with a file that says that it came so far.

    gloo's threads drop Python objects of the last backward, for which they need the GIL; torch ends the threads while
    it holds that, in destroy_process_group as well as where the model goes. Two runs never ended (torch 2.13), one of
    them behind a barrier alone; a process that leaves here drops nothing.
    """
    Path(folder, str(rank)).touch()
    torch.distributed.barrier()
    os._exit(0)


def run_two(work: Callable[..., None], folder: Path) -> None:
    """Run two processes that `leave`, and see that they did."""
    start_processes(work, (str(folder),), 2)
    assert {"0", "1"} <= {path.name for path in folder.iterdir()}


def ends(pid: int, seconds: float = 2.0) -> bool:
    """Return whether a process that is no child ends within so many seconds; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
