"""Rotary position embeddings in one pass; backward is the same pass with the negative angle.

Letters: M tokens, of which T have one stride in memory; H heads, K head size, R the first numbers of a head that are
rotated, P positions of the tables; B the dimension of x before T. `stride_X_l` is the stride of X along letter l.
"""
