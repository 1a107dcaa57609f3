"""Positions as rotations of queries and keys."""
