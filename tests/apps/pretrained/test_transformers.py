"""Models of transformers as ours and back: the same logits for every architecture, in batches of several lengths.

Tolerance: 1e-5 of fp32 as documented; the logits are about 1, and both sides round in other orders. Each mapping is
held to a mistake in it, too: that must show a hundred times as much.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.apps.classification.model import EncoderConfig, TextEncoder
from fastformer.apps.language import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.pretrained import from_transformers, to_transformers
from fastformer.apps.translation import TranslationConfig, TranslationModel
from tests.apps.pretrained.tiny_models import ALL, LENGTH, D, V, batch, build

transformers = pytest.importorskip("transformers")

FP32, FP64, LENGTHS = 1e-5, 1e-10, [LENGTH, 1, 9, 17]
EXACT = [name for name in ALL if name.startswith(("gpt2", "bert", "marian"))]  # others round norms and angles to fp32


def theirs_of(model: Any) -> Tensor:
    """The logits, or hidden states, of the real tokens in order."""
    ids, mask = batch(LENGTHS)
    kind = model.config.model_type
    if kind == "marian":
        read, seen = batch([5, 7, 1, 12], seed=1)
        out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=read, decoder_attention_mask=seen).logits
        return out[seen.bool()]
    if kind == "bert":
        types = batch(LENGTHS, seed=2)[0] % 2
        out = model(input_ids=ids, attention_mask=mask, token_type_ids=types)
        found = out.logits if hasattr(out, "logits") else out.last_hidden_state
        return found if found.dim() == 2 else found[mask.bool()]
    return model(input_ids=ids, attention_mask=mask).logits[mask.bool()]


def ours_of(model: Any, packed: bool = False) -> Tensor:
    ids, mask = batch(LENGTHS)
    given, lengths = (ids[mask.bool()] if packed else ids), torch.tensor(LENGTHS)
    kind = type(model).__name__
    if kind == "TranslationModel":
        read, seen = batch([5, 7, 1, 12], seed=1)
        return model.logits(model(given, lengths, read, seen.sum(1)))
    if kind == "LanguageModel":
        return model.logits(model(given, lengths))
    types = batch(LENGTHS, seed=2)[0] % 2
    hidden = model(given, lengths, types[mask.bool()] if packed else types)
    return hidden if kind == "TextEncoder" else model.logits(hidden)


def apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_transformers(name: str) -> None:
    theirs = build(name)
    ours, expected = from_transformers(theirs), theirs_of(theirs)
    assert expected.std() > 0.2  # else the tolerance would say nothing
    assert apart(ours_of(ours), expected) < FP32
    assert apart(ours_of(ours, packed=True), expected) < FP32
    if name in EXACT:
        theirs = theirs.double()
        ours = from_transformers(theirs)
        assert {x.dtype for x in ours.state_dict().values()} == {torch.float64}
        assert apart(ours_of(ours), theirs_of(theirs)) < FP64


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_a_saved_folder_is_the_model(name: str, tmp_path: Any) -> None:
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "model")
    assert apart(ours_of(from_transformers(tmp_path / "model")), theirs_of(theirs)) < FP32


@pytest.mark.parametrize("name", ALL)
def test_weights_are_copies_and_all_of_them_are_there(name: str) -> None:
    theirs = build(name)
    ours = from_transformers(theirs)
    assert not {x.data_ptr() for x in ours.parameters()} & {x.data_ptr() for x in theirs.parameters()}
    assert all(not x.is_meta for x in (*ours.parameters(), *ours.state_dict().values()))
    assert not ours.training
    assert from_transformers(theirs.train()).training
    tables = sum(p.numel() for n, p in theirs.named_parameters() if "embed_positions" in n)
    bias = theirs.final_logits_bias.numel() if hasattr(theirs, "final_logits_bias") else 0
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) - tables + bias


RATES = {
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.2, "embd_pdrop": 0.4},
    "llama": {"attention_dropout": 0.2},
    "bert tokens": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    "marian": {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3},
}


@pytest.mark.parametrize("name", RATES)
def test_dropout_rates_are_those_of_transformers(name: str) -> None:
    ours = from_transformers(build(name, **RATES[name]))
    residual = 0.0 if name == "llama" else 0.1
    inner = 0.3 if name == "marian" else 0.0
    layers = [m for m in ours.modules() if hasattr(m, "linear2")]
    assert len(layers) == (5 if name == "marian" else 2)
    for layer in layers:
        assert {x.dropout for x in layer.attentions} == {0.2}
        assert (layer.dropout.p, layer.dropout1.p, layer.dropout2.p) == (inner, residual, residual)
    embedding = ours.source_embedding if name == "marian" else ours.embedding
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
    theirs = build(name)
    back = to_transformers(from_transformers(theirs))
    assert type(back) is type(theirs)
    expected = theirs.state_dict()
    found = back.state_dict()
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        if "embed_positions" in key:  # the table of positions is as long as the configuration says
            rows = min(len(x), len(found[key]))
            assert torch.equal(found[key][:rows], x[:rows])
        else:
            assert torch.equal(found[key], x), key
    assert apart(theirs_of(back), theirs_of(theirs)) == 0


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
def test_converted_back_logits_are_those_of_fastformer(model: Any, tmp_path: Any) -> None:
    theirs = to_transformers(model)
    assert apart(theirs_of(theirs), ours_of(model)) < FP32
    theirs.save_pretrained(tmp_path / "model")
    again = type(theirs).from_pretrained(tmp_path / "model", local_files_only=True)
    assert apart(theirs_of(again), ours_of(model)) < FP32
    assert apart(ours_of(from_transformers(tmp_path / "model")), ours_of(model)) == 0


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
        (translation_model(positions="sinusoidal"), "MarianMTModel cannot represent .*positions='sinusoidal' must be"),
        (translation_model(norm_first=True, final_norm=True), "norm_first=True .*final_norm=True"),
        (translation_model(norm_eps=1e-6), "norm_eps=1e-06"),
        (translation_model(bias=False), "bias=False"),
        (TextEncoder(EncoderConfig(9, d_model=8, heads=2, layers=1)), "model must be one of .*, not a TextEncoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_they_have_not_is_refused_by_name(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_transformers(model)


@torch.no_grad()
def test_a_weight_that_was_changed_shows() -> None:
    """The comparisons above can fail."""
    model = language_model()
    theirs = to_transformers(model)
    weight = theirs.transformer.h[0].attn.c_attn.weight
    weight.copy_(weight.roll(D, 1))
    assert apart(theirs_of(theirs), ours_of(model)) > 100 * FP32
