"""What people do with a padding-free Hugging Face model beside calling it."""

import pytest
import torch

pytest.importorskip("transformers")

from fastformer.integrations.transformers import padding_free
from tests.integrations.test_packed import assert_same
from tests.integrations.tiny_transformers import (
    ROUNDINGS,
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
    inputs = pairs(name, "left")
    eager, model = both_ways(name)
    expected = outcome(without_dropout(eager), inputs)
    checkpoint(without_dropout(model), reentrant)
    assert_same(outcome(model, inputs), expected)
    assert len(seen) == 2 * attentions(name)  # computed again


@pytest.mark.parametrize("name", ["bert", "gpt2"])  # GPT-2's layers are not told that weights are wanted
def test_checkpointed_activations_and_attention_weights(name):
    inputs = pairs(name, "right") | {"output_attentions": True}
    eager, model = both_ways(name)
    expected = outcome(without_dropout(eager), inputs)
    checkpoint(without_dropout(model))
    assert_same(outcome(model, inputs), expected)


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


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_prefix_in_the_cache_runs_padded(seen):
    peft = pytest.importorskip("peft")
    found, inputs = [], batch("llama", "right")
    for model in both_ways("llama"):
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        found.append(adapted.eval()(**inputs).loss)
    assert_close(found[1], found[0], ROUNDINGS)
    assert not seen


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
    """With its autocast, clipping of gradients and accumulation of steps."""
    accelerate = pytest.importorskip("accelerate")
    inputs = batch("bert", "left")
    found = []
    for pack in (False, True):
        model = without_dropout(tiny("bert", "eager").float())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        if pack and prepared == "last":
            padding_free(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        if pack and prepared == "first":
            assert padding_free(model).packed
        losses = []
        for _ in range(4):
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(losses)
        assert type(accelerator.unwrap_model(model)) is type(tiny("bert"))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, ROUNDINGS)
    assert found[0][0] != found[0][-1]
    assert len(seen) == 2 * 4


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


def test_gradients_of_each_example():
    """torch.func maps over a batch whose mask has no values to look at: nothing is packed."""
    inputs = batch("bert", "right")
    eager, model = both_ways("bert")
    parameters, real = dict(model.named_parameters()), inputs["attention_mask"].bool()

    def loss(values, ids):
        given = {"input_ids": ids, "attention_mask": inputs["attention_mask"]}
        return torch.func.functional_call(model, values, (), given).logits[real].square().mean()

    found = torch.func.grad(loss)(parameters, inputs["input_ids"])
    logits = eager(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    logits[real].square().mean().backward()
    for name, x in eager.named_parameters():
        if x.grad is not None:
            assert_close(found[name], x.grad, ROUNDINGS)
