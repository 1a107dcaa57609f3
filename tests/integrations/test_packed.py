"""`padding_free` on models of Hugging Face transformers, against `attn_implementation="eager"`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor, nn
from transformers import BertConfig, BertModel, DynamicCache, EncoderDecoderCache

from fastformer.integrations.transformers import entry, padding_free
from fastformer.nn.inspection import TOKEN_WISE
from tests.integrations.small_configs import LENGTH, VOCABULARY, build, small
from tests.integrations.tiny_transformers import (
    CACHE,
    GENERATING,
    MODELS,
    PAIRS,
    ROUNDINGS,
    assert_as_eager,
    assert_same,
    attentions,
    batch,
    both_ways,
    outcome,
    pairs,
    tiny,
)
from tests.support.closeness import assert_close

# Windows and the biases of T5 and MPNet count positions, so that padding between tokens cannot be left out.
WITH_GAPS = {"mistral": 0, "gemma2": 0, "mpnet": 0, "t5": 4}  # the decoder's tokens have no gaps


def assert_same_logits(name: str, mask: Tensor, inputs_of: Callable[[Any], dict[str, Any]]) -> None:
    """Compare eager and padding-free logits at real positions, each model with inputs of its own."""
    eager, packed = (model(attention_mask=mask, **inputs_of(model)).logits[mask.bool()] for model in both_ways(name))
    assert_close(packed, eager, ROUNDINGS)


def reasons(model: nn.Module) -> str:
    report = padding_free(model)
    assert not report.packed
    return " / ".join(entry.outcome for entry in report.padded)


@pytest.mark.parametrize("side", [None, "right", "left", "gaps"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name, side, packed_calls):
    inputs = pairs(name, side)
    expected = outcome(tiny(name, "eager"), inputs)
    model = tiny(name, "eager")
    report = padding_free(model)
    assert len(report.packed) == (2 if MODELS[name] is PAIRS else 1)
    assert not report.padded
    assert_same(outcome(model, inputs), expected)
    calls = WITH_GAPS.get(name, attentions(name)) if side == "gaps" else attentions(name)
    assert len(packed_calls) == (0 if side is None else calls)
    if side is not None and MODELS[name] is not PAIRS:
        assert set(packed_calls) <= {int(inputs["attention_mask"].sum())}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, packed_calls):
    inputs = pairs("t5", "right")
    eager, model = both_ways("t5")
    with mode():
        assert_close(model(**inputs).loss, eager(**inputs).loss, ROUNDINGS)
    model(**inputs).loss.backward()  # no tensor of inference mode is kept
    assert len(packed_calls) == 12


def test_outputs_as_a_tuple(packed_calls):
    inputs = {name: x for name, x in batch("bert", "right").items() if name != "labels"}
    expected, out = (model.base_model(**inputs, return_dict=False) for model in both_ways("bert"))
    assert type(out) is tuple
    real = inputs["attention_mask"].bool()
    assert_close(out[0][real], expected[0][real], ROUNDINGS)
    assert len(packed_calls) == 2


def test_embeddings_in_place_of_ids(packed_calls):
    """RoBERTa then counts columns, not ids other than the padding token's."""
    mask, ids = batch("roberta", "left")["attention_mask"], batch("roberta", "left")["input_ids"]
    assert_same_logits("roberta", mask, lambda model: {"inputs_embeds": model.get_input_embeddings()(ids)})
    assert len(packed_calls) == 2


def test_states_of_padding_are_zero_and_a_pooler_reads_padded_states(packed_calls):
    model = build("bert", "eager", torch.float64)
    padding_free(model)
    inputs = batch("bert", "left")
    out = model(inputs["input_ids"], inputs["attention_mask"])
    assert not out.last_hidden_state[~inputs["attention_mask"].bool()].any()
    assert_close(out.pooler_output[1], torch.tanh(model.pooler.dense.bias))  # its first column is padding
    assert len(packed_calls) == 2


@pytest.mark.parametrize("side", ["right", "left", "gaps"])
@pytest.mark.parametrize("name", MODELS)
def test_few_tokens_in_inference_run_padded_and_give_the_same(name, side, packed_calls, monkeypatch):
    """With zeros at padding, in all hidden states and as a tuple, too."""
    model, inputs = both_ways(name)[1], pairs(name, side)
    forms: list[dict[str, Any]] = [{"output_hidden_states": True}, {"return_dict": False}]
    with torch.no_grad():
        expected = [model(**inputs, **form) for form in forms]
        calls = len(packed_calls)
        monkeypatch.setattr(entry, "_MOST_WASTED", 1 << 20)
        actual = [model(**inputs, **form) for form in forms]
    assert len(packed_calls) == calls
    assert_close(actual[0].loss, expected[0].loss, ROUNDINGS)
    states = "decoder_hidden_states" if MODELS[name] is PAIRS else "hidden_states"
    real = inputs["decoder_attention_mask" if MODELS[name] is PAIRS else "attention_mask"].bool()
    for one, other in zip(actual[0][states], expected[0][states], strict=True):
        assert not one[~real].any()
        assert_close(one[real], other[real], ROUNDINGS)
    assert type(actual[1]) is tuple
    assert_close(actual[1][0], expected[1][0], ROUNDINGS)
    model(**inputs)  # with gradients, packed
    assert len(packed_calls) > calls or not calls


def test_a_source_is_padded_and_a_target_is_not(packed_calls):
    for without, calls in (("decoder_attention_mask", 2), ("attention_mask", 4)):
        inputs = {key: x for key, x in pairs("marian", "right").items() if key != without}
        packed_calls.clear()
        assert_as_eager("marian", inputs)
        assert len(packed_calls) == calls


@pytest.mark.parametrize("states_padded", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_decoder_that_is_given_states(name, states_padded, packed_calls):
    """Cross attention by configuration, as in EncoderDecoderModel: the states' gradient too."""
    inputs = batch(name, "left")
    given = torch.randn(3, 5, 32, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]) if states_padded else None
    results = []
    for whole in both_ways(name, is_decoder=True, add_cross_attention=True):
        model = whole.base_model
        given.grad = None
        out = model(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], encoder_hidden_states=given,
            encoder_attention_mask=mask, use_cache=False,
        ).last_hidden_state[inputs["attention_mask"].bool()]  # fmt: skip
        out.square().sum().backward()
        results.append([out, given.grad.clone(), *(x.grad for x in model.parameters() if x.grad is not None)])
    assert_same(results[1], results[0])
    assert len(packed_calls) == 4


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", GENERATING)
def test_a_cache_holds_what_eager_gives_it(name, given, packed_calls):
    inputs, of_pairs = pairs(name, "left"), MODELS[name] is PAIRS
    labels = inputs.pop("labels")
    if of_pairs:
        inputs["decoder_input_ids"] = labels.clamp(min=0)
    caches = []
    for model in both_ways(name):
        cache = DynamicCache(config=model.config)
        if given:
            inputs[CACHE] = EncoderDecoderCache(cache, DynamicCache()) if of_pairs else cache
        caches.append(model(**inputs, use_cache=True)[CACHE])
        assert not given or caches[-1] is inputs[CACHE]
    assert len(packed_calls) == attentions(name)
    real = inputs["decoder_attention_mask" if of_pairs else "attention_mask"].bool()
    parts = [caches]
    if of_pairs:
        parts = [[each.self_attention_cache for each in caches], [each.cross_attention_cache for each in caches]]
        assert caches[1].is_updated == {0: True, 1: True}
    for (expected, results), mask in zip(parts, [real, inputs["attention_mask"].bool()], strict=False):
        assert [layer.get_seq_length() for layer in results.layers] == [
            layer.get_seq_length() for layer in expected.layers
        ]
        for one, other in zip(results.layers, expected.layers, strict=True):
            kept = mask[:, -one.keys.shape[2] :]  # a window keeps the last ones
            for x, y in ((one.keys, other.keys), (one.values, other.values)):
                assert_close(x.transpose(1, 2)[kept], y.transpose(1, 2)[kept], ROUNDINGS)


class Halving(DynamicCache):
    def update(self, *args, **kwargs):
        return tuple(x / 2 for x in super().update(*args, **kwargs))


def test_caches_of_other_classes_run_padded(packed_calls):
    inputs = batch("llama", "left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert_same_logits("llama", mask, lambda model: {"input_ids": ids, CACHE: Halving()})
    assert not packed_calls


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_a_memory_kept_from_another_target_runs_padded(name, packed_calls):
    inputs, results = pairs(name, "right"), []
    inputs["decoder_input_ids"] = inputs.pop("labels").clamp(min=0)
    for model in both_ways(name):
        kept = model(**inputs)[CACHE].cross_attention_cache
        packed_calls.clear()
        logits = model(**inputs, **{CACHE: EncoderDecoderCache(DynamicCache(), kept)}).logits
        results.append(logits[inputs["decoder_attention_mask"].bool()])
    assert_close(results[1], results[0], ROUNDINGS)
    assert len(packed_calls) == 2  # of the encoder


@pytest.mark.parametrize("setting", ["output_attentions", "output_router_logits", "chunk_size_feed_forward"])
def test_settings_that_keep_batches_padded(setting, packed_calls):
    """Router logits go into a loss that balances experts by the padding mask."""
    model = tiny("mixtral", "eager", **{setting: 3 if "chunk" in setting else True})
    padding_free(model)
    model(**batch("llama", "right"))
    assert not packed_calls


def test_masks_of_the_user_run_padded(packed_calls):
    inputs = batch("llama", "right")
    over_pairs = inputs["attention_mask"].bool()[:, None, None, :] & torch.ones(9, 9, dtype=torch.bool).tril()
    eager, model = both_ways("llama")
    assert_same(outcome(model, {**inputs, "attention_mask": over_pairs}), outcome(eager, inputs))
    assert not packed_calls


def shift(module: nn.Module) -> None:
    """A forward that changes the first position of each row, which packed tokens have once."""
    forward = module.forward
    module.forward = lambda x: torch.cat([forward(x)[:, :1] + 1, forward(x)[:, 1:]], 1)


class Shifting(nn.Linear):
    def forward(self, x):
        return super().forward(x.roll(1, 1))


def of_another_class(module: nn.Module) -> None:
    module.__class__ = Shifting


def with_a_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output.roll(1, 1))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("change", [shift, of_another_class, with_a_hook])
def test_replaced_modules_and_hooks_see_padded_batches(change, order, packed_calls):
    results, inputs = [], batch("llama", "right")
    for pack in (False, True):
        model = tiny("llama", "eager")
        if pack and order == "after":
            padding_free(model)
        change(model.model.layers[1].mlp.down_proj)
        if pack and order == "before":
            padding_free(model)
        results.append(outcome(model, inputs))
    assert_same(results[1], results[0])
    assert not packed_calls


def test_hooks_of_the_model_itself_see_batches(packed_calls):
    model, shapes = tiny("bert"), []
    padding_free(model)
    model.bert.register_forward_hook(lambda module, args, output: shapes.append(output[0].shape))
    model.bert.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["attention_mask"].shape), with_kwargs=True
    )
    model(**batch("bert", "left"))
    assert shapes == [(3, LENGTH), (3, LENGTH, 32)]
    assert len(packed_calls) == 2


def test_a_part_that_is_declared_token_wise(monkeypatch, packed_calls):
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def change(model):
        for layer in model.bert.encoder.layer:
            layer.output.dense.__class__ = Doubled
        return model

    monkeypatch.setattr("fastformer.nn.inspection.TOKEN_WISE", {*TOKEN_WISE, Doubled})
    assert_as_eager("bert", batch("bert", "left"), change)
    assert len(packed_calls) == 2


def test_a_subclass_of_a_user_runs_padded(packed_calls):
    class Mine(BertModel):
        pass

    Mine.__module__ = "__main__"
    config = small(BertConfig, VOCABULARY)
    assert reasons(Mine(config)) == "Mine is not among the classes that were tested"
    named = Mine._from_config(config, attn_implementation="fastformer")
    assert named.config._attn_implementation == "fastformer"


def test_classes_that_mix_tokens_by_configuration():
    """The record has the class, because few tokens do not exceed the capacity of its experts."""
    model = build("switch_transformers", "eager", torch.float32, encoder_sparse_step=1, decoder_sparse_step=1)
    assert "experts drop what exceeds their capacity" in reasons(model)
