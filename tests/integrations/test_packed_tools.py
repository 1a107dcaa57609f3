"""What people do with a Hugging Face model beside calling it, while its layers run without padding."""

import copy
import io
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from torch import nn

from fastformer.integrations.transformers import padded, padding_free
from tests.integrations.test_packed_models import assert_same, outcome
from tests.integrations.tiny_transformers import (
    ROUNDINGS,
    VOCABULARY,
    batch,
    both_ways,
    checkpoint,
    count_packed,
    pairs,
    tiny,
    without_dropout,
)
from tests.support.closeness import assert_close


@pytest.fixture
def seen(monkeypatch):
    return count_packed(monkeypatch)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama", "marian", "t5"])
def test_checkpointed_activations(name, reentrant, seen):
    inputs = pairs(name, "left")
    expected = outcome(without_dropout(tiny(name, "eager")), inputs)
    model = without_dropout(tiny(name, "eager"))
    padding_free(model)
    checkpoint(model, reentrant)
    assert_same(outcome(model, inputs), expected)
    assert len(seen) == 2 * (6 if name in ("marian", "t5") else 2)  # computed again


@pytest.mark.parametrize("attention", ["eager, packed", "fastformer"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])  # GPT-2's layers are not told that weights are wanted
def test_checkpointed_activations_and_attention_weights(name, attention):
    inputs = pairs(name, "right") | {"output_attentions": True}
    expected = outcome(without_dropout(tiny(name, "eager")), inputs)
    model = without_dropout(tiny(name, attention.split(",")[0]))
    if attention != "fastformer":
        padding_free(model)
    checkpoint(model)
    assert_same(outcome(model, inputs), expected)


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_a_file])
def test_copies_run_packed_and_can_be_undone(way, seen):
    inputs = pairs("marian", "right")
    model = tiny("marian", "sdpa")
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


def test_saved_and_loaded_it_is_an_ordinary_model(tmp_path, seen):
    model = tiny("bert", "sdpa")
    names = list(model.state_dict())
    padding_free(model)
    assert list(model.state_dict()) == names
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
    for pack in (False, True):
        model = tiny("llama", "eager")
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
        if pack:
            padding_free(adapted)
        found.append(adapted.eval()(**inputs).loss)
    assert_close(found[1], found[0], ROUNDINGS)
    assert not seen


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_accelerate_moves_its_weights(name, seen):
    """Between calls they are on meta, T5's bias too."""
    accelerate = pytest.importorskip("accelerate")
    inputs = pairs(name, "left")
    expected = tiny(name, "eager")(**inputs).loss
    model = tiny(name)
    padding_free(model)
    accelerate.cpu_offload(model)
    assert_close(model(**inputs).loss, expected, ROUNDINGS)
    assert len(seen) == (6 if name == "t5" else 2)


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
        whole = accelerator.unwrap_model(model)
        assert type(whole) is type(tiny("bert"))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, ROUNDINGS)
    assert found[0][0] != found[0][-1]
    assert len(seen) == 2 * 4


GENERATE = {
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "assistant": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "several of each": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "length_penalty": 2.0},
}
ONE_ROW = ("prompt lookup", "assistant")  # transformers has these for a row alone


@pytest.mark.parametrize("way", GENERATE)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_ways_to_generate(name, way, seen):
    """The prompt runs packed, an assistant's too; not into a static cache, which has more columns."""
    rows = slice(1, 2) if way in ONE_ROW else slice(None)
    inputs = {key: x[rows] for key, x in batch(name, "left").items() if key != "labels"}
    settings = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **GENERATE[way]}
    found = []
    for model in both_ways(name):
        model.generation_config.eos_token_id = None
        if way == "assistant":
            settings["assistant_model"] = tiny(
                name, "eager", **{"num_layers" if name == "t5" else "num_hidden_layers": 1}
            )
            settings["assistant_model"].generation_config.eos_token_id = None
            if found:
                assert padding_free(settings["assistant_model"]).packed
        torch.manual_seed(5)
        found.append(model.generate(**inputs, **settings))
    assert torch.equal(*found)
    assert found[0].shape[1] > 7
    filled = {"static cache": 0 if name == "llama" else 2, "assistant": 3}
    assert len(seen) == filled.get(way, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpointed"), [("bert", False), ("llama", True)])
def test_trainer(name, checkpointed, tmp_path, seen):
    from transformers import Trainer, TrainingArguments

    named = "activation_checkpointing" in TrainingArguments.__dataclass_fields__  # transformers 5.20 and later
    options = {"activation_checkpointing" if named else "gradient_checkpointing": True} if checkpointed else {}
    rows = [{key: x[i] for key, x in batch(name, "right").items()} for i in range(3)]
    losses = []
    for pack in (False, True):
        model = without_dropout(tiny(name, "eager").float())
        if pack:
            padding_free(model)
        settings = TrainingArguments(
            str(tmp_path / str(pack)), max_steps=4, per_device_train_batch_size=3, per_device_eval_batch_size=3,
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiled_it_is_one_graph_of_padded_batches(name, seen):
    inputs = batch(name, "right")
    model = tiny(name)
    padding_free(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        seen.clear()
        actual = torch.compile(model, backend="eager", fullgraph=True)(**inputs).logits
    real = inputs["attention_mask"].bool()
    assert_close(actual[real], expected[real], ROUNDINGS)
    assert not seen


def test_autocast(seen):
    inputs = batch("llama", "left")
    found = []
    for model in both_ways("llama"):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(model(**inputs).loss)
    # Two layers and the loss in bf16, whose inputs are rounded alike: a few roundings of the result.
    assert abs((found[0] - found[1]).item()) < 8 * torch.finfo(torch.bfloat16).eps * found[0].item()
    assert len(seen) == 2


def test_gradients_of_each_example(seen):
    """torch.func sees one example at a time: nothing is packed, and nothing is wrong."""
    inputs = batch("bert", "right")
    model = tiny("bert")
    padding_free(model)
    parameters = dict(model.named_parameters())
    real = inputs["attention_mask"].bool()

    def loss(its, ids):
        out = torch.func.functional_call(model, its, (), {"input_ids": ids, "attention_mask": inputs["attention_mask"]})
        return out.logits[real].square().mean()

    found = torch.func.grad(loss)(parameters, inputs["input_ids"])
    eager = tiny("bert", "eager")
    logits = eager(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    logits[real].square().mean().backward()
    for name, x in eager.named_parameters():
        if x.grad is not None:
            assert_close(found[name], x.grad, ROUNDINGS)
    assert logits.shape[-1] == VOCABULARY
