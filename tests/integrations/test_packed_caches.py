"""What packed models keep of a prompt, and where, against `attn_implementation="eager"`."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

from fastformer.integrations.transformers import padding_free
from tests.integrations.test_packed_models import attentions
from tests.integrations.tiny_transformers import (
    CAUSAL,
    GENERATING,
    LENGTH,
    MODELS,
    PAIRS,
    ROUNDINGS,
    batch,
    both_ways,
    count_packed,
    pairs,
    tiny,
)
from tests.support.closeness import assert_close


@pytest.fixture
def seen(monkeypatch):
    return count_packed(monkeypatch)


@pytest.mark.parametrize("name", GENERATING)
def test_the_first_step_of_one_row_with_a_static_cache_is_no_packed_batch(name):
    ids = torch.tensor([[5, 7, 9] if MODELS[name][0] is PAIRS else [5]])  # the decoder begins with one token
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    assert torch.equal(*(model.generate(ids, **settings) for model in both_ways(name)))


@pytest.mark.parametrize("name", GENERATING)
def test_a_cache_holds_what_eager_gives_it(name, seen):
    inputs = pairs(name, "left")
    labels = inputs.pop("labels")
    if MODELS[name][0] is PAIRS:
        inputs["decoder_input_ids"] = labels.clamp(min=0)
    caches = []
    for pack in (False, True):
        model = tiny(name, "eager")
        if pack:
            padding_free(model)
        caches.append(model(**inputs, use_cache=True).past_key_values)
    assert len(seen) == attentions(name)
    real = inputs["decoder_attention_mask" if MODELS[name][0] is PAIRS else "attention_mask"].bool()
    assert type(caches[1]) is (EncoderDecoderCache if MODELS[name][0] is PAIRS else DynamicCache)
    parts = [caches]
    if MODELS[name][0] is PAIRS:
        parts = [[each.self_attention_cache for each in caches], [each.cross_attention_cache for each in caches]]
        assert caches[1].is_updated == {0: True, 1: True}
    for (wanted, found), its in zip(parts, [real, inputs["attention_mask"].bool()], strict=False):
        assert [layer.get_seq_length() for layer in found.layers] == [layer.get_seq_length() for layer in wanted.layers]
        for one, other in zip(found.layers, wanted.layers, strict=True):
            kept = its[:, -one.keys.shape[2] :]  # a window keeps the last ones
            for x, y in ((one.keys, other.keys), (one.values, other.values)):
                assert_close(x.transpose(1, 2)[kept], y.transpose(1, 2)[kept], ROUNDINGS)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_sequence_in_pieces_runs_padded_after_the_first(name, seen):
    inputs = batch(name, "left")
    results = []
    for pack in (False, True):
        model = tiny(name, "eager")
        if pack:
            padding_free(model)
        cache, logits = DynamicCache(config=model.config), []
        with torch.no_grad():
            for start, end in ((0, 6), (6, 8), (8, 9)):
                result = model(
                    inputs["input_ids"][:, start:end], attention_mask=inputs["attention_mask"][:, :end],
                    past_key_values=cache, position_ids=torch.arange(start, end).expand(3, -1),
                )  # fmt: skip
                logits.append(result.logits)
        results.append(torch.cat(logits, 1)[inputs["attention_mask"].bool()])
    assert_close(results[1], results[0], ROUNDINGS)
    assert len(seen) == 2


def test_a_static_cache_runs_padded(seen):
    inputs = batch("llama", "left")
    found = []
    for model in both_ways("llama"):
        cache = StaticCache(config=model.config, max_cache_len=LENGTH + 3)
        found.append(model(inputs["input_ids"], attention_mask=inputs["attention_mask"], past_key_values=cache).logits)
    real = inputs["attention_mask"].bool()
    assert_close(found[1][real], found[0][real], ROUNDINGS)
    assert not seen


class Halving(DynamicLayer):
    """Keys and values of somebody's own precision, say: what it returns is not what came."""

    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        return keys / 2, values


def of_own_layers(model):
    cache = DynamicCache()
    cache.layer_class_to_replicate = Halving
    return cache


def with_an_own_layer(model):
    cache = DynamicCache(config=model.config)
    cache.layers[1] = Halving()
    return cache


def with_an_own_update(model):
    cache = DynamicCache()
    update = cache.update

    def halving(*args, **kwargs):
        keys, values = update(*args, **kwargs)
        return keys / 2, values

    cache.update = halving
    return cache


@pytest.mark.parametrize("make", [of_own_layers, with_an_own_layer, with_an_own_update])
def test_a_cache_that_returns_something_else_runs_padded(make, seen):
    inputs, found = batch("llama", "right"), []
    for model in both_ways("llama"):
        found.append(model(**inputs, past_key_values=make(model)).logits[inputs["attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert not seen


def test_an_update_put_into_the_class_of_layers_is_called(monkeypatch, seen):
    update = DynamicLayer.update
    monkeypatch.setattr(DynamicLayer, "update", lambda *args, **kwargs: tuple(x / 2 for x in update(*args, **kwargs)))
    inputs, found = batch("llama", "right"), []
    for model in both_ways("llama"):
        found.append(model(**inputs, past_key_values=DynamicCache()).logits[inputs["attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert not seen


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_a_memory_that_is_kept_from_another_target(name, seen):
    """The decoder takes keys and values of the memory as they are, padded."""
    inputs, found = pairs(name, "right"), []
    inputs["decoder_input_ids"] = inputs.pop("labels").clamp(min=0)
    for model in both_ways(name):
        kept = model(**inputs).past_key_values.cross_attention_cache
        seen.clear()
        logits = model(**inputs, past_key_values=EncoderDecoderCache(DynamicCache(), kept)).logits
        found.append(logits[inputs["decoder_attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert len(seen) == 2  # of the encoder
