"""A kernel that ends the process that compiles it, as a failed assertion of the compiler does."""

import multiprocessing
import os

import torch
import triton

if multiprocessing.parent_process() is not None:
    os._exit(1)


@triton.jit
def crash_kernel(x_ptr):
    pass


def crash_cases():
    yield "crash", lambda: crash_kernel[(1,)](torch.empty(1, device="meta"))
