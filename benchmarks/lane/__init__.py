"""Everything that waits for a GPU, in runs of minutes: `python -m benchmarks.lane`."""
