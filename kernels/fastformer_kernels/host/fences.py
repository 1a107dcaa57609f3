"""Fences that Triton 3.6 leaves out of kernels for sm_90, added to the PTX of fastformer's kernels.

A wgmma reads shared memory through the async proxy, and PTX requires a `fence.proxy.async` after cp.async wrote there.
Triton 3.6 emits none there; Triton 3.7 does. The environment variable `FASTFORMER_FENCES=0` leaves them out, to measure
their effect.
"""

import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver

ADDED = triton.__version__.startswith("3.6.") and os.environ.get("FASTFORMER_FENCES") != "0"
# The option of kernels that get fences, which is ptxas's default anyway. It keeps them apart in Triton's cache, whose
# keys do not depend on the hook.
_MARK = "-O3"


def add_fences(ptx: str) -> str:
    """Return the PTX with a fence after each wait for copies, if it has a wgmma."""
    if "wgmma.mma_async" not in ptx:
        return ptx
    return re.sub(r"(\bcp\.async\.wait_(?:group\s+\d+|all)\s*;)", r"\1\n\tfence.proxy.async.shared::cta;", ptx)


def _change_stages(_: Any, stages: dict[str, Callable[..., Any]], options: Any, *__: Any) -> None:
    """Add the fences to the result of the PTX stage; a hook of Triton's compiler."""
    if getattr(options, "ptx_options", None) == _MARK:
        make_ptx = stages["ptx"]
        stages["ptx"] = lambda *arguments: add_fences(make_ptx(*arguments))


if ADDED:
    knobs.runtime.add_stages_inspection_hook = _change_stages


@cache
def options_of(device: int) -> dict[str, str]:
    """Return the options of a launch on a device that needs the fences."""
    return {"ptx_options": _MARK} if driver.active.get_current_target().arch == 90 else {}
