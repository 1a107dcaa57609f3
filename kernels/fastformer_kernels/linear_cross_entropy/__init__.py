"""Loss and gradients of a chunk of logits.

Letters: M rows, V vocabulary. `stride_logits_m` is how far apart the rows of a chunk are: V, padded to a whole vector.
"""
