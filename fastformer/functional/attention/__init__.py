"""Attention: over padded batches, with its weights, and within packed sequences."""
