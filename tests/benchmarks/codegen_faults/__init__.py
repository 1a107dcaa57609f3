"""Kernels with one fault each, and their cases for `benchmarks.codegen --cases codegen_faults`."""
