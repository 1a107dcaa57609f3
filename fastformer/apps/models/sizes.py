"""How large a model is, counted from its settings before a tensor of it is made.

Settings may be a typing error or a stranger's. torch answers sizes near 2^63 with an overflow, and those a little below
by filling the memory.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

LARGEST = 2**31 - 1  # of one size: what kernels count to
_ROOT = Path("/")
MOST_LAYERS = 10_000  # of one stack; each takes a millisecond and tens of kilobytes to make, however narrow it is


def describe_size(network: Callable[[Any], nn.Module], config: Any) -> str:
    """Distinct parameters and their bytes in words, of the model that is made of a configuration."""
    with torch.device("meta"):
        parameters = list(network(config).parameters())
    count = sum(p.numel() for p in parameters)
    size = sum(p.numel() * p.element_size() for p in parameters)
    return f"{count:,} parameters, {size / 2**20:.1f} MiB"


def check_memory(settings: Any) -> None:
    """Refuse a model that this machine cannot hold in fp32.

    Args:
        settings: of a model, with `matrix_numbers`.

    Raises:
        ValueError: naming what it takes and what there is.
    """
    needed, there = 4 * settings.matrix_numbers, _memory()
    if there is not None and needed > there:
        raise ValueError(
            f"a model of these sizes has at least {settings.matrix_numbers:,} parameters, {needed / 2**30:,.1f} GiB in "
            f"fp32, but this machine has {there / 2**30:,.1f} GiB: lower d_model, feed_forward, the layers or the "
            "vocabulary"
        )


def _memory() -> int | None:
    """Bytes that this process may ever have, swap left out; None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [] if limit == resource.RLIM_INFINITY else [limit]
    return min([physical, *limits, *_group_limits(_ROOT)])


def _group_limits(root: Path) -> Iterator[int]:
    """Bytes that Linux's control groups leave to this process, its own (a container's, a job's) and those above it.

    Of version 2, and of the memory controller of version 1, where they are mounted as usual. In a container the groups
    may have the names that they bear outside: what is not there by such a name is passed over, up to the root.
    """
    groups = ""
    with suppress(OSError, UnicodeDecodeError):
        groups = (root / "proc/self/cgroup").read_text()
    for line in groups.splitlines():
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        own = mounted / group.lstrip("/")
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError):  # there is none; "max"
                yield int((folder / ("memory.limit_in_bytes" if controllers else "memory.max")).read_text())
            if folder == mounted:
                break
