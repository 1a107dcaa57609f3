"""Models of transformers as ours: the same logits for every architecture, in batches of several lengths and in steps.

Tolerance: 1e-5 of fp32 as documented; the logits are about 1, and both sides round in other orders. Each mapping is
held to a mistake in it, too: that must show a hundred times as much.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.apps.pretrained import from_transformers
from tests.apps.pretrained.tiny_models import ALL, LENGTH, batch, build

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


@torch.no_grad()
@pytest.mark.parametrize("name", EXACT)
def test_logits_are_those_of_transformers_in_fp64(name: str) -> None:
    theirs = build(name, torch.float64)
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
