"""Norms over the last dimensions, and the step between two sublayers: residual, dropout and norm."""
