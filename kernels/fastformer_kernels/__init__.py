"""Triton kernels and their launchers, nothing else: no modules, no autograd, no op registration, no environment.

A room an op, or a family of ops, of the same name as under `fastformer.functional`: kernels and, below them, the
functions that launch them on tensors. A launcher picks its tile sizes in one function whose docstring holds the
measurement behind them, and runs under its tensor's device guard. What kernels share is in `random` and `constants`,
what launchers share in `host`.

With `TRITON_INTERPRET=1`, set before this package is imported, every kernel runs on CPU tensors. Without a GPU the
launchers also accept meta tensors: nothing runs, but what would be compiled can be recorded (`benchmarks/codegen`).
"""
