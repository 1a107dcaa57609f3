"""Models of transformers as ours: the same logits for every architecture, in batches of several lengths and in steps.

Tolerance: 1e-5 of fp32 as documented; the logits are about 1, and both sides round in other orders. Each mapping is
held to a mistake in it, too: that must show a hundred times as much.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.apps.pretrained import from_transformers
from tests.apps.pretrained.tiny_models import ALL, DECODERS, LENGTH, TRANSLATORS, batch, build

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
def test_logits_are_theirs(name: str) -> None:
    theirs = build(name)
    ours, expected = from_transformers(theirs), theirs_of(theirs)
    assert expected.std() > 0.2  # else the tolerance would say nothing
    assert apart(ours_of(ours), expected) < FP32
    assert apart(ours_of(ours, packed=True), expected) < FP32


@torch.no_grad()
@pytest.mark.parametrize("name", EXACT)
def test_logits_are_theirs_in_fp64(name: str) -> None:
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


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_steps_with_the_cache_are_theirs(name: str) -> None:
    """Prompts of different lengths in one pass, then token by token, each against their whole text."""
    theirs = build(name)
    ours, lengths = from_transformers(theirs), [6, 1, 11]
    whole, _ = batch([length + 5 for length in lengths])
    cache = ours.decoder.new_cache(3, longest=LENGTH)

    def step(start: list[int], count: list[int]) -> Tensor:
        from fastformer.packing import Layout

        layout = Layout.from_lengths(count)
        at = torch.cat([torch.arange(a, a + n) for a, n in zip(start, count, strict=True)])
        row = torch.arange(3).repeat_interleave(torch.tensor(count))
        x = ours.embedding(whole[row, at], at, int(at.max()) + 1)
        return ours.logits(ours.decoder.step(x, cache, layout))[layout.offsets[1:] - 1]

    found = [step([0, 0, 0], lengths)]
    found += [step([length + t for length in lengths], [1, 1, 1]) for t in range(5)]
    for row, length in enumerate(lengths):
        expected = theirs(input_ids=whole[row : row + 1, : length + 5]).logits[0, length - 1 :]
        assert apart(torch.stack([each[row] for each in found]), expected) < FP32


@torch.no_grad()
@pytest.mark.parametrize("name", TRANSLATORS)
def test_steps_of_the_search_are_theirs(name: str) -> None:
    from fastformer.apps.translation import DecoderState

    theirs = build(name)
    ours = from_transformers(theirs)
    ids, mask = batch(LENGTHS)
    read, _ = batch([6] * len(LENGTHS), seed=1)
    state = DecoderState(ours, ids, torch.tensor(LENGTHS))
    found = torch.stack([state.step(read[:, t]) for t in range(6)], 1)
    expected = theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=read).logits
    assert apart(found, expected) < FP32


def _swap(model: Any, name: str) -> None:
    """Exchange the halves of a weight."""
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight.copy_(weight.roll(len(weight) // 2, 0))


def _rotary(**changes: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        import dataclasses

        for layer in model.decoder.layers:
            layer.self_attn.rotary = dataclasses.replace(layer.self_attn.rotary, **changes)

    return change


def _layers(model: Any, **changes: Any) -> None:
    for module in model.modules():
        for name, value in changes.items():
            if isinstance(getattr(module, name, None), int | float | tuple):
                setattr(module, name, value)


def _unscaled(model: Any) -> None:
    model.source_embedding.scale = 1.0


def _interleaved(model: Any) -> None:
    for side in (model.source_embedding, model.target_embedding):
        side.halves = False
        side.table = side.table[:0]


MISTAKES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "gpt2: q and k": ("gpt2", lambda m: _swap(m, "decoder.layers.0.self_attn.in_proj_weight")),
    "gpt2: one position on": ("gpt2", lambda m: _swap(m, "embedding.positions.weight")),
    "gpt2: eps": ("gpt2", lambda m: _layers(m, eps=1e-2)),
    "gpt2: relu": (
        "gpt2",
        lambda m: [setattr(x, "activation", torch.nn.functional.relu) for x in m.decoder.layers],
    ),
    "llama: theta": ("llama", _rotary(theta=10_500.0)),
    "llama: interleaved": ("llama", _rotary(interleaved=True)),
    "llama: gate and up": ("llama", lambda m: _swap(m, "decoder.layers.1.linear1.weight")),
    "llama: eps": ("llama", lambda m: _layers(m, eps=1e-2)),
    "llama: scaling": ("llama scaled as 3", _rotary(scaling=None)),
    "llama: stretched": ("llama stretched", _rotary(scaling=None)),
    "llama: biases": ("llama tied, biases", lambda m: _swap(m, "decoder.layers.0.linear1.bias")),
    "qwen2: biases": ("qwen2", lambda m: _swap(m, "decoder.layers.0.self_attn.in_proj_bias")),
    "qwen2: window": ("qwen2 window", lambda m: _layers(m, window=(5, 5))),
    "qwen3: norms of heads": ("qwen3", lambda m: _swap(m, "decoder.layers.0.self_attn.q_norm.weight")),
    "qwen3: kv heads": ("qwen3", lambda m: _swap(m, "decoder.layers.0.self_attn.in_proj_weight")),
    "mistral: window": ("mistral window", lambda m: _layers(m, window=(5, 5))),
    "bert: types": ("bert", lambda m: _swap(m, "embedding.types.weight")),
    "bert: norm": ("bert tokens", lambda m: _swap(m, "embedding.norm.weight")),
    "bert: pooler": ("bert sequences", lambda m: _swap(m, "pooler.weight")),
    "marian: scale": ("marian", _unscaled),
    "marian: order of sines": ("marian", _interleaved),
    "marian: cross attention": ("marian", lambda m: _swap(m, "decoder.layers.2.multihead_attn.in_proj_weight")),
    "marian: bias of the logits": ("marian, two vocabularies", lambda m: _swap(m, "output.bias")),
}


@torch.no_grad()
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_mapping_shows(mistake: str) -> None:
    name, change = MISTAKES[mistake]
    theirs = build(name)
    ours = from_transformers(theirs)
    change(ours)
    assert apart(ours_of(ours), theirs_of(theirs)) > 100 * FP32


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
def test_dropout_rates_are_theirs(name: str) -> None:
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


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert tokens", "marian"])
def test_they_train(name: str) -> None:
    """Gradients are those of the same function: compared for the first matrix, in fp32 relative to the largest."""
    theirs = build(name)
    ours = from_transformers(theirs)
    first = {"gpt2": "transformer.wte", "llama": "model.embed_tokens", "marian": "model.shared"}
    (theirs_of(theirs) ** 2).mean().backward()
    (ours_of(ours) ** 2).mean().backward()
    embedding = ours.target_embedding if name == "marian" else ours.embedding
    expected = theirs.get_submodule(first.get(name, "bert.embeddings.word_embeddings")).weight.grad
    found = embedding.tokens.weight.grad
    pad = theirs.config.pad_token_id  # their embedding gives padding no gradient
    rows = torch.tensor([i for i in range(len(expected)) if i != pad])
    assert apart(found[rows], expected[rows]) < FP32 * float(expected.abs().max())
