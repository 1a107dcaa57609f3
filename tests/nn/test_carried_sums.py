"""The last sum of a pre-norm layer, made with the next norm, and norms that are written as the next product reads them.

Both have the bits of layers that are called one after another; compiled kernels but for the order of their sums, which
goes by the tile that a kernel gets.
"""

import math
from collections.abc import Sequence

import pytest
import torch

import fastformer
from fastformer.packing import Layout
from tests.support.fused_op import DEVICE, INTERPRETED, needs_kernels

HALF = torch.float16  # of bf16, Triton's interpreter rounds down where a GPU rounds to nearest
LAYOUT = Layout.from_lengths([3, 2]).to(DEVICE)
X, MEMORY = (torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE) for seed in (1, 2))


def stack(kind, final_norm=True, **options):
    torch.manual_seed(0)
    options = {"nhead": 2, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True, "norm_first": True, **options}
    layer = getattr(fastformer, f"Transformer{kind}Layer")(16, **options)
    final = fastformer.LayerNorm(16) if final_norm else None
    made = getattr(fastformer, f"Transformer{kind}")(layer, 3, final)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return made.to(DEVICE)


def results(found, autocast, one_by_one):
    """Output and gradients; of the whole stack, or of its layers in their order."""
    x, memory = X.clone().requires_grad_(), MEMORY.clone().requires_grad_()
    found.zero_grad()
    more = (memory, LAYOUT) if isinstance(found, fastformer.TransformerDecoder) else ()
    torch.manual_seed(3)
    with torch.autocast(DEVICE, HALF, enabled=autocast):
        if one_by_one:
            out = x
            for layer in found.layers:
                out = layer.compose(out, *layer.packed_attentions(LAYOUT, False, None, *more))
            out = out if found.norm is None else found.norm(out)
        else:
            out = found.packed(x, LAYOUT, *more, causal=False)
    out.float().square().sum().backward()
    return [out, x.grad, *(p.grad for p in found.parameters())]


def assert_same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], backend: str, dtype: torch.dtype) -> None:
    """Equal bits; of compiled kernels, what sums in another order leave.

    A sum of at most 24 terms is off by some sqrt(24) roundings, and forward and backward are 2 x 24 steps of such sums
    (8 a layer), one after another: 48 sqrt(24) roundings of the largest number, if all went one way. In 16 bits, what
    is rounded to them may come out one step apart at each.
    """
    for x, y in zip(ours, theirs, strict=True):
        if backend == "reference" or INTERPRETED:
            assert torch.equal(x, y)
        else:
            steps = 48 * (1.0 if dtype == HALF else math.sqrt(24))
            atol = steps * torch.finfo(dtype).eps / 2 * y.detach().abs().max().item()
            torch.testing.assert_close(x, y, rtol=0, atol=atol)


OPTIONS = ({}, {"norm": "rms"}, {"final_norm": False}, {"dropout": 0.3})
BACKENDS = [
    *((options, "reference") for options in OPTIONS),
    *(pytest.param(options, "triton", marks=needs_kernels) for options in OPTIONS[:2]),  # whose dropout draws anew
]


@pytest.mark.parametrize(("options", "backend"), BACKENDS, ids=str)
@pytest.mark.parametrize(("kind", "autocast"), [("Encoder", False), ("Encoder", True), ("Decoder", True)])
def test_a_stack_has_the_bits_of_its_layers(options, kind, autocast, backend):
    """Dropout draws in the same order, too."""
    found = stack(kind, **options)
    with fastformer.backend(backend):
        ours, theirs = (results(found, autocast, one_by_one) for one_by_one in (False, True))
    assert_same(ours, theirs, backend, HALF if autocast else torch.float32)


def test_hooks_of_norms_and_dropouts_are_called():
    found, seen = stack("Encoder"), []
    for module in (found.layers[1].norm1, found.layers[0].dropout2, found.norm):
        module.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].shape))
    found.packed(X, LAYOUT)
    assert seen == [X.shape] * 3


def test_a_hooked_linear_layer_sees_the_norm_in_torchs_dtype():
    found, seen = stack("Encoder"), []
    found.layers[0].linear1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.autocast(DEVICE, HALF):
        found.packed(X, LAYOUT)
    assert seen == [torch.float32]
