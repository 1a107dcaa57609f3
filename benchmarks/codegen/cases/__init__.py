"""Every configuration that the launchers can choose, for `python -m benchmarks.codegen`.

A function NAME_cases() yields pairs: the name of a configuration, which becomes NAME/configuration, and a function
without arguments that calls launchers on meta tensors such that they choose it.
"""
