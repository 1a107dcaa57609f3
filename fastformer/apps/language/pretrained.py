"""Convert decoders of transformers to language models: GPT-2, Llama, Qwen2, Qwen3 and Mistral; GPT-2 also back."""

from typing import Any

from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.pretrained.architecture import ACTIVATIONS, HF_ACTIVATIONS, Architecture, Reader, hf_settings

_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}

_GPT2 = {
    "embedding.tokens.weight": "transformer.wte.weight",
    "embedding.positions.weight": "transformer.wpe.weight",
    "decoder.layers.{n}.self_attn.in_proj_weight": "transformer.h.{n}.attn.c_attn.weight.T",
    "decoder.layers.{n}.self_attn.in_proj_bias": "transformer.h.{n}.attn.c_attn.bias",
    "decoder.layers.{n}.self_attn.out_proj.weight": "transformer.h.{n}.attn.c_proj.weight.T",
    "decoder.layers.{n}.self_attn.out_proj.bias": "transformer.h.{n}.attn.c_proj.bias",
    "decoder.layers.{n}.linear1.weight": "transformer.h.{n}.mlp.c_fc.weight.T",
    "decoder.layers.{n}.linear1.bias": "transformer.h.{n}.mlp.c_fc.bias",
    "decoder.layers.{n}.linear2.weight": "transformer.h.{n}.mlp.c_proj.weight.T",
    "decoder.layers.{n}.linear2.bias": "transformer.h.{n}.mlp.c_proj.bias",
    "decoder.layers.{n}.norm1.weight": "transformer.h.{n}.ln_1.weight",
    "decoder.layers.{n}.norm1.bias": "transformer.h.{n}.ln_1.bias",
    "decoder.layers.{n}.norm2.weight": "transformer.h.{n}.ln_2.weight",
    "decoder.layers.{n}.norm2.bias": "transformer.h.{n}.ln_2.bias",
    "decoder.norm.weight": "transformer.ln_f.weight",
    "decoder.norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
_QKV = "model.layers.{{n}}.self_attn.{x}_proj.{kind}"
_LLAMA = {
    "embedding.tokens.weight": "model.embed_tokens.weight",
    **{
        f"decoder.layers.{{n}}.self_attn.in_proj_{kind}": " ".join(_QKV.format(x=x, kind=kind) for x in "qkv")
        for kind in ("weight", "bias")
    },
    "decoder.layers.{n}.self_attn.q_norm.weight": "model.layers.{n}.self_attn.q_norm.weight",
    "decoder.layers.{n}.self_attn.k_norm.weight": "model.layers.{n}.self_attn.k_norm.weight",
    "decoder.layers.{n}.self_attn.out_proj.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "decoder.layers.{n}.self_attn.out_proj.bias": "model.layers.{n}.self_attn.o_proj.bias",
    "decoder.layers.{n}.linear1.weight": "model.layers.{n}.mlp.gate_proj.weight model.layers.{n}.mlp.up_proj.weight",
    "decoder.layers.{n}.linear1.bias": "model.layers.{n}.mlp.gate_proj.bias model.layers.{n}.mlp.up_proj.bias",
    "decoder.layers.{n}.linear2.weight": "model.layers.{n}.mlp.down_proj.weight",
    "decoder.layers.{n}.linear2.bias": "model.layers.{n}.mlp.down_proj.bias",
    "decoder.layers.{n}.norm1.weight": "model.layers.{n}.input_layernorm.weight",
    "decoder.layers.{n}.norm2.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "decoder.norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


_GPT2_SETTINGS = {
    "vocabulary": "vocab_size",
    "d_model": "n_embd",
    "heads": "n_head",
    "layers": "n_layer",
    "norm_eps": "layer_norm_epsilon",
    "max_positions": "n_positions",
    "dropout": "resid_pdrop",
    "embedding_dropout": "embd_pdrop",
    "attention_dropout": "attn_pdrop",
}
_LLAMA_SETTINGS = {
    "vocabulary": "vocab_size",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "feed_forward": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
}


def _gpt2(c: Reader) -> dict[str, Any]:
    c.require(
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        reorder_and_upcast_attn=False,
        add_cross_attention=False,
    )
    return {
        **CLASSICAL,
        **c.settings(_GPT2_SETTINGS),
        "feed_forward": c.n_inner or 4 * c.n_embd,
        "activation": c.choose("activation_function", ACTIVATIONS),
        "positions": "learned",
        "scale_embeddings": False,
        "embeddings": _embeddings(c),
        "activation_dropout": 0.0,
        **c.ids(),
    }


def _gpt2_configuration(c: LanguageConfig) -> dict[str, Any]:
    return {
        **hf_settings(c, _GPT2_SETTINGS),
        "n_inner": c.feed_forward,
        "activation_function": HF_ACTIVATIONS.get(c.activation, c.activation),
        "tie_word_embeddings": c.embeddings == "tied",
        "pad_token_id": c.pad_id,
        "bos_token_id": c.bos_id,
        "eos_token_id": c.eos_id,
    }


def _llama_family(c: Reader) -> dict[str, Any]:
    """Return the settings that Llama, Qwen and Mistral have in common."""
    return {
        **c.settings(_LLAMA_SETTINGS),
        "kv_heads": c.num_key_value_heads or c.num_attention_heads,
        "head_size": getattr(c.config, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "activation": c.choose("hidden_act", _GATED),
        "norm": "rms",
        "bias": False,
        "scale_embeddings": False,
        "embeddings": _embeddings(c),
        "dropout": 0.0,
        **_rotary(c),
        **c.ids(),
    }


def _llama(c: Reader) -> dict[str, Any]:
    if c.attention_bias != c.mlp_bias:
        raise c.refuse("attention_bias", c.attention_bias, f"that of mlp_bias, {c.mlp_bias}")
    return {**_llama_family(c), "bias": c.attention_bias}


def _qwen2(c: Reader) -> dict[str, Any]:
    return {**_llama_family(c), "qkv_bias": True, "window": _window_of_layers(c)}


def _qwen3(c: Reader) -> dict[str, Any]:
    c.require(attention_bias=False, rms_norm_eps=1e-6)  # the eps of q_norm and k_norm in fastformer
    return {**_llama_family(c), "qk_norm": True, "window": _window_of_layers(c)}


def _mistral(c: Reader) -> dict[str, Any]:
    return {**_llama_family(c), "window": _window(c.sliding_window)}


def _embeddings(c: Reader) -> str:
    return "tied" if c.tie_word_embeddings else "separate"


def _window(tokens: int | None) -> int | None:
    """Return the window without the token itself, which transformers counts."""
    return None if tokens is None else tokens - 1


def _window_of_layers(c: Reader) -> int | None:
    kinds = set(c.layer_types)
    if kinds == {"sliding_attention"}:
        return _window(c.sliding_window)
    if kinds != {"full_attention"}:
        raise c.refuse("layer_types", c.layer_types, "the same for all layers")
    return None


def _rotary(c: Reader) -> dict[str, Any]:
    rope = dict(c.rope_parameters)
    kind = rope.pop("rope_type", "default")
    rope.pop("type", None)  # the older name of rope_type
    settings: dict[str, Any] = {"positions": "rotary", "rotary_theta": float(rope.pop("rope_theta"))}
    if kind in ("linear", "llama3"):
        settings["rotary_scaling"] = float(rope.pop("factor"))
    elif kind != "default":
        raise c.refuse("rope_type", kind, "default, linear or llama3")
    if kind == "llama3":
        settings["rotary_original"] = rope.pop("original_max_position_embeddings")
        for name, value in (("low_freq_factor", 1.0), ("high_freq_factor", 4.0)):
            if (factor := rope.pop(name)) != value:
                raise c.refuse(f"rope_parameters[{name!r}]", factor, repr(value))
    if rope.pop("partial_rotary_factor", 1.0) != 1.0 or rope:
        raise c.refuse("rope_parameters", c.rope_parameters, "without more than what is known")
    return settings


_SUMMARY = frozenset(
    f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
)
_LENGTHS = frozenset({"max_position_embeddings"})
# transformers computes layer_types from these.
_SLIDING = _LENGTHS | {"use_sliding_window", "sliding_window", "max_window_layers"}

ARCHITECTURES = {
    "GPT2LMHeadModel": Architecture(
        LanguageModel, LanguageConfig, _gpt2, _GPT2, idle=_SUMMARY, configuration=_gpt2_configuration
    ),
    "LlamaForCausalLM": Architecture(
        LanguageModel, LanguageConfig, _llama, _LLAMA, idle=_LENGTHS | {"head_dim", "pretraining_tp"}
    ),
    "Qwen2ForCausalLM": Architecture(LanguageModel, LanguageConfig, _qwen2, _LLAMA, idle=_SLIDING),
    "Qwen3ForCausalLM": Architecture(LanguageModel, LanguageConfig, _qwen3, _LLAMA, idle=_SLIDING | {"head_dim"}),
    "MistralForCausalLM": Architecture(LanguageModel, LanguageConfig, _mistral, _LLAMA, idle=_LENGTHS | {"head_dim"}),
}
