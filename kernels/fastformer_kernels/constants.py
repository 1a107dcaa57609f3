"""Numbers that several kernels need."""

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction; exp takes four more, three for subnormal numbers
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32: finite, so that a difference with it is never NaN
