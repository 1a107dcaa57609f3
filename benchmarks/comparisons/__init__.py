"""Whole comparisons that several benchmarks share: of two functions, of training steps."""
