"""Measure what calls cost the host, on a machine without a GPU: `python -m benchmarks.host`."""
