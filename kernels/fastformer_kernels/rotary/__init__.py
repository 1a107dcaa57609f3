"""Rotary position embeddings, in one pass, and the same pass with the negative angle as the way back.

Letters: M tokens, of which T follow each other in memory at one distance; H heads, K head size, R the first numbers of
a head that are turned, P positions of the tables; B what x has before T. `stride_X_l` is how far apart those of X are.
"""
