"""Loss and gradients of a chunk of logits.

Letters: M rows, V vocabulary. `stride_logits_m` is the stride of a chunk's rows: V, padded to a whole vector.
"""
