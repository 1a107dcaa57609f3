"""Modules, layers and stacks with the kernels inside against torch.nn's own: masks, options, packed sequences, dropout.

Kernels have their own tests, option by option; modules have theirs, on the reference. Here is what lies between: that
masks, layouts and options mean the same to both, and that the gradients of all parameters come back.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer.host import autograd_function
from fastformer.packing import Layout, pack, unpack
from tests.support.closeness import gradients
from tests.support.fused_module import FF, B, D, H, S, T, ahead, check, padding, pairs, random, right_padding
from tests.support.fused_op import DEVICE, needs_kernels
from tests.support.masks import minus_infinity

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]


def checked(made: list[nn.Module], dtype: torch.dtype, inputs: dict[str, Tensor], given: dict[str, Any]) -> None:
    """Compare ours with torch's; masks have gradients, too."""
    masks = {key: x for key, x in given.items() if isinstance(x, Tensor)}
    check(*made, dtype, {**inputs, **masks}, **{key: x for key, x in given.items() if key not in masks})


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
    made = [library.MultiheadAttention(D, H, **settings) for library in (fastformer, nn)]

    def shape(length: int, width: int) -> tuple[int, ...]:
        if "unbatched" in kind:
            return length, width
        return (B, length, width) if made[0].batch_first else (length, B, width)

    inputs, given = {"query": random(*shape(T, D))}, make()
    if kind == "self":
        given |= {"key": "query", "value": "query"}
    elif kind == "memory":
        inputs["key"] = random(*shape(S, D))
        given["value"] = "key"
    else:
        inputs |= {"key": random(*shape(S, made[0].kdim)), "value": random(*shape(S, made[0].vdim))}
    checked(made, dtype, inputs, given)


def layer(library: Any, kind: str, **settings: Any) -> nn.Module:
    name = f"Transformer{kind}Layer"
    return getattr(library, name)(D, H, dim_feedforward=FF, dropout=0.0, batch_first=True, **settings)  # type: ignore[no-any-return]


def rows(kind: str) -> dict[str, Tensor]:
    return {"src": random(B, T, D)} if kind == "Encoder" else {"tgt": random(B, T, D), "memory": random(B, S, D)}


TGT_PADDING, MEMORY_PADDING = right_padding([5, 2], T), right_padding([4, 7], S)
# The layer's settings and the rest of its arguments.
LAYERS = {
    "Encoder: post-norm, relu, padding": ({}, lambda: {"src_key_padding_mask": TGT_PADDING}),
    "Encoder: pre-norm, gelu, causal": (
        {"norm_first": True, "activation": "gelu"},
        lambda: {"src_mask": ahead(T), "is_causal": True},
    ),
    "Encoder: post-norm, tanh-gelu, no bias, float masks": (
        {"activation": nn.GELU("tanh"), "bias": False},
        lambda: {"src_mask": ahead(T, True), "src_key_padding_mask": minus_infinity(TGT_PADDING)},
    ),
    "Encoder: pre-norm, silu, mask of each head": (
        {"norm_first": True, "activation": nn.SiLU(), "layer_norm_eps": 0.1},
        lambda: {"src_mask": pairs(B * H, T, T), "src_key_padding_mask": padding(T)},
    ),
    "Decoder: post-norm, relu, causal, padding of both": (
        {},
        lambda: {
            "tgt_mask": ahead(T),
            "tgt_is_causal": True,
            "tgt_key_padding_mask": TGT_PADDING,
            "memory_key_padding_mask": MEMORY_PADDING,
        },
    ),
    "Decoder: pre-norm, gelu, float masks": (
        {"norm_first": True, "activation": "gelu"},
        lambda: {
            "tgt_mask": ahead(T, True),
            "memory_mask": pairs(T, S, float_=True),
            "memory_key_padding_mask": minus_infinity(MEMORY_PADDING),
        },
    ),
}
LAYERS_IN_FP16 = ("Encoder: post-norm, relu, padding", "Decoder: pre-norm, gelu, float masks")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in LAYERS] + [(case, torch.float16) for case in LAYERS_IN_FP16],
)
def test_layers(case, dtype):
    settings, make = LAYERS[case]
    kind = case.partition(":")[0]
    checked([layer(library, kind, **settings) for library in (fastformer, nn)], dtype, rows(kind), make())


class Packed(nn.Module):
    """`packed` as forward."""

    def __init__(self, module: nn.Module, *layouts: Layout, causal: bool) -> None:
        super().__init__()
        self.module, self.layouts, self.causal = module, layouts, causal

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is None:
            return self.module.packed(tokens, self.layouts[0], causal=self.causal)
        return self.module.packed(tokens, self.layouts[0], memory, self.layouts[1], causal=self.causal)


class Padded(Packed):
    """The same of torch's module: unpack, mask, and pack what comes out."""

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        layout, x = self.layouts[0], unpack(tokens, self.layouts[0])
        hidden, mask = ~layout.mask(), ahead(layout.max_length).to(tokens.device) if self.causal else None
        if memory is None:
            return pack(self.module(x, mask, src_key_padding_mask=hidden), layout)
        keys = unpack(memory, self.layouts[1])
        hidden_keys = ~self.layouts[1].mask()
        out = self.module(x, keys, mask, tgt_key_padding_mask=hidden, memory_key_padding_mask=hidden_keys)
        return pack(out, layout)


def with_rms_norms(made: nn.Module, norm: type[nn.RMSNorm]) -> nn.Module:
    """The layer, with these in the place of its norms; torch's layer, which calls its norms, is the formula."""
    for name, module in list(made.named_children()):
        if isinstance(module, nn.LayerNorm):
            made.register_module(name, norm(D, eps=1e-5))
    return made


@pytest.mark.parametrize(
    ("kind", "norm_first", "causal"),
    [("Encoder", False, False), ("Encoder", True, True), ("Decoder", False, True), ("Decoder", True, False)],
)
@pytest.mark.parametrize("norm", ["layer norm", "RMS norm", "RMS norm, padded"])
def test_packed_layers_and_layers_with_rms_norm(kind, norm_first, causal, norm):
    made = [layer(library, kind, norm_first=norm_first) for library in (fastformer, nn)]
    if "RMS" in norm:
        made = [
            with_rms_norms(made[0], fastformer.RMSNorm if causal else nn.RMSNorm),
            with_rms_norms(made[1], nn.RMSNorm),
        ]
    if "padded" in norm:
        masks = {"src_key_padding_mask": TGT_PADDING} if kind == "Encoder" else {}
        return checked(made, torch.float32, rows(kind), masks or {"memory_key_padding_mask": MEMORY_PADDING})
    layouts = [Layout.from_lengths([5, 1, 3], DEVICE), Layout.from_lengths([2, 6, 1], DEVICE)]
    inputs = {"tokens": random(layouts[0].total, D)}
    if kind == "Decoder":
        inputs["memory"] = random(layouts[1].total, D)
    stacks = [getattr(library, f"Transformer{kind}")(x, 1) for library, x in zip((fastformer, nn), made, strict=True)]
    made = [cls(stack, *layouts, causal=causal) for cls, stack in zip((Packed, Padded), stacks, strict=True)]
    return check(*made, torch.float32, inputs)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_modules_run_kernels(norm, monkeypatch):
    """The tests above would pass as well if a module went past its op."""
    launched = set()
    launcher = autograd_function._launcher
    monkeypatch.setattr(autograd_function, "_launcher", lambda *names: launched.add(names[0]) or launcher(*names))
    module = layer(fastformer, "Encoder", norm_first=True)
    module = (with_rms_norms(module, fastformer.RMSNorm) if norm == "rms_norm" else module).to(DEVICE)
    with fastformer.backend("triton"):
        module(torch.randn(1, T, D, device=DEVICE))
    assert launched == {"attention.forward", f"norms.{norm}", "norms.dropout_add_norm", "feed_forward.kernels"}


LAYER = {"d_model": D, "nhead": H, "dim_feedforward": FF, "dropout": 0.1, "batch_first": True}
DROPOUT = {
    "FeedForward": lambda: (fastformer.FeedForward(D, FF, 0.1), [(B, T, D)]),
    "MultiheadAttention": lambda: (fastformer.MultiheadAttention(D, H, 0.1, batch_first=True), [(B, T, D)] * 3),
    "TransformerEncoderLayer": lambda: (fastformer.TransformerEncoderLayer(**LAYER), [(1, T, D)]),
    "TransformerDecoderLayer": lambda: (
        fastformer.TransformerDecoderLayer(**LAYER, norm_first=True),
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
