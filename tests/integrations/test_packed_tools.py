"""What people do with a padding-free Hugging Face model beside calling it."""

import pytest
import torch

pytest.importorskip("transformers")

from fastformer.integrations.transformers import padding_free
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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama", "marian", "t5"])
def test_checkpointed_activations(name, reentrant, seen):
    assert_as_eager(name, pairs(name, "left"), lambda model: checkpoint(without_dropout(model), reentrant))
    assert len(seen) == 2 * attentions(name)  # computed again


@pytest.mark.parametrize("name", ["bert", "gpt2"])  # GPT-2's layers are not told that weights are wanted
def test_checkpointed_activations_and_attention_weights(name):
    inputs = pairs(name, "right") | {"output_attentions": True}
    assert_as_eager(name, inputs, lambda model: checkpoint(without_dropout(model)))


def test_saved_and_loaded_it_is_an_ordinary_model(tmp_path, seen):
    model = tiny("bert", "sdpa")
    padding_free(model)
    model.save_pretrained(tmp_path)
    made = type(model).from_pretrained(tmp_path)
    assert made.config._attn_implementation == "sdpa"
    made(**batch("bert", "right"))
    assert not seen


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize("order", ["adapter first", "adapter last"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_adapters(name, order, seen):
    peft = pytest.importorskip("peft")
    targets = {"bert": ["query", "dense"], "llama": "all-linear", "gpt2": ["c_attn", "c_fc"]}[name]
    settings = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=name == "gpt2", init_lora_weights=False)
    found, inputs = [], batch(name, "left")
    for pack in (False, True):
        model = tiny(name, "eager")
        if pack and order == "adapter last":
            assert padding_free(model).packed
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, settings).to(model.dtype)
        if pack and order == "adapter first":
            assert padding_free(adapted).packed
        found.append(outcome(adapted.eval(), inputs))
    assert_same(found[1], found[0])
    assert len(found[1]) > 6
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_accelerate_moves_its_weights(name, seen):
    """Between calls they are on meta, T5's bias too."""
    accelerate = pytest.importorskip("accelerate")
    inputs = pairs(name, "left")
    eager, model = both_ways(name)
    accelerate.cpu_offload(model)
    assert_close(model(**inputs).loss, eager(**inputs).loss, ROUNDINGS)
    assert len(seen) == attentions(name)


@pytest.mark.parametrize("prepared", ["first", "last"])
def test_accelerate_prepares_it_for_training(prepared, seen):
    accelerate = pytest.importorskip("accelerate")
    found, inputs = [], batch("bert", "left")
    for pack in (False, True):
        model = without_dropout(tiny("bert", "eager").float())
        if pack and prepared == "last":
            padding_free(model)
        model = accelerate.Accelerator(cpu=True).prepare(model)
        if pack and prepared == "first":
            assert padding_free(model).packed
        found.append(outcome(model, inputs))
    assert_same(found[1], found[0])
    assert len(seen) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpointed"), [("bert", False), ("llama", True)])
def test_trainer(name, checkpointed, tmp_path, seen):
    from transformers import Trainer, TrainingArguments

    named = "activation_checkpointing" in TrainingArguments.__dataclass_fields__  # transformers 5.20 and later
    options = {"activation_checkpointing" if named else "gradient_checkpointing": True} if checkpointed else {}
    rows = [{key: x[i] for key, x in batch(name, "right").items()} for i in range(3)]
    losses = []
    for model in both_ways(name):
        model = without_dropout(model.float())
        settings = TrainingArguments(
            str(tmp_path / str(len(losses))), max_steps=4, per_device_train_batch_size=3, per_device_eval_batch_size=3,
            report_to=[], use_cpu=True, logging_steps=1, save_strategy="no", disable_tqdm=True, learning_rate=0.01,
            **options,
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        losses[-1].append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # Adam divides by its own gradients' size
    assert losses[0][0] > losses[0][-1]
    assert len(seen) == 2 * (4 * (2 if checkpointed else 1) + 1)  # checkpointed layers are computed twice


def test_autocast(seen):
    inputs = batch("llama", "left")
    found = []
    for model in both_ways("llama"):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(model(**inputs).loss)
    # Two layers and the loss in bf16, whose inputs are rounded alike: a few roundings of the result.
    assert abs((found[0] - found[1]).item()) < 8 * torch.finfo(torch.bfloat16).eps * found[0].item()
    assert len(seen) == 2
