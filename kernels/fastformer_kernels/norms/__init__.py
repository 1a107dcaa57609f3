"""The norms over rows, one per file. `layer_norm` has the tile sizes, `rows` and `long_rows` have shared kernels.

Letters: M rows, N row length, P programs whose partial sums are added at a time; x input, y output, s the sum of x and
the residual. `stride_X_m` is the stride of the rows of X, in units of ALIGN elements (`layer_norm.row_strides`).
"""
