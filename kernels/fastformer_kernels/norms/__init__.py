"""The norms over rows, a file each. `layer_norm` has the tiles, `rows` and `long_rows` what kernels share.

Letters: M rows, N row length, P programs whose partial sums are added at a time; x input, y output, s the sum of x and
the residual. `stride_X_m` is how far apart the rows of X are, in units of ALIGN elements (`layer_norm.row_strides`).
"""
