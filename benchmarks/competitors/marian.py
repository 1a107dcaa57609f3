"""Hugging Face's MarianMT with the weights of a `TranslationModel`: the same model in other hands.

Marian is post-norm without a norm after its stacks, scales embeddings by sqrt(d), and has biases everywhere, so only a
model with these settings becomes one. Its positions are a table, which takes ours.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.models.embeddings import sinusoidal_positions
from fastformer.apps.translation.model import TranslationModel


@torch.no_grad()
def marian(model: TranslationModel, positions: int) -> Any:
    """Make a `transformers.MarianMTModel` for sequences of up to so many positions, in evaluation mode.

    Raises:
        ValueError: Marian has no such model.
    """
    from transformers import MarianConfig, MarianMTModel

    c = model.config
    if c.norm_first or c.final_norm or not c.scale_embeddings or not c.bias or c.output_bias:
        raise ValueError(
            "Marian is post-norm, without final norms and an output bias, with scaled embeddings and biases"
        )
    theirs = MarianMTModel(
        MarianConfig(
            vocab_size=c.source_vocabulary,
            decoder_vocab_size=c.target_vocabulary,
            share_encoder_decoder_embeddings=False,
            tie_word_embeddings=False,
            max_position_embeddings=positions,
            encoder_layers=c.encoder_layers,
            decoder_layers=c.decoder_layers,
            encoder_attention_heads=c.heads,
            decoder_attention_heads=c.heads,
            encoder_ffn_dim=c.feed_forward,
            decoder_ffn_dim=c.feed_forward,
            d_model=c.d_model,
            activation_function=c.activation,
            dropout=c.dropout,
            scale_embedding=True,
            pad_token_id=c.pad_id,
            eos_token_id=c.eos_id,
            bos_token_id=c.bos_id,
            decoder_start_token_id=c.bos_id,
            forced_eos_token_id=None,
        )
    ).to(model.output.weight)
    parts = theirs.model
    for stack, embedding in ((parts.encoder, model.source_embedding), (parts.decoder, model.target_embedding)):
        stack.embed_tokens.weight.copy_(embedding.tokens.weight)
        stack.embed_positions.weight.copy_(sinusoidal_positions(positions, c.d_model))
    theirs.lm_head.weight.copy_(model.output.weight)
    theirs.final_logits_bias.zero_()
    for ours, other in zip([*model.encoder.layers], [*parts.encoder.layers], strict=True):
        _attention(ours.self_attn, other.self_attn)
        _rest(ours, other, [other.self_attn_layer_norm, other.final_layer_norm])
    for ours, other in zip([*model.decoder.layers], [*parts.decoder.layers], strict=True):
        _attention(ours.self_attn, other.self_attn)
        _attention(ours.multihead_attn, other.encoder_attn)
        _rest(ours, other, [other.self_attn_layer_norm, other.encoder_attn_layer_norm, other.final_layer_norm])
    return theirs.eval()


def _copy(to: Any, weight: Tensor, bias: Tensor) -> None:
    to.weight.copy_(weight)
    to.bias.copy_(bias)


def _attention(ours: Any, theirs: Any) -> None:
    parts = zip(ours.in_proj_weight.chunk(3), ours.in_proj_bias.chunk(3), strict=True)
    for name, (weight, bias) in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
        _copy(getattr(theirs, name), weight, bias)
    _copy(theirs.out_proj, ours.out_proj.weight, ours.out_proj.bias)


def _rest(ours: Any, theirs: Any, norms: list[nn.Module]) -> None:
    _copy(theirs.fc1, ours.linear1.weight, ours.linear1.bias)
    _copy(theirs.fc2, ours.linear2.weight, ours.linear2.bias)
    for i, norm in enumerate(norms):
        source = getattr(ours, f"norm{i + 1}")
        _copy(norm, source.weight, source.bias)
