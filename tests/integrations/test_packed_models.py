"""Models of Hugging Face transformers whose layers run without padding, against `attn_implementation="eager"`."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor

import fastformer
from fastformer.integrations.transformers import padded, padding_free
from tests.integrations.tiny_transformers import (
    GENERATING,
    MODELS,
    PAIRS,
    ROUNDINGS,
    VOCABULARY,
    batch,
    count_packed,
    pairs,
    tiny,
)
from tests.support.closeness import assert_close

# Attention within windows, and T5's bias, count positions, so that padding between tokens is none to leave out.
WITH_GAPS = {"mistral": 0, "gemma2": 1, "t5": 0}


@pytest.fixture
def seen(monkeypatch):
    return count_packed(monkeypatch)


def attentions(name: str) -> int:
    return 6 if MODELS[name][0] is PAIRS else 2


def outcome(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Loss, logits at real positions, and the gradient of every parameter."""
    result = model(**inputs)
    result.loss.backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    return [result.loss, result.logits[inputs["labels"] != -100], *gradients]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, ROUNDINGS)


@pytest.mark.parametrize("side", [None, "right", "left", "gaps"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name, side, seen):
    inputs = pairs(name, side)
    expected = outcome(tiny(name, "eager"), inputs)
    model = tiny(name, "eager")
    report = padding_free(model)
    assert [entry.outcome for entry in report.packed] == ["2 layers"] * (2 if MODELS[name][0] is PAIRS else 1)
    assert not report.padded
    assert_same(outcome(model, inputs), expected)
    own = WITH_GAPS.get(name, attentions(name)) if side == "gaps" else attentions(name)
    if name == "t5" and side == "gaps":  # the decoder's tokens have no gaps
        own = 4
    assert len(seen) == (0 if side is None else own)
    if side is not None and MODELS[name][0] is not PAIRS:
        assert set(seen) <= {int(inputs["attention_mask"].sum())}


def test_what_layers_see_are_tokens():
    model, shapes = tiny("bert"), []
    padding_free(model)

    def look(module, args):
        shapes.append(args[0].shape)

    look.__module__ = "accelerate.hooks"  # of those that look at no batch
    model.bert.encoder.layer[1].output.register_forward_pre_hook(look)
    inputs = batch("bert", "left")
    model(**inputs)
    assert shapes == [(1, int(inputs["attention_mask"].sum()), 32)]


def test_the_state_after_the_last_layer_is_zero_at_padding():
    inputs = batch("bert", "right")
    model = tiny("bert").bert.encoder
    padding_free(model.layer)  # not of a model: nothing changes
    whole = tiny("bert")
    padding_free(whole)
    kept: list[Tensor] = []
    whole.bert.encoder.register_forward_hook(lambda module, args, output: kept.append(output.last_hidden_state))
    whole(**inputs)
    real = inputs["attention_mask"].bool()
    assert not kept[0][~real].any()
    assert kept[0][real].abs().min() > 0


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", GENERATING)
def test_generation_packs_the_prompt(name, beams, seen):
    inputs = batch(name, "left")
    settings = {"max_new_tokens": 7, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    found = []
    for pack in (False, True):
        model = tiny(name, "eager")
        model.generation_config.eos_token_id = None  # all seven tokens
        if pack:
            padding_free(model)
        found.append(model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings))
    assert torch.equal(*found)
    assert len(seen) == 2  # the layers of the prompt; steps have nothing to leave out


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(name, mode, seen):
    inputs = pairs(name, "right")
    eager, model = tiny(name, "eager"), tiny(name)
    padding_free(model)
    with mode():
        expected = eager(**inputs)
        actual = model(**inputs)
    assert_close(actual.loss, expected.loss, ROUNDINGS)
    assert len(seen) == attentions(name)
    model(**inputs).loss.backward()  # nothing of before is in the way


@pytest.mark.parametrize("name", ["bert", "mistral", "marian", "t5"])
def test_a_row_without_tokens(name, seen):
    inputs = pairs(name, "right")
    for mask in ("attention_mask", "decoder_attention_mask"):
        if mask in inputs:
            inputs[mask][1] = 0
    inputs["labels"][1] = -100
    expected = outcome(tiny(name, "eager"), inputs)
    model = tiny(name)
    padding_free(model)
    assert_same(outcome(model, inputs), expected)
    assert len(seen) == attentions(name)


def test_a_row_alone(seen):
    """One sequence: packed and padded differ in their length alone."""
    inputs = {key: x[1:2] for key, x in batch("llama", "left").items()}
    expected = outcome(tiny("llama", "eager"), inputs)
    model = tiny("llama")
    padding_free(model)
    assert_same(outcome(model, inputs), expected)
    assert seen == [4, 4]


def test_the_encoder_is_padded_and_the_decoder_is_not(seen):
    """Labels say what is padding of a decoder by default, not its mask: it attends to packed states all the same."""
    inputs = batch("marian", "right")
    expected = outcome(tiny("marian", "eager"), inputs)
    model = tiny("marian")
    padding_free(model)
    assert_same(outcome(model, inputs), expected)
    assert len(seen) == 2
    inputs = pairs("marian", "right")
    del inputs["attention_mask"]
    expected = outcome(tiny("marian", "eager"), inputs)
    model.zero_grad()
    seen.clear()
    assert_same(outcome(model, inputs), expected)
    assert len(seen) == 4


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_a_source_without_tokens_alone(name):
    """Of one sentence: nothing is there to pack, and the decoder sees nothing, as beside others."""
    model, inputs = tiny(name), {key: x[:1] for key, x in pairs(name, "right").items()}
    del inputs["labels"]
    inputs["decoder_input_ids"] = inputs["input_ids"][:, :7]
    inputs["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    inputs["attention_mask"].zero_()
    expected = model(**inputs).logits[:, :4]
    padding_free(model)
    assert_close(model(**inputs).logits[:, :4], expected, ROUNDINGS)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("states_padded", [False, True])
def test_a_decoder_that_is_given_states(name, states_padded, seen):
    """Cross attention by configuration, as in EncoderDecoderModel: the states' gradient too."""
    inputs = batch(name, "left")
    given = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]) if states_padded else None
    found = []
    for pack in (False, True):
        model = tiny(name, "eager", is_decoder=True, add_cross_attention=True).base_model
        if pack:
            assert padding_free(model).packed
        given.grad = None
        out = model(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], encoder_hidden_states=given,
            encoder_attention_mask=mask, use_cache=False,
        ).last_hidden_state[inputs["attention_mask"].bool()]  # fmt: skip
        out.square().sum().backward()
        found.append([out, given.grad.clone(), *(x.grad for x in model.parameters() if x.grad is not None)])
    assert_same(found[1], found[0])
    assert len(seen) == 4


def test_training_draws_dropout_for_tokens_alone(seen):
    model = tiny("bert").train()
    padding_free(model)
    inputs = batch("bert", "right")
    losses = {model(**inputs).loss.item() for _ in range(3)}
    assert len(losses) == 3
    assert len(seen) == 6


def test_undone_it_is_what_it_was(seen):
    model = tiny("marian", "sdpa")
    report = padding_free(model)
    assert model.config._attn_implementation == "fastformer"
    undone = padded(model)
    assert [entry.name for entry in undone.packed] == [entry.name for entry in report.packed]
    assert model.config._attn_implementation == "sdpa"
    untouched = tiny("marian", "sdpa")
    assert [name for name, _ in model.named_modules()] == [name for name, _ in untouched.named_modules()]
    for module, other in zip(model.modules(), untouched.modules(), strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
        assert len(module._forward_pre_hooks) == len(module._forward_pre_hooks_with_kwargs) == 0
        assert len(module._forward_hooks) == len(module._forward_hooks_with_kwargs) == 0
    model(**pairs("marian", "right"))
    assert not seen
    assert not padded(model).packed


def test_twice_is_once(seen):
    model = tiny("bert", "sdpa")
    padding_free(model)
    padding_free(model)
    assert all(len(layer._forward_pre_hooks) == 1 for layer in model.bert.encoder.layer)
    model(**batch("bert", "left"))
    assert len(seen) == 2
    padded(model)
    assert model.config._attn_implementation == "sdpa"


def test_t5_makes_no_table_of_pairs(monkeypatch):
    """Neither of its biases nor zeros for its cross attention: [H, 2 P - 1] and one number."""
    received = []
    op = fastformer.functional.packed_attention

    def spy(*args, distance_bias=None, **settings):
        received.append(None if distance_bias is None else tuple(distance_bias.shape))
        return op(*args, distance_bias=distance_bias, **settings)

    monkeypatch.setattr(fastformer.functional, "packed_attention", spy)
    model = tiny("t5")
    padding_free(model)
    made = []
    zeros = torch.zeros

    def watched(*args, **kwargs):
        made.extend([args] if isinstance(args[0], tuple) and len(args[0]) == 4 else [])
        return zeros(*args, **kwargs)

    monkeypatch.setattr("transformers.models.t5.modeling_t5.torch.zeros", watched)
    model(**pairs("t5", "right"))
    assert received == [(4, 17), (4, 17), (4, 13), None, (4, 13), None]
    assert not made


def test_sinks_run_packed(seen):
    from transformers import GptOssConfig, GptOssForCausalLM

    from tests.integrations.tiny_transformers import GROUPED

    config = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 4, "sliding_window": 4}
    inputs, found = batch("llama", "left"), []
    for pack in (False, True):
        torch.manual_seed(1)
        settings = GptOssConfig(**config, attn_implementation="eager", experts_implementation="eager")
        model = GptOssForCausalLM(settings).eval()
        for name, x in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(x)
        if pack:
            padding_free(model)
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == 2
    assert int(inputs["input_ids"].max()) < VOCABULARY
