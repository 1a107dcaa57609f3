"""Attention: over padded batches, with its weights, and within packed sequences.

`op` has the public functions and their checks, `rules` what one call says about who attends to whom, `fused` the way to
the kernels; `reference` is the specification, `packed_reference` its form for packed sequences.
"""
