"""The model classes of transformers that fastformer converts: Marian, BERT, GPT-2, Llama, Qwen2, Qwen3 and Mistral."""

from typing import Any

from torch import Tensor

from fastformer.apps.classification.model import (
    ClassifierConfig,
    EncoderConfig,
    SequenceClassifier,
    TextEncoder,
    TokenClassifier,
)
from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.pretrained.architecture import Architecture, Reader
from fastformer.apps.translation.model import TranslationConfig, TranslationModel

# Name in transformers -> in fastformer; of several names for one function, the last is written back.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "swish": "silu",
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_HF_ACTIVATIONS = {name: hf_name for hf_name, name in _ACTIVATIONS.items()}
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
_MOST_POSITIONS = 1 << 16  # transformers computes Marian's table of positions before it loads a weight

_GPT2 = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "decoder.layers.{n}.self_attn.in_proj": "transformer.h.{n}.attn.c_attn",
    "decoder.layers.{n}.self_attn.out_proj": "transformer.h.{n}.attn.c_proj",
    "decoder.layers.{n}.linear1": "transformer.h.{n}.mlp.c_fc",
    "decoder.layers.{n}.linear2": "transformer.h.{n}.mlp.c_proj",
    "decoder.layers.{n}.norm1": "transformer.h.{n}.ln_1",
    "decoder.layers.{n}.norm2": "transformer.h.{n}.ln_2",
    "decoder.norm": "transformer.ln_f",
    "output": "lm_head",
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
        "activation": c.choose("activation_function", _ACTIVATIONS),
        "positions": "learned",
        "scale_embeddings": False,
        "embeddings": "tied" if c.tie_word_embeddings else "separate",
        "activation_dropout": 0.0,
        **c.ids(),
    }


def _gpt2_configuration(c: LanguageConfig) -> dict[str, Any]:
    return {
        **_hf_settings(c, _GPT2_SETTINGS),
        "n_inner": c.feed_forward,
        "tie_word_embeddings": c.embeddings == "tied",
        "bos_token_id": c.bos_id,
    }


def _hf_settings(config: Any, names: dict[str, str]) -> dict[str, Any]:
    """Return the inverse of `Reader.settings`, in which an unset dropout rate is `dropout`, and common settings."""
    values = {hf_name: getattr(config, name) for name, hf_name in names.items()}
    return {
        **{name: config.dropout if value is None else value for name, value in values.items()},
        "activation_function": _HF_ACTIVATIONS.get(config.activation, config.activation),
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
    }


_LLAMA = {
    "embedding.tokens": "model.embed_tokens",
    "decoder.layers.{n}.self_attn.in_proj": "model.layers.{n}.self_attn.[q|k|v]_proj",
    "decoder.layers.{n}.self_attn.q_norm": "model.layers.{n}.self_attn.q_norm",
    "decoder.layers.{n}.self_attn.k_norm": "model.layers.{n}.self_attn.k_norm",
    "decoder.layers.{n}.self_attn.out_proj": "model.layers.{n}.self_attn.o_proj",
    "decoder.layers.{n}.linear1": "model.layers.{n}.mlp.[gate|up]_proj",
    "decoder.layers.{n}.linear2": "model.layers.{n}.mlp.down_proj",
    "decoder.layers.{n}.norm1": "model.layers.{n}.input_layernorm",
    "decoder.layers.{n}.norm2": "model.layers.{n}.post_attention_layernorm",
    "decoder.norm": "model.norm",
    "output": "lm_head",
}
_SIZES = {  # as Llama and BERT name them
    "vocabulary": "vocab_size",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "feed_forward": "intermediate_size",
}
_LLAMA_SETTINGS = {**_SIZES, "norm_eps": "rms_norm_eps", "attention_dropout": "attention_dropout"}


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
        "embeddings": "tied" if c.tie_word_embeddings else "separate",
        "dropout": 0.0,
        **_rotary(c),
        **c.ids(),
    }


def _llama(c: Reader) -> dict[str, Any]:
    if c.attention_bias != c.mlp_bias:
        raise c.refuse("attention_bias", c.attention_bias, f"that of mlp_bias, {c.mlp_bias}")
    return {**_llama_family(c), "bias": c.attention_bias}


def _qwen2(c: Reader) -> dict[str, Any]:
    return {**_llama_family(c), "qkv_bias": True, "window": _window(c, c.layer_types)}


def _qwen3(c: Reader) -> dict[str, Any]:
    c.require(attention_bias=False, rms_norm_eps=1e-6)  # the eps of q_norm and k_norm in fastformer
    return {**_llama_family(c), "qk_norm": True, "window": _window(c, c.layer_types)}


def _mistral(c: Reader) -> dict[str, Any]:
    return {**_llama_family(c), "window": _window(c, ["sliding_attention"])}


def _window(c: Reader, layers: list[str]) -> int | None:
    """Return the window without the token itself, which transformers counts."""
    if len(set(layers)) > 1:
        raise c.refuse("layer_types", layers, "the same for all layers")
    return None if layers[0] == "full_attention" or c.sliding_window is None else c.sliding_window - 1


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


_BERT = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.positions": "embeddings.position_embeddings",
    "embedding.types": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "encoder.layers.{n}.self_attn.in_proj": "encoder.layer.{n}.attention.self.[query|key|value]",
    "encoder.layers.{n}.self_attn.out_proj": "encoder.layer.{n}.attention.output.dense",
    "encoder.layers.{n}.norm1": "encoder.layer.{n}.attention.output.LayerNorm",
    "encoder.layers.{n}.linear1": "encoder.layer.{n}.intermediate.dense",
    "encoder.layers.{n}.linear2": "encoder.layer.{n}.output.dense",
    "encoder.layers.{n}.norm2": "encoder.layer.{n}.output.LayerNorm",
    "pooler": "pooler.dense",
}
_BERT_CLASSIFIER = {name: f"bert.{hf_name}" for name, hf_name in _BERT.items()} | {"output": "classifier"}
_BERT_SETTINGS = {
    **_SIZES,
    "norm_eps": "layer_norm_eps",
    "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}


def _bert(c: Reader) -> dict[str, Any]:
    c.require(is_decoder=False, add_cross_attention=False)
    return {
        **c.settings(_BERT_SETTINGS),
        "activation": c.choose("hidden_act", _ACTIVATIONS),
        "norm_first": False,
        "final_norm": False,
        "positions": "learned",
        "embedding_norm": True,
        "scale_embeddings": False,
        "activation_dropout": 0.0,
        "pooling": "first",
        "pooler": any("pooler." in name for name in c.weights),
    }


def _bert_classifier(c: Reader) -> dict[str, Any]:
    if c.classifier_dropout not in (None, c.hidden_dropout_prob):
        raise c.refuse("classifier_dropout", c.classifier_dropout, f"hidden_dropout_prob, {c.hidden_dropout_prob}")
    return {**_bert(c), "classes": c.num_labels}


_MARIAN_LAYER = {
    "self_attn.in_proj": "self_attn.[q|k|v]_proj",
    "self_attn.out_proj": "self_attn.out_proj",
    "norm1": "self_attn_layer_norm",
    "linear1": "fc1",
    "linear2": "fc2",
}
_MARIAN_LAYERS = {
    "encoder": {**_MARIAN_LAYER, "norm2": "final_layer_norm"},
    "decoder": {
        **_MARIAN_LAYER,
        "multihead_attn.in_proj": "encoder_attn.[q|k|v]_proj",
        "multihead_attn.out_proj": "encoder_attn.out_proj",
        "norm2": "encoder_attn_layer_norm",
        "norm3": "final_layer_norm",
    },
}
_MARIAN = {
    "source_embedding.tokens": "model.encoder.embed_tokens",
    "target_embedding.tokens": "model.decoder.embed_tokens",
    **{
        f"{stack}.layers.{{n}}.{name}": f"model.{stack}.layers.{{n}}.{hf_name}"
        for stack, names in _MARIAN_LAYERS.items()
        for name, hf_name in names.items()
    },
    "output": "lm_head",
    "output.bias": "final_logits_bias",
}
_MARIAN_SETTINGS = {
    **{name: name for name in ("d_model", "encoder_layers", "decoder_layers")},
    **{name: name for name in ("dropout", "attention_dropout", "activation_dropout")},
    "source_vocabulary": "vocab_size",
    "heads": "encoder_attention_heads",
    "feed_forward": "encoder_ffn_dim",
    "scale_embeddings": "scale_embedding",
}


def _marian(c: Reader) -> dict[str, Any]:
    c.require(is_decoder=False, encoder_layerdrop=0, decoder_layerdrop=0)
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = getattr(c, f"encoder_{name}"), getattr(c, f"decoder_{name}")
        if encoder != decoder:
            raise c.refuse(f"decoder_{name}", decoder, f"encoder_{name}, {encoder}")
    shared, tied = c.share_encoder_decoder_embeddings, c.tie_word_embeddings
    if shared and not tied:
        raise c.refuse("tie_word_embeddings", tied, "True with share_encoder_decoder_embeddings")
    if not 1 <= c.max_position_embeddings <= _MOST_POSITIONS:
        raise c.refuse("max_position_embeddings", c.max_position_embeddings, f"from 1 to {_MOST_POSITIONS:,}")
    ids = c.ids("decoder_start_token_id")  # the padding token
    if ids["bos_id"] == ids["eos_id"]:
        raise c.refuse("decoder_start_token_id", c.decoder_start_token_id, "another token than eos_token_id")
    return {
        **c.settings(_MARIAN_SETTINGS),
        "target_vocabulary": c.vocab_size if shared else c.decoder_vocab_size,
        "activation": c.choose("activation_function", _ACTIVATIONS),
        "norm_first": False,
        "final_norm": False,
        "positions": "sinusoidal_halves",
        "embeddings": "shared" if shared else "tied" if tied else "separate",
        "output_bias": True,
        **ids,
    }


def _marian_configuration(c: TranslationConfig) -> dict[str, Any]:
    return {
        **_hf_settings(c, _MARIAN_SETTINGS),
        "decoder_vocab_size": c.target_vocabulary,
        "decoder_attention_heads": c.heads,
        "decoder_ffn_dim": c.feed_forward,
        "share_encoder_decoder_embeddings": c.embeddings == "shared",
        "tie_word_embeddings": c.embeddings != "separate",
        "decoder_start_token_id": c.bos_id,
        "forced_eos_token_id": c.eos_id,
    }


def _positions(model: TranslationModel, like: Tensor) -> Tensor:
    return model.target_embedding.encodings(len(like))[: len(like)]


_SUMMARY = {f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")}
_LENGTHS = {"max_position_embeddings"}
# transformers computes layer_types from these.
_SLIDING = _LENGTHS | {"use_sliding_window", "sliding_window", "max_window_layers"}
# Special ids belong to the tokenizer; word embeddings are tied to a head that these classes do not have.
_BERT_IDLE = {"pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"}
# Settings of generation, and the size of the target vocabulary, unused with a joint one.
_MARIAN_IDLE = {"forced_eos_token_id", "bos_token_id", "decoder_vocab_size"}


def _decoder(settings: Any, modules: dict[str, str], idle: set[str], **more: Any) -> Architecture:
    return Architecture(LanguageModel, LanguageConfig, settings, modules, idle, **more)


ARCHITECTURES = {
    "GPT2LMHeadModel": _decoder(_gpt2, _GPT2, _SUMMARY, transposed=True, configuration=_gpt2_configuration),
    "LlamaForCausalLM": _decoder(_llama, _LLAMA, _LENGTHS | {"head_dim", "pretraining_tp"}),
    "Qwen2ForCausalLM": _decoder(_qwen2, _LLAMA, _SLIDING),
    "Qwen3ForCausalLM": _decoder(_qwen3, _LLAMA, _SLIDING | {"head_dim"}),
    "MistralForCausalLM": _decoder(_mistral, _LLAMA, _LENGTHS | {"head_dim"}),
    "BertModel": Architecture(TextEncoder, EncoderConfig, _bert, _BERT, _BERT_IDLE | {"classifier_dropout"}),
    **{
        f"BertFor{task}Classification": Architecture(
            network, ClassifierConfig, _bert_classifier, _BERT_CLASSIFIER, _BERT_IDLE
        )
        for task, network in (("Token", TokenClassifier), ("Sequence", SequenceClassifier))
    },
    "MarianMTModel": Architecture(
        TranslationModel,
        TranslationConfig,
        _marian,
        _MARIAN,
        _MARIAN_IDLE,
        computed={
            "model.shared.weight": lambda model, like: model.target_embedding.tokens.weight,
            "model.encoder.embed_positions.weight": _positions,
            "model.decoder.embed_positions.weight": _positions,
        },
        configuration=_marian_configuration,
    ),
}
