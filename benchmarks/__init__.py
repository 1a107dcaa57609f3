"""How fast and how small, against what one would use instead; `pytest benchmarks --benchmark-only` prints it."""
