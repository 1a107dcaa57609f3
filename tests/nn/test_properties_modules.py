"""Whole stacks over drawn sizes, lengths and settings: converted = original, packed = padded, cached = uncached.

A failing example that hypothesis finds stays here as an `@example`.
"""

import copy
import warnings
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fastformer
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.language.window import LanguageState
from tests.support.closeness import assert_close, gradients

DOUBLE = {"batch_first": True, "dtype": torch.float64}
PROFILE: dict[str, Any] = {"deadline": None, "derandomize": True}
lists_of_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)
stack_settings = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([1, 2, 4]),
        "layers": st.integers(1, 2),
        "norm_first": st.booleans(),
        "activation": st.sampled_from(["relu", "gelu"]),
        "bias": st.booleans(),
        "left": st.booleans(),
        "causal": st.booleans(),
        "seed": st.integers(0, 100),
    }
)


def hidden_positions(lengths: list[int], left: bool) -> torch.Tensor:
    """torch's key padding mask `[B, T]`, True where a position is padding."""
    steps = torch.arange(max(lengths))
    given = torch.tensor(lengths)[:, None]
    return steps < max(lengths) - given if left else steps >= given


def encoder(drawn: dict[str, Any]) -> nn.TransformerEncoder:
    torch.manual_seed(drawn["seed"])
    options = {name: drawn[name] for name in ("norm_first", "activation", "bias")}
    layer = nn.TransformerEncoderLayer(8, drawn["heads"], 12, 0.0, **options, **DOUBLE)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on its nested tensors
        return nn.TransformerEncoder(layer, drawn["layers"])


@settings(max_examples=30, **PROFILE)
@given(stack_settings, lists_of_lengths)
def test_a_converted_encoder_is_the_original_at_real_positions(drawn: dict[str, Any], lengths: list[int]) -> None:
    # Left padding and a causal mask leave torch's first queries nothing to attend to: NaN there, not here.
    drawn = {**drawn, "left": drawn["left"] and not drawn["causal"]}
    theirs = encoder(drawn)
    ours = copy.deepcopy(theirs)
    assert not fastformer.convert(ours).padded
    hidden = hidden_positions(lengths, drawn["left"])
    x = torch.randn(*hidden.shape, 8, dtype=torch.float64, requires_grad=True)
    T = hidden.shape[1]
    mask = torch.ones(T, T, dtype=torch.bool).triu(1) if drawn["causal"] else None
    results = []
    for model in (ours, theirs):
        out = model(x, mask, src_key_padding_mask=hidden)[~hidden]
        results.append([out, *gradients(out, [x, *model.parameters()])])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, roundings=1e4)


@settings(max_examples=30, **PROFILE)
@given(stack_settings, lists_of_lengths, lists_of_lengths)
def test_packed_is_padded(drawn: dict[str, Any], lengths: list[int], memory_lengths: list[int]) -> None:
    torch.manual_seed(drawn["seed"])
    B = min(len(lengths), len(memory_lengths))
    options = {name: drawn[name] for name in ("norm_first", "activation", "bias")}
    layer = fastformer.TransformerDecoderLayer(8, drawn["heads"], 12, 0.0, **options, **DOUBLE)  # type: ignore[arg-type]
    model = fastformer.TransformerDecoder(layer, drawn["layers"])
    sides = []
    masks = [hidden_positions(side[:B], drawn["left"]) for side in (lengths, memory_lengths)]
    for hidden in masks:
        sides.append(torch.randn(*hidden.shape, 8, dtype=torch.float64, requires_grad=True))
    T = masks[0].shape[1]
    causal = torch.ones(T, T, dtype=torch.bool).triu(1) if drawn["causal"] else None
    results = []
    for padding_free in (True, False):
        out = model(
            *sides,
            causal,
            tgt_key_padding_mask=masks[0],
            memory_key_padding_mask=masks[1],
            padding_free=padding_free,
        )
        out = out[~masks[0]]
        results.append([out, *gradients(out, [*sides, *model.parameters()])])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, roundings=1e4)


@settings(max_examples=30, **PROFILE)
@given(stack_settings, st.lists(st.lists(st.integers(4, 11), min_size=1, max_size=6), min_size=1, max_size=3))
def test_a_cache_gives_what_the_whole_text_gives(drawn: dict[str, Any], prompts: list[list[int]]) -> None:
    torch.manual_seed(drawn["seed"])
    config = LanguageConfig(
        vocabulary=12,
        d_model=8,
        heads=drawn["heads"],
        layers=drawn["layers"],
        feed_forward=12,
        norm_first=drawn["norm_first"],
        activation=drawn["activation"],
        bias=drawn["bias"],
    )
    model = LanguageModel(config).double().eval()
    with torch.inference_mode():
        state = LanguageState(model, prompts, 20)
        texts = [torch.tensor(prompt) for prompt in prompts]
        found = state.logits
        for _ in range(3):
            lengths = torch.tensor([len(text) for text in texts])
            hidden = model(torch.cat(texts), lengths)
            assert_close(found, model.logits(hidden[lengths.cumsum(0) - 1]), roundings=1e4)
            ids = torch.randint(4, 12, (len(texts),))
            found = state.step(ids)
            texts = [torch.cat(pair) for pair in zip(texts, ids.split(1), strict=True)]
