"""Layers and stacks with the kernels inside against torch.nn's own: masks, packed sequences, copies, checkpoints.

Kernels have their own tests, option by option; layers have theirs, on the reference. Here is what lies between.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fastformer
from fastformer.host import autograd_function
from fastformer.packing import Layout, pack, unpack
from tests.support.fused_module import FF, B, D, H, S, T, ahead, check, padding, pairs, random, right_padding
from tests.support.fused_op import DEVICE, needs_kernels

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]


def layer(library: Any, name: str, **settings: Any) -> nn.Module:
    made: nn.Module = getattr(library, name)(D, H, dim_feedforward=FF, dropout=0.0, batch_first=True, **settings)
    return made


def with_rms_norms(made: nn.Module, norm: type[nn.RMSNorm]) -> nn.Module:
    """The layer, with these in the place of its norms."""
    for name, module in list(made.named_children()):
        if isinstance(module, nn.LayerNorm):
            made.register_module(name, norm(D, eps=1e-5))
    return made


def minus_infinity(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)


TGT_PADDING, MEMORY_PADDING = right_padding([5, 2], T), right_padding([4, 7], S)
# The layer's settings and the rest of its arguments.
ENCODER_LAYERS = {
    "post-norm, relu, padding": ({}, lambda: {"src_key_padding_mask": TGT_PADDING}),
    "pre-norm, gelu, causal": (
        {"norm_first": True, "activation": "gelu"},
        lambda: {"src_mask": ahead(T), "is_causal": True},
    ),
    "post-norm, tanh-gelu, no bias, float masks": (
        {"activation": nn.GELU("tanh"), "bias": False},
        lambda: {"src_mask": ahead(T, True), "src_key_padding_mask": minus_infinity(TGT_PADDING)},
    ),
    "pre-norm, silu, mask of each head": (
        {"norm_first": True, "activation": nn.SiLU(), "layer_norm_eps": 0.1},
        lambda: {"src_mask": pairs(B * H, T, T), "src_key_padding_mask": padding(T)},
    ),
}
DECODER_LAYERS = {
    "post-norm, relu, causal, padding of both": (
        {},
        lambda: {
            "tgt_mask": ahead(T),
            "tgt_is_causal": True,
            "tgt_key_padding_mask": TGT_PADDING,
            "memory_key_padding_mask": MEMORY_PADDING,
        },
    ),
    "pre-norm, gelu, float masks": (
        {"norm_first": True, "activation": "gelu"},
        lambda: {
            "tgt_mask": ahead(T, True),
            "memory_mask": pairs(T, S, float_=True),
            "memory_key_padding_mask": minus_infinity(MEMORY_PADDING),
        },
    ),
}


def check_layers(name: str, settings: dict[str, Any], make: Callable[[], Any], dtype: torch.dtype) -> None:
    arguments = make()
    inputs = {"src": random(B, T, D)} if "Encoder" in name else {"tgt": random(B, T, D), "memory": random(B, S, D)}
    masks = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
    rest = {key: x for key, x in arguments.items() if key not in masks}
    made = [layer(library, name, **settings) for library in (fastformer, nn)]
    check(*made, dtype, {**inputs, **masks}, **rest)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in ENCODER_LAYERS), ("post-norm, relu, padding", torch.float16)],
)
def test_encoder_layer(case, dtype):
    check_layers("TransformerEncoderLayer", *ENCODER_LAYERS[case], dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in DECODER_LAYERS), ("pre-norm, gelu, float masks", torch.float16)],
)
def test_decoder_layer(case, dtype):
    check_layers("TransformerDecoderLayer", *DECODER_LAYERS[case], dtype)


class Packed(nn.Module):
    """`packed` as forward."""

    def __init__(self, module: nn.Module, *layouts: Layout, **settings: Any) -> None:
        super().__init__()
        self.module, self.layouts, self.settings = module, layouts, settings

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is None:
            return self.module.packed(tokens, self.layouts[0], **self.settings)
        return self.module.packed(tokens, self.layouts[0], memory, self.layouts[1], **self.settings)


class Padded(nn.Module):
    """The same of torch's module: unpack, mask, and pack what comes out."""

    def __init__(self, module: nn.Module, *layouts: Layout, causal: bool) -> None:
        super().__init__()
        self.module, self.layouts, self.causal = module, layouts, causal

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        layout, x = self.layouts[0], unpack(tokens, self.layouts[0])
        hidden, mask = ~layout.mask(), ahead(layout.max_length).to(tokens.device) if self.causal else None
        if memory is None:
            return pack(self.module(x, mask, src_key_padding_mask=hidden), layout)
        keys = unpack(memory, self.layouts[1])
        hidden_keys = ~self.layouts[1].mask()
        out = self.module(x, keys, mask, tgt_key_padding_mask=hidden, memory_key_padding_mask=hidden_keys)
        return pack(out, layout)


FORMS = pytest.mark.parametrize(
    ("name", "norm_first", "causal"),
    [
        ("TransformerEncoderLayer", False, False),
        ("TransformerEncoderLayer", True, True),
        ("TransformerDecoderLayer", False, True),
        ("TransformerDecoderLayer", True, False),
    ],
)


@FORMS
def test_packed_layers(name, norm_first, causal):
    check_packed(causal, *(layer(library, name, norm_first=norm_first) for library in (fastformer, nn)))


@FORMS
@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_rms_norm(name, norm_first, causal, packed):
    """torch's layer, which calls its norms, is the formula."""
    norms = {fastformer: fastformer.RMSNorm if causal else nn.RMSNorm, nn: nn.RMSNorm}
    made = [with_rms_norms(layer(library, name, norm_first=norm_first), norms[library]) for library in norms]
    if packed:
        check_packed(causal, *made)
    elif "Encoder" in name:
        check(*made, torch.float32, {"src": random(B, T, D), "src_key_padding_mask": TGT_PADDING})
    else:
        rows = {"tgt": random(B, T, D), "memory": random(B, S, D)}
        check(*made, torch.float32, {**rows, "memory_key_padding_mask": MEMORY_PADDING})


def check_packed(causal: bool, ours: nn.Module, torchs: nn.Module) -> None:
    layouts = [Layout.from_lengths([5, 1, 3], DEVICE), Layout.from_lengths([2, 6, 1], DEVICE)]
    inputs = {"tokens": random(layouts[0].total, D)}
    if isinstance(ours, nn.TransformerDecoderLayer):
        inputs["memory"] = random(layouts[1].total, D)
    check(
        Packed(ours, *layouts, causal=causal),
        Padded(torchs, *layouts, causal=causal),
        torch.float32,
        inputs,
    )


def zeroed(module: nn.Module, hidden: Tensor) -> Any:
    """torch's stack as a function of its parameters, with zeros at padding, as ours has."""

    def run(parameters: dict[str, Tensor], **given: Any) -> Tensor:
        out: Tensor = functional_call(module, parameters, (), given, strict=True)
        return out.masked_fill(hidden.to(out.device)[:, :, None], 0.0)

    return run


@pytest.mark.slow
def test_encoder_stack():
    made = []
    for library in (fastformer, nn):
        first = layer(library, "TransformerEncoderLayer", norm_first=True)
        made.append(library.TransformerEncoder(first, 2, library.LayerNorm(D)))
    masks = {"mask": ahead(T), "src_key_padding_mask": TGT_PADDING}
    inputs, settings = {"src": random(B, T, D), **masks}, {"is_causal": True}
    check(made[0], zeroed(made[1], TGT_PADDING), torch.float32, inputs, **settings)
    made[0].padding_free = False
    check(*made, torch.float32, inputs, **settings)


def transformer(library: Any, dropout: float = 0.0) -> nn.Module:
    made: nn.Module = library.Transformer(D, H, 1, 1, FF, dropout, batch_first=True)
    return made


@pytest.mark.slow
def test_transformer():
    inputs = {
        "src": random(B, S, D),
        "tgt": random(B, T, D),
        "tgt_mask": ahead(T),
        "src_key_padding_mask": MEMORY_PADDING,
        "memory_key_padding_mask": MEMORY_PADDING,
        "tgt_key_padding_mask": TGT_PADDING,
    }
    expected = zeroed(transformer(nn), TGT_PADDING)
    check(transformer(fastformer), expected, torch.float32, inputs, tgt_is_causal=True)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_modules_run_kernels(norm, monkeypatch):
    """The tests above would pass as well if a module went past its op."""
    launched = set()
    launcher = autograd_function._launcher
    monkeypatch.setattr(autograd_function, "_launcher", lambda *names: launched.add(names[0]) or launcher(*names))
    module = layer(fastformer, "TransformerEncoderLayer", norm_first=True)
    module = (with_rms_norms(module, fastformer.RMSNorm) if norm == "rms_norm" else module).to(DEVICE)
    with fastformer.backend("triton"):
        module(torch.randn(1, T, D, device=DEVICE))
    assert launched == {
        "attention.forward",
        f"norms.{norm}",
        "norms.dropout_add_norm",
        "feed_forward.kernels",
    }
