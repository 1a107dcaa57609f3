"""What stands before the first layer, in one pass.

Letters: M tokens, N width, V vocabulary, P positions of the table. `stride_X_l` is how far apart the rows of X are.
"""
