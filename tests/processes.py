"""Processes of one machine for the tests of torch.distributed, started from one server that has torch imported."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

# What DistributedDataParallel imports, and takes seconds to. No module of the tests: the server does not find them.
PRELOADED = ["torch.distributed", "torch._dynamo"]


def start_processes(work: Callable[..., None], arguments: tuple[Any, ...], count: int, join: bool = True) -> Any:
    """`torch.multiprocessing.spawn`, whose processes would import everything anew each."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return torch.multiprocessing.start_processes(work, arguments, count, join, start_method="forkserver")
