"""Fences that Triton leaves out of kernels for sm_90 and sm_100, added to the PTX of fastformer's kernels.

A wgmma (sm_90) or tcgen05.mma (sm_100) reads shared memory through the async proxy, and PTX requires a
`fence.proxy.async` after cp.async wrote there. Triton 3.6 emits none there. Triton 3.7 and 3.8 emit it before each
wgmma, but not before each tcgen05.mma of attention's backward; Triton 3.9 does. The environment variable
`FASTFORMER_FENCES=0` leaves them out, to measure their effect.
"""

import os
import re
from functools import cache
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver

from fastformer_kernels.host.architecture import architecture_of

# The GPUs whose kernels lack fences, by version of Triton.
_LACKING = {"3.6.": ("sm_90", "sm_100"), "3.7.": ("sm_100",), "3.8.": ("sm_100",)}.get(triton.__version__[:4], ())
ADDED = bool(_LACKING) and os.environ.get("FASTFORMER_FENCES") != "0"
# The option of kernels that get fences, which is ptxas's default anyway. It keeps them apart in Triton's cache, whose
# keys do not depend on the hook.
_MARK = "-O3"


def add_fences(ptx: str) -> str:
    """Return the PTX with a fence after each wait for copies, if it has a product that reads by the async proxy."""
    if "wgmma.mma_async" not in ptx and "tcgen05.mma" not in ptx:
        return ptx
    return re.sub(r"(\bcp\.async\.wait_(?:group\s+\d+|all)\s*;)", r"\1\n\tfence.proxy.async.shared::cta;", ptx)


def change_stages(*arguments: Any) -> tuple[str, str]:
    """Add the fences to the result of the PTX stage; a hook of Triton's compiler.

    From Triton 3.7 on, it is also called without arguments, and returns what the keys of kernels get: nothing.
    """
    if arguments:
        _, stages, options, *_ = arguments
        if getattr(options, "ptx_options", None) == _MARK:
            make_ptx = stages["ptx"]
            stages["ptx"] = lambda *inputs: add_fences(make_ptx(*inputs))
    return "", ""


@cache
def options_of(device: int) -> dict[str, str]:
    """Return the options of a launch on the current device, and set the hook if the device needs the fences."""
    target = driver.active.get_current_target()
    if target.backend != "cuda" or architecture_of(f"sm_{target.arch}") not in _LACKING:
        return {}
    knobs.runtime.add_stages_inspection_hook = change_stages
    return {"ptx_options": _MARK}
