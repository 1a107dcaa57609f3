"""Attention: one kernel per file; `problem` is shared by launchers, `scores` by kernels; `tiles` has the tile sizes.

Letters: B batch, H query heads, T queries, S keys, K head size of queries and keys, V that of values, R rows of a tile
of decoding (queries of all heads of a key head), D distances of a tile of their sums; q queries, k keys, v values.

`X_ptr` is the address of tensor X, `stride_X_l` its stride along letter l: in elements for masks and the log-sum-exp
`lse`, in units of ALIGN elements for tensors of heads (`problem.views`). The gradient of X is named dX: dout, dq, dk,
dv, dmask, dbias, dweights. delta has the layout of lse.
"""
