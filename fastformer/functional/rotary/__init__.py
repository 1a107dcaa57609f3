"""Rotary position embeddings of queries and keys."""
