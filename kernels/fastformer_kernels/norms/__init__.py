"""The norms over rows: `norm` has formulas and launchers, `short_rows` and `long_rows` the kernels, `rows` their parts.

Letters: M rows, N row length, P programs whose partial sums are added at a time; x input, y output, s the sum of x and
the residual. `stride_X_m` is the stride of the rows of X, in units of ALIGN elements (`tiles.row_strides`).
"""
