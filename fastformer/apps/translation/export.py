"""CTranslate2's description of a translation model."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastformer.apps.export.ctranslate2 import vocabulary, write_embedding, write_stack
from fastformer.apps.text import Tokenizer
from fastformer.apps.translation.model import TranslationModel


def ctranslate2_spec(
    model: TranslationModel, tokenizers: Sequence[Tokenizer], settings: Mapping[str, Any], positions: int
) -> Any:
    """All but the output projection and what every model has; see `fastformer.apps.export.ctranslate2`.

    Raises:
        ValueError: queries and keys are normed, which CTranslate2 4.8 leaves out of cross-attention without a word.
    """
    if model.config.qk_norm:
        raise ValueError("CTranslate2 has no cross-attention with qk_norm")
    from ctranslate2.specs import TransformerDecoderSpec, TransformerEncoderSpec, TransformerSpec

    heads = model.config.heads
    encoder = TransformerEncoderSpec(len(model.encoder.layers), heads, **settings)
    decoder = TransformerDecoderSpec(len(model.decoder.layers), heads, **settings)
    spec = TransformerSpec(encoder, decoder)
    write_embedding(spec.encoder.embeddings[0], spec.encoder, model.source_embedding, positions)
    write_embedding(spec.decoder.embeddings, spec.decoder, model.target_embedding, positions)
    write_stack(spec.encoder, model.encoder)
    write_stack(spec.decoder, model.decoder)
    source, target = (vocabulary(tokenizer) for tokenizer in tokenizers)
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    spec.config.add_source_eos = True
    spec.config.decoder_start_token = target[model.config.bos_id]
    return spec
