"""Kinds of layers that differ from BERT's and Llama's: what they are given, keep for others or make by themselves."""

import copy
import gc
import pickle
import threading
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastformer import functional
from fastformer.integrations.transformers import given_masks, own_code, padded, padding_free
from fastformer.integrations.transformers.given_masks import padding_rules
from fastformer.integrations.transformers.masks import MaskRules, mask_rules
from tests.integrations import survey
from tests.integrations.test_packed_models import assert_same, outcome
from tests.integrations.tiny_transformers import batch, checkpoint, count_packed, tiny, without_dropout
from tests.support.closeness import assert_close

TIMES = {"gemma4_text": 4, "gemma3n_text": 8, "umt5": 6, "albert": 2, "llama4_text": 1}


@pytest.fixture
def seen(monkeypatch):
    return count_packed(monkeypatch)


def both(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The eager model of a type, and the same padding-free."""
    eager, model = (survey.build(name, "eager", dtype, **options) for _ in range(2))
    assert padding_free(model).packed
    return eager, model


def assert_equal(model: Any, eager: Any, side: str = "left") -> None:
    assert survey.difference(survey.results(model, side), survey.results(eager, side)) is None


@pytest.mark.parametrize("name", sorted(TIMES.keys() - {"albert"}))  # whose groups cannot be
def test_checkpointed_activations(name, seen):
    eager, model = both(name)
    without_dropout(eager)
    checkpoint(without_dropout(model))
    assert_equal(model, eager, "right")
    assert len(seen) == 2 * TIMES[name]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_undoing(name, way, seen):
    eager, model = both(name)
    made = way(model)
    assert_equal(made, eager)
    assert len(seen) == TIMES[name]
    padded(made)
    for module, other in zip(made.modules(), eager.modules(), strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert_equal(made, eager)
    assert len(seen) == TIMES[name]


def test_umt5_makes_no_table_of_pairs(monkeypatch):
    """Each attention makes a bias: by distance, and for the cross attention none."""
    _, model = both("umt5")
    made, received, op = [], [], functional.packed_attention

    def spy(*args: Any, distance_bias: Any = None, **settings: Any) -> Any:
        received.append(None if distance_bias is None else tuple(distance_bias.shape))
        return op(*args, distance_bias=distance_bias, **settings)

    kind = type(model.encoder.block[0].layer[0].SelfAttention)
    compute, zeros = kind.compute_bias, torch.zeros
    monkeypatch.setattr(own_code, "_LIBRARIES", own_code._LIBRARIES | {"tests"})  # what spies here looks at no batch
    monkeypatch.setattr(functional, "packed_attention", spy)
    monkeypatch.setattr(
        kind,
        "compute_bias",
        lambda self, queries, *args, **given: (made.append(queries), compute(self, queries, *args, **given))[1],
    )
    monkeypatch.setattr(
        torch,
        "zeros",
        lambda *args, **given: (made.append(len(args[0]) if isinstance(args[0], tuple) else 0), zeros(*args, **given))[
            1
        ],
    )
    survey.results(model, "right")
    assert received == [(4, 17)] * 2 + [(4, 13), None] * 2
    assert set(made) <= {0, 1}


def test_a_bias_is_made_by_distance_while_a_layer_runs_packed_alone(seen):
    """What runs padded, or raises, finds the attention as it was."""
    eager, model = both("umt5")
    attention = model.encoder.block[1].layer[0].SelfAttention
    before = dict(attention.__dict__)
    assert_equal(model, eager, "none")
    assert not seen
    assert_equal(model, eager, "gaps")
    assert len(seen) == 0  # neither side has its padding at an end

    def broken(*given: Any) -> Any:
        raise ArithmeticError

    broken.__module__ = "accelerate.hooks"  # of those that look at no batch
    handle = attention.o.register_forward_pre_hook(broken)
    with pytest.raises(ArithmeticError):
        survey.results(model, "left")
    assert len(seen) == 2
    assert attention.__dict__ == before
    handle.remove()
    assert_equal(model, eager, "left")


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n_text"])
def test_generation_with_shared_keys_and_values(name, seen):
    """From the first layer on that shares others' keys, Gemma 4 computes the last position of the prompt alone."""
    inputs = survey.batch(tiny("llama"), "left")
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for way in ("eager", "fastformer", "packed"):
        model = survey.build(
            name, "eager" if way == "packed" else way, torch.float32, transformers.AutoModelForCausalLM
        )
        if way == "packed":
            assert padding_free(model).packed
        found.append(model.generate(**inputs, **settings))
        assert bool(seen) == (way == "packed")
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
    assert len(seen) == {"gemma4_text": 2, "gemma3n_text": 8}[name]  # of Gemma 4 the layers before


@pytest.mark.parametrize("index", range(4))
def test_shared_keys_and_values_of_layers_that_run_otherwise(index, seen):
    """A layer with somebody's hook runs padded: it stores, or finds, keys in that form."""
    eager, model = both("gemma4_text")
    model.layers[index].mlp.register_forward_hook(lambda *_: None)
    assert_equal(model, eager, "right")
    assert len(seen) == 3


def test_masks_over_all_pairs_between_layers_that_run_packed(seen):
    """Chunks are none of the op's words: such layers run padded, whatever ran before them."""
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    changes = {
        "num_hidden_layers": 3, "layer_types": kinds, "no_rope_layers": [0, 1, 0], "attention_chunk_size": 3,
        "moe_layers": [],
    }  # fmt: skip
    eager, model = both("llama4_text", **changes)
    assert_equal(model, eager, "right")
    assert len(seen) == 2


def test_layers_that_are_called_several_times(seen):
    """ALBERT's: a group of layers stands for all of its own."""
    eager, model = both("albert", torch.float64, num_hidden_layers=5)
    for side in survey.SIDES:
        assert_equal(model, eager, side)
    assert len(seen) == 5 * 4
    model.encoder.albert_layer_groups[0].albert_layers[0].chunk_size_feed_forward = 3
    model(**survey.batch(model, "right"))
    assert len(seen) == 5 * 4
    assert [entry.outcome for entry in padding_free(model).padded] == ["chunk_size_feed_forward is 3"]


def test_positions_in_three_dimensions_at_once(seen):
    """Their ids alone `[3, B, L]`, which layers hand on and none reads."""
    eager, model = both("glm4v_moe_text")
    assert_equal(model, eager)
    assert len(seen) == 2


@pytest.mark.parametrize("side", ["left", "empty"])
def test_a_layer_behind_packed_ones_sees_no_zeros_at_padding(side, seen):
    """Of which Gemma 3n's standard deviations have no gradient."""
    eager, model = both("gemma3n_text")
    for its in (eager, model):
        its.layers[-1].self_attn.register_forward_hook(lambda *_: None)
    assert_equal(model, eager, side)
    assert len(seen) == 7


def test_labels_that_are_handed_down_to_the_layers(seen):
    """As Gemma 4's are in training."""
    found = []
    for model in both("gemma4", auto=transformers.AutoModelForCausalLM):
        inputs = survey.batch(without_dropout(model), "right")
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        found.append(
            {"loss": loss.detach()} | {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        )
    assert found[0].keys() == found[1].keys()
    largest = max(float(x.abs().max()) for x in found[0].values())
    for key, x in found[0].items():
        torch.testing.assert_close(found[1][key], x, rtol=0, atol=2000 * torch.finfo(x.dtype).eps * largest)
    assert seen


@pytest.mark.parametrize("side", ["left", "none"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl_moe", "paddleocr_vl"])
def test_one_sequence_whose_positions_have_three_dimensions(name, side):
    """`[3, 1, L]`, which `generate` makes in advance, is no batch of three."""
    eager, model = both(name, auto=transformers.AutoModelForImageTextToText)
    inputs = {key: x[1:2] for key, x in survey.batch(model, side).items()}
    found = [its.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0) for its in (model, eager)]
    assert torch.equal(*found)


def test_a_part_that_has_a_model_of_its_own(seen):
    """Of a model whose other parts compute attention by themselves, and which refuses the name."""
    with pytest.raises(ValueError, match="does not reach the attention of GotOcr2Model"):
        survey.build("got_ocr2", "fastformer", torch.float32)
    eager, model = both("got_ocr2")
    assert model.config._attn_implementation == "eager"
    assert_equal(model, eager)
    assert len(seen) == 2
    padded(model)
    assert model.language_model.config._attn_implementation == "eager"


class TestRulesOfTheLastQueries:
    def test_they_are_those_rows_of_the_mask(self):
        real = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
        q, k = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64).unbind()
        from transformers import masking_utils

        for pattern in (masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(2)):
            rules = mask_rules(3, 5, 5, mask_function=pattern, attention_mask=real[[0, 1, 0]])
            module = torch.nn.Identity().eval()
            attend = functional_of(module)
            whole = attend(q, k, rules)
            assert rules[:, :, -2:, :].shape == (3, 1, 2, 5)
            assert_close(attend(q[:, :, -2:], k, rules[:, :, -2:, :]), whole[:, -2:])
            assert rules[:, :, 0:, :] is rules

    @pytest.mark.parametrize("index", [0, (0, 0), (slice(None), slice(None), slice(0, 2), slice(None)),
                                       (slice(0, 1), slice(None), slice(-1, None), slice(None))])  # fmt: skip
    def test_others_are_refused(self, index):
        with pytest.raises(TypeError, match="computes with its attention mask by itself"):
            MaskRules((2, 1, 5, 5), 5, causal=True)[index]


def functional_of(module: Any) -> Any:
    from fastformer.integrations.transformers.attention import attention_forward

    return lambda q, k, rules: attention_forward(module, q, k, k, rules)[0]


REAL = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()


class TestMasksThatAModelMade:
    """`[B, 1, 1, S]`, as LayoutLM's: padding, if they say nothing else."""

    @pytest.mark.parametrize("lowest", [-1e4, torch.finfo(torch.float32).min, -torch.inf])
    def test_additive_ones(self, lowest):
        mask = torch.zeros(2, 1, 1, 3).masked_fill(~REAL[:, None, None], lowest)
        rules = padding_rules(mask)
        assert torch.equal(rules.key_mask, REAL)
        assert rules.shape == (2, 1, 3, 3)
        assert rules.real_keys(mask.device) is padding_rules(mask, packed=True).real_keys(mask.device)  # read once
        mask.fill_(0.0)
        assert padding_rules(mask).key_mask.all()
        padding_rules(mask).once("name", lambda: 3)
        assert "name" not in padding_rules(mask, packed=True)._memory  # nothing of a forward pass stays with a mask

    def test_they_are_forgotten(self):
        """What was read of a mask goes with the mask, also where its numbers are what was read."""
        masks = weakref.WeakSet()
        for dtype in (torch.bool, torch.float32):
            mask = torch.zeros(2, 1, 1, 3, dtype=dtype)
            assert padding_rules(mask) is not None
            masks.add(mask)
        del mask
        assert not masks

    @pytest.mark.parametrize("value", [-9999.0, 0.5, torch.nan])
    def test_what_says_more(self, value):
        assert padding_rules(torch.zeros(2, 1, 1, 3).masked_fill(~REAL[:, None, None], value)) is None
        assert padding_rules(torch.zeros(2, 1, 3, 3)) is None
        assert padding_rules(torch.zeros(2, 1, 1, 3, requires_grad=True)) is None

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_bool_ones_of_the_user(self, mode, seen):
        inputs = batch("bert", "left")
        given = {**inputs, "attention_mask": inputs["attention_mask"].bool()[:, None, None]}
        eager, model = tiny("bert", "eager"), tiny("bert")
        padding_free(model)
        assert_same(outcome(model, given), outcome(eager, inputs))
        assert len(seen) == 2
        with mode():
            fresh = {**given, "attention_mask": given["attention_mask"] & True}
            assert_close(model(**fresh).loss, eager(**inputs).loss, 2000.0)
        assert len(seen) == 4

    @pytest.mark.parametrize("failed", [None, ValueError, KeyboardInterrupt])
    def test_a_layer_that_somebody_calls_sees_the_batch(self, failed, seen, monkeypatch):
        """In a loop of his own, say, that stops before the last one; also after a call of the model that failed."""
        eager, model = tiny("bert", "eager"), tiny("bert")
        padding_free(model)
        if failed:  # of Ctrl-C, torch tells no hook
            with monkeypatch.context() as patch:
                patch.setattr(functional, "packed_attention", Mock(side_effect=failed))
                with pytest.raises(failed):
                    model(**batch("bert", "right"))
        x, real = torch.randn(3, 9, 16, dtype=torch.float64), batch("bert", "right")["attention_mask"].bool()
        mask = torch.zeros(3, 1, 1, 9, dtype=torch.float64).masked_fill(~real[:, None, None], -torch.inf)
        with torch.no_grad():
            found, expected = (its.bert.encoder.layer[0](x, mask) for its in (model, eager))
        assert_close(found, expected, 2000.0)
        assert not seen
        alive = weakref.ref(model.bert.encoder)
        del model
        gc.collect()
        assert alive() is None

    @pytest.mark.parametrize("why", ["full", "hooks"])
    def test_one_by_which_no_layer_packs_is_read_once_a_pass(self, why, monkeypatch):
        """Each time waits for the device."""
        inputs, model, read = batch("bert", "left"), tiny("bert"), Mock(side_effect=given_masks._padding)
        padding_free(model)
        monkeypatch.setattr(given_masks, "_padding", read)
        mask = torch.zeros(3, 1, 1, 9, dtype=torch.float64)
        if why == "hooks":
            mask[:, :, :, :2] = -torch.inf
            for layer in model.bert.encoder.layer:
                layer.register_forward_hook(lambda *_: None)
        for _ in range(3):
            model(input_ids=inputs["input_ids"], attention_mask=mask)
        assert read.call_count == 3

    @pytest.mark.parametrize("change", ["inference", "data", "numpy"])
    def test_one_that_changes_without_a_trace_is_read_again(self, change, seen):
        inputs, eager, model = batch("bert", "left"), tiny("bert", "eager"), tiny("bert")
        padding_free(model)
        left = inputs["attention_mask"].bool().numpy()[:, None, None]
        shared = left[:, :, :, ::-1].copy()
        with torch.inference_mode(change == "inference"):
            given = torch.from_numpy(shared) if change == "numpy" else torch.tensor(shared)
            with torch.no_grad():
                model(input_ids=inputs["input_ids"], attention_mask=given)
            if change == "numpy":
                shared[:] = left
            else:
                (given if change == "inference" else given.data).copy_(torch.from_numpy(left))
        with torch.no_grad():
            found = model(**{**inputs, "attention_mask": given}).loss
        assert_close(found, eager(**inputs).loss.detach(), 2000.0)
        assert len(seen) == 4


def test_undoing_a_model_that_makes_biases_and_that_somebody_interrupted():
    """Of Ctrl-C, torch tells no hook."""
    eager, model = both("umt5")
    hook = Mock(side_effect=KeyboardInterrupt, __module__="accelerate.hooks")  # of those that look at no batch
    stops = model.encoder.block[0].layer[0].SelfAttention.v.register_forward_pre_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        model(**survey.batch(model, "left"))
    stops.remove()
    padded(model)
    for module, other in zip(model.modules(), eager.modules(), strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
    assert_equal(model, eager)


@pytest.mark.parametrize("first", ["left", "none"])
def test_two_threads_run_one_model_that_makes_biases(first, seen):
    """One is inside of an attention, packed or padded, while the other runs a batch that is longer."""
    eager, model = (survey.build("umt5", "eager", torch.float64) for _ in range(2))
    padding_free(model)
    cross = model.decoder.block[0].layer[1].EncDecAttention
    waits, ends, found = threading.Event(), threading.Event(), {}
    longer = {name: x.repeat(1, 2) for name, x in survey.batch(model, "right").items()}

    def wait(*_: Any) -> None:
        if not waits.is_set():
            waits.set()
            assert ends.wait(60)

    wait.__module__ = "accelerate.hooks"  # of those that look at no batch
    cross.q.register_forward_pre_hook(wait)

    def run() -> None:
        with torch.no_grad():
            found["short"] = model(**survey.batch(model, first), use_cache=False)[0]

    thread = threading.Thread(target=run)
    thread.start()
    assert waits.wait(60)
    try:
        with torch.no_grad():
            found["long"] = model(**longer, use_cache=False)[0]
    finally:
        ends.set()
        thread.join()
    for name, inputs in (("short", survey.batch(model, first)), ("long", longer)):
        real = inputs["decoder_attention_mask"].bool()
        with torch.no_grad():
            assert_close(found[name][real], eager(**inputs, use_cache=False)[0][real], 2000.0)
    assert "compute_bias" not in cross.__dict__
    assert not cross.has_relative_attention_bias
