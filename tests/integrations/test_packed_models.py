"""Models under `padding_free` that are copied, saved, checkpointed, adapted, trained, sharded or run in kernels."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

pytest.importorskip("transformers")

import transformers
from torch import Tensor, nn

import fastformer
from fastformer import functional
from fastformer.integrations.transformers import padded, padding_free
from tests.integrations import survey
from tests.integrations.small_configs import build
from tests.integrations.tiny_transformers import (
    PAIRS,
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
from tests.support.fused_op import DEVICE, compare, needs_kernels
from tests.support.noise import noise
from tests.support.processes import leave, run_two, two_of_gloo


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize(("name", "before"), [("marian", "sdpa"), ("t5", "sdpa"), ("mpnet", "eager")])
def test_copies_run_packed_and_padded_undoes_padding_free(name, before, way, packed_calls):
    inputs, model, untouched = pairs(name, "right"), tiny(name, before), tiny(name, before)
    padding_free(model)
    report = padding_free(model)  # twice is once
    assert model.get_encoder().config._attn_implementation == "fastformer"
    assert list(model.state_dict()) == list(untouched.state_dict())
    expected, copied = outcome(model, inputs), way(model)
    copied.zero_grad()
    assert_same(outcome(copied, inputs), expected)
    assert len(packed_calls) == 2 * attentions(name)
    undone = padded(copied)
    assert [entry.name for entry in undone.padded] == [entry.name for entry in report.packed]
    assert str(undone).startswith(f"0 models packed, {len(undone.padded)} padded\n")
    assert copied.get_encoder().config._attn_implementation == before
    for module, other in zip(copied.modules(), untouched.modules(), strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    copied(**inputs)
    assert len(packed_calls) == 2 * attentions(name)
    assert not padded(copied).padded
    model(**inputs)  # the original runs packed as before
    assert len(packed_calls) == 3 * attentions(name)


def test_position_embeddings_that_were_resized_since_count_columns(packed_calls):
    eager, model = (build("pegasus", "eager", torch.float64, PAIRS) for _ in range(2))
    padding_free(model)
    for each in (eager, model):
        each.resize_position_embeddings(64)  # makes new modules
    inputs = pairs("marian", "right")
    assert_same(outcome(model, inputs), outcome(eager, inputs))
    assert packed_calls


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch, packed_calls):
    """Also Ctrl-C; a layer that is called alone afterwards sees what it is given."""
    eager, model = both_ways("bert")
    with monkeypatch.context() as patch:
        patch.setattr("fastformer.functional.packed_attention", lambda *args, **settings: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch("bert", "right"))
    x, mask = torch.randn(3, 9, 32, dtype=torch.float64), torch.zeros(3, 1, 1, 9, dtype=torch.float64)
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
    eager, model = (without_dropout(build(name, "eager", torch.float32)) for _ in range(2))
    padding_free(model)
    checkpoint(model)
    assert survey.difference(survey.results(model, "left"), survey.results(eager, "left")) is None


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n_text", "qwen2_vl"])
def test_generation_of_models_with_special_layers(name):
    auto = transformers.AutoModelForImageTextToText if name == "qwen2_vl" else transformers.AutoModelForCausalLM
    settings, results = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}, []
    for pack in (False, True):
        model = build(name, "eager", torch.float32, auto)
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


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SMALLER: dict[str, dict[str, Any]] = {
    "mistral": {**HEADS, "hidden_size": 16},
    "t5": {"num_heads": 2, "d_model": 8, "num_layers": 1, "num_decoder_layers": 1},
    "gpt_oss": {**HEADS, "hidden_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 4},
}
# How often each attention runs packed, in which kind of call.
CALLS = {"mistral": {"window": 2}, "t5": {"distance_bias": 2, "plain": 1}, "gpt_oss": {"sinks": 1, "sinks window": 1}}


def count_kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the packed calls by their options."""
    counts: dict[str, int] = {}
    op = functional.packed_attention

    def counting(*args: Any, **settings: Any) -> Tensor:
        options = [name for name in ("distance_bias", "sinks", "window") if settings[name] is not None]
        kind = " ".join(options) or "plain"
        counts[kind] = counts.get(kind, 0) + 1
        return op(*args, **settings)

    monkeypatch.setattr(functional, "packed_attention", counting)
    return counts


@needs_kernels
@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_of_kernels(name, monkeypatch):
    """Held to eager in fp64 by its own error in fp32 and the noise of its formula; no call may fall back."""
    inputs = {key: x.to(DEVICE) for key, x in pairs("t5" if name == "t5" else "llama", "left").items()}
    eager, wide, model = (tiny(name, "eager", **SMALLER[name]).float().to(DEVICE) for _ in range(3))
    wide.double().set_attn_implementation("sdpa" if name == "mistral" else "eager")  # whose softmax is in fp32

    def results(net: Any) -> list[Tensor]:
        net.zero_grad(set_to_none=True)
        return outcome(net, inputs)

    exact, plain = results(wide), results(eager)
    noises = noise(lambda: results(wide), exact, torch.float32)
    padding_free(model)
    counts = count_kinds(monkeypatch)
    with fastformer.backend("triton"):
        compare(results(model), plain, exact, noises)
    assert counts == CALLS[name]


SIDES = (("right", "left"), ("left", None))  # of each step, for each process; without padding nothing is packed


def loss(model: Any, name: str, side: str | None, row: int) -> Tensor:
    """Return the loss of a batch whose rows begin with another one in each process."""
    value: Tensor = model(**{key: x.roll(row, 0) for key, x in pairs(name, side).items()}).loss
    return value


def gradients_of_one_process(name: str) -> list[dict[str, Tensor]]:
    """Return eager's gradients in each step: the mean over both processes."""
    model, gradients = without_dropout(tiny(name, "eager")), []
    for sides in SIDES:
        model.zero_grad()
        sum(loss(model, name, side, rank) for rank, side in enumerate(sides)).div(2).backward()
        gradients.append({key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None})
    return gradients


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layers in [x for x in model.modules() if isinstance(x, nn.ModuleList) and "Layer" in type(x[0]).__name__]:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def work(rank: int, folder: str) -> None:
    two_of_gloo(rank, folder)
    for name in ("llama", "t5"):
        expected = gradients_of_one_process(name)
        for way in ("ddp", "sharded first", "sharded and checkpointed"):
            model = without_dropout(tiny(name, "eager"))
            if way != "sharded first":
                assert padding_free(model).packed
            outside: Any = sharded(model) if way != "ddp" else nn.parallel.DistributedDataParallel(model)
            if way == "sharded first":
                assert padding_free(model).packed
            if way == "sharded and checkpointed":
                checkpoint(model)
            assert all(hasattr(x, "full_tensor") == (way != "ddp") for x in model.parameters())
            for sides, expected_gradients in zip(SIDES, expected, strict=True):
                outside.zero_grad()
                with survey.counted() as calls:
                    loss(outside, name, sides[rank], rank).backward()
                again = 2 if way == "sharded and checkpointed" else 1
                assert calls["packed_attention"] == (0 if sides[rank] is None else again * attentions(name))
                gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
                assert gradients.keys() == expected_gradients.keys()
                for key, x in expected_gradients.items():
                    gradient = gradients[key]
                    assert_close(gradient if way == "ddp" else gradient.full_tensor(), x, ROUNDINGS)
            assert padded(model).padded
    leave(rank, folder)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    """Each has other padding; the model is sharded or copied."""
    run_two(work, tmp_path)
