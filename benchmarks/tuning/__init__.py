"""Each kernel's tile against its neighbours: `python -m benchmarks.tuning`."""
