"""Norms over the last dimensions, one per file, and the step between two sublayers: residual, dropout and norm."""
