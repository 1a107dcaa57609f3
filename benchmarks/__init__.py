"""Speed and memory of fastformer against competitors: `pytest benchmarks --benchmark-only`.

`bench_*` hold the cases, one file an op, a model or a question. `harness` times and records. `competitors` are the
other sides, and comparisons with them that cases share. Commands: `codegen` compiles the kernels and counts
instructions, `host` times calls without a GPU, `tuning` times tiles of attention, `recipes` trains, `lane` runs
everything that waits for a GPU, `report` writes tables and charts.

On a GPU everything runs on one stream that is not the default one, so that a backward alone can be captured, and
flushes of the L2 cache before each call give the host 1 ms to queue it; a longer call may include waiting for the host.
With padding on the right, SDPA is also timed with `is_causal` alone, which is right at all real positions: it is the
strongest baseline.
"""
