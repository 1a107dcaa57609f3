"""The public ops.

Every op checks its arguments, then runs its fused kernel or the reference: `auto` takes the kernel where it applies,
`triton` raises with the reason where it does not. `explain` returns the implementation of each op, and the reason.
"""

# An op hides the package of its name: `functional.attention` is the function. All packages are imported here, because a
# later import would replace the function by the package.

from fastformer.functional.attention.op import attention, attention_with_weights, packed_attention
from fastformer.functional.choice import OPS, check_backend, explain
from fastformer.functional.dropout import dropout
from fastformer.functional.embedding.op import embedding
from fastformer.functional.feed_forward.op import feed_forward
from fastformer.functional.linear_cross_entropy.op import linear_cross_entropy
from fastformer.functional.norms.op import dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm
from fastformer.functional.rotary.op import rotary

__all__ = [
    "OPS",
    "attention",
    "attention_with_weights",
    "check_backend",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "embedding",
    "explain",
    "feed_forward",
    "layer_norm",
    "linear_cross_entropy",
    "packed_attention",
    "rms_norm",
    "rotary",
]
