"""Measure the host time of calls on a machine without a GPU: `python -m benchmarks.host`."""
