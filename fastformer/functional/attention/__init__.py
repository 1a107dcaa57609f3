"""Attention: over padded batches, with its weights, and within packed sequences.

`op` has the public functions and their checks, `rules` what one call says about who attends to whom, `fused` the way to
the kernels; `reference` is the specification, `query_blocks` its form for long sequences, `packed_reference` that for
packed ones.
"""
