"""Embedding of tokens and positions with dropout, in one pass.

Letters: M tokens, N width, V vocabulary, P positions of the table. `stride_X_l` is the stride of the rows of X. In
backward `words` are the ids in ascending order, and `tokens` the indices of their tokens.
"""
