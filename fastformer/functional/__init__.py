"""The public ops.

Every op checks its arguments, then runs its fused kernel or the reference: `auto` takes the kernel where it applies,
`triton` raises with the reason where it does not. `explain` says which it would be, and why.
"""

# An op hides the file of its name: `functional.attention` is the function. All files are loaded here, at once, because
# loading one later would put the file in the function's place. `choice` alone decides between implementations.

from fastformer.functional.attention import attention, attention_with_weights, packed_attention
from fastformer.functional.choice import OPS, check_backend, explain
from fastformer.functional.dropout import dropout
from fastformer.functional.embedding import embedding
from fastformer.functional.feed_forward import feed_forward
from fastformer.functional.linear_cross_entropy import linear_cross_entropy
from fastformer.functional.norms import dropout_add_layer_norm, layer_norm, rms_norm

__all__ = [
    "OPS",
    "attention",
    "attention_with_weights",
    "check_backend",
    "dropout",
    "dropout_add_layer_norm",
    "embedding",
    "explain",
    "feed_forward",
    "layer_norm",
    "linear_cross_entropy",
    "packed_attention",
    "rms_norm",
]
