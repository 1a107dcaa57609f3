"""The last sum of a pre-norm layer, made with the next norm, and norms that are written as their reader takes them.

Both have the bits of layers that are called one after another; compiled kernels but for the order of their sums, which
goes by the tile that a kernel gets.
"""

import math
from collections.abc import Sequence

import pytest
import torch

import fastformer
from fastformer.functional import dropout_add_layer_norm, layer_norm
from fastformer.nn import layers
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.packing import Layout
from tests.support.fused_op import DEVICE, INTERPRETED, needs_kernels

HALF = torch.float16  # of bf16, Triton's interpreter rounds down where a GPU rounds to nearest
LAYOUT = Layout.from_lengths([3, 2]).to(DEVICE)
BACKENDS = ["reference", pytest.param("triton", marks=needs_kernels)]
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
MEMORY = torch.randn(5, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)


def stack(kind, final_norm=True, **options):
    torch.manual_seed(0)
    options = {"nhead": 2, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True, "norm_first": True, **options}
    norm = fastformer.LayerNorm(16) if final_norm else None
    if kind == "encoder":
        found = fastformer.TransformerEncoder(TransformerEncoderLayer(16, **options), 3, norm)
    else:
        found = fastformer.TransformerDecoder(TransformerDecoderLayer(16, **options), 3, norm)
    with torch.no_grad():
        for p in found.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return found.to(DEVICE)


def results(found, autocast, product_dtype=None, monkeypatch=None):
    """Output and gradients."""
    if product_dtype is not None:
        monkeypatch.setattr(layers, "_product_dtype", product_dtype)
    x, memory = X.clone().requires_grad_(), MEMORY.clone().requires_grad_()
    found.zero_grad()
    torch.manual_seed(3)
    with torch.autocast(DEVICE, HALF, enabled=autocast):
        more = (memory, LAYOUT) if isinstance(found, fastformer.TransformerDecoder) else ()
        out = found.packed(x, LAYOUT, *more)
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


def one_by_one(found, monkeypatch):
    monkeypatch.setattr(type(found), "_carries", lambda *_: False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_carried_sums_have_the_bits_of_others(kind, autocast, final_norm, backend, monkeypatch):
    found = stack(kind, final_norm)
    with fastformer.backend(backend):
        carried = results(found, autocast)
        one_by_one(found, monkeypatch)
        apart = results(found, autocast)
    assert_same(carried, apart, backend, HALF if autocast else torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_norms_written_for_their_readers_have_the_bits_of_autocast(kind, backend, monkeypatch):
    found, asked = stack(kind), layers._product_dtype
    dtypes = []
    with fastformer.backend(backend):
        ours = results(found, True, lambda *a: (dtypes.append(asked(*a)), dtypes[-1])[1], monkeypatch)
        theirs = results(found, True, lambda *_: None, monkeypatch)
    assert dtypes.count(HALF) == (6 if kind == "encoder" else 9)  # all but the last norm
    assert_same(ours, theirs, backend, HALF)


def test_dropout_draws_in_the_same_order(monkeypatch):
    found = stack("decoder", dropout=0.3)
    carried = results(found, False)
    one_by_one(found, monkeypatch)
    assert all(torch.equal(x, y) for x, y in zip(carried, results(found, False), strict=True))


@pytest.mark.parametrize("changes", [{"norm_first": False}, "checkpoint", "subclass", "instance"], ids=str)
def test_what_does_not_carry(changes):
    found = stack("encoder", **(changes if isinstance(changes, dict) else {}))
    if changes == "checkpoint":
        found.checkpoint_activations = True
    if changes == "subclass":
        found.layers[1].__class__ = type("Own", (TransformerEncoderLayer,), {})
    if changes == "instance":
        found.layers[1].packed = lambda x, *_: x + 1
    others = changes in ("subclass", "instance")
    assert [found._carries(layer) for layer in found.layers] == [others, False, others]


def test_an_own_packed_between_others_is_called():
    found = stack("encoder")
    expected = found.layers[0].packed(X, LAYOUT) + 1
    expected = found.norm(found.layers[2].packed(expected, LAYOUT))
    found.layers[1].packed = lambda x, *_: x + 1
    assert torch.equal(found.packed(X, LAYOUT), expected)


def test_hooks_of_norms_and_dropouts_are_called():
    found, seen = stack("encoder"), []
    for module in (found.layers[1].norm1, found.layers[0].dropout2, found.norm):
        module.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].shape))
    found.packed(X, LAYOUT)
    assert seen == [X.shape] * 3


def test_a_hooked_reader_sees_the_norm_as_torch_gives_it():
    """Who replaces what reads a norm, or looks at it, gets no 16 bits of ours."""
    found, seen = stack("encoder"), []
    found.layers[0].linear1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.autocast(DEVICE, HALF):
        found.packed(X, LAYOUT)
    assert seen == [torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_norms_in_another_dtype_are_those_rounded_once(backend):
    weight, bias = torch.rand(16, device=DEVICE) + 0.5, torch.rand(16, device=DEVICE)
    results = []
    for dtype in (None, HALF):
        x, w, b = (t.clone().requires_grad_() for t in (X, weight, bias))
        with fastformer.backend(backend):
            y = layer_norm(x, 16, w, b, dtype=dtype)
            z, s = dropout_add_layer_norm(x, MEMORY, 16, w, b, dtype=dtype)
        assert s.dtype == torch.float32
        assert y.dtype == z.dtype == (dtype or torch.float32)
        y, z = y.to(HALF), z.to(HALF)
        (y * MEMORY.to(HALF) + z).sum().backward()
        results.append((y, z, s, x.grad, w.grad, b.grad))
    assert_same(*results, backend, HALF)
