"""How fast and how small, against what one would use instead; `pytest benchmarks --benchmark-only` prints it.

`bench_*` hold the cases: a file an op, a model or a question. They stand on `competitors`, `comparisons` and `harness`
(clock, floors of the machine, a race behind a check of the results, records). `codegen` counts what kernels compile to;
`report`, `tuning`, `host`, `recipes` and `lane` are commands: `python -m benchmarks.report`. A package imports only
from packages before it in this order.

On a GPU everything runs on one stream that is not the default one, so that a backward alone can be captured too, and
four flushes of the L2 cache before each call give the host time to queue it (not measured on a GPU). Where padding
stands on the right, SDPA is timed with `is_causal` alone as well, which is right at all real positions, because it is
the strongest baseline.
"""
