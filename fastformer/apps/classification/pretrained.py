"""Convert BERT (Devlin et al. 2019) from transformers to an encoder or a classifier."""

from typing import Any

from fastformer.apps.classification.model import (
    ClassifierConfig,
    EncoderConfig,
    SequenceClassifier,
    TextEncoder,
    TokenClassifier,
)
from fastformer.apps.pretrained.architecture import ACTIVATIONS, Architecture, Reader

_LAYER = {
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}
_EMBEDDING = {
    "tokens.weight": "word_embeddings.weight",
    "positions.weight": "position_embeddings.weight",
    "types.weight": "token_type_embeddings.weight",
    "norm.weight": "LayerNorm.weight",
    "norm.bias": "LayerNorm.bias",
}
_SETTINGS = {
    "vocabulary": "vocab_size",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "feed_forward": "intermediate_size",
    "norm_eps": "layer_norm_eps",
    "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}


def _weights(prefix: str) -> dict[str, str]:
    layer = f"{prefix}encoder.layer.{{n}}."
    names = {f"embedding.{name}": f"{prefix}embeddings.{hf_name}" for name, hf_name in _EMBEDDING.items()}
    for kind in ("weight", "bias"):
        qkv = " ".join(f"{layer}attention.self.{x}.{kind}" for x in ("query", "key", "value"))
        names[f"encoder.layers.{{n}}.self_attn.in_proj_{kind}"] = qkv
        names |= {f"encoder.layers.{{n}}.{name}.{kind}": f"{layer}{hf_name}.{kind}" for name, hf_name in _LAYER.items()}
        names[f"pooler.{kind}"] = f"{prefix}pooler.dense.{kind}"
        names[f"output.{kind}"] = f"classifier.{kind}"
    return names


def _encoder(c: Reader) -> dict[str, Any]:
    c.require(is_decoder=False, add_cross_attention=False)
    return {
        **c.settings(_SETTINGS),
        "activation": c.choose("hidden_act", ACTIVATIONS),
        "norm_first": False,
        "final_norm": False,
        "positions": "learned",
        "embedding_norm": True,
        "scale_embeddings": False,
        "activation_dropout": 0.0,
        "pooling": "first",
        "pooler": any("pooler." in name for name in c.weights),
    }


def _classifier(c: Reader) -> dict[str, Any]:
    if c.classifier_dropout not in (None, c.hidden_dropout_prob):
        raise c.refuse("classifier_dropout", c.classifier_dropout, f"hidden_dropout_prob, {c.hidden_dropout_prob}")
    return {**_encoder(c), "classes": c.num_labels}


# Special ids belong to the tokenizer; word embeddings are tied to a head that these classes do not have.
_IDLE = frozenset({"pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"})

ARCHITECTURES = {
    "BertModel": Architecture(TextEncoder, EncoderConfig, _encoder, _weights(""), idle=_IDLE | {"classifier_dropout"}),
    "BertForTokenClassification": Architecture(
        TokenClassifier, ClassifierConfig, _classifier, _weights("bert."), idle=_IDLE
    ),
    "BertForSequenceClassification": Architecture(
        SequenceClassifier, ClassifierConfig, _classifier, _weights("bert."), idle=_IDLE
    ),
}
