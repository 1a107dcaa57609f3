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

_LONGEST = 1 << 16  # rows of the table of positions, which transformers computes before it has a weight


def _attention(ours: str, theirs: str) -> dict[str, str]:
    both = {
        f"{ours}.in_proj_{part}": " ".join(f"{theirs}.{x}_proj.{part}" for x in "qkv") for part in ("weight", "bias")
    }
    return both | {f"{ours}.out_proj.{part}": f"{theirs}.out_proj.{part}" for part in ("weight", "bias")}


def _parts(**theirs: str) -> dict[str, str]:
    """Weight and bias of linear layers and norms; ours -> theirs."""
    return {f"{ours}.{part}": f"{name}.{part}" for ours, name in theirs.items() for part in ("weight", "bias")}


def _stack(name: str, layer: dict[str, str]) -> dict[str, str]:
    layers = f"{name}.layers.{{n}}."
    return {f"{layers}{ours}": " ".join(f"model.{layers}{x}" for x in theirs.split()) for ours, theirs in layer.items()}


_LAYER = _attention("self_attn", "self_attn") | _parts(linear1="fc1", linear2="fc2", norm1="self_attn_layer_norm")
_WEIGHTS = {
    "source_embedding.tokens.weight": "model.encoder.embed_tokens.weight",
    "target_embedding.tokens.weight": "model.decoder.embed_tokens.weight",
    **_stack("encoder", _LAYER | _parts(norm2="final_layer_norm")),
    **_stack(
        "decoder",
        _LAYER
        | _attention("multihead_attn", "encoder_attn")
        | _parts(norm2="encoder_attn_layer_norm", norm3="final_layer_norm"),
    ),
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
    """Read a folder of transformers with a Marian model and its tokenizers: the model in fp32, and both sides'.

    Raises:
        ImportError, FileNotFoundError, ValueError: as `from_transformers` and `read_marian`; or the two do not fit.
    """
    model, tokenizers = from_transformers(folder), read_marian(folder)
    if not isinstance(model, TranslationModel):
        raise ValueError(f"{folder} must hold a Marian model, not one that becomes a {type(model).__name__}")
    c = model.config
    for tokenizer, size in zip(tokenizers, (c.source_vocabulary, c.target_vocabulary), strict=True):
        if tokenizer.size != size:
            raise ValueError(f"{folder}: a vocabulary has {tokenizer.size} entries, the model {size}")
    for name in ("pad_id", "bos_id", "eos_id"):
        if getattr(c, name) != (theirs := getattr(tokenizers[1], name)):
            raise ValueError(f"{folder}: the model has {name} {getattr(c, name)}, the vocabulary {theirs}")
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
