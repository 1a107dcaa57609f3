"""Small, randomly initialised models of Hugging Face transformers, and padded batches for them."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging

from fastformer.integrations.transformers import padding_free
from tests.integrations.small_configs import mask
from tests.support.closeness import assert_close

logging.set_verbosity_error()

VOCABULARY, LENGTH, WINDOW = 60, 9, 4
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPOUT = 0.3
# Large initial values: weights far from uniform, so that a wrong mask shows.
PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "initializer_range": 0.4, **SPECIAL,
}  # fmt: skip
GROUPED = {**PLAIN, "num_key_value_heads": 2, "attention_dropout": DROPOUT}
GEMMA = {"sliding_window": WINDOW, "head_dim": 4, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 1.5}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "initializer_range": 0.4, "attn_pdrop": DROPOUT}
LATENT = {  # values have a head size of their own
    "attention_dropout": DROPOUT, "num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
MARIAN = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.4, "attention_dropout": DROPOUT,
    "max_position_embeddings": 64, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "initializer_factor": 2.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "dropout_rate": DROPOUT,
    "decoder_start_token_id": 1,
}  # fmt: skip
IDS = {"vocab_size": VOCABULARY, **SPECIAL}
BIDIRECTIONAL, DECODERS, PAIRS = AutoModelForMaskedLM, AutoModelForCausalLM, AutoModelForSeq2SeqLM
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (BIDIRECTIONAL, transformers.BertConfig, {**PLAIN, "attention_probs_dropout_prob": DROPOUT}),
    "roberta": (BIDIRECTIONAL, transformers.RobertaConfig, {**PLAIN, "attention_probs_dropout_prob": DROPOUT}),
    "mpnet": (BIDIRECTIONAL, transformers.MPNetConfig, {**PLAIN, "attention_probs_dropout_prob": DROPOUT}),
    "gpt2": (DECODERS, transformers.GPT2Config, {**IDS, **GPT}),
    "llama": (DECODERS, transformers.LlamaConfig, GROUPED),
    "mistral": (DECODERS, transformers.MistralConfig, {**GROUPED, "sliding_window": WINDOW}),
    "gemma2": (DECODERS, transformers.Gemma2Config, {**GROUPED, **GEMMA}),
    "deepseek_v3": (DECODERS, transformers.DeepseekV3Config, {**PLAIN, **LATENT}),
    "marian": (PAIRS, transformers.MarianConfig, {**IDS, **MARIAN}),
    "t5": (PAIRS, transformers.T5Config, {**IDS, **T5}),
}
# transformers takes the softmax of these in fp32, whatever the model's dtype.
DTYPES = {
    name: torch.float32 if name in ("llama", "mistral", "gemma2", "deepseek_v3") else torch.float64 for name in MODELS
}
ROUNDINGS = 2000.0  # two layers with large weights, added up in another order
BY_NAME = [name for name in MODELS if name != "mpnet"]  # which computes its attention itself
GENERATING = [name for name in MODELS if MODELS[name][0] in (DECODERS, PAIRS)]
CAUSAL = [name for name in MODELS if MODELS[name][0] is DECODERS]


def tiny(name: str, attention: str = "fastformer", **changes: Any) -> PreTrainedModel:
    """A model in evaluation mode; the same parameters for every attention."""
    auto, config, settings = MODELS[name]
    torch.manual_seed(1)
    model: PreTrainedModel = auto.from_config(config(**{**settings, **changes}), attn_implementation=attention)
    return model.to(DTYPES[name]).eval()


def batch(name: str, side: str | None) -> dict[str, Tensor]:
    """ids, labels (-100 where padding would be asked for a word) and, unless side is None, the padding mask."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(3, VOCABULARY, (2, 3, LENGTH), generator=generator)
    if side is None:
        return {"input_ids": ids, "labels": labels}
    real = mask(side, LENGTH)
    if MODELS[name][0] is PAIRS:
        labels = labels[:, : LENGTH - 2]
        tail = torch.tensor([7, 3, 5])[:, None] <= torch.arange(LENGTH - 2)
        labels = labels.masked_fill(tail, -100)
    else:
        asked = real.bool()
        if MODELS[name][0] is DECODERS:  # the first token after padding is predicted from padding
            asked = asked & asked.roll(1, 1)
        labels = labels.masked_fill(~asked, -100)
    return {"input_ids": ids.masked_fill(real == 0, 0), "attention_mask": real, "labels": labels}


def pairs(name: str, side: str | None) -> dict[str, Tensor]:
    """`batch`, and where there is a decoder of its own, the mask that says what of its input is padding."""
    inputs = batch(name, side)
    if MODELS[name][0] is PAIRS and side is not None:
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
    return 6 if MODELS[name][0] is PAIRS else 2


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
