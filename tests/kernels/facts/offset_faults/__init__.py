"""Kernels with and without an offset of 32 bits, and their cases for `kernel_facts.py`."""
