"""Export translation and language models to CTranslate2.

CTranslate2 takes tokens, not text: an exported folder holds the tokenizers too, and its configuration adds eos to each
source. Positions that are added to embeddings are written as a table, because the sinusoids of other programs come in
another order; CTranslate2 refuses sequences beyond the end of the table.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fastformer.apps.models.embeddings import Embedding, sinusoidal_positions
from fastformer.apps.models.settings import ModelSettings
from fastformer.apps.runs.application import application_for
from fastformer.apps.system.files import new_folder
from fastformer.apps.text import Tokenizer
from fastformer.nn.activations import is_gated
from fastformer.nn.projections import QK_EPS, Projections
from fastformer.settings import check_value

_POSITIONS = 2048  # sinusoidal ones that are written; learned ones are written as they are
_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "silu": "SWISH",
    "gelu_tanh": "GELUTanh",
    "geglu": "GELU",
    "swiglu": "SWISH",
    "reglu": "RELU",
}
Quantization = Literal["int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32"]


def export_ctranslate2(
    folder: Path | str, model: Any, tokenizers: Sequence[Tokenizer], quantization: Quantization = "float32"
) -> None:
    """Write a model that `ctranslate2.Translator` or `ctranslate2.Generator` loads, and the tokenizers beside it.

    Args:
        folder: the folder to create.
        model: a `TranslationModel` or `LanguageModel`.
        tokenizers: source and target of a translation model, or the one of a language model.
        quantization: the type of the stored weights; see CTranslate2's documentation.

    Raises:
        ImportError: ctranslate2 is not installed.
        FileExistsError: the folder exists and is not empty.
        TypeError: the model belongs to no application.
        ValueError: CTranslate2 has no such model or layers, quantization is unknown, or the number of tokenizers is
            wrong.
    """
    application = application_for(model, tokenizers)
    if application.kind not in ("translation", "language"):
        raise ValueError(f"CTranslate2 has no models like {type(model).__name__}; export it as safetensors")
    try:
        import ctranslate2.specs as specs
    except ImportError as error:
        raise ImportError("export to CTranslate2 needs ctranslate2: pip install 'fastformer[ctranslate2]'") from error
    check_value("quantization", quantization, str, choices=get_args(Quantization))
    c, translates = model.config, application.kind == "translation"
    if translates and c.qk_norm:  # CTranslate2 4.8 leaves it out of cross-attention without an error
        raise ValueError("CTranslate2 has no cross-attention with qk_norm")
    settings: dict[str, Any] = {"num_heads": c.heads, **_settings(c, specs)}
    *source, target = (tokenizer.pieces(range(tokenizer.size)) for tokenizer in tokenizers)
    layers = len(model.decoder.layers)
    decoder = specs.TransformerDecoderSpec(layers, with_encoder_attention=translates, **settings)
    if translates:
        encoder = specs.TransformerEncoderSpec(len(model.encoder.layers), **settings)
        spec = specs.TransformerSpec(encoder, decoder)
        _embedding(encoder.embeddings[0], encoder, model.source_embedding)
        _embedding(decoder.embeddings, decoder, model.target_embedding)
        _stack(encoder, model.encoder)
        spec.register_source_vocabulary(*source)
        spec.register_target_vocabulary(target)
        spec.config.add_source_eos = True
        spec.config.decoder_start_token = target[c.bos_id]
    else:
        spec = specs.TransformerDecoderModelSpec(decoder)
        _embedding(decoder.embeddings, decoder, model.embedding)
        spec.register_vocabulary(target)
    _stack(decoder, model.decoder)
    _linear(decoder.projection, model.output.weight, model.output.bias)
    spec.config.unk_token = target[tokenizers[-1].unk_id]
    spec.config.bos_token, spec.config.eos_token = target[c.bos_id], target[c.eos_id]
    spec.config.layer_norm_epsilon = c.norm_eps
    spec.validate()
    spec.optimize(quantization=quantization)
    with new_folder(Path(folder).resolve()) as new:
        spec.save(str(new))
        application.save_tokenizers(new, tokenizers)


def _settings(c: ModelSettings, specs: Any) -> dict[str, Any]:
    """Return the arguments of CTranslate2's stacks; raise ValueError for layers that CTranslate2 does not have."""
    missing = {
        "window": c.window is not None,
        "softcap": c.softcap is not None,
        "sinks": c.sinks,
        f"positions {c.positions}": c.positions in ("alibi", "relative"),
        # The spec has no field for the scaling factor then.
        "rotary_original": c.rotary_original is not None,
        # A spec has one epsilon for all norms.
        f"qk_norm and norm_eps other than {QK_EPS}": c.qk_norm and c.norm_eps != QK_EPS,
    }
    if any(missing.values()):
        raise ValueError(f"CTranslate2 has no layers with {', '.join(name for name, used in missing.items() if used)}")
    scaling = c.rotary_scaling
    # The constructors take a final norm with pre-norm layers only, so `_stack` sets `pre_norm` afterwards.
    return {
        "activation": getattr(specs.common_spec.Activation, _ACTIVATIONS[c.activation]),
        "ffn_glu": is_gated(c.activation),
        "no_final_norm": not c.final_norm,
        "rms_norm": c.norm == "rms",
        "num_heads_kv": c.kv_heads,
        "head_dim": c.head_size,
        "qk_norm": c.qk_norm,
        "rotary_dim": c.rotary.rotated_size(c.head_width) if c.positions == "rotary" else None,
        "rotary_interleave": False,
        "rotary_base": c.rotary_theta,
        "rotary_scaling_type": None if scaling is None else specs.attention_spec.RotaryScalingType.Linear,
        "rotary_scaling_factor": scaling or 1.0,
    }


def _array(x: Any) -> Any:
    return x.detach().float().cpu().contiguous().numpy()


def _linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _array(weight)
    if bias is not None:
        spec.bias = _array(bias)


def _norm(spec: Any, norm: nn.Module) -> None:
    spec.gamma = _array(norm.weight)
    if not isinstance(norm, nn.RMSNorm):
        spec.beta = _array(torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)


def _embedding(spec: Any, stack: Any, embedding: Embedding) -> None:
    spec.weight = _array(embedding.tokens.weight)
    stack.scale_embeddings = embedding.scale != 1.0
    if hasattr(stack, "position_encodings"):
        if embedding.positions is not None:
            table = embedding.positions.weight
        else:
            table = sinusoidal_positions(_POSITIONS, embedding.tokens.embedding_dim, halves=embedding.halves)
        stack.position_encodings.encodings = _array(table * embedding.adds_positions)


def _stack(spec: Any, stack: Any) -> None:
    spec.pre_norm = stack.layers[0].norm_first
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        _attention(layer_spec.self_attention, layer.self_attn, layer.norm1)
        norm = layer.norm2
        if hasattr(layer, "multihead_attn"):
            _attention(layer_spec.attention, layer.multihead_attn, layer.norm2)
            norm = layer.norm3
        _feed_forward(layer_spec.ffn, layer, norm)
    if stack.norm is not None:
        _norm(spec.layer_norm, stack.norm)


def _attention(spec: Any, module: Projections, norm: nn.Module) -> None:
    """Write an attention module; CTranslate2 stores input projections as one matrix, or queries and the rest."""
    *inputs, output = spec.linear
    weight, bias = module.in_proj_weight, module.in_proj_bias
    queries = module.num_heads * module.head_dim
    row_slices = [slice(None)] if len(inputs) == 1 else [slice(queries), slice(queries, None)]
    for projection, rows in zip(inputs, row_slices, strict=True):
        _linear(projection, weight[rows], None if bias is None else bias[rows])
    _linear(output, module.out_proj.weight, module.out_proj.bias)
    _norm(spec.layer_norm, norm)
    if hasattr(spec, "q_norm"):
        _norm(spec.q_norm, module.q_norm)
        _norm(spec.k_norm, module.k_norm)


def _feed_forward(spec: Any, layer: Any, norm: nn.Module) -> None:
    """Write both projections; CTranslate2 stores that of a gate separately."""
    _norm(spec.layer_norm, norm)
    weight, bias = layer.linear1.weight, layer.linear1.bias
    inputs = [spec.linear_0, spec.linear_0_noact] if hasattr(spec, "linear_0_noact") else [spec.linear_0]
    biases = [None] * len(inputs) if bias is None else bias.chunk(len(inputs))
    for each, w, b in zip(inputs, weight.chunk(len(inputs)), biases, strict=True):
        _linear(each, w, b)
    _linear(spec.linear_1, layer.linear2.weight, layer.linear2.bias)
