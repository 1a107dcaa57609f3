"""The norms over rows: `norm` has formulas and launchers, `short_rows` and `long_rows` the kernels.

`rows` has the device functions that kernels share, and the second kernel of backward, which adds partial sums; `tiles`
chooses grids and tiles.

Letters: M rows, N row length, P programs whose partial sums are added at a time; x input, y output, s the sum of the
residual and dropout(x). `stride_X_m` is the stride of the rows of X, in units of ALIGN elements (`tiles.row_strides`).
"""
