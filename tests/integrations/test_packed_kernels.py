"""Whole models of Hugging Face transformers whose packed attention runs in the kernels, as accurate as `eager`."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

import fastformer
from fastformer import functional
from fastformer.integrations.transformers import padding_free
from tests.integrations.tiny_transformers import GROUPED, outcome, pairs, tiny
from tests.support.fused_op import DEVICE, compare, needs_kernels
from tests.support.noise import noise

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 4, "experts_implementation": "eager"}
# How often each attention runs packed, in which kind of call.
CALLS = {"mistral": {"window": 2}, "t5": {"distance_bias": 4, "plain": 2}, "gpt_oss": {"sinks": 1, "sinks window": 1}}


def made(name: str) -> Any:
    """A model of two layers, or two and two, in fp32."""
    if name == "t5":
        return tiny(name, "eager", num_heads=2, d_model=8).float()
    if name == "mistral":
        return tiny(name, "eager", **HEADS).float()
    torch.manual_seed(1)
    settings = {**GROUPED, **HEADS, **EXPERTS, "sliding_window": 4, "attn_implementation": "eager"}
    model = GptOssForCausalLM(GptOssConfig(**settings)).eval()
    for key, x in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(x)
    return model


def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the packed calls by what they are given."""
    seen: dict[str, int] = {}
    op = functional.packed_attention

    def counting(*args: Any, **settings: Any) -> Tensor:
        given = [name for name in ("distance_bias", "sinks", "window") if settings[name] is not None]
        kind = " ".join(given) or "plain"
        seen[kind] = seen.get(kind, 0) + 1
        return op(*args, **settings)

    monkeypatch.setattr(functional, "packed_attention", counting)
    return seen


@needs_kernels
@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients(name, monkeypatch):
    """Held to eager in fp64 by its own error in fp32 and the noise of its formula; no call may fall back."""
    inputs = {key: x.to(DEVICE) for key, x in pairs("t5" if name == "t5" else "llama", "left").items()}
    eager, wide, model = (made(name).to(DEVICE) for _ in range(3))
    wide.double().set_attn_implementation("sdpa" if name == "mistral" else "eager")  # whose softmax is in fp32

    def results(net: Any) -> list[Tensor]:
        net.zero_grad(set_to_none=True)
        return outcome(net, inputs)

    exact, plain = results(wide), results(eager)
    noises = noise(lambda: results(wide), exact, torch.float32)
    padding_free(model)
    seen = kinds(monkeypatch)
    with fastformer.backend("triton"):
        compare(results(model), plain, exact, noises)
    assert seen == CALLS[name]
