"""docs/tutorials/post-norm-maps.md: a module a head, masks that are True where nothing may be seen, attention maps."""

import pytest
import torch

import fastformer
from fastformer.apps.translation import TranslationModel
from tests.support.closeness import assert_close
from tests.support.translation_task import PAD, config, paper_positions
from tests.support.tutorial_models import EncoderDecoder, Ways, defined, drawn, hidden_is_true, look_ahead, sentences

weights, lengths = defined("post-norm-maps", "weights", "lengths")


def halves(length, width):
    """Sines first, then cosines."""
    table = paper_positions(length, width)
    return torch.cat([table[:, ::2], table[:, 1::2]], 1)


WAYS = Ways(by_head=True, bias=False, scale=False, positions=halves, hide=hidden_is_true)


def masks(source, target):
    """Of the source `[B, 1, 1, S]` and of the target `[B, 1, T, T]`, True where nothing may be seen."""
    return (source == PAD)[:, None, None], (target == PAD)[:, None, None] | ~look_ahead(target.shape[1])


def ours_like(theirs, table):
    settings = {"norm_first": False, "final_norm": False, "scale_embeddings": False, "embeddings": "separate"}
    places = {"positions": "learned", "max_positions": len(table)}
    ours = TranslationModel(config(**settings, **places, output_bias=True)).double().eval()
    ours.load_state_dict(weights(theirs.state_dict(), WAYS.heads, table))
    return ours


@pytest.fixture(scope="module")
def both():
    """The tutorial's model after a batch, ours with its weights, and the batch with its lengths."""
    theirs = drawn(EncoderDecoder(WAYS))
    source, target = sentences()
    with torch.no_grad():
        given = theirs(source, target, *masks(source, target))
    of = [lengths(mask[:, 0]) for mask in masks(source, target)]
    of[1] = (target != PAD).sum(-1)
    return theirs, ours_like(theirs, halves(50, WAYS.width).float()), source, target, *of, given


@torch.no_grad()
def test_its_weights_give_its_outputs(both):
    theirs, ours, source, target, source_lengths, target_lengths, given = both
    assert source_lengths.tolist() == [7, 3]
    assert_close(ours.logits(ours(source, source_lengths, target, target_lengths)), given[target != PAD])
    other = ours_like(theirs, paper_positions(50, WAYS.width).float())
    wrong = other.logits(other(source, source_lengths, target, target_lengths))
    assert (wrong - given[target != PAD]).abs().max() > 1e-2


@torch.no_grad()
def test_its_maps(both):
    theirs, ours, source, target, source_lengths, target_lengths, _ = both
    theirs(source, target, *masks(source, target))  # its modules hold the maps of their last call
    found = ours.attention_maps(source, target, source_lengths, target_lengths)
    kinds = {"encoder": theirs.maps(theirs.encoder), "decoder": theirs.maps(theirs.decoder)}
    kinds["cross"] = theirs.maps(theirs.decoder, 1)
    for kind, maps in kinds.items():
        for i, (S, T) in enumerate(zip(source_lengths.tolist(), target_lengths.tolist(), strict=True)):
            rows, columns = {"encoder": (S, S), "decoder": (T, T), "cross": (T, S)}[kind]
            assert_close(found[i][kind], maps[:, i, :, :rows, :columns])


@torch.no_grad()
def test_masks_are_true_where_nothing_may_be_seen(both):
    """As it is for modules; inverted for functional.attention, where the wrong one shows the future."""
    theirs, ours, *_ = both
    x = torch.randn(2, 6, WAYS.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden = ~look_ahead(6)
    attention = theirs.decoder[0].attentions[0]
    given = attention(x, x, hidden)
    module = ours.decoder.layers[0].self_attn
    assert_close(module(x, x, x, attn_mask=hidden)[0], given)
    q, k, v = (attention.split(projection, x) for projection in (attention.w_q, attention.w_k, attention.w_v))

    def by_function(mask):
        out = fastformer.functional.attention(q, k, v, mask)
        return attention.w_o(out.transpose(1, 2).reshape(x.shape))

    assert_close(by_function(~hidden), given)
    wrong = by_function(hidden)
    assert (wrong - given).abs().max() > 1e-2
    _, maps = fastformer.functional.attention_with_weights(q, k, v, hidden)
    assert maps.tril().abs().max() == 0
