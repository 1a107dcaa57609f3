"""Attention: one launcher per file; launchers share `problem`, kernels share `scores`; `tiles` has the tile sizes.

Letters: B batch, H query heads, T queries, S keys, K head size of queries and keys, V that of values, R rows of a tile
of decoding (queries of all heads of a key head), D distances of a tile of their sums; q queries, k keys, v values.

`X_ptr` is the address of tensor X, `stride_X_l` its stride along letter l: in units of ALIGN elements for tensors of
heads (`problem.views`), in elements for all others, such as masks and the log-sum-exp `lse`. The gradient of X is named
dX: dout, dq, dk, dv, dmask, dbias, dweights. delta has the layout of lse.
"""
