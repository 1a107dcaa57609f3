"""Embedding of tokens and positions, with dropout."""
