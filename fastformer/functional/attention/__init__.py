"""Attention: over padded batches, with its weights, and within packed sequences.

`op` has the public functions and their checks, `rules` the options of one call, and `fused` the calls of the kernels;
`reference` is the specification, `packed_reference` its form for packed sequences.
"""
