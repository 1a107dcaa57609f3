"""Modules with the kernels inside are as accurate as on the reference: outputs, gradients of inputs, masks, parameters.

Kernels have their own tests, option by option; modules have theirs, on the reference, against torch.nn. Here is what
lies between: masks, layouts and options mean the same to both. Backend "triton" never falls back.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.host import autograd_function
from fastformer.packing import Layout, pack
from tests.nn.test_options import LENGTHS, L, batch, decoder, encoder, hidden
from tests.support.fused_op import (
    DEVICE,
    assert_model_as_accurate_as_reference,
    assert_module_as_accurate_as_reference,
    needs_kernels,
)
from tests.support.masks import ahead
from tests.support.protocol_cases import CASES, DROP_INS

pytestmark = [needs_kernels, pytest.mark.usefixtures("slow_path")]
D, H, FF, B, T = 16, 2, 24, 2, 5


MODULES = [*DROP_INS, "FeedForward", "LinearCrossEntropy", "TransformerEncoder.packed", "TransformerDecoder.packed"]
IN_FP16 = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer, pre-norm")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in MODULES), *((name, torch.float16) for name in IN_FP16)],
)
def test_every_module_is_as_accurate_as_the_reference(name, dtype):
    case = CASES[name]
    args, kwargs = case.inputs(3, 5, dtype)
    assert_module_as_accurate_as_reference(case.pair()[0], args, dtype, case.method, **kwargs)


@pytest.mark.parametrize(("norm", "op"), [(fastformer.LayerNorm, "layer_norm"), (fastformer.RMSNorm, "rms_norm")])
def test_modules_run_kernels(norm, op):
    """The tests above would pass as well if a module went past its op."""
    layer = fastformer.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=True, norm_first=True)
    layer.norm1, layer.norm2 = norm(D), norm(D)
    layer, x = layer.to(DEVICE), torch.randn(1, T, D, device=DEVICE)
    with fastformer.backend("triton"), torch.profiler.profile() as profile:
        layer(x)
    ops = {event.name for event in profile.events() if event.name.startswith("fastformer::")}
    assert ops == {
        f"fastformer::{name}" for name in ("attention_forward", op, "dropout_add_norm", "feed_forward_activate")
    }


# One option is enough for what they share; "all" has each of them.
each_option = pytest.mark.parametrize("name", ["rms", "all"])


@each_option
def test_causal_encoders_with_options_are_as_accurate_as_the_reference(name):
    masks = {"src_key_padding_mask": hidden("right"), "is_causal": True}
    assert_module_as_accurate_as_reference(encoder(name), (batch(),), **masks)


@pytest.mark.slow
def test_a_decoder_with_options_is_as_accurate_as_the_reference():
    masks = {"memory_key_padding_mask": hidden("right"), "tgt_mask": ahead(6), "tgt_is_causal": True}
    assert_module_as_accurate_as_reference(decoder("all"), (batch(6), batch()), **masks)


@pytest.mark.parametrize(
    ("kind", "name", "capacity"), [("encoder", "rms", None), ("encoder", "all", None), ("decoder", "qkv_bias", L)]
)
def test_cached_steps_with_options_are_as_accurate_as_the_reference(kind, name, capacity):
    """A chunk of ragged lengths, then a token a row."""
    x, layout = batch(), Layout.from_lengths(LENGTHS, DEVICE, L)

    def results(stack: Any) -> list[Tensor]:
        tokens = x.to(DEVICE, next(stack.parameters()).dtype)
        memory = len(x) if kind == "encoder" else tokens
        cache = stack.new_cache(memory, capacity=None if capacity is None else capacity + 1)
        return [stack.step(pack(tokens, layout), cache, layout), stack.step(tokens[:, -1:], cache)]

    stack = encoder(name) if kind == "encoder" else decoder(name)
    assert_model_as_accurate_as_reference(stack.to(DEVICE, torch.float32), results)


def test_a_packed_stack_draws_the_seeds_of_its_dropout_together(monkeypatch):
    draws, draw = [], autograd_function._draw
    monkeypatch.setattr(autograd_function, "_draw", lambda x, count: draws.append(count) or draw(x, count))
    layer = fastformer.TransformerEncoderLayer(D, H, FF, 0.5, batch_first=True, device=DEVICE)
    stack = fastformer.TransformerEncoder(layer, 2)
    padding = torch.arange(T, device=DEVICE) >= torch.tensor([[T], [2]], device=DEVICE)
    with fastformer.backend("triton"):
        stack(torch.randn(B, T, D, device=DEVICE), src_key_padding_mask=padding).sum().backward()
    assert len(draws) == 1
