"""Models of Hugging Face transformers on our attention against `attn_implementation="eager"`."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_masks_for_generate

from fastformer.integrations import transformers as integration
from tests.integrations.small_configs import LENGTH, VOCABULARY, build
from tests.integrations.test_packed import reasons
from tests.integrations.tiny_transformers import (
    BY_NAME,
    CACHE,
    CAUSAL,
    GENERATING,
    MODELS,
    PAIRS,
    ROUNDINGS,
    WAYS,
    batch,
    fast,
    pairs,
    tiny,
)
from tests.support.closeness import assert_close

GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
}
RARE = ("prompt lookup", "sampling")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in GENERATING for how in GENERATE if name in ("llama", "t5") or how not in RARE],
)
def test_generation(name, how, way, packed_calls):
    rows = slice(1, 2) if how == "prompt lookup" else slice(None)  # transformers has it for a row alone
    inputs = {key: x[rows] for key, x in batch(name, "left").items() if key != "labels"}
    settings = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **GENERATE[how]}
    results = []
    for model in (tiny(name, "eager"), fast(name, way)):
        model.generation_config.eos_token_id = None  # all seven tokens
        torch.manual_seed(5)
        results.append(model.generate(**inputs, **settings))
    assert results[0].shape[1] == (8 if MODELS[name] is PAIRS else LENGTH + 7)
    assert torch.equal(*results)
    packed = way == "layers" and (how != "static cache" or MODELS[name] is PAIRS)
    assert len(packed_calls) == (2 if packed else 0)  # the layers of the prompt; steps have nothing to leave out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_sequence_in_pieces(name, kind, way, packed_calls):
    """Several new tokens after those in the cache, with padding on the left: pieces of 4, 3, 1 and 1."""
    inputs = batch(name, "left")
    results = []
    for model in (tiny(name, "eager"), fast(name, way)):
        static = StaticCache(config=model.config, max_cache_len=LENGTH + 3) if kind == "static" else None
        cache, logits, start = static or DynamicCache(config=model.config), [], 0
        with torch.no_grad():
            for end in (4, 7, 8, 9):
                result = model(
                    inputs["input_ids"][:, start:end], attention_mask=inputs["attention_mask"][:, :end],
                    **{CACHE: cache}, position_ids=torch.arange(start, end).expand(3, -1), use_cache=True,
                )  # fmt: skip
                logits.append(result.logits)
                start = end
        results.append(torch.cat(logits, 1)[inputs["attention_mask"].bool()])
    assert_close(results[1], results[0], ROUNDINGS)
    assert len(packed_calls) == (2 if way == "layers" and kind == "dynamic" else 0)  # of the first piece


@pytest.mark.parametrize("asked", ["hidden_states", "attentions"])
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in MODELS for way in WAYS if name in BY_NAME or way == "layers"]
)
def test_hidden_states_and_attention_weights(name, way, asked, packed_calls):
    """Weights are of padded batches."""
    inputs = pairs(name, "right")
    expected, model = tiny(name, "eager")(**inputs, **{f"output_{asked}": True}), fast(name, way)
    actual = model(**inputs, **{f"output_{asked}": True})
    assert bool(packed_calls) == (way == "layers" and asked == "hidden_states")
    kinds = [key for key, value in expected.items() if key.endswith(asked) and value]
    assert kinds
    masks = {x.shape[1]: x.bool() for key, x in inputs.items() if key.endswith("attention_mask")}
    for kind in kinds:
        for one, other in zip(actual[kind], expected[kind], strict=True):
            assert one.shape == other.shape
            real = masks[one.shape[-2]]
            one, other = (x.transpose(1, 2)[real] if x.dim() == 4 else x[real] for x in (one, other))
            assert_close(one, other, ROUNDINGS)
    assert not any(model(**inputs).get(kind) for kind in kinds)


def test_switching_a_model():
    model, inputs = tiny("bert", "sdpa"), batch("bert", "right")
    before = model(**inputs).loss
    for name in ("fastformer", "eager"):
        model.set_attn_implementation(name)
        assert_close(model(**inputs).loss, before, ROUNDINGS)


@pytest.mark.parametrize(("way", "name"), [("attention", "mistral"), ("attention", "t5"), ("layers", "llama")])
def test_compiles_in_one_graph(name, way, packed_calls):
    """Of padded batches, with one layer."""
    inputs = pairs(name, "right") | {"use_cache": False}  # which torch 2.11 cannot compile
    real = inputs["labels"] != -100
    model = fast(
        name, way, **({"num_layers": 1, "num_decoder_layers": 1} if name == "t5" else {"num_hidden_layers": 1})
    )
    with torch.no_grad():
        expected = model(**inputs).logits
        packed_calls.clear()
        actual = torch.compile(model, backend="eager", fullgraph=True)(**inputs).logits
    assert_close(actual[real], expected[real], ROUNDINGS)
    assert not packed_calls


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
            each(inputs["input_ids"], attention_mask=real, **{CACHE: cache})
        for position in range(LENGTH, length):
            real = torch.cat([real, real.new_ones(3, 1)], 1)
            ids, positions = torch.randint(3, VOCABULARY, (3, 1)), torch.full((3, 1), position)
            results = []
            for (each, step), cache in zip(models, caches, strict=True):
                mask = create_masks_for_generate(each.config, torch.empty(3, 1, 0), real, cache, positions)
                result = step(ids, attention_mask=mask, **{CACHE: cache}, position_ids=positions)
                results.append(result.logits)
            assert_close(results[1], results[0], ROUNDINGS)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("name", ["bloom", "deberta-v2", "mpnet"])
def test_a_model_that_computes_its_attention_itself(name):
    with pytest.raises(ValueError, match=r"does not reach the attention of .*Model, .* use \"eager\""):
        build(name, "fastformer", torch.float32)
    model = build(name, "eager", torch.float32)
    model.set_attn_implementation("fastformer")  # transformers warns
    assert model.config._attn_implementation == "eager"
    if name == "mpnet":
        assert integration.padding_free(model).packed
    else:
        assert reasons(model) == "computes its attention outside of transformers' attention interface"
