"""A kernel that writes down where its programs are placed; a module of its own, as Triton reads a kernel's file."""

import triton
import triton.language as tl

from fastformer_kernels.attention.scores import place


@triton.jit
def places_kernel(found_ptr, tiles, together):
    """Store (rank, head) of each program, int32 `[programs, 2]`."""
    rank, head = place(tiles, together)
    tl.store(found_ptr + 2 * tl.program_id(0), rank)
    tl.store(found_ptr + 2 * tl.program_id(0) + 1, head)
