"""Layers with options on the kernels are as accurate as on the reference: outputs and all gradients.

Backend "triton" never falls back, so each option runs in kernels, packed, padded and in steps.
"""

import pytest
import torch

from fastformer.packing import Layout, pack
from tests.nn.options.test_layers_with_options import LENGTHS, OPTIONS, B, L, ahead, batch, decoder, encoder, hidden
from tests.support.fused_op import DEVICE, assert_model_as_accurate_as_reference, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("slow_path")]
# One option is enough for what they share; "all" has each of them, and CI leaves the others to `make long`.
CASES = [pytest.param(name, marks=[] if name in ("rms", "all") else [pytest.mark.long]) for name in OPTIONS]


def hold(stack, forward):
    """Hold forward(stack, dtype), and the gradients of all parameters, to the rule."""

    def results(model):
        dtype = next(model.parameters()).dtype
        out = forward(model, dtype)
        wanted = list(model.parameters()) if out.requires_grad else []
        return out, *(torch.autograd.grad(out.square().sum(), wanted) if wanted else ())

    assert_model_as_accurate_as_reference(stack.to(DEVICE, torch.float32), results)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("padding_free", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_causal_encoder(name, padding_free):
    x, padding = batch(), hidden("right").to(DEVICE)

    def forward(stack, dtype):
        out = stack(x.to(DEVICE, dtype), None, padding, is_causal=True, padding_free=padding_free)
        return out * ~padding[:, :, None]

    hold(encoder(name), forward)


@pytest.mark.parametrize("name", CASES)
def test_a_decoder(name):
    x, memory, padding = batch(6), batch(), hidden("right").to(DEVICE)

    def forward(stack, dtype):
        given = {"memory_key_padding_mask": padding, "tgt_mask": ahead(6).to(DEVICE), "tgt_is_causal": True}
        return stack(x.to(DEVICE, dtype), memory.to(DEVICE, dtype), **given)

    hold(decoder(name), forward)


@pytest.mark.parametrize("name", CASES)
def test_steps(name):
    x, layout = batch(), Layout.from_lengths(LENGTHS - 1, DEVICE, L)

    def forward(stack, dtype):
        cache, given = stack.new_cache(B), x.to(DEVICE, dtype)
        prompts = stack.step(pack(given, layout), cache, layout)
        return torch.cat([prompts, stack.step(given[:, -1:], cache).flatten(0, 1)])

    hold(encoder(name), forward)
