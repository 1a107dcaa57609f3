"""What must hold on a GPU too: `pytest -m gpu`. Skipped elsewhere; in benchmarks/GPU_TODO.md until it has run."""

import pytest
import torch
from closeness import assert_close, gradients
from torch import nn

import fastformer
from fastformer.generate import SearchOptions, beam_search, greedy_search
from fastformer.models import TranslationConfig, TranslationModel, translation_loss
from fastformer.text import EncodedPairs, Sequences, SpecialIds, collate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABULARY = 20


def batch():
    generator = torch.Generator().manual_seed(1)
    sides = [
        Sequences.from_lists([torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths])
        for lengths in ((3, 9, 1, 70), (5, 2, 8, 66))
    ]
    return collate(EncodedPairs(*sides, SpecialIds(), SpecialIds()))


def model() -> TranslationModel:
    config = TranslationConfig(VOCABULARY, VOCABULARY, d_model=32, heads=4, encoder_layers=2, decoder_layers=2)
    return TranslationModel(config).double().eval()


def test_loss_and_gradients_are_those_of_the_cpu():
    here = model()
    there = model()
    there.load_state_dict(here.state_dict())
    there.cuda()
    one = translation_loss(here, batch())
    two = translation_loss(there, batch().to(torch.device("cuda")))
    assert_close(two.cpu(), one, roundings=1e4)
    for a, b in zip(gradients(two, there.parameters()), gradients(one, here.parameters()), strict=True):
        assert_close(a.cpu(), b, roundings=1e5)


def test_searches_find_what_they_find_on_the_cpu():
    here, given = model(), batch()
    options = SearchOptions(beam=3, max_length=12)
    one = (
        greedy_search(here, given.source, given.source_lengths, options),
        beam_search(here, given.source, given.source_lengths, options),
    )
    source = given.source.cuda()
    here.cuda()
    two = (
        greedy_search(here, source, given.source_lengths, options),
        beam_search(here, source, given.source_lengths, options),
    )
    assert [h.ids for h in one[0]] == [h.ids for h in two[0]]
    assert [[h.ids for h in n] for n in one[1]] == [[h.ids for h in n] for n in two[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_agree_with_torch(dtype: torch.dtype, norm_first: bool, slow_path: None):
    options = {"batch_first": True, "norm_first": norm_first, "device": "cuda", "dtype": dtype}
    theirs = nn.TransformerEncoderLayer(64, 4, 128, 0.0, **options)
    ours = fastformer.TransformerEncoderLayer(64, 4, 128, 0.0, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 17, 64, device="cuda", dtype=dtype)
    padding = torch.arange(17, device="cuda") >= torch.tensor([17, 5, 1], device="cuda")[:, None]
    assert_close(ours(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding), roundings=10)


def test_dropout_is_reproducible_and_keeps_its_rate():
    x = torch.ones(1000, 1000, device="cuda")
    torch.manual_seed(3)
    one = fastformer.functional.dropout(x, 0.3)
    torch.manual_seed(3)
    assert torch.equal(one, fastformer.functional.dropout(x, 0.3))
    assert abs((one == 0).float().mean().item() - 0.3) < 0.005
