"""Models in the formats of other programs: CTranslate2, and safetensors with their settings.

CTranslate2 takes tokens, not text: an exported folder holds the tokenizers too, and `eos` has to end each source, which
the exported configuration asks for. Positions are written as a table, because sinusoids of other programs come in
another order; sequences beyond its end are refused there.

Letters: D model width.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.models.embeddings import Embedding, sinusoidal_positions
from fastformer.apps.system.guarded import check_path, read_file
from fastformer.apps.text import Tokenizer
from fastformer.apps.train.weights import (
    CheckpointError,
    check_finite,
    check_size,
    put_weights,
    read_weights,
    write_weights,
)
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.settings import check_value, to_plain

__all__ = ["export_ctranslate2", "export_safetensors", "load_safetensors"]

Model = TranslationModel | LanguageModel
Dtype = Literal["float32", "float16", "bfloat16"]
Quantization = Literal["int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32"]

_KINDS: dict[str, tuple[type, type]] = {
    "translation": (TranslationConfig, TranslationModel),
    "language": (LanguageConfig, LanguageModel),
}


@contextmanager
def _new_folder(folder: Path | str) -> Iterator[Path]:
    """Write beside, then rename: after a failure there is no half folder.

    Raises:
        FileExistsError: the folder exists and is not empty.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            folder.rmdir()
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_tokenizers(model: Model, tokenizers: Sequence[Tokenizer]) -> None:
    wanted = 2 if isinstance(model, TranslationModel) else 1
    if len(tokenizers) != wanted:
        raise ValueError(f"tokenizers must be {wanted} for a {type(model).__name__}, not {len(tokenizers)}")


def _check_dtype(dtype: object) -> None:
    check_value("dtype", dtype, str, choices=get_args(Dtype))


def _save_tokenizers(folder: Path, tokenizers: Sequence[Tokenizer]) -> None:
    names = ("source", "target") if len(tokenizers) == 2 else ("",)
    for name, tokenizer in zip(names, tokenizers, strict=True):
        tokenizer.save(folder / "tokenizer" / name)


def export_safetensors(
    folder: Path | str, model: Model, tokenizers: Sequence[Tokenizer], dtype: Dtype = "float32"
) -> None:
    """Write `model.safetensors`, `config.json` and the tokenizers into a new folder.

    Args:
        folder: to make.
        model: with its configuration.
        tokenizers: source and target of a translation model, or the one of a language model.
        dtype: of the weights.

    Raises:
        FileExistsError: the folder exists and is not empty.
        ValueError: an unknown dtype, or not as many tokenizers as the model has sides.
    """
    _check_dtype(dtype)
    _check_tokenizers(model, tokenizers)
    kind = next(name for name, (_, of) in _KINDS.items() if isinstance(model, of))
    converted: dict[int, Tensor] = {}  # tied weights stay one tensor

    def convert(x: Tensor) -> Tensor:
        return converted.setdefault(x.data_ptr(), x.to(getattr(torch, dtype)))

    with _new_folder(folder) as new:
        write_weights(new / "model.safetensors", {name: convert(x) for name, x in model.state_dict().items()})
        content = {"kind": kind, "dtype": dtype, "model": to_plain(model.config)}
        (new / "config.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        _save_tokenizers(new, tokenizers)


def load_safetensors(folder: Path | str) -> Model:
    """Load the model of a folder that `export_safetensors` wrote, in its dtype, in evaluation mode.

    Raises:
        fastformer.apps.train.CheckpointError: there is none, or it is damaged.
        fastformer.apps.system.guarded.IrregularFileError: one of its files is a link, a pipe or a device.
    """
    folder = Path(folder)
    path = folder / "model.safetensors"
    try:
        content = json.loads(read_file(folder / "config.json", folder))
        settings, model = _KINDS[content["kind"]]
        _check_dtype(content["dtype"])
        config = settings(**content["model"])
        check_size(config.matrix_numbers, path.stat().st_size if check_path(path, folder) else sys.maxsize, path)
        built: Model = model(config).to(getattr(torch, content["dtype"]))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no exported model, there is no config.json") from None
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'}: not the configuration of an exported model: {error}"
        ) from None
    put_weights(built, read_weights(path), path)
    check_finite(built, path)
    return built.eval()


def export_ctranslate2(
    folder: Path | str,
    model: Model,
    tokenizers: Sequence[Tokenizer],
    quantization: Quantization = "float32",
    positions: int = 2048,
) -> None:
    """Write a model that `ctranslate2.Translator` or `ctranslate2.Generator` loads, and the tokenizers beside it.

    Args:
        folder: to make.
        model: with its configuration.
        tokenizers: source and target of a translation model, or the one of a language model.
        quantization: of the weights; see CTranslate2's documentation.
        positions: how many sinusoidal positions to write; learned ones are written as they are.

    Raises:
        ImportError: ctranslate2 is not installed.
        FileExistsError: the folder exists and is not empty.
        ValueError: an unknown quantization, fewer than 1 position, or not as many tokenizers as the model has sides.
    """
    try:
        import ctranslate2.specs as specs
    except ImportError as error:
        raise ImportError("export to CTranslate2 needs ctranslate2: pip install 'fastformer[ctranslate2]'") from error
    check_value("quantization", quantization, str, choices=get_args(Quantization))
    check_value("positions", positions, int, at_least=1)
    _check_tokenizers(model, tokenizers)
    c = model.config
    activations = {"relu": specs.common_spec.Activation.RELU, "gelu": specs.common_spec.Activation.GELU}
    # A final norm goes with pre-norm layers only, so the kind of layers is said afterwards.
    settings = {"activation": activations[c.activation], "no_final_norm": not c.final_norm}
    if isinstance(model, TranslationModel):
        spec = specs.TransformerSpec.from_config(
            (len(model.encoder.layers), len(model.decoder.layers)), c.heads, **settings
        )
        _embedding(spec.encoder.embeddings[0], spec.encoder, model.source_embedding, positions)
        _embedding(spec.decoder.embeddings, spec.decoder, model.target_embedding, positions)
        _stack(spec.encoder, model.encoder)
        _stack(spec.decoder, model.decoder)
        source, target = (_tokens(tokenizer) for tokenizer in tokenizers)
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)
        spec.config.add_source_eos = True
        spec.config.decoder_start_token = target[c.bos_id]
    else:
        spec = specs.TransformerDecoderModelSpec.from_config(len(model.decoder.layers), c.heads, **settings)
        _embedding(spec.decoder.embeddings, spec.decoder, model.embedding, positions)
        _stack(spec.decoder, model.decoder)
        (target,) = (_tokens(tokenizer) for tokenizer in tokenizers)
        spec.register_vocabulary(target)
    _linear(spec.decoder.projection, model.output.weight, model.output.bias)
    spec.config.unk_token = target[tokenizers[-1].unk_id]
    spec.config.bos_token, spec.config.eos_token = target[c.bos_id], target[c.eos_id]
    spec.config.layer_norm_epsilon = c.norm_eps
    spec.validate()
    spec.optimize(quantization=quantization)
    with _new_folder(folder) as new:
        spec.save(str(new))
        _save_tokenizers(new, tokenizers)


def _tokens(tokenizer: Tokenizer) -> list[str]:
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


def _embedding(spec: Any, stack: Any, embedding: Embedding, positions: int) -> None:
    spec.weight = _array(embedding.tokens.weight)
    stack.scale_embeddings = embedding.scale != 1.0
    width = embedding.tokens.embedding_dim
    table = sinusoidal_positions(positions, width) if embedding.positions is None else embedding.positions.weight
    stack.position_encodings.encodings = _array(table)


def _stack(spec: Any, stack: Any) -> None:
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
