"""Compile the kernels without a GPU, and check the result: `python -m benchmarks.codegen`."""
