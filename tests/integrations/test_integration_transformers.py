"""Models of Hugging Face transformers on our attention against `attn_implementation="eager"`."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import AttentionInterface, DynamicCache, MoonshineConfig, MoonshineModel, StaticCache
from transformers.masking_utils import create_masks_for_generate

import fastformer
from fastformer import functional
from fastformer.integrations import transformers as integration
from tests.integrations.tiny_transformers import (
    CAUSAL,
    DECODERS,
    DROPOUT,
    GENERATING,
    LENGTH,
    MODELS,
    PAIRS,
    ROUNDINGS,
    VOCABULARY,
    batch,
    checkpoint,
    pairs,
    tiny,
    without_dropout,
)
from tests.support.closeness import assert_close
from tests.support.fused_op import DEVICE, needs_kernels
from tests.support.python import python


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """What `functional.attention` and `attention_with_weights` receive, in order."""
    received: list[dict[str, Any]] = []

    def spy(op):
        def record(q, k, v, mask=None, **settings):
            received.append({"q": q, "k": k, "mask": mask, **settings})
            return op(q, k, v, mask, **settings)

        return record

    monkeypatch.setattr(functional, "attention", spy(functional.attention))
    monkeypatch.setattr(functional, "attention_with_weights", spy(functional.attention_with_weights))
    return received


def outcome(name: str, attention: str, inputs: dict[str, Tensor], **changes: Any) -> tuple[Tensor, Tensor, dict]:
    """Logits at real positions, loss, and the gradient of every parameter."""
    model = tiny(name, attention, **changes)
    result = model(**inputs)
    result.loss.backward()
    logits = result.logits[inputs["labels"] != -100]
    if MODELS[name][0] is DECODERS and "attention_mask" in inputs:
        logits = result.logits[inputs["attention_mask"].bool()]
    return logits, result.loss, {key: x.grad for key, x in model.named_parameters()}


@pytest.mark.parametrize("side", [None, "right", "left", "gaps"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name, side, calls):
    inputs = batch(name, side)
    expected = outcome(name, "eager", inputs)
    assert not calls
    actual = outcome(name, "fastformer", inputs)
    assert len(calls) == (6 if MODELS[name][0] is PAIRS else 2)
    for one, other in zip(actual[:2], expected[:2], strict=True):
        assert_close(one, other, ROUNDINGS)
    assert actual[2].keys() == expected[2].keys()
    for key, gradient in expected[2].items():
        assert (gradient is None) == (actual[2][key] is None), key
        if gradient is not None:
            assert_close(actual[2][key], gradient, ROUNDINGS)


@pytest.mark.parametrize("name", MODELS)
def test_the_op_gets_flags_and_no_mask_over_pairs(name, calls):
    inputs = batch(name, "left" if name in CAUSAL else "right")
    tiny(name)(**inputs)
    real = inputs["attention_mask"].bool()
    for call in calls:
        queries, keys = call["q"].shape[2], call["k"].shape[2]
        if name == "t5":
            assert call["mask"].shape == (1, 4, queries, keys)  # the position bias alone
        else:
            assert call["mask"] is None
        if keys == LENGTH:
            assert torch.equal(call["key_mask"], real)
        else:
            assert call["key_mask"] is None
        assert call["dropout_p"] == 0.0
    decoder = [call["causal"] for call in calls]
    if MODELS[name][0] is PAIRS:
        assert decoder == [False, False, True, False, True, False]
    else:
        assert decoder == [name in CAUSAL] * 2
    windows = {"mistral": [(3, 0)] * 2, "gemma2": [(3, 0), None]}
    assert [call["window"] for call in calls] == windows.get(name, [None] * len(calls))
    assert {call["softcap"] for call in calls} == {1.5 if name == "gemma2" else None}
    if name in ("llama", "mistral", "gemma2"):
        assert {(call["q"].shape[1], call["k"].shape[1]) for call in calls} == {(4, 2)}


def test_without_padding_a_causal_model_gives_causality_alone(calls):
    tiny("gpt2")(torch.randint(3, VOCABULARY, (2, 5)), attention_mask=torch.ones(2, 5, dtype=torch.long))
    assert all(call["mask"] is call["key_mask"] is call["window"] is None and call["causal"] for call in calls)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", GENERATING)
def test_generation(name, beams, cache):
    inputs = batch(name, "left")
    settings = {"max_new_tokens": 7, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    if cache == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    found = []
    for attention in ("eager", "fastformer"):
        model = tiny(name, attention)
        model.generation_config.eos_token_id = None  # all seven tokens
        found.append(model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings))
    assert found[0].shape[1] == (8 if MODELS[name][0] is PAIRS else LENGTH + 7)
    assert torch.equal(*found)


def test_decoding_gets_no_mask_over_pairs(calls):
    model = tiny("mistral")
    inputs = batch("mistral", "left")
    model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=7, eos_token_id=None)
    assert len(calls) == 14
    assert all(call["mask"] is None for call in calls)
    assert {call["k"].shape[2] for call in calls[2:]} == {4}  # the cache keeps a window


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_sequence_in_pieces(name, kind):
    """Several new tokens after those in the cache, with padding on the left: pieces of 4, 3, 1 and 1."""
    inputs = batch(name, "left")
    real = inputs["attention_mask"]
    results = []
    for attention in ("eager", "fastformer"):
        model = tiny(name, attention)
        static = StaticCache(config=model.config, max_cache_len=LENGTH + 3) if kind == "static" else None
        cache = static or DynamicCache(config=model.config)
        logits, start = [], 0
        with torch.no_grad():
            for end in (4, 7, 8, 9):
                piece = inputs["input_ids"][:, start:end]
                positions = torch.arange(start, end).expand(3, -1)
                result = model(
                    piece, attention_mask=real[:, :end], past_key_values=cache, position_ids=positions, use_cache=True
                )
                logits.append(result.logits)
                start = end
        results.append(torch.cat(logits, 1)[real.bool()])
    assert_close(results[1], results[0], ROUNDINGS)


@pytest.mark.parametrize("name", MODELS)
def test_output_attentions(name):
    inputs = batch(name, "right")
    expected = tiny(name, "eager")(**inputs, output_attentions=True)
    model = tiny(name)
    actual = model(**inputs, output_attentions=True)
    kinds = [key for key, value in expected.items() if key.endswith("attentions") and value]
    assert kinds == (
        ["decoder_attentions", "cross_attentions", "encoder_attentions"] if MODELS[name][0] is PAIRS else ["attentions"]
    )
    real = inputs["attention_mask"].bool()
    for kind in kinds:
        assert len(actual[kind]) == len(expected[kind]) == 2
        for weights, other in zip(actual[kind], expected[kind], strict=True):
            assert weights.shape == other.shape
            if name in CAUSAL:  # where padding sees no key in its window, eager says all are equal
                weights, other = (x.transpose(1, 2)[real] for x in (weights, other))
            assert_close(weights, other, ROUNDINGS)
    assert not any(model(**inputs).get(kind) for kind in kinds)


def test_output_attentions_of_a_static_cache_are_as_long_as_the_cache():
    inputs = batch("llama", "left")
    found = []
    for attention in ("eager", "fastformer"):
        model = tiny("llama", attention)
        cache = StaticCache(config=model.config, max_cache_len=LENGTH + 3)
        kwargs = {"attention_mask": inputs["attention_mask"], "past_key_values": cache, "output_attentions": True}
        found.append(model(inputs["input_ids"], **kwargs).attentions)
    real = inputs["attention_mask"].bool()
    for weights, other in zip(found[1], found[0], strict=True):
        assert weights.shape == (3, 4, LENGTH, LENGTH + 3)
        assert_close(weights.transpose(1, 2)[real], other.transpose(1, 2)[real], ROUNDINGS)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_in_training_only(name, calls):
    model = tiny(name).train()
    inputs = batch(name, "right")
    model(**inputs).loss.backward()
    assert {call["dropout_p"] for call in calls} == {DROPOUT}
    calls.clear()
    model.eval()(**inputs)
    assert {call["dropout_p"] for call in calls} == {0.0}


def test_switching_a_model(calls):
    model = tiny("bert", "sdpa")
    inputs = batch("bert", "right")
    before = model(**inputs).loss
    assert not calls
    model.set_attn_implementation("fastformer")
    assert_close(model(**inputs).loss, before, ROUNDINGS)
    assert len(calls) == 2
    model.set_attn_implementation("eager")
    model(**inputs)
    assert len(calls) == 2


def test_activation_checkpointing():
    inputs = batch("llama", "right")
    expected = outcome("llama", "fastformer", inputs)[2]
    model = tiny("llama").train()
    model.config.attention_dropout = 0.0
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # older releases
    model(**inputs).loss.backward()
    for key, x in model.named_parameters():
        assert_close(x.grad, expected[key], ROUNDINGS)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama", "marian", "t5"])
def test_a_bool_mask_that_changes_before_backward(name, checkpointed):
    """Others make a mask of their own of it, so that backward does not see the change."""
    found = []
    for attention in ("eager", "fastformer"):
        model, inputs = without_dropout(tiny(name, attention)), pairs(name, "right")
        inputs |= {key: x.bool() for key, x in inputs.items() if key.endswith("attention_mask")}
        if checkpointed:
            checkpoint(model)
        loss = model(**inputs).loss
        for key, x in inputs.items():
            if key.endswith("attention_mask"):
                x.fill_(True)
        loss.backward()
        found.append({key: x.grad for key, x in model.named_parameters() if x.grad is not None})
    for key, x in found[0].items():
        assert_close(found[1][key], x, ROUNDINGS)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral", "t5"])
def test_compiles_in_one_graph(name):
    inputs = batch(name, "right")
    if name == "gpt2":  # its loss warns, which torch.compile cannot trace
        del inputs["labels"]
    model = tiny(name)
    with torch.no_grad():
        expected = model(**inputs).logits
        actual = torch.compile(model, backend="eager", fullgraph=True)(**inputs).logits
    assert_close(actual, expected, ROUNDINGS)


def test_compiled_decoding_traces_once():
    """As `generate` compiles it: masks are made outside of the graph, the cache is static."""
    inputs, length = batch("llama", "left"), LENGTH + 4
    eager, model = tiny("llama", "eager"), tiny("llama")
    graphs = CompileCounter()
    models = [(eager, eager.forward), (model, torch.compile(model.forward, backend=graphs, fullgraph=True))]
    caches = [StaticCache(config=model.config, max_cache_len=length) for _ in models]
    real = inputs["attention_mask"]
    with torch.no_grad():
        for (each, _), cache in zip(models, caches, strict=True):
            each(inputs["input_ids"], attention_mask=real, past_key_values=cache)
        for position in range(LENGTH, length):
            real = torch.cat([real, real.new_ones(3, 1)], 1)
            ids, positions = torch.randint(3, VOCABULARY, (3, 1)), torch.full((3, 1), position)
            results = []
            for (each, step), cache in zip(models, caches, strict=True):
                mask = create_masks_for_generate(each.config, torch.empty(3, 1, 0), real, cache, positions)
                result = step(ids, attention_mask=mask, past_key_values=cache, position_ids=positions)
                results.append(result.logits)
            assert_close(results[1], results[0], ROUNDINGS)
    assert graphs.frame_count == 1


@needs_kernels
@pytest.mark.parametrize("name", ["mistral", "t5"])
def test_with_the_kernels(name):
    """Padding, windows, grouped heads and a position bias with its gradient: a layer of one head or two."""
    inputs = batch(name, "right")
    inputs = {key: x.to(DEVICE) for key, x in inputs.items()}
    small = {"num_heads": 1, "num_layers": 1} if name == "t5" else {"num_attention_heads": 2, "num_hidden_layers": 1}
    found = []
    for attention, choice in (("eager", "reference"), ("fastformer", "triton")):
        model = tiny(name, attention, **small, **({} if name == "t5" else {"num_key_value_heads": 1}))
        model = model.to(DEVICE, torch.float32)
        with fastformer.backend(choice):
            result = model(**inputs)
            result.loss.backward()
        found.append([result.logits[inputs["labels"] != -100], result.loss, *(x.grad for x in model.parameters())])
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_close(actual, expected, ROUNDINGS)


def test_a_model_that_says_itself_whether_it_is_causal():
    """Moonshine's attention states False where it has a mask, which says it."""
    found, generator = [], torch.Generator().manual_seed(1)
    speech, ids = torch.randn(2, 4000, generator=generator), torch.randint(3, 60, (2, 7), generator=generator)
    for attention in ("eager", "fastformer"):
        config = MoonshineConfig(
            vocab_size=60, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=1,
            decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4, pad_token_id=0,
            initializer_range=0.2,
        )  # fmt: skip
        torch.manual_seed(2)
        model = MoonshineModel._from_config(config, attn_implementation=attention).eval()
        mask = torch.arange(4000) < torch.tensor([[4000], [2500]])
        found.append(model(speech, mask.long(), decoder_input_ids=ids).last_hidden_state)
    assert_close(found[1], found[0], ROUNDINGS)


def test_registering_twice_changes_nothing():
    before = AttentionInterface().valid_keys()
    integration.register()
    assert AttentionInterface().valid_keys() == before
    assert "fastformer" in before


@pytest.mark.long
def test_models_build_beside_this_package():
    """`kernels/` in the repository must not shadow the distribution of that name, which transformers looks for."""
    code = (
        "import transformers, fastformer.integrations.transformers as integration;"
        "transformers.BertModel(transformers.BertConfig(num_hidden_layers=1));"
        "print(integration.NAME)"
    )
    run = python("-c", code)
    assert run.stdout.split() == ["fastformer"], run.stderr
