"""Rotary position embeddings in one pass; backward is the same pass with the negative angle.

Letters: B and T dimensions of x `[B, T, H, K]`, M = B T tokens, H heads, K head size; the first R numbers of a head are
rotated; P positions of the tables. `stride_X_l` is the stride of X along letter l.
"""
