"""Small models of Hugging Face transformers with heads, eager and on fastformer's attention, and padded batches."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from fastformer.integrations.transformers import padding_free
from tests.integrations.small_configs import LENGTH, TARGETS, VOCABULARY, build, mask
from tests.support.closeness import assert_close

logging.set_verbosity_error()

CACHE = "cache" if "cache" in signature(BaseModelOutputWithPast).parameters else "past_key_values"  # since 5.24

BIDIRECTIONAL, DECODERS, PAIRS = AutoModelForMaskedLM, AutoModelForCausalLM, AutoModelForSeq2SeqLM
MODELS: dict[str, Any] = {
    **dict.fromkeys(("bert", "roberta", "mpnet"), BIDIRECTIONAL),
    **dict.fromkeys(("gpt2", "llama", "mistral", "gemma2", "deepseek_v3"), DECODERS),
    **dict.fromkeys(("marian", "t5"), PAIRS),
}
BOTH_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {**BOTH_KINDS, "attn_logit_softcapping": 1.5},  # a limit that changes scores of this size
    "gpt_oss": BOTH_KINDS,
    "deepseek_v3": {"first_k_dense_replace": 2},  # no layer has experts
    "marian": {"forced_eos_token_id": None},
    "t5": {
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6,
        "decoder_start_token_id": 1,
    },
}
# transformers takes the softmax of these in fp32, whatever the model's dtype.
IN_FP32 = ("llama", "mistral", "gemma2", "deepseek_v3", "mixtral", "gpt_oss")
ROUNDINGS = 2000.0  # two layers with large weights, added up in another order
BY_NAME = [name for name in MODELS if name != "mpnet"]  # which computes its attention itself
GENERATING = [name for name in MODELS if MODELS[name] in (DECODERS, PAIRS)]
CAUSAL = [name for name in MODELS if MODELS[name] is DECODERS]


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name in IN_FP32 else torch.float64


def tiny(name: str, attention: str = "fastformer", **changes: Any) -> PreTrainedModel:
    """Return a model in evaluation mode; the same parameters for every attention."""
    changes = {**CHANGES.get(name, {}), **changes}
    model: PreTrainedModel = build(name, attention, dtype_of(name), MODELS.get(name, DECODERS), **changes)
    return model


def batch(name: str, side: str | None) -> dict[str, Tensor]:
    """ids, labels (-100 where padding would be asked for a word) and, unless side is None, the padding mask."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(3, VOCABULARY, (2, 3, LENGTH), generator=generator)
    if side is None:
        return {"input_ids": ids, "labels": labels}
    real = mask(side, LENGTH)
    if MODELS[name] is PAIRS:
        labels = labels[:, :TARGETS]
        tail = torch.tensor([7, 3, 5])[:, None] <= torch.arange(TARGETS)
        labels = labels.masked_fill(tail, -100)
    else:
        asked = real.bool()
        if MODELS[name] is DECODERS:  # the first token after padding is predicted from padding
            asked = asked & asked.roll(1, 1)
        labels = labels.masked_fill(~asked, -100)
    return {"input_ids": ids.masked_fill(real == 0, 0), "attention_mask": real, "labels": labels}


def pairs(name: str, side: str | None) -> dict[str, Tensor]:
    """`batch`, and where there is a decoder of its own, the mask that says what of its input is padding."""
    inputs = batch(name, side)
    if MODELS[name] is PAIRS and side is not None:
        inputs["decoder_attention_mask"] = (inputs["labels"] != -100).long()
    return inputs


def without_dropout(model: Any) -> Any:
    """The model in training, where it draws nothing."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def checkpoint(model: Any, reentrant: bool = False) -> Any:
    """Have each layer's activations computed again; return the model."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # from 5.20 on
    enable({"use_reentrant": reentrant})
    return model


WAYS = ("attention", "layers")  # the name alone, and `padding_free`


def fast(name: str, way: str = "layers", **changes: Any) -> Any:
    """A model whose attention, or all of whose layers, leave the padding out."""
    model = tiny(name, "eager" if way == "layers" else "fastformer", **changes)
    if way == "layers":
        assert padding_free(model).packed
    return model


def both_ways(name: str, **changes: Any) -> Any:
    """The eager model of a name, and the same padding-free."""
    return tiny(name, "eager", **changes), fast(name, **changes)


def attentions(name: str) -> int:
    """How many attentions a model has."""
    return 6 if MODELS[name] is PAIRS else 2


def outcome(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Loss, logits at real positions, and the gradient of every parameter."""
    result = model(**inputs)
    result.loss.backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    return [result.loss, result.logits[inputs["labels"] != -100], *gradients]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, ROUNDINGS)


def assert_as_eager(name: str, inputs: dict[str, Tensor], change: Any = None) -> None:
    """Compare the outcomes of `both_ways`, after a change to each model."""
    models = both_ways(name)
    assert_same(*(outcome(change(model) if change else model, inputs) for model in reversed(models)))
