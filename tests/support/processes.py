"""Processes of one machine for the tests of torch.distributed, started from one server that has torch imported.

And whether a process that a test found out about is gone.
"""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing

# What DistributedDataParallel imports, and takes seconds to. No module of the tests: the server does not find them.
PRELOADED = ["torch.distributed", "torch._dynamo"]


def start_processes(work: Callable[..., None], arguments: tuple[Any, ...], count: int, join: bool = True) -> Any:
    """`torch.multiprocessing.spawn`, whose processes would import everything anew each."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return torch.multiprocessing.start_processes(work, arguments, count, join, start_method="forkserver")


def ends(pid: int, seconds: float = 2.0) -> bool:
    """Whether a process that is not ours to wait for ends within so many seconds; a zombie has."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
