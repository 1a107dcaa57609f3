"""Flattened batches of several sequences in a row, whose position ids begin again with each."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DataCollatorWithFlattening, StaticCache

from fastformer.integrations.transformers import padding_free
from tests.integrations import survey
from tests.integrations.small_configs import LENGTH, VOCABULARY, build
from tests.integrations.tiny_transformers import CACHE, ROUNDINGS, assert_same, fast, outcome, tiny
from tests.support.closeness import assert_close

LENGTHS = (4, 1, 3, 2)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
ROWS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 1, 2, 0, 1]])  # the first is one sequence


def collated(**options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    results = DataCollatorWithFlattening(return_tensors="pt", **options)([{"input_ids": row} for row in rows])
    return {name: x for name, x in results.items() if x is not None}


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    ("options", "caches"),
    [
        ({}, {}),
        ({}, {"use_cache": False}),
        ({"return_flash_attn_kwargs": True, "return_seq_idx": True}, {"attention_mask": torch.ones(1, sum(LENGTHS))}),
    ],
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_the_collator_of_transformers(name, options, pack, caches, packed_calls):
    """Every attention gets the run of tokens, whether all layers were asked to be packed or not."""
    inputs = collated(**options) | caches
    expected = outcome(tiny(name, "eager"), collated() | {"use_cache": False})
    model = tiny(name)
    if pack:
        padding_free(model)
    assert_same(outcome(model, inputs), expected)
    assert packed_calls == [sum(LENGTHS)] * 2


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_several_rows_of_sequences(name, packed_calls):
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (2, LENGTH)), "position_ids": ROWS, "use_cache": False}
    actual, expected = (tiny(name, each)(**inputs, output_hidden_states=True) for each in ("fastformer", "eager"))
    for one, other in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert_close(one, other, ROUNDINGS)
    assert packed_calls == [2 * LENGTH] * 2


@pytest.mark.parametrize("name", ["llama", "llama4_text", "falcon_h1", "lfm2", "t5gemma"])
def test_flattened_batches_that_cannot_be_separated_raise(name):
    """Attention weights, chunks, layers that mix tokens outside attention, a decoder."""
    model = tiny(name) if name == "llama" else build(name, "fastformer", torch.float32)
    asked = {"output_attentions": True} if name == "llama" else {}
    pairs = {"decoder_input_ids": torch.ones(1, 3, dtype=torch.long)} if name == "t5gemma" else {}
    with pytest.raises(ValueError, match="one sequence a row with an attention_mask"):
        model(input_ids=collated()["input_ids"], position_ids=POSITIONS, **asked, **pairs)


def test_flattened_batches_with_a_filled_or_static_cache_raise():
    model = tiny("llama")
    filled = model(input_ids=torch.ones(1, 2, dtype=torch.long))[CACHE]
    for cache in (filled, StaticCache(model.config, max_cache_len=16)):
        with pytest.raises(ValueError, match="use_cache=False"):
            model(**collated(), **{CACHE: cache})


def test_position_ids_beside_a_padding_mask_are_positions():
    """`generate` gives padding on the left positions that begin again."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    inputs = {"input_ids": torch.arange(3, 12)[None], "position_ids": positions, "attention_mask": mask}
    expected, actual = (tiny("llama", name)(**inputs).logits[:, 3:] for name in ("eager", "fastformer"))
    assert_close(actual, expected, ROUNDINGS)


def test_the_sequences_of_mpnet(packed_calls):
    """It refuses the name, with which the survey begins."""
    eager, model = (build("mpnet", "eager", torch.float64) for _ in range(2))
    padding_free(model)
    survey._keeps_apart(model, eager, {})
    assert set(packed_calls) == {9}


@pytest.mark.parametrize("pack", [False, True])
def test_an_encoder_that_counts_positions_itself(pack):
    eager, model = (build("bart", name, torch.float64).get_encoder() for name in ("eager", "fastformer"))
    if pack:
        padding_free(model)
    ids = collated()["input_ids"]
    expected = [eager(input_ids=each).last_hidden_state for each in ids.split(LENGTHS, 1)]
    actual = model(input_ids=ids, position_ids=POSITIONS).last_hidden_state
    assert_close(actual, torch.cat(expected, 1), ROUNDINGS)


@pytest.mark.parametrize("name", ["llama", "mpnet"])
def test_compiled_flattened_sequences_do_not_attend_to_one_another(name):
    changes = {"num_hidden_layers": 1}
    inputs, model = collated(), fast(name, **changes) if name == "mpnet" else tiny(name, **changes)
    expected = model(**inputs).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(**inputs).logits, expected, ROUNDINGS)


def test_flattened_batches_without_position_ids_raise():
    inputs = {**collated(), "cu_seq_lens_q": torch.tensor([0, 4, 5, 8, 10]), "use_cache": False}
    tiny("llama")(**inputs)
    inputs["position_ids"] = None
    with pytest.raises(ValueError, match="cu_seq_lens_q has several sequences a row"):
        tiny("llama")(**inputs)
    inputs["cu_seq_lens_q"] = torch.tensor([0, 10])
    tiny("llama")(**inputs)
