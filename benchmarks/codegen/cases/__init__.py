"""Every configuration that the launchers can choose, one file a file of kernels, for `python -m benchmarks.codegen`.

A module has `cases()`, which yields pairs: the name of a configuration, and a function without arguments that calls
launchers on meta tensors such that they choose it.
"""
