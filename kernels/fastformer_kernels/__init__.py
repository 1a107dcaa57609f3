"""Triton kernels and their launchers: no modules, no autograd, no op registration.

One package per op or family of ops, with the same name as in `fastformer.functional`. A launcher is a function of
tensors: it chooses tile sizes, allocates the results, and launches its kernels under the device guard of a tensor.
Functions or tables, with the measurements behind them, choose the tile sizes. Kernels share `random`, `sums` and
`constants`, launchers share `host`.

With `TRITON_INTERPRET=1`, set before this package is imported, every kernel runs on CPU tensors. Without a GPU the
launchers also accept meta tensors: nothing runs, but compilations can be recorded (`benchmarks/codegen`).
"""
