"""Numbers that several kernels need."""

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction; exp takes care of subnormal numbers, which cost 3
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32: finite, so that a difference with it is never NaN
