"""Layers and stacks of ours and of torch with the same parameters, inputs and masks for them, and the comparison."""

import math

import torch
from torch import nn

import fastformer
from tests.support.closeness import assert_close, gradients, random

D, H, FF, B, T, S = 6, 3, 7, 2, 5, 4
KINDS = ("TransformerEncoderLayer", "TransformerDecoderLayer")


class Twice(nn.Module):
    """An activation that no library knows."""

    def forward(self, x):
        return 2 * x.sin()


def randomise(module):
    """Values that leave no bias zero and no norm weight one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4)


def layers(kind, dtype=torch.float64, **settings):
    settings = {"d_model": D, "nhead": H, "dim_feedforward": FF, "dropout": 0.0, **settings}
    ours, torchs = getattr(fastformer, kind)(**settings, dtype=dtype), getattr(nn, kind)(**settings, dtype=dtype)
    randomise(ours)
    torchs.load_state_dict(ours.state_dict(), strict=True)
    return ours, torchs


def stacks(kind, norm, dtype=torch.float64, num_layers=2, **settings):
    settings = {"d_model": D, "nhead": H, "dim_feedforward": FF, "dropout": 0.0, **settings}
    made = []
    for library in (fastformer, nn):
        layer = getattr(library, kind + "Layer")(**settings, dtype=dtype)
        final = library.LayerNorm(D, dtype=dtype) if norm else None
        made.append(getattr(library, kind)(layer, num_layers, final))
    randomise(made[0])
    made[1].load_state_dict(made[0].state_dict(), strict=True)
    return made


def transformers(dtype=torch.float64, **settings):
    settings = {
        "d_model": D,
        "nhead": H,
        "num_encoder_layers": 2,
        "num_decoder_layers": 1,
        "dim_feedforward": FF,
        "dropout": 0.0,
        **settings,
    }
    ours, torchs = fastformer.Transformer(**settings, dtype=dtype), nn.Transformer(**settings, dtype=dtype)
    randomise(ours)
    torchs.load_state_dict(ours.state_dict(), strict=True)
    return ours, torchs


def inputs_for(kind, batch_first=False, dtype=torch.float64, batched=True):
    def make(length):
        shape = (length, D) if not batched else (B, length, D) if batch_first else (length, B, D)
        return random(*shape, dtype=dtype)

    return (make(T),) if "Encoder" in kind else (make(T), make(S))


def causal_mask(length, kind):
    mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    return mask.isinf() if kind == "bool" else mask


MASKS = ("padding", "causal", "causal hint", "3-D and padding", "hint and padding")


def arguments_for(kind, masks, mask_kind):
    """Torch's arguments for a form of masks; no query is left without keys."""
    padding, memory_padding = torch.zeros(B, T).bool(), torch.zeros(B, S).bool()
    padding[0, 3:], memory_padding[1, 1:] = True, True
    if mask_kind == "float":
        padding, memory_padding = (
            torch.zeros(x.shape, dtype=torch.float64).masked_fill(x, -math.inf) for x in (padding, memory_padding)
        )
    causal = causal_mask(T, mask_kind)
    heads = causal[None].repeat(B * H, 1, 1)
    memory_mask = torch.rand(T, S) < 0.4
    memory_mask[:, 0] = False
    if mask_kind == "float":
        memory_mask = torch.randn(T, S, dtype=torch.float64).masked_fill(memory_mask, -math.inf)
    encoder = {
        "padding": {"src_key_padding_mask": padding},
        "causal": {"src_mask": causal},
        "causal hint": {"src_mask": causal, "is_causal": True},
        "3-D and padding": {"src_mask": heads, "src_key_padding_mask": padding},
        "hint and padding": {"src_mask": causal, "src_key_padding_mask": padding, "is_causal": True},
    }
    decoder = {
        "padding": {"tgt_key_padding_mask": padding, "memory_key_padding_mask": memory_padding},
        "causal": {"tgt_mask": causal, "memory_mask": memory_mask},
        "causal hint": {"tgt_mask": causal, "tgt_is_causal": True},
        "3-D and padding": {"tgt_mask": heads, "memory_key_padding_mask": memory_padding},
        "hint and padding": {
            "tgt_mask": causal,
            "tgt_key_padding_mask": padding,
            "memory_key_padding_mask": memory_padding,
            "tgt_is_causal": True,
        },
    }
    return (encoder if "Encoder" in kind else decoder)[masks]


def check(ours, torchs, inputs, **arguments):
    out, expected = ours(*inputs, **arguments), torchs(*inputs, **arguments)
    assert_close(out, expected)
    actual = gradients(out, [*inputs, *ours.parameters()])
    for a, w in zip(actual, gradients(expected, [*inputs, *torchs.parameters()]), strict=True):
        assert_close(a, w)
