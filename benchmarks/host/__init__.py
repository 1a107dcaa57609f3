"""What a call costs the host, on a machine without a GPU: `python -m benchmarks.host`."""
