"""The last sum of a pre-norm layer, made with the next norm, and norms that are written as their reader takes them.

Both have the bits of layers that are called one after another; compiled kernels but for the order of their sums, which
goes by the tile that a kernel gets.
"""

import math
from collections.abc import Sequence

import pytest
import torch

import fastformer
from fastformer.functional import dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm
from fastformer.nn import layers as layers_module
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.packing import Layout
from tests.support.fused_op import DEVICE, INTERPRETED, needs_kernels

HALF = torch.float16  # of bf16, Triton's interpreter rounds down where a GPU rounds to nearest
LAYOUT = Layout.from_lengths([3, 2]).to(DEVICE)
BACKENDS = ["reference", pytest.param("triton", marks=needs_kernels)]
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
MEMORY = torch.randn(5, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)


NORMS = pytest.mark.parametrize("rms", [False, True], ids=["layer norm", "RMS norm"])


def stack(kind, final_norm=True, rms=False, **options):
    torch.manual_seed(0)
    options = {"nhead": 2, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True, "norm_first": True, **options}
    norm = fastformer.LayerNorm(16) if final_norm else None
    if kind == "encoder":
        found = fastformer.TransformerEncoder(TransformerEncoderLayer(16, **options), 3, norm)
    else:
        found = fastformer.TransformerDecoder(TransformerDecoderLayer(16, **options), 3, norm)
    if rms:
        for path, module in list(found.named_modules()):
            if isinstance(module, fastformer.LayerNorm):
                found.set_submodule(path, fastformer.RMSNorm(16))
    with torch.no_grad():
        for p in found.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return found.to(DEVICE)


def results(found, autocast, product_dtype=None, monkeypatch=None):
    """Output and gradients."""
    if product_dtype is not None:
        monkeypatch.setattr(layers_module, "product_dtype", product_dtype)
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


def one_by_one(monkeypatch):
    monkeypatch.setattr("fastformer.nn.layer_stack._LAYERS", ())  # no layer is composed by the stack


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "autocast"),
    [
        ("encoder", False),
        ("encoder", True),
        pytest.param("decoder", False, marks=pytest.mark.long),
        ("decoder", True),
    ],
)
@pytest.mark.parametrize("final_norm", [True, False])
@NORMS
def test_carried_sums_have_the_bits_of_others(rms, kind, autocast, final_norm, backend, monkeypatch):
    found = stack(kind, final_norm, rms)
    with fastformer.backend(backend):
        carried = results(found, autocast)
        one_by_one(monkeypatch)
        apart = results(found, autocast)
    assert_same(carried, apart, backend, HALF if autocast else torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@NORMS
def test_norms_written_for_their_readers_have_the_bits_of_autocast(rms, kind, backend, monkeypatch):
    found, asked = stack(kind, rms=rms), layers_module.product_dtype
    dtypes = []
    with fastformer.backend(backend):
        ours = results(found, True, lambda *a: (dtypes.append(asked(*a)), dtypes[-1])[1], monkeypatch)
        theirs = results(found, True, lambda *_: None, monkeypatch)
    assert dtypes.count(HALF) == (6 if kind == "encoder" else 9)  # all but the last norm
    assert_same(ours, theirs, backend, HALF)


def test_dropout_draws_in_the_same_order(monkeypatch):
    found = stack("decoder", dropout=0.3)
    carried = results(found, False)
    one_by_one(monkeypatch)
    assert all(torch.equal(x, y) for x, y in zip(carried, results(found, False), strict=True))


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
@NORMS
def test_norms_in_another_dtype_are_those_rounded_once(rms, backend):
    norm, step = (rms_norm, dropout_add_rms_norm) if rms else (layer_norm, dropout_add_layer_norm)
    parameters = [torch.rand(16, device=DEVICE) + 0.5, torch.rand(16, device=DEVICE)][: 1 if rms else 2]
    results = []
    for dtype in (None, HALF):
        x, *affine = (t.clone().requires_grad_() for t in (X, *parameters))
        with fastformer.backend(backend):
            y = norm(x, 16, *affine, dtype=dtype)
            z, s = step(x, MEMORY, 16, *affine, dtype=dtype)
        assert s.dtype == torch.float32
        assert y.dtype == z.dtype == (dtype or torch.float32)
        y, z = y.to(HALF), z.to(HALF)
        (y * MEMORY.to(HALF) + z).sum().backward()
        results.append((y, z, s, x.grad, *(t.grad for t in affine)))
    assert_same(*results, backend, HALF)
