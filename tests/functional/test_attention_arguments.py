"""What the ops of attention refuse, and with which message."""

import math
import re

import pytest
import torch

from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.packing import Layout

INF = math.inf
q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
SHARED = [
    ({"alignment": "left"}, ValueError, "alignment must be one of top_left, bottom_right, not 'left'"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, not 1.5"),
    ({"window": 3}, TypeError, "window must be a tuple (left, right), not int"),
    ({"window": (1, 2, 3)}, ValueError, "window must be a tuple (left, right), not of 3 elements"),
    ({"window": (1.0, None)}, TypeError, "window must hold integers or None, not 1.0"),
    ({"window": (None, True)}, TypeError, "window must hold integers or None, not True"),
    ({"window": (0, -1)}, ValueError, "window must not hold negative numbers: -1"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive and finite, not 0.0"),
    ({"softcap": INF}, ValueError, "softcap must be positive and finite, not inf"),
    ({"softcap": True}, TypeError, "softcap must be a number, not bool"),
    ({"softcap": "1"}, TypeError, "softcap must be a number, not str"),
    ({"softcap": 5e-324}, ValueError, "softcap must lie between 1e-30 and 1e+30"),
    ({"distance_bias": torch.zeros(4, 9).int()}, TypeError, "distance_bias must be floating point, not torch.int32"),
    ({"distance_bias": torch.zeros(2, 9)}, ValueError, "distance_bias must be of shape [4, 2 * P - 1], not [2, 9]"),
    ({"distance_bias": torch.zeros(4, 10)}, ValueError, "distance_bias must be of shape [4, 2 * P - 1], not [4, 10]"),
    ({"distance_bias": torch.zeros(4, 7)}, ValueError, "distance_bias must be of at least 5 positions"),
    ({"distance_bias": torch.zeros(4, 9).tolist()}, TypeError, "distance_bias must be a Tensor, not list"),
    ({"distance_bias": torch.zeros(4, 9, device="meta")}, ValueError, "distance_bias is on meta, q on cpu"),
    ({"sinks": torch.zeros(4).bool()}, TypeError, "sinks must be floating point, not torch.bool"),
    ({"sinks": torch.zeros(2)}, ValueError, "sinks must be of shape [4], not [2]"),
    ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks is on meta, q on cpu"),
]
PADDED = [
    ({"q": q[0]}, ValueError, "q must be of shape [batch, heads, length, head size], not [4, 3, 8]"),
    ({"k": k[:1]}, ValueError, "q, k and v must have the same batch: 2, 1, 2"),
    ({"v": k[:, :, :4]}, ValueError, "k and v must have the same length, not 5 and 4"),
    ({"v": k[:, :1]}, ValueError, "k and v must have the same number of heads, not 2 and 1"),
    ({"k": k[..., :4]}, ValueError, "q and k must have the same head size, not 8 and 4"),
    ({"q": q[:, :3]}, ValueError, "the heads of q (3) must be a multiple of those of k (2)"),
    ({"k": k[:, :0], "v": k[:, :0]}, ValueError, "must be a multiple of those of k (0)"),
    ({"mask": torch.zeros(5, 3)}, ValueError, "mask must be broadcastable to [2, 4, 3, 5], not of shape [5, 3]"),
    ({"mask": torch.zeros(3, 5).int()}, TypeError, "mask must be bool or floating point, not torch.int32"),
    ({"key_mask": torch.zeros(2, 5)}, TypeError, "key_mask must be bool, not torch.float32"),
    ({"key_mask": torch.zeros(2, 3).bool()}, ValueError, "key_mask must be of shape [2, 5], not [2, 3]"),
    ({"key_lengths": torch.tensor([6, 1])}, ValueError, "key_lengths must lie between 0 and the length of k, 5: 6"),
    ({"query_lengths": torch.tensor([-1, 1])}, ValueError, "query_lengths must lie between 0 and the length of q, 3"),
    ({"key_lengths": torch.tensor([1.0, 2.0])}, TypeError, "key_lengths must be integers, not torch.float32"),
    ({"key_lengths": [1, 2]}, TypeError, "key_lengths must be a Tensor, not list"),
    (
        {"key_lengths": torch.tensor([1, 2**63 + 5], dtype=torch.uint64)},
        ValueError,
        "key_lengths must lie between 0 and the length of k, 5: 9223372036854775813",
    ),
    ({"key_lengths": torch.tensor([1])}, ValueError, "key_lengths must be of shape [2], not [1]"),
]
layout, key_layout = Layout.from_lengths([3, 3]), Layout.from_lengths([5, 5])
tokens, keys = torch.zeros(6, 4, 8), torch.zeros(10, 2, 8)
PACKED = [
    ({"q": tokens[:4]}, ValueError, "q must be of shape [6, heads, head size], not [4, 4, 8]"),
    ({"k": keys[None]}, ValueError, "k must be of shape"),
    ({"layout": layout.to("meta")}, ValueError, "layout is on meta, q on cpu: all must be on one device"),
    ({"key_layout": Layout.from_lengths([10])}, ValueError, "layout has 2 sequences, key_layout 1"),
    ({"q": tokens[:, :3]}, ValueError, "the heads of q (3) must be a multiple of those of k (2)"),
    ({"k": keys[..., :4]}, ValueError, "q and k must have the same head size, not 8 and 4"),
]
GIVEN = {
    attention: {"q": q, "k": k, "v": k},
    attention_with_weights: {"q": q, "k": k, "v": k},
    packed_attention: {"q": tokens, "k": keys, "v": keys, "layout": layout, "key_layout": key_layout},
}


@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [(op, *case) for op in GIVEN for case in [*SHARED, *(PACKED if op is packed_attention else PADDED)]],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", ""),
)
def test_errors_name_the_argument(op, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        op(**GIVEN[op] | arguments)


def test_the_least_and_the_largest_softcap():
    for softcap in (1e-30, 1e30):
        assert attention(q, k, k, softcap=softcap).isfinite().all()
