"""Real trainings for several seeds under a time limit: `python -m benchmarks.recipes`."""
