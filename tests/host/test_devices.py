"""Tensors that no call may mix: every op refuses those on another device, and what is no tensor, by name.

The "meta" device stands for a second GPU.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fastformer
from fastformer import functional
from fastformer.host.devices import DeviceError
from fastformer.packing import Layout, from_nested, pack, to_nested, unpack
from tests.support.fused_op import needs_kernels

T, D, F, H, V = 5, 16, 32, 2, 11
x, heads, dense = torch.randn(T, D), torch.randn(T, H, D), torch.randn(1, H, T, D)
weight, bias, ids = torch.ones(D), torch.zeros(D), torch.arange(T)
layout = Layout.from_lengths([2, 3])
RMS_NORM = {"x": x, "normalized_shape": D, "weight": weight}
NORM = {**RMS_NORM, "bias": bias}
ATTENTION = {
    "q": dense, "k": dense, "v": dense, "mask": torch.ones(T, T).bool(), "key_mask": torch.ones(1, T).bool(),
    "query_lengths": torch.tensor([T]), "key_lengths": torch.tensor([T]),
}  # fmt: skip
CALLS = {
    functional.attention: ATTENTION,
    functional.attention_with_weights: ATTENTION,
    functional.packed_attention: {"q": heads, "k": heads, "v": heads, "layout": layout, "key_layout": layout},
    functional.layer_norm: NORM,
    functional.rms_norm: RMS_NORM,
    functional.dropout_add_layer_norm: {**NORM, "residual": x},
    functional.dropout_add_rms_norm: {**RMS_NORM, "residual": x},
    functional.feed_forward: {
        "x": x, "weight1": torch.randn(F, D), "bias1": torch.zeros(F), "weight2": torch.randn(D, F), "bias2": bias,
    },
    functional.linear_cross_entropy: {"x": x, "weight": torch.randn(V, D), "target": ids, "bias": torch.zeros(V)},
    functional.embedding: {"ids": ids, "weight": torch.randn(V, D), "table": x, "positions": ids},
    functional.rotary: {
        "x": heads, "positions": torch.arange(T), "cos": torch.randn(T, D // 2), "sin": torch.randn(T, D // 2),
    },
    functional.dropout: {"x": x, "p": 0.5},
    pack: {"padded": torch.randn(2, 3, D), "layout": layout},
    unpack: {"tokens": x, "layout": layout},
    to_nested: {"tokens": x, "layout": layout},
    from_nested: {"nested": to_nested(x, layout)},
}  # fmt: skip
OPTIONAL = {"mask", "key_mask", "query_lengths", "key_lengths", "key_layout", "bias", "bias1", "bias2"}
EITHER = [(functional.embedding, "table"), (functional.embedding, "positions")]  # both or none
GIVEN = [(op, name) for op, given in CALLS.items() for name, a in given.items() if isinstance(a, Tensor | Layout)]
MIXABLE = [(op, name) for op, name in GIVEN if sum(o is op for o, _ in GIVEN) > 1]
IDS = "{0.__name__}-{1}".format


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_kernels)], autouse=True)
def backend(request):
    with fastformer.backend(request.param):
        yield request.param


def test_every_op_is_here():
    assert {op.__name__ for op in CALLS} >= set(functional.OPS)


@pytest.mark.parametrize(("op", "name"), MIXABLE, ids=[IDS(*each) for each in MIXABLE])
def test_a_tensor_on_another_device_is_refused_by_name(op, name):
    given = CALLS[op]
    with pytest.raises(DeviceError) as error:
        op(**given | {name: given[name].to("meta")})
    told = str(error.value).replace(",", "").replace(":", "").split()
    assert {name, "meta", "cpu"} <= set(told)
    assert told[0] in given  # where the first is the one elsewhere, the second is named before it
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize(("op", "name"), GIVEN, ids=[IDS(*each) for each in GIVEN])
@pytest.mark.parametrize("wrong", [None, [1.0], 3, torch.zeros(2).numpy()], ids=["None", "list", "int", "ndarray"])
def test_an_argument_that_is_no_tensor_is_named(op, name, wrong):
    if wrong is None and (name in OPTIONAL or (name == "weight" and "normalized_shape" in CALLS[op])):
        pytest.skip("None is allowed")
    error = ValueError if wrong is None and (op, name) in EITHER else TypeError
    with pytest.raises(error, match=rf"^{name} (must be a (Tensor|Layout), not {type(wrong).__name__}|is None)"):
        op(**CALLS[op] | {name: wrong})


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
def test_all_on_meta_goes_on_working(op, backend):
    if backend == "triton":
        pytest.skip("the kernels take no meta tensors")
    if op is from_nested:
        pytest.skip("its offsets have no values there")
    given = {n: a.to("meta") if isinstance(a, Tensor | Layout) else a for n, a in CALLS[op].items()}
    expected = op(**CALLS[op])
    out = op(**given)
    for a, b in zip(*([y] if isinstance(y, Tensor) else y for y in (out, expected)), strict=True):
        assert a.is_meta
        assert a.is_nested or a.shape == b.shape


def test_fake_tensors_have_the_devices_that_they_stand_for():
    with FakeTensorMode(allow_non_fake_inputs=True), fastformer.backend("reference"):
        a, w = torch.empty(T, D, device="cuda:0"), torch.empty(D, device="cuda:1")
        with pytest.raises(DeviceError, match=r"^weight is on cuda:1, x on cuda:0: all must be on one device$"):
            functional.layer_norm(a, D, w)
        assert functional.layer_norm(a, D, w.to("cuda:0")).device == a.device


def test_a_default_device_is_not_that_of_tensors(backend):
    """Such as a script of a GPU sets: what is drawn, grouped and remembered for tensors of the CPU stays there."""
    stack = fastformer.TransformerEncoder(fastformer.TransformerEncoderLayer(D, H, F, batch_first=True), 1).eval()
    lengths, order, tokens = torch.tensor([2, 0, 40]), torch.tensor([2, 0, 1]), torch.randn(42, H, D)

    def found():
        torch.manual_seed(0)
        within = Layout.from_lengths(lengths)
        yield functional.packed_attention(tokens, tokens, tokens, within, dropout_p=0.5)
        yield functional.dropout(x, 0.5)
        cache = stack.new_cache(3)
        yield stack.step(x[:3, None], cache)
        cache.reorder(order)
        cache.keep(order)
        yield stack.step(x[:3, None], cache)
        cache.crop(1)
        yield stack.step(x[1:4, None], cache)

    expected = list(found())
    with torch.device("meta"):
        for a, b in zip(found(), expected, strict=True):
            assert torch.equal(a, b)
