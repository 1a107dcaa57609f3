"""What ops and packing refuse: tensors of different devices, arguments of a wrong type, shape, dtype or range.

The "meta" device stands for a second GPU.
"""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fastformer
from fastformer import functional
from fastformer.functional import (
    attention,
    attention_with_weights,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    embedding,
    feed_forward,
    linear_cross_entropy,
    packed_attention,
    rotary,
)
from fastformer.host.devices import DeviceError
from fastformer.packing import Layout, from_nested, pack, to_nested, unpack
from tests.support.fused_op import DEVICE, needs_kernels

x, ids, heads = torch.randn(2, 4), torch.tensor([0, 2]), torch.randn(2, 3, 8)
w1, w2, table = torch.randn(6, 4), torch.randn(4, 6), torch.randn(5, 4)
q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
tokens, keys = torch.randn(6, 4, 8), torch.randn(10, 2, 8)
layout, key_layout = Layout.from_lengths([3, 3]), Layout.from_lengths([5, 5])
RULES = {"distance_bias": torch.zeros(4, 9), "sinks": torch.zeros(4)}
ATTENTION = {
    "q": q, "k": k, "v": k, "mask": torch.ones(3, 5).bool(), "key_mask": torch.ones(2, 5).bool(),
    "query_lengths": torch.tensor([3, 3]), "key_lengths": torch.tensor([5, 5]), **RULES,
}  # fmt: skip
RMS_NORM = {"x": x, "normalized_shape": 4, "weight": torch.ones(4)}
LAYER_NORM = {**RMS_NORM, "bias": torch.zeros(4)}
CALLS: dict[Any, dict[str, Any]] = {
    attention: ATTENTION,
    attention_with_weights: ATTENTION,
    packed_attention: {"q": tokens, "k": keys, "v": keys, "layout": layout, "key_layout": key_layout, **RULES},
    functional.layer_norm: LAYER_NORM,
    functional.rms_norm: RMS_NORM,
    dropout_add_layer_norm: {**LAYER_NORM, "residual": x},
    dropout_add_rms_norm: {**RMS_NORM, "residual": x},
    feed_forward: {"x": x, "weight1": w1, "bias1": torch.zeros(6), "weight2": w2, "bias2": torch.zeros(4)},
    linear_cross_entropy: {"x": x, "weight": torch.randn(5, 4), "target": ids, "bias": torch.zeros(5)},
    embedding: {"ids": ids[None], "weight": torch.randn(3, 4), "table": table, "positions": ids[None]},
    rotary: {"x": heads, "positions": torch.tensor([0, 4]), "cos": table, "sin": table},
    functional.dropout: {"x": x, "p": 0.5},
    pack: {"padded": torch.randn(2, 3, 4), "layout": layout},
    unpack: {"tokens": tokens, "layout": layout},
    to_nested: {"tokens": tokens, "layout": layout},
    from_nested: {"nested": to_nested(tokens, layout)},
}
MAY_BE_NONE = {"mask", "key_mask", "query_lengths", "key_lengths", "key_layout", "distance_bias", "sinks"}
MAY_BE_NONE |= {"bias", "bias1", "bias2"}
every_op = pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)


def tensors(op: Any) -> list[str]:
    return [name for name, value in CALLS[op].items() if isinstance(value, Tensor | Layout)]


def test_every_op_is_here() -> None:
    assert {op.__name__ for op in CALLS} >= set(functional.OPS)


@every_op
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_kernels)])
def test_a_tensor_on_another_device_is_refused_by_name(op: Any, backend: Any) -> None:
    arguments = CALLS[op]
    for name in tensors(op) if len(tensors(op)) > 1 else ():
        with fastformer.backend(backend), pytest.raises(DeviceError) as error:
            op(**arguments | {name: arguments[name].to("meta")})
        words = str(error.value).replace(",", "").replace(":", "").split()
        assert {name, "meta", "cpu"} <= set(words)
        assert words[0] in arguments  # where the first is the one elsewhere, the second is named before it


@every_op
@pytest.mark.parametrize("wrong", [None, [1.0], 3, np.zeros(2)], ids=["None", "list", "int", "ndarray"])
def test_an_argument_that_is_no_tensor_is_named(op: Any, wrong: Any) -> None:
    for name in tensors(op):
        if wrong is None and (name in MAY_BE_NONE or (name == "weight" and "normalized_shape" in CALLS[op])):
            continue
        error = ValueError if wrong is None and op is embedding and name in ("table", "positions") else TypeError
        with pytest.raises(error, match=rf"^{name} (must be a (Tensor|Layout), not {type(wrong).__name__}|is None)"):
            op(**CALLS[op] | {name: wrong})


@pytest.mark.parametrize("op", [op for op in CALLS if op is not from_nested], ids=lambda op: op.__name__)
def test_all_on_meta_goes_on_working(op: Any) -> None:
    arguments = {n: a.to("meta") if isinstance(a, Tensor | Layout) else a for n, a in CALLS[op].items()}
    for a, b in zip(*([y] if isinstance(y, Tensor) else y for y in (op(**arguments), op(**CALLS[op]))), strict=True):
        assert a.is_meta
        assert a.is_nested or a.shape == b.shape


def test_fake_tensors_have_the_devices_that_they_stand_for() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), fastformer.backend("reference"):
        a, w = torch.empty(2, 4, device="cuda:0"), torch.empty(4, device="cuda:1")
        with pytest.raises(DeviceError, match=r"^weight is on cuda:1, x on cuda:0: all must be on one device$"):
            functional.layer_norm(a, 4, w)
        assert functional.layer_norm(a, 4, w.to("cuda:0")).device == a.device


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_kernels)])
def test_a_default_device_is_not_that_of_tensors(backend: Any) -> None:
    """Such as a script of a GPU sets: what is drawn, grouped and remembered for tensors of another stays there."""
    with torch.device(DEVICE):
        layer = fastformer.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        stack = fastformer.TransformerEncoder(layer, 1).eval()
        lengths, order = torch.tensor([2, 0, 40]), torch.tensor([2, 0, 1])
        packed, new = torch.randn(42, 2, 16), torch.randn(3, 1, 16)

    def results():
        torch.manual_seed(0)
        within = Layout.from_lengths(lengths)
        yield packed_attention(packed, packed, packed, within, dropout_p=0.5)
        yield functional.dropout(new, 0.5)
        cache = stack.new_cache(3)
        yield stack.step(new, cache)
        cache.reorder(order)
        cache.keep(order)
        yield stack.step(new, cache)
        cache.crop(1)
        yield stack.step(new, cache)

    with fastformer.backend(backend):
        expected = list(results())
        with torch.device("meta"):
            for a, b in zip(results(), expected, strict=True):
                assert torch.equal(a, b)


Case = tuple[dict[str, Any], type[Exception], str]
OF_ATTENTION: list[Case] = [
    ({"alignment": "left"}, ValueError, "alignment must be one of top_left, bottom_right, not 'left'"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, not 1.5"),
    ({"window": 3}, ValueError, "window must be a tuple (left, right) of integers of at least 0 or None, not 3"),
    ({"window": (0, -1)}, ValueError, "window must be a tuple (left, right) of integers of at least 0"),
    ({"softcap": math.inf}, ValueError, "softcap must be a number between 1e-30 and 1e+30, not inf"),
    ({"distance_bias": torch.zeros(4, 9).int()}, TypeError, "distance_bias must be floating point, not torch.int32"),
    ({"distance_bias": torch.zeros(2, 9)}, ValueError, "distance_bias must be of shape [4, 2 * P - 1], not [2, 9]"),
    ({"distance_bias": torch.zeros(4, 7)}, ValueError, "distance_bias must be of at least 5 positions"),
    ({"sinks": torch.zeros(2)}, ValueError, "sinks must be of shape [4], not [2]"),
]
PADDED: list[Case] = [
    ({"q": q[0]}, ValueError, "q must be of shape [batch, heads, length, head size], not [4, 3, 8]"),
    ({"k": k[:1]}, ValueError, "q, k and v must have the same batch: 2, 1, 2"),
    ({"v": k[:, :, :4]}, ValueError, "k and v must have the same length, not 5 and 4"),
    ({"v": k[:, :1]}, ValueError, "k and v must have the same number of heads, not 2 and 1"),
    ({"k": k[..., :4]}, ValueError, "q and k must have the same head size, not 8 and 4"),
    ({"q": q[:, :3]}, ValueError, "the heads of q (3) must be a multiple of those of k (2)"),
    ({"mask": torch.zeros(5, 3)}, ValueError, "mask must be broadcastable to [2, 4, 3, 5], not of shape [5, 3]"),
    ({"mask": torch.zeros(3, 5).int()}, TypeError, "mask must be bool or floating point, not torch.int32"),
    ({"key_mask": torch.zeros(2, 5)}, TypeError, "key_mask must be bool, not torch.float32"),
    ({"key_mask": torch.zeros(2, 3).bool()}, ValueError, "key_mask must be of shape [2, 5], not [2, 3]"),
    ({"key_lengths": torch.tensor([6, 1])}, ValueError, "key_lengths must lie between 0 and 5, the length of k, not 6"),
    (
        {"query_lengths": torch.tensor([-1, 1])},
        ValueError,
        "query_lengths must lie between 0 and 3, the length of q, not -1",
    ),
    ({"key_lengths": torch.tensor([1.0, 2.0])}, TypeError, "key_lengths must be integers, not torch.float32"),
    (
        {"key_lengths": torch.tensor([1, 2**63 + 5], dtype=torch.uint64)},
        ValueError,
        "key_lengths must lie between 0 and 5, the length of k, not -9223372036854775803",
    ),
]
OF_PACKED_ATTENTION: list[Case] = [
    ({"q": tokens[:4]}, ValueError, "q must be of shape [6, heads, head size], not [4, 4, 8]"),
    ({"key_layout": Layout.from_lengths([10])}, ValueError, "layout has 2 sequences, key_layout 1"),
]
OF_NORMS: list[Case] = [
    ({"residual": torch.zeros(3, 4)}, ValueError, "x and residual must have the same shape, not [2, 4] and [3, 4]"),
    ({"dropout_p": 2.0}, ValueError, "dropout_p must be between 0 and 1, not 2.0"),
]
ACTIVATIONS = "activation must be one of relu, gelu, gelu_tanh, geglu, swiglu, reglu, not 'tanh'"
OF_FEED_FORWARD: list[Case] = [
    ({"activation": "tanh"}, ValueError, ACTIVATIONS),
    ({"weight1": torch.zeros(6, 5)}, ValueError, "weight1 must be of shape [F, D] for x of shape [2, 4], not [6, 5]"),
    ({"bias1": torch.zeros(1)}, ValueError, "bias1 must be of shape [6], not [1]"),
    ({"dropout_p": -1.0}, ValueError, "dropout_p must be between 0 and 1, not -1.0"),
    ({"weight2": torch.zeros(4, 5)}, ValueError, "weight2 must be of shape [out, 6]"),
]
OF_EMBEDDING: list[Case] = [
    ({"ids": ids[None].int()}, TypeError, "ids must be int64, not torch.int32"),
    ({"ids": ids[None] + 1}, IndexError, "ids must lie between 0 and 2, the last row of weight, not 3"),
    ({"positions": ids[None] + 3}, IndexError, "positions must lie between 0 and 4, the last row of table, not 5"),
    ({"positions": ids[None].double()}, TypeError, "positions must be int64, not torch.float64"),
    ({"positions": ids}, ValueError, "positions must be of the shape of ids, [1, 2], not [2]"),
    ({"positions": None}, ValueError, "positions is None: pass table and positions, or neither"),
    ({"table": None}, ValueError, "table is None: pass table and positions, or neither"),
    ({"table": torch.zeros(5, 3)}, ValueError, "table must be of shape [P, 4], not [5, 3]"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, not 1.5"),
]
RANGE = "positions must lie between 0 and 4, as cos and sin have P = 5 rows, not"
LEARNT = table.clone().requires_grad_()
OF_ROTARY: list[Case] = [
    ({"x": heads.long()}, TypeError, "x must be floating point, not torch.int64"),
    ({"positions": ids.int()}, TypeError, "positions must be int64, not torch.int32"),
    ({"positions": ids + 3}, ValueError, f"{RANGE} 5"),
    ({"positions": torch.zeros(3).long()}, ValueError, "positions must broadcast to x.shape[:-2], [2], not [3]"),
    ({"cos": table.half()}, TypeError, "cos must be float32 or float64, not torch.float16"),
    ({"cos": torch.zeros(5, 5)}, ValueError, "cos must be of shape [P, R / 2], R at most 8"),
    ({"sin": table[:4]}, ValueError, "sin must be of the shape of cos, [5, 4], not [4, 4]"),
    ({"cos": LEARNT}, ValueError, "cos requires a gradient, which rotary has for x only"),
]
OF_LOSS: list[Case] = [
    ({"target": ids[:1]}, ValueError, "target must be of shape [2], not [1]"),
    ({"weight": torch.zeros(5, 3)}, ValueError, "weight must be of shape [V, 4] with V of at least 1, not [5, 3]"),
    ({"bias": torch.zeros(1)}, ValueError, "bias must be of shape [5], not [1]"),
    ({"reduction": "max"}, ValueError, "reduction must be one of mean, sum, none, not 'max'"),
    ({"label_smoothing": 1.1}, ValueError, "label_smoothing must be between 0 and 1, not 1.1"),
    ({"target": ids + 3}, IndexError, "target must lie between 0 and 4 or be -100, not 5"),
    ({"target": ids.double()}, TypeError, "target must be int64, not torch.float64"),
]
OF_UNPACKING: list[Case] = [({"tokens": tokens[:5]}, ValueError, "tokens has 5 rows, the lengths add up to 6")]
FOUR = Layout.from_lengths([2, 4])
OF_PACKING: list[Case] = [
    ({"padded": torch.zeros(3, 4)}, ValueError, "padded has 3 rows, lengths has 2"),
    ({"layout": FOUR}, ValueError, "a length of 4 is beyond the row of 3"),
    ({"layout": Layout.from_lengths([2, 1], columns=4)}, ValueError, "a length of 4 is beyond the row of 3"),
]
WRONG: dict[Any, list[Case]] = {
    attention: OF_ATTENTION + PADDED, attention_with_weights: OF_ATTENTION + PADDED,
    packed_attention: OF_ATTENTION + OF_PACKED_ATTENTION, dropout_add_layer_norm: OF_NORMS,
    dropout_add_rms_norm: OF_NORMS, feed_forward: OF_FEED_FORWARD, embedding: OF_EMBEDDING, rotary: OF_ROTARY,
    linear_cross_entropy: OF_LOSS, pack: OF_PACKING, unpack: OF_UNPACKING, to_nested: OF_UNPACKING,
}  # fmt: skip


@pytest.mark.parametrize("op", WRONG, ids=lambda op: op.__name__)
def test_an_error_names_the_argument_and_what_is_allowed(op: Any) -> None:
    for changes, error, message in WRONG[op]:
        with pytest.raises(error, match=re.escape(message)):
            op(**CALLS[op] | changes)


def test_the_least_and_the_largest_softcap() -> None:
    for softcap in (1e-30, 1e30):
        assert attention(q, k, k, softcap=softcap).isfinite().all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_are_no_batch_of_sequences_are_refused() -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.zeros(5, 3), torch.tensor([0, 2, 5])).transpose(1, 2)
    strided = torch.nested.as_nested_tensor([torch.zeros(2, 3), torch.zeros(2, 4)], layout=torch.strided)
    for wrong in (jagged, strided):
        with pytest.raises(ValueError, match="nested must be ragged in its second dimension alone"):
            from_nested(wrong)


LENGTHS: list[tuple[Any, type[Exception], str]] = [
    ([2, -1], ValueError, "must not be negative: -1"),
    ([2.0, 1.0], TypeError, "must be integers, not torch.float32"),
    (np.array([True]), TypeError, "must be integers, not torch.bool"),
    ([None, 1], TypeError, "must be integers [B], not [None, 1]: "),
    (None, TypeError, "must be integers [B], not None: "),
    (torch.ones(1, 2).long(), ValueError, "must be one-dimensional [B], not of shape [1, 2]"),
    ([2, 2**31], ValueError, "must be at most 2147483647, not 2147483648"),
    ([2**31 - 1] * 2, ValueError, "must add up to at most 2147483647, not 4294967294"),
]


def test_wrong_lengths_and_masks_of_a_layout_are_refused_by_name() -> None:
    for wrong, error, message in LENGTHS:
        with pytest.raises(error, match=f"^lengths {re.escape(message)}"):
            Layout.from_lengths(wrong)
    with pytest.raises(ValueError, match="a length of 5 is beyond the row of 4"):
        Layout.from_lengths([2, 5], columns=4)
    with pytest.raises(TypeError, match=r"padding must be bool, True = padding, not torch\.float32"):
        Layout.from_mask(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"padding must be of shape \[B, L\], not \[3\]"):
        Layout.from_mask(torch.zeros(3).bool())
