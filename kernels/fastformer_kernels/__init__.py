"""Triton kernels and their launchers, nothing else: no modules, no autograd, no op registration, no environment.

One package per op or family of ops, with the same name as in `fastformer.functional`: kernels and, below them, their
launchers, functions of tensors. A launcher picks its tile sizes in one function, whose docstring holds the measurement
behind them, and runs under its tensor's device guard. `random` and `constants` are shared by kernels, `host` by
launchers.

With `TRITON_INTERPRET=1`, set before this package is imported, every kernel runs on CPU tensors. Without a GPU the
launchers also accept meta tensors: nothing runs, but compilations can be recorded (`benchmarks/codegen`).
"""
