"""What the kernels compile to, without a GPU: `python -m benchmarks.codegen`."""
