"""Modules of fastformer and of torch.nn with the same parameters, inputs and masks for them, and their comparison.

Letters: B batch, T targets, S sources, D model width, H heads.
"""

import warnings

import pytest
import torch
from torch import Tensor, nn

import fastformer
from tests.support.closeness import assert_same, random
from tests.support.masks import ahead, left, right

D, H, FF, B, T, S = 6, 3, 7, 3, 5, 4
LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer")
STACKS = ("TransformerEncoder", "TransformerDecoder")
# For files that compare with torch.nn: torch's documented path, and no warnings of torch's own modules.
BESIDE_TORCH = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),  # where one mask is bool and the other is not
]


class Twice(nn.Module):
    """An activation that no library knows."""

    def forward(self, x):
        return 2 * x.sin()


def randomise(module):
    """Draw all parameters, so that no bias is zero and no norm weight is one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4)


def build(library, kind, dtype=torch.float64, num_layers=2, norm=True, **settings):
    """Build a module of fastformer or of torch.nn."""
    if kind == "MultiheadAttention":
        return library.MultiheadAttention(D, H, dtype=dtype, **settings)
    settings = {"d_model": D, "nhead": H, "dim_feedforward": FF, "dropout": 0.0, "batch_first": True, **settings}
    if kind == "Transformer":
        with warnings.catch_warnings(action="ignore"):  # of torch, which takes no nested tensors for such layers
            return library.Transformer(num_encoder_layers=1, num_decoder_layers=2, **settings, dtype=dtype)
    if kind in LAYERS:
        return getattr(library, kind)(**settings, dtype=dtype)
    layer = getattr(library, kind + "Layer")(**settings, dtype=dtype)
    final = nn.LayerNorm(settings["d_model"], dtype=dtype) if norm else None
    more = {"enable_nested_tensor": False} if kind == "TransformerEncoder" else {}
    return getattr(library, kind)(layer, num_layers, final, **more)


def twins(kind, dtype=torch.float64, **settings):
    """Build a module of fastformer and one of torch.nn, with the same parameters."""
    model, torchs = (build(library, kind, dtype, **settings) for library in (fastformer, nn))
    randomise(model)
    torchs.load_state_dict(model.state_dict(), strict=True)
    return model, torchs


def inputs_for(kind, batch_first=True, dtype=torch.float64, batched=True):
    """Return the inputs: source; target and memory; or source and target."""
    lengths = (T,) if "Encoder" in kind else (S, T) if kind == "Transformer" else (T, S)
    shapes = [(n, D) if not batched else (B, n, D) if batch_first else (n, B, D) for n in lengths]
    return tuple(random(*shape, dtype=dtype) for shape in shapes)


def check(model, torchs, inputs, padding=None, **arguments):
    """Compare outputs and the gradients of inputs, masks that learn, and parameters.

    padding: `[B, T]` of the output, in its layout: rows that a stack of fastformer sets to 0.
    """
    out, expected = model(*inputs, **arguments), torchs(*inputs, **arguments)
    if isinstance(expected, Tensor) and expected.is_contiguous():  # callers may view it
        assert out.is_contiguous()
    if padding is not None:
        assert not out[padding].any()
        expected = expected.masked_fill(padding[..., None], 0.0)
    if isinstance(out, tuple):
        assert [x is None for x in out] == [x is None for x in expected]
        out, expected = ([x for x in each if x is not None] for each in (out, expected))
    tensors = (x for x in (*inputs, *arguments.values()) if isinstance(x, Tensor) and x.requires_grad)
    leaves = list(dict.fromkeys(tensors))
    assert_same(out, expected, [*leaves, *model.parameters()], [*leaves, *torchs.parameters()])


AHEAD = ahead(T)
# Of the targets [B, T] and of the sources [B, S].
PADDING = {
    "right": (right([5, 2, 3], T), right([1, 4, 2], S)),
    "left": (left([5, 2, 3], T), left([1, 4, 2], S)),
    "both sides": (torch.stack([right([3], T)[0], left([2], T)[0], right([5], T)[0]]), left([1, 4, 2], S)),
    "gaps": (torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]]).bool(), right([3, 3, 4], S)),
    "a column of padding": (right([3, 2, 1], T), right([3, 3, 2], S)),
    "none": (right([5, 5, 5], T), right([4, 4, 4], S)),
}
