"""CTranslate2: what all models share of its description of them; which model becomes which is its application's.

CTranslate2 takes tokens, not text: an exported folder holds the tokenizers too, and `eos` has to end each source, which
the exported configuration asks for. Positions are written as a table, because sinusoids of other programs come in
another order; sequences beyond its end are refused there.

Letters: D model width.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fastformer.apps.export.folder import application_for, new_folder
from fastformer.apps.models.embeddings import Embedding, sinusoidal_positions
from fastformer.apps.text import Tokenizer
from fastformer.settings import check_value

Quantization = Literal["int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32"]


def export_ctranslate2(
    folder: Path | str,
    model: Any,
    tokenizers: Sequence[Tokenizer],
    quantization: Quantization = "float32",
    positions: int = 2048,
) -> None:
    """Write a model that `ctranslate2.Translator` or `ctranslate2.Generator` loads, and the tokenizers beside it.

    Args:
        folder: to make.
        model: of one of the applications, with its configuration.
        tokenizers: source and target of a translation model, or the one of a language model.
        quantization: of the weights; see CTranslate2's documentation.
        positions: how many sinusoidal positions to write; learned ones are written as they are.

    Raises:
        ImportError: ctranslate2 is not installed.
        FileExistsError: the folder exists and is not empty.
        TypeError: the model is of no application.
        ValueError: CTranslate2 has no such models, an unknown quantization, fewer than 1 position, or not as many
            tokenizers as the model has sides.
    """
    application = application_for(model, tokenizers)
    if application.ctranslate2 is None:
        raise ValueError(f"CTranslate2 has no models like {type(model).__name__}; export it as safetensors")
    try:
        import ctranslate2.specs as specs
    except ImportError as error:
        raise ImportError("export to CTranslate2 needs ctranslate2: pip install 'fastformer[ctranslate2]'") from error
    check_value("quantization", quantization, str, choices=get_args(Quantization))
    check_value("positions", positions, int, at_least=1)
    c = model.config
    activations = {"relu": specs.common_spec.Activation.RELU, "gelu": specs.common_spec.Activation.GELU}
    beyond = [*c.options(causal=True), *([] if c.activation in activations else [f"activation {c.activation}"])]
    if beyond or c.embedded_positions == "none":
        raise ValueError(f"export to CTranslate2 knows no models with {', '.join(beyond) or 'no positions'}")
    # A final norm goes with pre-norm layers only, so the kind of layers is said afterwards.
    settings = {"activation": activations[c.activation], "no_final_norm": not c.final_norm}
    spec = application.ctranslate2(model, tokenizers, settings, positions)
    target = vocabulary(tokenizers[-1])
    _linear(spec.decoder.projection, model.output.weight, model.output.bias)
    spec.config.unk_token = target[tokenizers[-1].unk_id]
    spec.config.bos_token, spec.config.eos_token = target[c.bos_id], target[c.eos_id]
    spec.config.layer_norm_epsilon = c.norm_eps
    spec.validate()
    spec.optimize(quantization=quantization)
    with new_folder(folder) as new:
        spec.save(str(new))
        application.save_tokenizers(new, tokenizers)


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Every token of a vocabulary, by id."""
    return tokenizer.pieces(range(tokenizer.size))


def _array(x: Tensor) -> Any:
    return x.detach().float().cpu().contiguous().numpy()


def _linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _array(weight)
    if bias is not None:
        spec.bias = _array(bias)


def _norm(spec: Any, norm: nn.Module) -> None:
    weight, bias = norm.weight, norm.bias
    spec.gamma = _array(weight)  # type: ignore[arg-type]
    spec.beta = _array(torch.zeros_like(weight) if bias is None else bias)  # type: ignore[arg-type]


def write_embedding(spec: Any, stack: Any, embedding: Embedding, positions: int) -> None:
    """Write tokens and positions; `positions` is how many of sinusoidal ones."""
    spec.weight = _array(embedding.tokens.weight)
    stack.scale_embeddings = embedding.scale != 1.0
    width = embedding.tokens.embedding_dim
    learned = embedding.positions
    table = sinusoidal_positions(positions, width, halves=embedding.halves) if learned is None else learned.weight
    stack.position_encodings.encodings = _array(table)


def write_stack(spec: Any, stack: Any) -> None:
    """Write the layers and the final norm of a stack; `[q, k, v]` are one matrix on both sides."""
    spec.pre_norm = stack.layers[0].norm_first
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        attention = layer_spec.self_attention
        _linear(attention.linear[0], layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias)
        _linear(attention.linear[1], layer.self_attn.out_proj.weight, layer.self_attn.out_proj.bias)
        _norm(attention.layer_norm, layer.norm1)
        norms = [layer.norm2]
        if hasattr(layer, "multihead_attn"):
            attention, cross = layer_spec.attention, layer.multihead_attn
            D = cross.embed_dim
            bias = cross.in_proj_bias
            for linear, rows in ((attention.linear[0], slice(0, D)), (attention.linear[1], slice(D, 3 * D))):
                _linear(linear, cross.in_proj_weight[rows], None if bias is None else bias[rows])
            _linear(attention.linear[2], cross.out_proj.weight, cross.out_proj.bias)
            _norm(attention.layer_norm, layer.norm2)
            norms = [layer.norm3]
        _norm(layer_spec.ffn.layer_norm, norms[0])
        _linear(layer_spec.ffn.linear_0, layer.linear1.weight, layer.linear1.bias)
        _linear(layer_spec.ffn.linear_1, layer.linear2.weight, layer.linear2.bias)
    if stack.norm is not None:
        _norm(spec.layer_norm, stack.norm)
