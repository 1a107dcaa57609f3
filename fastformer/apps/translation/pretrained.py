"""Marian, the architecture of the OPUS-MT models of transformers, as a translation model (Junczys-Dowmunt et al. 2018).

Its decoder starts with the padding token, so bos and padding are one id here.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from fastformer.apps.pretrained import from_transformers
from fastformer.apps.pretrained.architecture import ACTIVATIONS, Architecture, Reader
from fastformer.apps.text import Tokenizer, read_marian
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.translator import Translator

_LONGEST = 1 << 16  # rows of the table of positions, which transformers computes before it has a weight


_PARTS = {
    "self_attn.out_proj": "self_attn.out_proj",
    "linear1": "fc1",
    "linear2": "fc2",
    "norm1": "self_attn_layer_norm",
}
_ENCODER = {**_PARTS, "norm2": "final_layer_norm"}
_DECODER = {
    **_PARTS,
    "multihead_attn.out_proj": "encoder_attn.out_proj",
    "norm2": "encoder_attn_layer_norm",
    "norm3": "final_layer_norm",
}


def _stack(name: str, layer: dict[str, str], attention: dict[str, str]) -> dict[str, str]:
    """Return the weights of a stack: of its linear layers and norms, and the input projections of its attention."""
    layers = f"{name}.layers.{{n}}."
    found: dict[str, str] = {}
    for part in ("weight", "bias"):
        found |= {f"{layers}{ours}.{part}": f"model.{layers}{theirs}.{part}" for ours, theirs in layer.items()}
        for ours, theirs in attention.items():
            qkv = " ".join(f"model.{layers}{theirs}.{x}_proj.{part}" for x in "qkv")
            found[f"{layers}{ours}.in_proj_{part}"] = qkv
    return found


_WEIGHTS = {
    "source_embedding.tokens.weight": "model.encoder.embed_tokens.weight",
    "target_embedding.tokens.weight": "model.decoder.embed_tokens.weight",
    **_stack("encoder", _ENCODER, {"self_attn": "self_attn"}),
    **_stack("decoder", _DECODER, {"self_attn": "self_attn", "multihead_attn": "encoder_attn"}),
    "output.weight": "lm_head.weight",
    "output.bias": "final_logits_bias[0]",
}


def _table(model: TranslationModel, like: Tensor) -> Tensor:
    return model.target_embedding.encodings(len(like))[: len(like)]


def _settings(c: Reader) -> dict[str, Any]:
    c.require(is_decoder=False, encoder_layerdrop=0, decoder_layerdrop=0)
    for ours in ("attention_heads", "ffn_dim"):
        one, other = getattr(c, f"encoder_{ours}"), getattr(c, f"decoder_{ours}")
        if one != other:
            raise c.refuse(f"decoder_{ours}", other, f"encoder_{ours}, {one}")
    shared, tied = c.share_encoder_decoder_embeddings, c.tie_word_embeddings
    if shared and not tied:
        raise c.refuse("tie_word_embeddings", tied, "True with share_encoder_decoder_embeddings")
    if not 1 <= c.max_position_embeddings <= _LONGEST:
        raise c.refuse("max_position_embeddings", c.max_position_embeddings, f"from 1 to {_LONGEST:,}")
    ids = c.ids("decoder_start_token_id")
    if ids["bos_id"] == ids["eos_id"]:
        raise c.refuse("decoder_start_token_id", c.decoder_start_token_id, "another token than eos_token_id")
    return {
        "source_vocabulary": c.vocab_size,
        "target_vocabulary": c.vocab_size if shared else c.decoder_vocab_size,
        "d_model": c.d_model,
        "heads": c.encoder_attention_heads,
        "feed_forward": c.encoder_ffn_dim,
        "encoder_layers": c.encoder_layers,
        "decoder_layers": c.decoder_layers,
        "activation": c.choose("activation_function", ACTIVATIONS),
        "norm_first": False,
        "final_norm": False,
        "positions": "sinusoidal_halves",
        "scale_embeddings": c.scale_embedding,
        "embeddings": "shared" if shared else "tied" if tied else "separate",
        "output_bias": True,
        "dropout": c.dropout,
        "attention_dropout": c.attention_dropout,
        "activation_dropout": c.activation_dropout,
        **ids,
    }


def _configuration(c: TranslationConfig) -> dict[str, Any]:
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    return {
        "vocab_size": c.source_vocabulary,
        "decoder_vocab_size": c.target_vocabulary,
        "d_model": c.d_model,
        **{f"{side}_attention_heads": c.heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": c.feed_forward for side in ("encoder", "decoder")},
        "encoder_layers": c.encoder_layers,
        "decoder_layers": c.decoder_layers,
        "activation_function": activations.get(c.activation, c.activation),
        "scale_embedding": c.scale_embeddings,
        "share_encoder_decoder_embeddings": c.embeddings == "shared",
        "tie_word_embeddings": c.embeddings != "separate",
        "dropout": c.dropout,
        "attention_dropout": c.dropout if c.attention_dropout is None else c.attention_dropout,
        "activation_dropout": c.dropout if c.activation_dropout is None else c.activation_dropout,
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
        # What generation reads, and the target's vocabulary where both sides have one.
        idle=frozenset({"forced_eos_token_id", "bos_token_id", "decoder_vocab_size"}),
        configuration=_configuration,
        unlike=frozenset({"output_bias"}),
    )
}
