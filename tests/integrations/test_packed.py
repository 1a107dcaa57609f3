"""`padding_free` on models of Hugging Face transformers, against `attn_implementation="eager"`."""

import copy
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch import Tensor, nn
from transformers import BertConfig, BertModel, DynamicCache, EncoderDecoderCache, StaticCache

import fastformer
from fastformer.integrations.transformers import eligibility, padded, padding_free
from fastformer.nn.inspection import TOKEN_WISE
from tests.integrations import survey
from tests.integrations.tiny_transformers import (
    CAUSAL,
    GENERATING,
    GROUPED,
    LENGTH,
    MODELS,
    PAIRS,
    PLAIN,
    ROUNDINGS,
    attentions,
    batch,
    both_ways,
    count_packed,
    outcome,
    pairs,
    tiny,
)
from tests.support.closeness import assert_close

# Windows and T5's bias count positions, so that padding between tokens cannot be left out.
WITH_GAPS = {"mistral": 0, "gemma2": 0, "t5": 4}  # the decoder's tokens have no gaps


@pytest.fixture
def seen(monkeypatch):
    return count_packed(monkeypatch)


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, ROUNDINGS)


def reasons(model: nn.Module, **options: Any) -> str:
    report = padding_free(model, **options)
    assert not report.packed
    return " / ".join(entry.outcome for entry in report.padded)


@pytest.mark.parametrize("side", [None, "right", "left", "gaps"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name, side, seen):
    inputs = pairs(name, side)
    expected = outcome(tiny(name, "eager"), inputs)
    model = tiny(name, "eager")
    report = padding_free(model)
    assert len(report.packed) == (2 if MODELS[name][0] is PAIRS else 1)
    assert not report.padded
    assert_same(outcome(model, inputs), expected)
    calls = WITH_GAPS.get(name, attentions(name)) if side == "gaps" else attentions(name)
    assert len(seen) == (0 if side is None else calls)
    if side is not None and MODELS[name][0] is not PAIRS:
        assert set(seen) <= {int(inputs["attention_mask"].sum())}


@pytest.mark.parametrize("name", ["bert", "mistral", "marian", "t5"])
def test_a_row_without_tokens(name, seen):
    inputs = pairs(name, "right")
    for mask in ("attention_mask", "decoder_attention_mask"):
        if mask in inputs:
            inputs[mask][1] = 0
    inputs["labels"][1] = -100
    found = [outcome(model, inputs) for model in both_ways(name)]
    assert_same(found[1], found[0])
    assert len(seen) == attentions(name)


def test_a_row_alone(seen):
    inputs = {key: x[1:2] for key, x in batch("llama", "left").items()}
    found = [outcome(model, inputs) for model in both_ways("llama")]
    assert_same(found[1], found[0])
    assert seen == [4, 4]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, seen):
    inputs = pairs("t5", "right")
    eager, model = both_ways("t5")
    with mode():
        assert_close(model(**inputs).loss, eager(**inputs).loss, ROUNDINGS)
    model(**inputs).loss.backward()  # no tensor of inference mode is kept
    assert len(seen) == 12


def test_dropout_is_drawn_for_tokens_alone(seen):
    model = tiny("bert").train()
    padding_free(model)
    assert len({model(**batch("bert", "right")).loss.item() for _ in range(3)}) == 3
    assert len(seen) == 6


def test_embeddings_in_place_of_ids(seen):
    """RoBERTa then counts columns, not what is not the padding token."""
    inputs, found = batch("roberta", "left"), []
    for model in both_ways("roberta"):
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        out = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], return_dict=False)[0]
        found.append(out[inputs["attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert len(seen) == 2


def test_states_of_padding_are_zero_and_a_pooler_reads_padded_states(seen):
    config = BertConfig(**PLAIN)
    config._attn_implementation = "eager"
    eager, model = BertModel(config).eval(), BertModel(copy.deepcopy(config)).eval()
    model.load_state_dict(eager.state_dict())
    padding_free(model)
    inputs = batch("bert", "right")
    del inputs["labels"]
    out = model(**inputs)
    assert not out.last_hidden_state[~inputs["attention_mask"].bool()].any()
    assert_close(out.pooler_output, eager(**inputs).pooler_output, ROUNDINGS)
    inputs = {key: x for key, x in batch("bert", "left").items() if key != "labels"}
    assert_close(model(**inputs).pooler_output[1], torch.tanh(model.pooler.dense.bias))  # its first column is padding


def test_a_source_is_padded_and_a_target_is_not(seen):
    for without, calls in (("decoder_attention_mask", 2), ("attention_mask", 4)):
        inputs = {key: x for key, x in pairs("marian", "right").items() if key != without}
        seen.clear()
        found = [outcome(model, inputs) for model in both_ways("marian")]
        assert_same(found[1], found[0])
        assert len(seen) == calls


@pytest.mark.parametrize("states_padded", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_decoder_that_is_given_states(name, states_padded, seen):
    """Cross attention by configuration, as in EncoderDecoderModel: the states' gradient too."""
    inputs = batch(name, "left")
    given = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]) if states_padded else None
    found = []
    for whole in both_ways(name, is_decoder=True, add_cross_attention=True):
        model = whole.base_model
        given.grad = None
        out = model(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], encoder_hidden_states=given,
            encoder_attention_mask=mask, use_cache=False,
        ).last_hidden_state[inputs["attention_mask"].bool()]  # fmt: skip
        out.square().sum().backward()
        found.append([out, given.grad.clone(), *(x.grad for x in model.parameters() if x.grad is not None)])
    assert_same(found[1], found[0])
    assert len(seen) == 4


def test_t5_makes_no_table_of_pairs(monkeypatch):
    """Neither of its biases nor zeros for its cross attention: [H, 2 P - 1] and one number."""
    received, made, op, zeros = [], [], fastformer.functional.packed_attention, torch.zeros

    def spy(*args, distance_bias=None, **settings):
        received.append(None if distance_bias is None else tuple(distance_bias.shape))
        return op(*args, distance_bias=distance_bias, **settings)

    def watched(*args, **kwargs):
        made.extend([args] if isinstance(args[0], tuple) and len(args[0]) == 4 else [])
        return zeros(*args, **kwargs)

    monkeypatch.setattr(fastformer.functional, "packed_attention", spy)
    monkeypatch.setattr("transformers.models.t5.modeling_t5.torch.zeros", watched)
    model = tiny("t5")
    padding_free(model)
    model(**pairs("t5", "right"))
    assert received == [(4, 17), (4, 17), (4, 13), None, (4, 13), None]
    assert not made


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", GENERATING)
def test_generation_packs_the_prompt(name, beams, seen):
    inputs = batch(name, "left")
    settings = {"max_new_tokens": 7, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    found = []
    for model in both_ways(name):
        model.generation_config.eos_token_id = None  # all seven tokens
        found.append(model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings))
    assert torch.equal(*found)
    assert len(seen) == 2  # the layers of the prompt; steps have nothing to leave out


GENERATE = {
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
}


@pytest.mark.parametrize("way", GENERATE)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_ways_to_generate(name, way, seen):
    rows = slice(1, 2) if way == "prompt lookup" else slice(None)  # transformers has it for a row alone
    inputs = {key: x[rows] for key, x in batch(name, "left").items() if key != "labels"}
    settings = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **GENERATE[way]}
    found = []
    for model in both_ways(name):
        model.generation_config.eos_token_id = None
        torch.manual_seed(5)
        found.append(model.generate(**inputs, **settings))
    assert torch.equal(*found)
    assert len(seen) == (0 if way == "static cache" and name == "llama" else 2)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", GENERATING)
def test_a_cache_holds_what_eager_gives_it(name, given, seen):
    inputs, of_pairs = pairs(name, "left"), MODELS[name][0] is PAIRS
    labels = inputs.pop("labels")
    if of_pairs:
        inputs["decoder_input_ids"] = labels.clamp(min=0)
    caches = []
    for model in both_ways(name):
        cache = DynamicCache(config=model.config)
        if given:
            inputs["past_key_values"] = EncoderDecoderCache(cache, DynamicCache()) if of_pairs else cache
        caches.append(model(**inputs, use_cache=True).past_key_values)
        assert not given or caches[-1] is inputs["past_key_values"]
    assert len(seen) == attentions(name)
    real = inputs["decoder_attention_mask" if of_pairs else "attention_mask"].bool()
    parts = [caches]
    if of_pairs:
        parts = [[each.self_attention_cache for each in caches], [each.cross_attention_cache for each in caches]]
        assert caches[1].is_updated == {0: True, 1: True}
    for (wanted, found), mask in zip(parts, [real, inputs["attention_mask"].bool()], strict=False):
        assert [layer.get_seq_length() for layer in found.layers] == [layer.get_seq_length() for layer in wanted.layers]
        for one, other in zip(found.layers, wanted.layers, strict=True):
            kept = mask[:, -one.keys.shape[2] :]  # a window keeps the last ones
            for x, y in ((one.keys, other.keys), (one.values, other.values)):
                assert_close(x.transpose(1, 2)[kept], y.transpose(1, 2)[kept], ROUNDINGS)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_sequence_in_pieces_runs_padded_after_the_first(name, seen):
    inputs = batch(name, "left")
    results = []
    for model in both_ways(name):
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


class Halving(DynamicCache):
    def update(self, *args, **kwargs):
        return tuple(x / 2 for x in super().update(*args, **kwargs))


@pytest.mark.parametrize("make", [lambda config: StaticCache(config, max_cache_len=LENGTH + 3), lambda _: Halving()])
def test_other_caches_run_padded(make, seen):
    inputs, found = batch("llama", "left"), []
    for model in both_ways("llama"):
        logits = model(**inputs, past_key_values=make(model.config)).logits
        found.append(logits[inputs["attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert not seen


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_a_memory_kept_from_another_target_runs_padded(name, seen):
    inputs, found = pairs(name, "right"), []
    inputs["decoder_input_ids"] = inputs.pop("labels").clamp(min=0)
    for model in both_ways(name):
        kept = model(**inputs).past_key_values.cross_attention_cache
        seen.clear()
        logits = model(**inputs, past_key_values=EncoderDecoderCache(DynamicCache(), kept)).logits
        found.append(logits[inputs["decoder_attention_mask"].bool()])
    assert_close(found[1], found[0], ROUNDINGS)
    assert len(seen) == 2  # of the encoder


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_hidden_states_and_attention_weights(name, asked, seen):
    """Weights are of padded batches."""
    inputs = pairs(name, "right")
    eager, model = both_ways(name)
    expected, actual = (each(**inputs, **{asked: True}) for each in (eager, model))
    assert bool(seen) == (asked == "output_hidden_states")
    kinds = [key for key in expected if key.endswith(asked.removeprefix("output_"))]
    assert kinds
    masks = {x.shape[1]: x.bool() for key, x in inputs.items() if key.endswith("attention_mask")}
    for one, other in zip(actual[kinds[0]], expected[kinds[0]], strict=True):
        real = masks[one.shape[1]] if one.dim() == 3 else slice(None)
        assert_close(one[real], other[real], ROUNDINGS)


@pytest.mark.parametrize("setting", ["output_attentions", "output_router_logits", "chunk_size_feed_forward"])
def test_settings_that_keep_batches_padded(setting, seen):
    """Router logits go into a loss that balances experts by the padding mask."""
    config = {**PLAIN, "num_key_value_heads": 2, "num_local_experts": 4, setting: 3 if "chunk" in setting else True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config, experts_implementation="eager"))
    padding_free(model)
    model(**batch("llama", "right"))
    assert not seen


def test_masks_of_the_user_run_padded(seen):
    inputs = batch("llama", "right")
    over_pairs = inputs["attention_mask"].bool()[:, None, None, :] & torch.ones(9, 9, dtype=torch.bool).tril()
    eager, model = both_ways("llama")
    assert_same(outcome(model, {**inputs, "attention_mask": over_pairs}), outcome(eager, inputs))
    assert not seen


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
def test_what_is_put_into_a_model_sees_batches(change, order, seen):
    found, inputs = [], batch("llama", "right")
    for pack in (False, True):
        model = tiny("llama", "eager")
        if pack and order == "after":
            padding_free(model)
        change(model.model.layers[1].mlp.down_proj)
        if pack and order == "before":
            padding_free(model)
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert not seen


def test_hooks_of_the_model_itself_see_batches(seen):
    model, shapes = tiny("bert"), []
    padding_free(model)
    model.bert.register_forward_hook(lambda module, args, output: shapes.append(output[0].shape))
    model.bert.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["attention_mask"].shape), with_kwargs=True
    )
    model(**batch("bert", "left"))
    assert shapes == [(3, LENGTH), (3, LENGTH, 16)]
    assert len(seen) == 2


def test_a_part_that_is_declared_token_wise(monkeypatch, seen):
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    monkeypatch.setattr("fastformer.nn.inspection.TOKEN_WISE", {*TOKEN_WISE, Doubled})
    found = []
    for model in both_ways("bert"):
        for layer in model.bert.encoder.layer:
            layer.output.dense.__class__ = Doubled
        found.append(outcome(model, batch("bert", "left")))
    assert_same(found[1], found[0])
    assert len(seen) == 2


def test_a_model_of_ones_own(seen):
    class Mine(BertModel):
        pass

    Mine.__module__ = "__main__"
    model = Mine(BertConfig(**PLAIN))
    assert reasons(model) == "Mine is not among the classes that were tested"
    assert padding_free(model, also=[Mine]).packed  # the caller knows
    with pytest.raises(TypeError, match="also must hold classes of modules, not 'BertLayer'"):
        padding_free(model, also=["BertLayer"])


def test_layers_left_out(seen):
    found, inputs = [], batch("llama", "right")
    for model in both_ways("llama"):
        model.config.num_hidden_layers = 1
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == 1


MIXING = (
    "mamba", "rwkv", "recurrent", "jamba", "bamba", "zamba", "convbert", "qwen3_next", "funnel", "reformer",
    "longformer", "longt5", "bigbird", "fnet", "canine", "falcon_h1", "xlstm", "minimax.", "nemotron_h",
)  # fmt: skip


def test_the_record_holds_no_class_that_mixes_tokens():
    """Recurrences, convolutions and blocks of tokens, by the names of their types."""
    assert not [name for name in eligibility.tested_classes() if name.startswith(MIXING)]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Lfm2", {**PLAIN, "num_key_value_heads": 2, "layer_types": ["full_attention", "conv"]}, "layers of kind conv"),
        (
            "SwitchTransformers",
            {"vocab_size": 60, "d_model": 16, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 32, "num_heads": 4}
            | {"d_kv": 4, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
            "experts drop what exceeds their capacity",
        ),
    ],
)
def test_classes_that_mix_tokens_by_configuration(name, settings, reason):
    """The record has the classes: in the survey they have no such layers, or few tokens."""
    config = getattr(transformers, f"{name}Config")(**settings)
    assert reason in reasons(getattr(transformers, f"{name}Model")(config))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_packed_and_can_be_undone(way, seen):
    inputs, model = pairs("t5", "right"), tiny("t5", "sdpa")
    padding_free(model)
    expected = outcome(model, inputs)
    made = way(model)
    seen.clear()
    made.zero_grad()
    assert_same(outcome(made, inputs), expected)
    assert len(seen) == 6
    padded(made)
    seen.clear()
    made(**inputs)
    assert not seen
    model(**inputs)  # the original is as it was
    assert len(seen) == 6


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_undone_it_is_what_it_was(name, seen):
    model, untouched = tiny(name, "sdpa"), tiny(name, "sdpa")
    padding_free(model)
    report = padding_free(model)  # twice is once
    assert model.get_encoder().config._attn_implementation == "fastformer"
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert [entry.name for entry in padded(model).packed] == [entry.name for entry in report.packed]
    assert model.get_encoder().config._attn_implementation == "sdpa"
    for module, other in zip(model.modules(), untouched.modules(), strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    model(**pairs(name, "right"))
    assert not seen
    assert not padded(model).packed


def test_another_attention_chosen_afterwards(seen):
    eager, model = both_ways("llama")
    model.set_attn_implementation("eager")
    inputs = batch("llama", "right")
    assert_same(outcome(model, inputs), outcome(eager, inputs))
    assert not seen


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch, seen):
    """Also Ctrl-C; a layer that is called alone afterwards sees what it is given."""
    eager, model = both_ways("bert")
    with monkeypatch.context() as patch:
        patch.setattr("fastformer.functional.packed_attention", lambda *args, **settings: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch("bert", "right"))
    x, mask = torch.randn(3, 9, 16, dtype=torch.float64), torch.zeros(3, 1, 1, 9, dtype=torch.float64)
    assert_close(model.bert.encoder.layer[0](x, mask), eager.bert.encoder.layer[0](x, mask), ROUNDINGS)


def test_the_report():
    model = nn.ModuleDict({"one": tiny("marian"), "two": nn.Linear(3, 3)})
    model["one"].model.decoder.layers[1].fc1 = nn.Conv1d(3, 3, 1)
    assert str(padding_free(model)).splitlines() == [
        "1 models packed, 1 padded",
        "  packed  one.model.encoder  transformers.MarianEncoder : runs on real tokens",
        "  padded  one.model.decoder  transformers.MarianDecoder : layers.1.fc1 is a Conv1d",
    ]
    assert str(padding_free(nn.Linear(3, 3))) == "0 models packed, 0 padded"


@pytest.mark.parametrize("name", ["albert", "gpt_oss", "gemma3n_text", "llama4_text", "qwen2_vl_text"])
def test_kinds_of_layers_that_differ(name):
    """Shared layers, attention sinks, shared keys and values, chunks, positions in three dimensions: with dropout off,
    in training, and with their activations computed again.
    """
    from tests.integrations.tiny_transformers import checkpoint, without_dropout

    eager, model, again = (without_dropout(survey.build(name, "eager", torch.float32)) for _ in range(3))
    expected = survey.results(eager, "left")
    padding_free(model)
    assert survey.difference(survey.results(model, "left"), expected) is None
    padding_free(again)
    if again.supports_gradient_checkpointing and name != "albert":
        checkpoint(again)
        assert survey.difference(survey.results(again, "left"), expected) is None


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n_text", "qwen2_vl"])
def test_generation_of_such(name):
    auto = transformers.AutoModelForImageTextToText if name == "qwen2_vl" else transformers.AutoModelForCausalLM
    settings, found = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}, []
    for pack in (False, True):
        model = survey.build(name, "eager", torch.float32, auto)
        if pack:
            assert padding_free(model).packed
        inputs = survey.batch(model, "left")
        found.append(model.generate(**inputs, **settings))
    assert torch.equal(*found)


def test_sinks_run_packed(seen):
    config = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 4, "sliding_window": 4}
    inputs, found = batch("llama", "left"), []
    for pack in (False, True):
        torch.manual_seed(1)
        settings = transformers.GptOssConfig(**config, attn_implementation="eager", experts_implementation="eager")
        model = transformers.GptOssForCausalLM(settings).eval()
        for name, x in model.named_parameters():
            if name.endswith("sinks"):
                nn.init.normal_(x)
        if pack:
            padding_free(model)
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == 2
