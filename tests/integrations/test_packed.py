"""`padding_free` on models of Hugging Face transformers, against `attn_implementation="eager"`."""

import copy
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch import nn
from transformers import BertConfig, BertModel, DynamicCache, EncoderDecoderCache

from fastformer.integrations.transformers import padded, padding_free
from fastformer.nn.inspection import TOKEN_WISE
from tests.integrations import survey
from tests.integrations.tiny_transformers import (
    GENERATING,
    LENGTH,
    MODELS,
    PAIRS,
    PLAIN,
    ROUNDINGS,
    assert_as_eager,
    assert_same,
    attentions,
    batch,
    both_ways,
    checkpoint,
    outcome,
    pairs,
    tiny,
    without_dropout,
)
from tests.support.closeness import assert_close

# Windows and the biases of T5 and MPNet count positions, so that padding between tokens cannot be left out.
WITH_GAPS = {"mistral": 0, "gemma2": 0, "mpnet": 0, "t5": 4}  # the decoder's tokens have no gaps


def reasons(model: nn.Module, **options: Any) -> str:
    report = padding_free(model, **options)
    assert not report.packed
    return " / ".join(entry.outcome for entry in report.padded)


@pytest.mark.parametrize("side", [None, "right", "left", "gaps"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients(name, side, packed_calls):
    inputs = pairs(name, side)
    expected = outcome(tiny(name, "eager"), inputs)
    model = tiny(name, "eager")
    report = padding_free(model)
    assert len(report.packed) == (2 if MODELS[name][0] is PAIRS else 1)
    assert not report.padded
    assert_same(outcome(model, inputs), expected)
    calls = WITH_GAPS.get(name, attentions(name)) if side == "gaps" else attentions(name)
    assert len(packed_calls) == (0 if side is None else calls)
    if side is not None and MODELS[name][0] is not PAIRS:
        assert set(packed_calls) <= {int(inputs["attention_mask"].sum())}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, packed_calls):
    inputs = pairs("t5", "right")
    eager, model = both_ways("t5")
    with mode():
        assert_close(model(**inputs).loss, eager(**inputs).loss, ROUNDINGS)
    model(**inputs).loss.backward()  # no tensor of inference mode is kept
    assert len(packed_calls) == 12


def test_embeddings_in_place_of_ids(packed_calls):
    """RoBERTa then counts columns, not what is not the padding token."""
    inputs, results = batch("roberta", "left"), []
    for model in both_ways("roberta"):
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        out = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], return_dict=False)[0]
        results.append(out[inputs["attention_mask"].bool()])
    assert_close(results[1], results[0], ROUNDINGS)
    assert len(packed_calls) == 2


def test_states_of_padding_are_zero_and_a_pooler_reads_padded_states(packed_calls):
    model = BertModel(BertConfig(**PLAIN)).eval()
    padding_free(model)
    inputs = batch("bert", "left")
    out = model(inputs["input_ids"], inputs["attention_mask"])
    assert not out.last_hidden_state[~inputs["attention_mask"].bool()].any()
    assert_close(out.pooler_output[1], torch.tanh(model.pooler.dense.bias))  # its first column is padding
    assert len(packed_calls) == 2


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
    given = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
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
    assert len(packed_calls) == attentions(name)
    real = inputs["decoder_attention_mask" if of_pairs else "attention_mask"].bool()
    parts = [caches]
    if of_pairs:
        parts = [[each.self_attention_cache for each in caches], [each.cross_attention_cache for each in caches]]
        assert caches[1].is_updated == {0: True, 1: True}
    for (wanted, results), mask in zip(parts, [real, inputs["attention_mask"].bool()], strict=False):
        assert [layer.get_seq_length() for layer in results.layers] == [
            layer.get_seq_length() for layer in wanted.layers
        ]
        for one, other in zip(results.layers, wanted.layers, strict=True):
            kept = mask[:, -one.keys.shape[2] :]  # a window keeps the last ones
            for x, y in ((one.keys, other.keys), (one.values, other.values)):
                assert_close(x.transpose(1, 2)[kept], y.transpose(1, 2)[kept], ROUNDINGS)


class Halving(DynamicCache):
    def update(self, *args, **kwargs):
        return tuple(x / 2 for x in super().update(*args, **kwargs))


def test_caches_of_other_classes_run_padded(packed_calls):
    inputs, results = batch("llama", "left"), []
    for model in both_ways("llama"):
        logits = model(**inputs, past_key_values=Halving()).logits
        results.append(logits[inputs["attention_mask"].bool()])
    assert_close(results[1], results[0], ROUNDINGS)
    assert not packed_calls


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_a_memory_kept_from_another_target_runs_padded(name, packed_calls):
    inputs, results = pairs(name, "right"), []
    inputs["decoder_input_ids"] = inputs.pop("labels").clamp(min=0)
    for model in both_ways(name):
        kept = model(**inputs).past_key_values.cross_attention_cache
        packed_calls.clear()
        logits = model(**inputs, past_key_values=EncoderDecoderCache(DynamicCache(), kept)).logits
        results.append(logits[inputs["decoder_attention_mask"].bool()])
    assert_close(results[1], results[0], ROUNDINGS)
    assert len(packed_calls) == 2  # of the encoder


@pytest.mark.parametrize("setting", ["output_attentions", "output_router_logits", "chunk_size_feed_forward"])
def test_settings_that_keep_batches_padded(setting, packed_calls):
    """Router logits go into a loss that balances experts by the padding mask."""
    config = {**PLAIN, "num_key_value_heads": 2, "num_local_experts": 4, setting: 3 if "chunk" in setting else True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config, experts_implementation="eager"))
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
    assert shapes == [(3, LENGTH), (3, LENGTH, 16)]
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
    model = Mine(BertConfig(**PLAIN))
    assert reasons(model) == "Mine is not among the classes that were tested"
    named = Mine._from_config(BertConfig(**PLAIN), attn_implementation="fastformer")
    assert named.config._attn_implementation == "fastformer"


def test_classes_that_mix_tokens_by_configuration():
    """The record has the class, because few tokens do not exceed the capacity of its experts."""
    sizes = {"vocab_size": 60, "d_model": 16, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 32, "num_heads": 4}
    experts = {"d_kv": 4, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    model = transformers.SwitchTransformersModel(transformers.SwitchTransformersConfig(**sizes, **experts))
    assert "experts drop what exceeds their capacity" in reasons(model)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize(("name", "before"), [("t5", "sdpa"), ("mpnet", "eager")])
def test_copies_run_packed_and_can_be_undone(name, before, way, packed_calls):
    inputs, model = pairs(name, "right"), tiny(name, before)
    padding_free(model)
    expected = outcome(model, inputs)
    made = way(model)
    packed_calls.clear()
    made.zero_grad()
    assert_same(outcome(made, inputs), expected)
    assert len(packed_calls) == attentions(name)
    padded(made)
    packed_calls.clear()
    made(**inputs)
    assert not packed_calls
    model(**inputs)  # the original is as it was
    assert len(packed_calls) == attentions(name)


@pytest.mark.parametrize(("name", "before"), [("marian", "sdpa"), ("t5", "sdpa"), ("mpnet", "eager")])
def test_padded_undoes_padding_free(name, before, packed_calls):
    model, untouched = tiny(name, before), tiny(name, before)
    padding_free(model)
    report = padding_free(model)  # twice is once
    assert model.get_encoder().config._attn_implementation == "fastformer"
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert [entry.name for entry in padded(model).packed] == [entry.name for entry in report.packed]
    assert model.get_encoder().config._attn_implementation == before
    for module, other in zip(model.modules(), untouched.modules(), strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    model(**pairs(name, "right"))
    assert not packed_calls
    assert not padded(model).packed


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch, packed_calls):
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


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3n_text", "llama4_text", "qwen2_vl_text"])
def test_checkpointed_activations_of_layers_that_differ(name):
    """Attention sinks, shared keys and values, chunks, positions in three dimensions."""
    eager, model = (without_dropout(survey.build(name, "eager", torch.float32)) for _ in range(2))
    padding_free(model)
    checkpoint(model)
    assert survey.difference(survey.results(model, "left"), survey.results(eager, "left")) is None


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n_text", "qwen2_vl"])
def test_generation_of_models_with_special_layers(name):
    auto = transformers.AutoModelForImageTextToText if name == "qwen2_vl" else transformers.AutoModelForCausalLM
    settings, results = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}, []
    for pack in (False, True):
        model = survey.build(name, "eager", torch.float32, auto)
        if pack:
            assert padding_free(model).packed
        inputs = survey.batch(model, "left")
        results.append(model.generate(**inputs, **settings))
    assert torch.equal(*results)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_checkpointed_activations(name, reentrant, packed_calls):
    assert_as_eager(name, pairs(name, "left"), lambda model: checkpoint(without_dropout(model), reentrant))
    assert len(packed_calls) == 2 * attentions(name)  # computed again


def test_a_saved_model_loads_as_an_ordinary_one(tmp_path, packed_calls):
    model = tiny("bert", "sdpa")
    padding_free(model)
    model.save_pretrained(tmp_path)
    made = type(model).from_pretrained(tmp_path)
    assert made.config._attn_implementation == "sdpa"
    made(**batch("bert", "right"))
    assert not packed_calls


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize("order", ["adapter first", "adapter last"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_adapters(name, order, packed_calls):
    peft = pytest.importorskip("peft")
    targets = {"bert": ["query", "dense"], "llama": "all-linear", "gpt2": ["c_attn", "c_fc"]}[name]
    settings = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=name == "gpt2", init_lora_weights=False)
    results, inputs = [], batch(name, "left")
    for pack in (False, True):
        model = tiny(name, "eager")
        if pack and order == "adapter last":
            assert padding_free(model).packed
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, settings).to(model.dtype)
        if pack and order == "adapter first":
            assert padding_free(adapted).packed
        results.append(outcome(adapted.eval(), inputs))
    assert_same(results[1], results[0])
    assert len(results[1]) > 6
    assert len(packed_calls) == 2


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_accelerate_moves_its_weights(name, packed_calls):
    """Between calls they are on meta, T5's bias too."""
    accelerate = pytest.importorskip("accelerate")
    inputs = pairs(name, "left")
    eager, model = both_ways(name)
    accelerate.cpu_offload(model)
    assert_close(model(**inputs).loss, eager(**inputs).loss, ROUNDINGS)
    assert len(packed_calls) == attentions(name)


@pytest.mark.slow
def test_trainer(tmp_path, packed_calls):
    """With checkpointed activations."""
    from transformers import Trainer, TrainingArguments

    named = "activation_checkpointing" in TrainingArguments.__dataclass_fields__  # transformers 5.20 and later
    rows = [{key: x[i] for key, x in batch("llama", "right").items()} for i in range(3)]
    losses = []
    for model in both_ways("llama"):
        model = without_dropout(model.float())
        settings = TrainingArguments(
            str(tmp_path / str(len(losses))), max_steps=4, per_device_train_batch_size=3, per_device_eval_batch_size=3,
            report_to=[], use_cpu=True, logging_steps=1, save_strategy="no", disable_tqdm=True, learning_rate=0.01,
            **{"activation_checkpointing" if named else "gradient_checkpointing": True},
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        losses[-1].append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # Adam divides by its own gradients' size
    assert losses[0][0] > losses[0][-1]
    assert len(packed_calls) == 2 * (4 * 2 + 1)  # checkpointed layers are computed twice


def test_autocast(packed_calls):
    inputs = batch("llama", "left")
    results = []
    for model in both_ways("llama"):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(model(**inputs).loss)
    # Two layers and the loss in bf16, whose inputs are rounded alike: a few roundings of the result.
    assert abs((results[0] - results[1]).item()) < 8 * torch.finfo(torch.bfloat16).eps * results[0].item()
    assert len(packed_calls) == 2
