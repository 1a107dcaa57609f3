"""Every configuration that the launchers can choose, a file an op or a file of kernels; for `benchmarks.codegen`.

A module has `cases()`, which yields pairs: the name of a configuration, and a function without arguments that calls
launchers on meta tensors such that they choose it.
"""
