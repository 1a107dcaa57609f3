"""Models of transformers converted to fastformer and back compute the same logits, for every architecture.

Tolerance: 1e-5 in fp32 as documented; the logits are about 1, and both libraries round in other orders.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.apps.classification.model import EncoderConfig, TextEncoder
from fastformer.apps.language import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.pretrained import from_transformers, to_transformers
from fastformer.apps.translation import TranslationConfig, TranslationModel
from tests.apps.pretrained.tiny_models import ALL, LENGTH, D, V, batch, build

pytest.importorskip("transformers")

FP32, FP64, LENGTHS = 1e-5, 1e-10, [LENGTH, 1, 9, 17]
EXACT = [name for name in ALL if name.startswith(("gpt2", "bert", "marian"))]  # others round norms and angles to fp32


def hf_logits(model: Any) -> Tensor:
    """The logits, or hidden states, of the real tokens in order."""
    ids, mask = batch(LENGTHS)
    kind = model.config.model_type
    if kind == "marian":
        target, real = batch([5, 7, 1, 12], seed=1)
        out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target, decoder_attention_mask=real)
        return out.logits[real.bool()]
    if kind == "bert":
        out = model(input_ids=ids, attention_mask=mask, token_type_ids=batch(LENGTHS, seed=2)[0] % 2)
        actual = out.logits if hasattr(out, "logits") else out.last_hidden_state
        return actual if actual.dim() == 2 else actual[mask.bool()]
    return model(input_ids=ids, attention_mask=mask).logits[mask.bool()]


def logits(model: Any, packed: bool = False) -> Tensor:
    ids, mask = batch(LENGTHS)
    ids, lengths = (ids[mask.bool()] if packed else ids), torch.tensor(LENGTHS)
    if isinstance(model, TranslationModel):
        target, real = batch([5, 7, 1, 12], seed=1)
        return model.logits(model(ids, lengths, target, real.sum(1)))
    if isinstance(model, LanguageModel):
        return model.logits(model(ids, lengths))
    types = batch(LENGTHS, seed=2)[0] % 2
    hidden = model(ids, lengths, types[mask.bool()] if packed else types)
    return hidden if type(model) is TextEncoder else model.logits(hidden)


def distance(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    hf_model = build(name)
    model, expected = from_transformers(hf_model).to("cpu"), hf_logits(hf_model)  # `to` refuses buffers on meta
    assert expected.std() > 0.2  # else the tolerance would say nothing
    assert distance(logits(model), expected) < FP32
    assert distance(logits(model, packed=True), expected) < FP32
    assert not {x.data_ptr() for x in model.parameters()} & {x.data_ptr() for x in hf_model.parameters()}
    assert (model.training, from_transformers(hf_model.train()).training) == (False, True)
    hf_model.eval().save_pretrained(tmp_path / "model")
    assert distance(logits(from_transformers(tmp_path / "model")), expected) < FP32
    if name in EXACT:
        model = from_transformers(hf_model.double())
        assert {x.dtype for x in model.state_dict().values()} == {torch.float64}
        assert distance(logits(model), hf_logits(hf_model)) < FP64


RATES = {
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.2, "embd_pdrop": 0.4},
    "llama": {"attention_dropout": 0.2},
    "bert tokens": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    "marian": {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3},
}


@pytest.mark.parametrize("name", RATES)
def test_dropout_rates_are_those_of_transformers(name: str) -> None:
    model = from_transformers(build(name, **RATES[name]))
    residual = 0.0 if name == "llama" else 0.1
    layers = [module for module in model.modules() if hasattr(module, "linear2")]
    for layer in layers:
        assert {x.dropout for x in layer.attentions} == {0.2}
        inner = 0.3 if name == "marian" else 0.0
        assert (layer.dropout.p, layer.dropout1.p, layer.dropout2.p) == (inner, residual, residual)
    embedding = model.source_embedding if name == "marian" else model.embedding
    assert embedding.dropout.p == RATES[name].get("embd_pdrop", residual)


SIZES = {"d_model": D, "heads": 4, "feed_forward": 24, "scale_embeddings": False}
GPT2 = {**SIZES, **CLASSICAL, "layers": 2, "positions": "learned", "max_positions": 32, "activation": "gelu_tanh"}
MARIAN = {**SIZES, "encoder_layers": 2, "decoder_layers": 3, "positions": "sinusoidal_halves", "norm_first": False}
MARIAN |= {"final_norm": False, "embeddings": "shared", "output_bias": True}
MARIAN |= {"pad_id": V - 1, "bos_id": V - 1, "eos_id": 0, "activation": "relu"}


def language_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LanguageModel(LanguageConfig(V, **{**GPT2, **changes})).eval()


def translation_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = TranslationModel(TranslationConfig(V, V, **{**MARIAN, **changes})).eval()
    if model.output.bias is not None:
        torch.nn.init.normal_(model.output.bias)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "gpt2 untied", "marian", "marian, two vocabularies"])
def test_there_and_back_is_the_same_model(name: str) -> None:
    hf_model = build(name)
    back = to_transformers(from_transformers(hf_model))
    assert type(back) is type(hf_model)
    expected, actual = hf_model.state_dict(), back.state_dict()
    assert actual.keys() == expected.keys()
    for key, x in expected.items():  # the table of positions is as long as the configuration says
        rows = min(len(x), len(actual[key]))
        assert torch.equal(actual[key][:rows], x[:rows]), key
        assert rows == len(x) or "embed_positions" in key


@torch.no_grad()
@pytest.mark.parametrize(
    "model",
    [
        language_model(),
        language_model(embeddings="separate", activation="gelu", dropout=0.3),
        language_model(activation="silu", norm_eps=1e-6),
        translation_model(),
        translation_model(output_bias=False, activation="silu", scale_embeddings=True),
        translation_model(embeddings="tied"),
        translation_model(embeddings="separate", activation="gelu_tanh"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_converted_back_logits_are_those_of_fastformer(model: Any, tmp_path: Path) -> None:
    hf_model = to_transformers(model)
    assert distance(hf_logits(hf_model), logits(model)) < FP32
    hf_model.save_pretrained(tmp_path / "model")
    loaded = type(hf_model).from_pretrained(tmp_path / "model", local_files_only=True)
    assert distance(hf_logits(loaded), logits(model)) < FP32
    assert distance(logits(from_transformers(tmp_path / "model")), logits(model)) == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (language_model(norm="rms"), "GPT2LMHeadModel cannot represent this model: norm='rms' must be 'layer'"),
        (language_model(positions="sinusoidal"), "positions='sinusoidal' must be 'learned'"),
        (language_model(norm_first=False, window=4), r"norm_first=False .*window=4"),
        (language_model(scale_embeddings=True), "scale_embeddings=True"),
        (language_model(kv_heads=2), "kv_heads=2"),
        (language_model(output_bias=True), "output_bias=True"),
        (language_model(activation="swiglu"), "activation_function must be .*, not 'swiglu'"),
        (translation_model(positions="learned"), "MarianMTModel cannot represent .*positions='learned' must be"),
        (translation_model(norm_first=True, final_norm=True), "norm_first=True .*final_norm=True"),
        (translation_model(norm_eps=1e-6), "norm_eps=1e-06"),
        (translation_model(bias=False), "bias=False"),
        (TextEncoder(EncoderConfig(9, d_model=8, heads=2, layers=1)), "model must be one of .*, not a TextEncoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_transformers_cannot_represent_are_refused(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_transformers(model)
