"""Norms, feed-forward, loss and attention as modules, with the kernels inside, against torch.nn's own.

Kernels have their own tests, option by option; modules have theirs, on the reference. Here is what lies between: that
masks, layouts and options mean the same to both, and that the gradients of all parameters come back.
"""

import pytest
import torch
import torch.nn.functional as F
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

V = 11
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "settings"),
    [((T, D), {}), ((B, 3, 4), {"bias": False, "eps": 0.1}), ((T, D), {"elementwise_affine": False})],
    ids=str,
)
def test_layer_norm(shape, settings, dtype):
    made = [library.LayerNorm(shape[1:], **settings) for library in (fastformer, nn)]
    check(*made, dtype, {"input": random(*shape)})


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(("shape", "settings"), [((B, T, D), {}), ((B, 3, 4), {"eps": 0.1})], ids=str)
def test_rms_norm(shape, settings, dtype):
    made = [library.RMSNorm(shape[-1:], **settings) for library in (fastformer, nn)]
    check(*made, dtype, {"x": random(*shape)})


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "reglu": lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward(activation, bias, recompute, dtype):
    ours = fastformer.FeedForward(D, FF, 0.0, activation, bias, recompute=recompute)

    def torchs(held: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = ACTIVATIONS[activation](F.linear(x, held["linear1.weight"], held.get("linear1.bias")))
        return F.linear(hidden, held["linear2.weight"], held.get("linear2.bias"))

    check(ours, torchs, dtype, {"x": random(B, T, D)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_cross_entropy(bias, reduction, dtype):
    ours = fastformer.LinearCrossEntropy(D, V, bias, 3, 0.1, reduction)
    target = torch.randint(V, (B, T))
    target[0, 1:3] = 3

    def torchs(held: dict[str, Tensor], input: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(input, held["weight"], held.get("bias")).flatten(0, 1)
        # The loss is fp32 whatever the logits are, fp64 apart.
        logits = logits.float() if logits.dtype == torch.float16 else logits
        loss = F.cross_entropy(logits, target.flatten(), ignore_index=3, label_smoothing=0.1, reduction=reduction)
        return loss.view(target.shape) if reduction == "none" else loss

    check(ours, torchs, dtype, {"input": random(B, T, D), "target": target})


EXTRA = {"add_bias_kv": True, "add_zero_attn": True}
WIDTHS = {"kdim": 12, "vdim": 20}
# The module's settings, which of its inputs are one tensor, and the rest of its arguments.
ATTENTION = {
    "nothing but self-attention": ({}, "self", lambda: {}),
    "weights of each head": ({"batch_first": True}, "memory", lambda: {"average_attn_weights": False}),
    "no weights, no bias": ({"bias": False}, "all", lambda: {"need_weights": False}),
    "bool padding": (
        {"batch_first": True},
        "memory",
        lambda: {"key_padding_mask": padding(S), "need_weights": False},
    ),
    "bool padding, weights": ({}, "all", lambda: {"key_padding_mask": padding(S)}),
    "float padding": ({}, "memory", lambda: {"key_padding_mask": padding(S, True), "need_weights": False}),
    "bool pairs": ({}, "all", lambda: {"attn_mask": pairs(T, S), "need_weights": False}),
    "bool pairs of each head, bool padding, weights of each head": (
        {"batch_first": True},
        "all",
        lambda: {
            "attn_mask": pairs(B * H, T, S),
            "key_padding_mask": padding(S),
            "average_attn_weights": False,
        },
    ),
    "float pairs": (
        {"batch_first": True},
        "self",
        lambda: {"attn_mask": pairs(T, T, float_=True), "need_weights": False},
    ),
    "float pairs of each head, float padding, weights": (
        {},
        "memory",
        lambda: {"attn_mask": pairs(B * H, T, S, float_=True), "key_padding_mask": padding(S, True)},
    ),
    "float pairs, bool padding": (
        {},
        "all",
        lambda: {"attn_mask": pairs(T, S, float_=True), "key_padding_mask": padding(S), "need_weights": False},
    ),
    "bool pairs, float padding": (
        {"batch_first": True},
        "memory",
        lambda: {"attn_mask": pairs(T, S), "key_padding_mask": padding(S, True), "need_weights": False},
    ),
    "causal": (
        {"batch_first": True},
        "self",
        lambda: {"attn_mask": ahead(T), "is_causal": True, "need_weights": False},
    ),
    "causal, float mask, weights": ({}, "self", lambda: {"attn_mask": ahead(T, True), "is_causal": True}),
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
    "learned key, bool padding": (
        {"add_bias_kv": True},
        "memory",
        lambda: {"key_padding_mask": padding(S), "need_weights": False},
    ),
    "zero key, float pairs": (
        {"add_zero_attn": True, "batch_first": True},
        "all",
        lambda: {"attn_mask": pairs(T, S, float_=True), "need_weights": False},
    ),
    "both keys, causal, weights": (EXTRA, "self", lambda: {"attn_mask": ahead(T), "is_causal": True}),
    "widths of keys and values": ({**WIDTHS, "batch_first": True}, "all", lambda: {"need_weights": False}),
    "widths, both keys, no bias, bool pairs, weights": (
        {**WIDTHS, **EXTRA, "bias": False},
        "all",
        lambda: {"attn_mask": pairs(T, S)},
    ),
    "unbatched, bool pairs of each head": (
        {},
        "unbatched self",
        lambda: {"attn_mask": pairs(H, T, T), "need_weights": False},
    ),
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
