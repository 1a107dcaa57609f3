"""Hugging Face models and batches for them, as small as the rules of their configurations allow."""

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import configuration_auto

VOCABULARY, ROWS, LENGTH, TARGETS = 99, 3, 9, 7
MOST_PARAMETERS = 6_000_000

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "model_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "global_head_dim", "swa_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "dense_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_dim", "expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    "sliding_window": 4,
    "local_attention": 6,  # of ModernBERT, to both sides
    "max_position_embeddings": 64,
    "n_positions": 64,
    "type_vocab_size": 2,
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "forced_eos_token_id"), 2),
    **dict.fromkeys(
        ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_chunk_size", "state_size", "chunk_size"), 8
    ),
    **dict.fromkeys(("mamba_d_ssm", "rnn_hidden_size", "lru_width"), 64),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 4,
    "rotary_dim": 8,
    **dict.fromkeys(("vocab_size_per_layer_input", "pronunciation_vocab_size", "shape_vocab_size"), 99),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "entity_emb_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_topk", "zero_expert_num"), 2),
    "entity_vocab_size": 99,
    "default_language": "en_XX",
}

# Rotary positions in three sections, which add up to half of the head size.
SECTIONED = ("glm4v", "glm_image", "glm_ocr", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl")


def small(cls: Any, vocabulary: int) -> Any:
    """A small configuration of a class, and of the parts that it has."""
    default = cls()
    values = default.to_dict()
    plain = {name for name, value in values.items() if not isinstance(value, list | dict)}
    settings: dict[str, Any] = {name: value for name, value in SIZES.items() if name in plain}
    settings |= dict.fromkeys(plain & {"vocab_size", "decoder_vocab_size", "src_vocab_size"}, vocabulary)
    if "qk_rope_head_dim" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]  # latent attention shares none
        settings |= {"qk_rope_head_dim": 4, "head_dim": 4} if "head_dim" in settings else {"qk_rope_head_dim": 4}
    if "num_hidden_layers" in settings:
        settings |= _layers(values)
    if cls.model_type == "lfm2":  # has attention alone by default, and convolutions in all models that exist
        settings["layer_types"] = ["full_attention", "conv"] * (settings["num_hidden_layers"] // 2)
    if "attention_types" in values:
        settings["attention_types"] = [[["global", "local"], 1]]
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and cls.model_type.startswith(SECTIONED):
        pairs = int(8 * rope.get("partial_rotary_factor", 1)) // 2
        settings["rope_parameters"] = {**rope, "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    theirs = getattr(cls, "attribute_map", {})
    settings = {name: value for name, value in settings.items() if name not in theirs}
    for name in getattr(cls, "sub_configs", {}):
        if getattr(default, name, None) is not None:
            settings.pop(name, None)
            settings[name] = small(type(getattr(default, name)), vocabulary).to_dict()
    return cls(**settings)


def _layers(values: dict[str, Any]) -> dict[str, Any]:
    """Two layers, or one of each kind that a configuration has: what it says of each layer, for those alone."""
    deep = values["num_hidden_layers"]
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == deep > 1}
    if not lists:
        return {}
    kinds = {str(each): index for index, each in reversed(list(enumerate(zip(*lists.values(), strict=True))))}
    chosen = sorted({*kinds.values(), deep - 1})[:4]
    chosen = chosen if len(chosen) > 1 else [0, deep - 1]
    shared = {}
    if values.get("num_kv_shared_layers") is not None:  # one of each kind, whose keys and values as many others share
        chosen = sorted(kinds.values())
        shared, chosen = {"num_kv_shared_layers": len(chosen)}, chosen * 2
    sized = {name: [SIZES.get(name, x[i]) for i in chosen] for name, x in lists.items()}
    return {"num_hidden_layers": len(chosen), **shared, **sized}


class NotSmall(Exception):
    """A type cannot be built small by these rules, or is no text model."""


@functools.cache
def _check(name: str, auto: Any) -> None:
    """Raise NotSmall for a type that takes no text or is too large."""
    config = small(configuration_auto.CONFIG_MAPPING[name], VOCABULARY)
    if getattr(transformers.MODEL_MAPPING[type(config)], "main_input_name", "input_ids") != "input_ids":
        raise NotSmall("takes no text")
    with torch.device("meta"):
        model = auto.from_config(config, attn_implementation="eager")
    count = sum(x.numel() for x in model.parameters())
    if count > MOST_PARAMETERS:
        raise NotSmall(f"has {count} parameters")


def build(name: str, attention: str, dtype: torch.dtype, auto: Any = transformers.AutoModel, **changes: Any) -> Any:
    """Return a small model of a type, with weights of about unit gain, the same for every attention."""
    _check(name, auto)
    config = small(configuration_auto.CONFIG_MAPPING[name], VOCABULARY)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(1)
    model = auto.from_config(config, attn_implementation=attention, experts_implementation="eager").to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for x in model.parameters():
            scale = x.shape[-1] ** -0.5 if x.dim() > 1 else 0.1
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64) * scale
            x.copy_(noise if x.dim() > 1 else x + noise)
    return model.eval()


def mask(side: str, length: int) -> Tensor:
    """int64 `[ROWS, length]`, 1 = real."""
    steps, lengths = torch.arange(length), torch.tensor([[length], [length // 2], [length - 3]])
    starts = {"right": steps < lengths, "left": steps >= length - lengths}
    gaps = {"gaps": steps % 3 == 2, "empty": (torch.arange(ROWS) != 1)[:, None]}
    real = {**starts, "gaps": starts["right"] | gaps["gaps"], "empty": starts["right"] & gaps["empty"]}.get(side)
    real = torch.ones(ROWS, length, dtype=torch.bool) if real is None else real
    return real.long()


def batch(model: Any, side: str) -> dict[str, Tensor]:
    """Ids and masks, of both sides where there are two."""
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "input_ids": torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=generator),
        "attention_mask": mask(side, LENGTH),
    }
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(5, VOCABULARY, (ROWS, TARGETS), generator=generator)
        inputs["decoder_attention_mask"] = mask(side, TARGETS)
    return inputs
