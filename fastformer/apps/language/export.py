"""CTranslate2's description of a language model."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastformer.apps.export.ctranslate2 import vocabulary, write_embedding, write_stack
from fastformer.apps.language.model import LanguageModel
from fastformer.apps.text import Tokenizer


def ctranslate2_spec(
    model: LanguageModel, tokenizers: Sequence[Tokenizer], settings: Mapping[str, Any], positions: int
) -> Any:
    """All but the output projection and what every model has; see `fastformer.apps.export.ctranslate2`."""
    from ctranslate2.specs import TransformerDecoderModelSpec, TransformerDecoderSpec

    layers, heads = len(model.decoder.layers), model.config.heads
    spec = TransformerDecoderModelSpec(TransformerDecoderSpec(layers, heads, with_encoder_attention=False, **settings))
    write_embedding(spec.decoder.embeddings, spec.decoder, model.embedding, positions)
    write_stack(spec.decoder, model.decoder)
    (tokens,) = (vocabulary(tokenizer) for tokenizer in tokenizers)
    spec.register_vocabulary(tokens)
    return spec
