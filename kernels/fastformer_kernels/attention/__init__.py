"""Attention: a kernel a file, `problem` for what their launchers share, `tiles` for what the kernels share.

Letters: B batch, H query heads, T queries, S keys, K head size of queries and keys, V that of values, R rows of a tile
of decoding (queries of all heads of a key head), D distances of a tile of their sums; q queries, k keys, v values.

`X_ptr` is where tensor X begins, `stride_X_l` how far apart its neighbours of letter l are: in elements for masks and
for the log-sum-exp `lse`, in units of ALIGN elements for tensors of heads (`problem.views`). A gradient is called as
what it is the gradient of, with a d: dout, dq, dk, dv, dmask, dbias, dweights. delta lies as lse does.
"""
