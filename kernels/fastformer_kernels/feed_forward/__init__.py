"""The activation between the two matrix products of a feed-forward layer, and its backward.

Letters: M rows, F feed-forward width, N columns and P rows of partial sums; h hidden before the activation, a after it.
"""
