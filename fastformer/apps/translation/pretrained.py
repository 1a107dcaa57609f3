"""Convert Marian (Junczys-Dowmunt et al. 2018), the architecture of OPUS-MT models, from and to transformers.

Marian's decoder starts with the padding token, so `bos_id` equals `pad_id`.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from fastformer.apps.pretrained import from_transformers
from fastformer.apps.pretrained.architecture import ACTIVATIONS, HF_ACTIVATIONS, Architecture, Reader, hf_settings
from fastformer.apps.text import Tokenizer
from fastformer.apps.text.marian_tokenizer import read_marian
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.translator import Translator

_MOST_POSITIONS = 1 << 16  # transformers computes the table of positions before it loads a weight

_LAYER = {
    "self_attn.out_proj": "self_attn.out_proj",
    "linear1": "fc1",
    "linear2": "fc2",
    "norm1": "self_attn_layer_norm",
}
_ENCODER = {**_LAYER, "norm2": "final_layer_norm"}
_DECODER = {
    **_LAYER,
    "multihead_attn.out_proj": "encoder_attn.out_proj",
    "norm2": "encoder_attn_layer_norm",
    "norm3": "final_layer_norm",
}


def _stack(name: str, modules: dict[str, str], attention: dict[str, str]) -> dict[str, str]:
    """Return {parameter name in fastformer: in transformers} of a stack, for modules and for input projections."""
    layer = f"{name}.layers.{{n}}."
    names: dict[str, str] = {}
    for kind in ("weight", "bias"):
        names |= {f"{layer}{module}.{kind}": f"model.{layer}{hf_name}.{kind}" for module, hf_name in modules.items()}
        for module, hf_name in attention.items():
            qkv = " ".join(f"model.{layer}{hf_name}.{x}_proj.{kind}" for x in "qkv")
            names[f"{layer}{module}.in_proj_{kind}"] = qkv
    return names


_WEIGHTS = {
    "source_embedding.tokens.weight": "model.encoder.embed_tokens.weight",
    "target_embedding.tokens.weight": "model.decoder.embed_tokens.weight",
    **_stack("encoder", _ENCODER, {"self_attn": "self_attn"}),
    **_stack("decoder", _DECODER, {"self_attn": "self_attn", "multihead_attn": "encoder_attn"}),
    "output.weight": "lm_head.weight",
    "output.bias": "final_logits_bias[0]",
}


_SETTINGS = {
    "source_vocabulary": "vocab_size",
    "d_model": "d_model",
    "heads": "encoder_attention_heads",
    "feed_forward": "encoder_ffn_dim",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "scale_embeddings": "scale_embedding",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
}


def _table(model: TranslationModel, like: Tensor) -> Tensor:
    return model.target_embedding.encodings(len(like))[: len(like)]


def _settings(c: Reader) -> dict[str, Any]:
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
    ids = c.ids("decoder_start_token_id")
    if ids["bos_id"] == ids["eos_id"]:
        raise c.refuse("decoder_start_token_id", c.decoder_start_token_id, "another token than eos_token_id")
    return {
        **c.settings(_SETTINGS),
        "target_vocabulary": c.vocab_size if shared else c.decoder_vocab_size,
        "activation": c.choose("activation_function", ACTIVATIONS),
        "norm_first": False,
        "final_norm": False,
        "positions": "sinusoidal_halves",
        "embeddings": "shared" if shared else "tied" if tied else "separate",
        "output_bias": True,
        **ids,
    }


def _configuration(c: TranslationConfig) -> dict[str, Any]:
    return {
        **hf_settings(c, _SETTINGS),
        "decoder_vocab_size": c.target_vocabulary,
        "decoder_attention_heads": c.heads,
        "decoder_ffn_dim": c.feed_forward,
        "activation_function": HF_ACTIVATIONS.get(c.activation, c.activation),
        "share_encoder_decoder_embeddings": c.embeddings == "shared",
        "tie_word_embeddings": c.embeddings != "separate",
        "pad_token_id": c.pad_id,
        "decoder_start_token_id": c.bos_id,
        "eos_token_id": c.eos_id,
        "forced_eos_token_id": c.eos_id,
    }


def read_pretrained(folder: Path | str) -> tuple[TranslationModel, tuple[Tokenizer, ...]]:
    """Read a Marian model in fp32 and the tokenizers of both sides from a folder of transformers."""
    model, tokenizers = from_transformers(folder), read_marian(folder)
    if not isinstance(model, TranslationModel):
        raise ValueError(f"{folder} must hold a Marian model, not one that becomes a {type(model).__name__}")
    try:
        Translator(model, *tokenizers)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return model.float(), tokenizers


ARCHITECTURES = {
    "MarianMTModel": Architecture(
        TranslationModel,
        TranslationConfig,
        _settings,
        _WEIGHTS,
        implied={
            "model.shared.weight": lambda model, like: model.target_embedding.tokens.weight,
            "model.encoder.embed_positions.weight": _table,
            "model.decoder.embed_positions.weight": _table,
        },
        # Settings of generation, and the size of the target vocabulary, unused with a joint one.
        idle=frozenset({"forced_eos_token_id", "bos_token_id", "decoder_vocab_size"}),
        configuration=_configuration,
        unlike=frozenset({"output_bias"}),
    )
}
