"""Models under `padding_free` that are copied, undone, saved, checkpointed, compiled, adapted, offloaded or trained."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch import nn

from fastformer.integrations.transformers import padded, padding_free
from tests.integrations import survey
from tests.integrations.tiny_transformers import (
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


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize(("name", "before"), [("t5", "sdpa"), ("mpnet", "eager")])
def test_copies_run_packed_and_can_be_undone(name, before, way, packed_calls):
    inputs, model = pairs(name, "right"), tiny(name, before)
    padding_free(model)
    expected = outcome(model, inputs)
    copied = way(model)
    packed_calls.clear()
    copied.zero_grad()
    assert_same(outcome(copied, inputs), expected)
    assert len(packed_calls) == attentions(name)
    padded(copied)
    packed_calls.clear()
    copied(**inputs)
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
    copied = type(model).from_pretrained(tmp_path)
    assert copied.config._attn_implementation == "sdpa"
    copied(**batch("bert", "right"))
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
