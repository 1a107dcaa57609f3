"""docs/tutorials/walkthrough.md: modules written out, an unbiased LayerNorm, masks that are True where one may look."""

import itertools

import pytest
import torch

import fastformer
from fastformer.apps.translation import TranslationModel
from tests.support.closeness import assert_close
from tests.support.translation_task import PAD, config
from tests.support.tutorial_models import (
    Attention,
    EncoderDecoder,
    UnbiasedNorm,
    Ways,
    defined,
    drawn,
    look_ahead,
    sentences,
)

weights, padding = defined("walkthrough", "weights", "padding")


def walkthrough(eps):
    return Ways(norm_first=True, norm=lambda width: UnbiasedNorm(width, eps), bias=False, final_norm=True)


@torch.no_grad()
def both(eps, norm_eps, mapped=weights):
    """Logits of the walk-through's model and of ours with its weights, at the real target positions."""
    theirs = drawn(EncoderDecoder(walkthrough(eps)))
    ours = TranslationModel(config(embeddings="separate", output_bias=True, norm_eps=norm_eps)).double().eval()
    ours.load_state_dict(mapped(theirs.state_dict()))
    source, target = sentences()
    mask, real = (source != PAD)[:, None], target != PAD
    given = theirs(source, target, mask[:, None], (real[:, None] & look_ahead(target.shape[1]))[:, None])[real]
    lengths = (~padding(mask)).sum(-1)
    return given, ours.logits(ours(source, lengths, target, real.sum(-1)))


def test_its_weights_give_its_outputs():
    """With nothing added to the deviation, to rounding."""
    given, ours = both(0.0, 1e-30)
    assert_close(ours, given)


def test_the_gain_is_what_makes_the_norm_unbiased():
    def without_gain(theirs):
        changed = {name: value * (12 / 11) ** 0.5 for name, value in theirs.items() if name.endswith("a_2")}
        return weights(theirs | changed)

    given, ours = both(0.0, 1e-30, without_gain)
    assert (given - ours).abs().max() > 1e-3


def relative(eps, norm_eps, deviation, width=64):
    """How much smaller or larger a row of this (biased) deviation comes out of our norm than out of theirs."""
    x = torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = (x - x.mean()) / x.std(correction=0) * deviation
    theirs = UnbiasedNorm(width, eps).double()(x)
    norm = fastformer.LayerNorm(width, eps=norm_eps).double()
    with torch.no_grad():
        norm.weight.fill_(((width - 1) / width) ** 0.5)
        return float((norm(x) / theirs - 1).abs().max())


@pytest.mark.parametrize("deviation", [0.25, 0.5, 1.0, 2.0, 8.0])
def test_what_eps_does_to_a_row(deviation):
    """The table of the page; what rounding adds is 100 roundings at most, as everywhere."""
    e, s, rounding = 1e-6 * (63 / 64) ** 0.5, deviation, 100 * torch.finfo(torch.float64).eps
    second = 4 * (e / s) ** 2 / min(s, 1) ** 2  # what the first order leaves out: squares of e/s and e/s²
    assert relative(1e-6, 1e-12, s) == pytest.approx(e / s, abs=second + 1e-12 / s**2 + rounding)
    assert relative(1e-6, 2 * e + e * e, s) == pytest.approx(e * abs(1 / s - 1 / s**2), abs=second + rounding)
    assert relative(1e-6, 1e-5, s) <= 5e-6 / s**2 + second + rounding
    if s >= 1:
        assert relative(1e-6, 2e-6, s) <= e / 4 + 2e-6 * (1 - (63 / 64) ** 0.5) + second + rounding


def test_the_difference_of_the_model_is_of_first_order_in_eps():
    """A tenth of eps, a tenth of the difference: what remains of second order is a tenth of that share."""
    differences = [(given - ours).abs().max() for given, ours in (both(eps, 2 * eps) for eps in (1e-4, 1e-5, 1e-6))]
    for larger, smaller in itertools.pairwise(differences):
        assert larger / smaller == pytest.approx(10, rel=0.05)


@torch.no_grad()
def test_masks_are_true_where_one_may_look():
    theirs = drawn(Attention(Ways()))
    ours = fastformer.MultiheadAttention(12, 3, batch_first=True).double().eval()
    state = {
        "encoder.0.attentions.0." + name: value for name, value in theirs.state_dict().items() if "w_q.b" not in name
    }
    biases = [theirs.state_dict()[f"{name}.bias"] for name in ("w_q", "w_k", "w_v")]
    mapped = {n.rpartition("self_attn.")[2]: v for n, v in weights(state).items() if "w_" not in n}
    ours.load_state_dict(mapped | {"in_proj_bias": torch.cat(biases)})
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[[True] * 3 + [False] * 2], [[True] + [False] * 4]])
    given = theirs(x, x, mask[:, None])
    assert_close(ours(x, x, x, key_padding_mask=padding(mask))[0], given)
    wrong = ours(x, x, x, key_padding_mask=mask[:, 0])[0]
    assert (wrong - given).abs().max() > 1e-2
    # Nothing but padding to look at: -1e9 spreads evenly, ours gives the bias of the projection, 0 before it.
    nothing = torch.zeros(2, 1, 5, dtype=torch.bool)
    theirs(x, x, nothing[:, None])
    assert_close(theirs.weights, torch.full_like(theirs.weights, 1 / 5))
    assert_close(ours(x, x, x, key_padding_mask=padding(nothing))[0], ours.out_proj.bias.expand(2, 5, 12).clone())
