"""Attention as a module, with the kernels inside, against torch.nn's own.

Kernels have their own tests, option by option; modules have theirs, on the reference. Here is what lies between: that
masks, layouts and options mean the same to both, and that the gradients of all parameters come back.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastformer
from tests.support.closeness import gradients
from tests.support.fused_module import FF, B, D, H, S, T, ahead, check, padding, pairs, random, right_padding
from tests.support.fused_op import DEVICE, needs_kernels

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]

EXTRA = {"add_bias_kv": True, "add_zero_attn": True}
WIDTHS = {"kdim": 12, "vdim": 20}
# The module's settings, which of its inputs are one tensor, and the rest of its arguments.
ATTENTION = {
    "nothing but self-attention": ({}, "self", lambda: {}),
    "bool pairs of each head, bool padding, weights of each head": (
        {"batch_first": True},
        "all",
        lambda: {
            "attn_mask": pairs(B * H, T, S),
            "key_padding_mask": padding(S),
            "average_attn_weights": False,
        },
    ),
    "float pairs of each head, float padding, weights": (
        {},
        "memory",
        lambda: {"attn_mask": pairs(B * H, T, S, float_=True), "key_padding_mask": padding(S, True)},
    ),
    "causal, bool padding": (
        {},
        "self",
        lambda: {
            "attn_mask": ahead(T),
            "is_causal": True,
            "need_weights": False,
            "key_padding_mask": right_padding([3, 5], T),
        },
    ),
    "both keys, causal, weights": (EXTRA, "self", lambda: {"attn_mask": ahead(T), "is_causal": True}),
    "widths of keys and values": ({**WIDTHS, "batch_first": True}, "all", lambda: {"need_weights": False}),
    "unbatched, padding, weights of each head": (
        {"batch_first": True},
        "unbatched all",
        lambda: {"key_padding_mask": padding(S)[0], "average_attn_weights": False},
    ),
}
IN_FP16 = ("nothing but self-attention", "float pairs of each head, float padding, weights", "causal, bool padding")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in ATTENTION] + [(name, torch.float16) for name in IN_FP16],
)
def test_multihead_attention(name, dtype):
    settings, kind, make = ATTENTION[name]
    arguments = make()
    ours, torchs = (library.MultiheadAttention(D, H, **settings) for library in (fastformer, nn))

    def shape(length: int, width: int) -> tuple[int, ...]:
        if "unbatched" in kind:
            return length, width
        return (B, length, width) if ours.batch_first else (length, B, width)

    inputs, same = {"query": random(*shape(T, D))}, {}
    if "self" in kind:
        same = {"key": "query", "value": "query"}
    elif kind == "memory":
        inputs["key"], same = random(*shape(S, D)), {"value": "key"}
    else:
        inputs |= {"key": random(*shape(S, ours.kdim)), "value": random(*shape(S, ours.vdim))}
    masks = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
    rest = {key: x for key, x in arguments.items() if key not in masks}
    check(ours, torchs, dtype, {**inputs, **masks}, **same, **rest)


DROPOUT = {
    "FeedForward": lambda: (fastformer.FeedForward(D, FF, 0.1), [(B, T, D)]),
    "MultiheadAttention": lambda: (fastformer.MultiheadAttention(D, H, 0.1, batch_first=True), [(B, T, D)] * 3),
    "TransformerEncoderLayer": lambda: (
        fastformer.TransformerEncoderLayer(D, H, FF, 0.1, batch_first=True),
        [(1, T, D)],
    ),
    "TransformerDecoderLayer": lambda: (
        fastformer.TransformerDecoderLayer(D, H, FF, 0.1, batch_first=True, norm_first=True),
        [(1, T, D), (1, S, D)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_under_a_seed_and_under_checkpointing(name):
    module, shapes = DROPOUT[name]()
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    leaves = [*inputs, *module.to(DEVICE).parameters()]

    def run(*inputs: Tensor) -> Tensor:
        out = module(*inputs)
        return out if isinstance(out, Tensor) else out[0]

    with fastformer.backend("triton"):
        torch.manual_seed(1)
        out = run(*inputs)
        expected = [out, *gradients(out, leaves)]
        torch.manual_seed(1)
        again = checkpoint(run, *inputs, use_reentrant=False)
        for a, b in zip([again, *gradients(again, leaves)], expected, strict=True):
            assert torch.isfinite(a).all()
            assert torch.equal(a, b)
        with torch.no_grad():
            assert not torch.equal(run(*inputs), out)
