"""docs/tutorials: a page's mapping of weights gives the outputs of the page's model; settings in its tables exist."""

import dataclasses
import math
import re

import pytest
import torch
from torch import Tensor, nn

import fastformer
from benchmarks.competitors.tutorials import FixedLengthTranslation
from fastformer.apps.language import (
    CLASSICAL,
    LanguageConfig,
    LanguageDataConfig,
    LanguageModel,
    LanguageTrainConfig,
    SamplingOptions,
)
from fastformer.apps.models import sinusoidal_positions
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import DataConfig, SearchOptions, TranslationConfig, TranslationModel
from tests.project.tutorial_models import (
    PAGES,
    EncoderDecoder,
    UnbiasedNorm,
    Ways,
    defined,
    drawn,
    hidden_is_true,
    sentences,
)
from tests.support.closeness import assert_close
from tests.support.masks import ahead, minus_infinity
from tests.support.translation_task import PAD, config, paper_positions, random_model

POST_NORM = {"norm_first": False, "final_norm": False, "scale_embeddings": False, "embeddings": "separate"}


def translation(state: dict[str, Tensor], **settings) -> TranslationModel:
    model = TranslationModel(config(**settings)).double().eval()
    model.load_state_dict(state)
    return model


def logits(model: TranslationModel, source: Tensor, target: Tensor, lengths: Tensor | None = None) -> Tensor:
    lengths = (source != PAD).sum(-1) if lengths is None else lengths
    return model.logits(model(source, lengths, target, (target != PAD).sum(-1)))


@pytest.mark.parametrize("faulty", [True, False])
@torch.no_grad()
def test_attention_french(faulty):
    """Fixed lengths of 200, dense masks, positions with a faulty exponent."""
    weights, lengths = defined("attention-french", "weights", "lengths")
    theirs = drawn(FixedLengthTranslation(random_model(norm_eps=1e-6)))
    if faulty:
        dimension = torch.arange(12)
        angles = torch.arange(theirs.LENGTH)[:, None] / 10000 ** (2 * dimension / 12)
        theirs.embeddings.table.copy_(torch.where(dimension % 2 == 0, angles.sin(), angles.cos()))
    else:
        theirs.embeddings.table.copy_(sinusoidal_positions(theirs.LENGTH, 12))
    positions = {"positions": "learned", "max_positions": 200} if faulty else {}
    ours = translation(weights(theirs.state_dict(), sinusoidal=not faulty), norm_eps=1e-6, **positions)
    source, target = sentences()
    memory, mask = theirs.encode(theirs.pad(source))
    expected = theirs.decode(theirs.pad(target), memory, mask)[:, : target.shape[1]][target != PAD]
    assert_close(logits(ours, source, target, lengths(mask)), expected)


@torch.no_grad()
def test_multi30k():
    """Post-norm, embeddings not scaled, masks of 1 and 0, `[B, 1, 1, S]`."""
    weights, padding = defined("multi30k", "weights", "padding")
    theirs, (source, target) = drawn(EncoderDecoder(Ways(scale=False))), sentences()
    own = (source != PAD).int()[:, None, None]
    both = (target != PAD).int()[:, None, None] * (~ahead(target.shape[1])).int()
    ours = translation(weights(theirs.state_dict()), **POST_NORM, output_bias=True)
    expected = theirs(source, target, own, both)[target != PAD]
    assert_close(logits(ours, source, target, (~padding(own)).sum(-1)), expected)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    attention = theirs.encoder[0].attentions[0]
    q, k, v = (attention.split(projection, x) for projection in (attention.w_q, attention.w_k, attention.w_v))
    actual = fastformer.functional.attention(q, k, v, own.bool()).transpose(1, 2).reshape(x.shape)
    assert_close(attention.w_o(actual), attention(x, x, own))


@torch.no_grad()
def test_post_norm_maps():
    """A module for each head, masks that are True where nothing may be seen, attention maps."""
    weights, lengths = defined("post-norm-maps", "weights", "lengths")

    def halves(length, width):  # sines first, then cosines
        table = paper_positions(length, width)
        return torch.cat([table[:, ::2], table[:, 1::2]], 1)

    ways = Ways(by_head=True, bias=False, scale=False, positions=halves, hide=hidden_is_true)
    theirs, (source, target) = drawn(EncoderDecoder(ways)), sentences()
    hidden, ends = (source == PAD)[:, None, None], (target != PAD).sum(-1)
    expected = theirs(source, target, hidden, (target == PAD)[:, None, None] | ahead(target.shape[1]))
    state = weights(theirs.state_dict(), ways.heads, halves(50, 12).float())
    ours = translation(state, **POST_NORM, output_bias=True, positions="learned", max_positions=50)
    assert_close(logits(ours, source, target, lengths(hidden[:, 0])), expected[target != PAD])
    for i, (S, T) in enumerate(zip(lengths(hidden[:, 0]).tolist(), ends.tolist(), strict=True)):
        maps = ours.attention_maps(source[i, :S], target[i, :T])
        assert_close(maps["encoder"], theirs.maps(theirs.encoder)[:, i, :, :S, :S])
        assert_close(maps["cross"], theirs.maps(theirs.decoder, 1)[:, i, :, :T, :S])


@torch.no_grad()
def test_walkthrough():
    """Modules written out, an unbiased LayerNorm, masks that are True where one may look."""
    weights, padding = defined("walkthrough", "weights", "padding")
    ways = Ways(norm_first=True, norm=lambda width: UnbiasedNorm(width, 0.0), bias=False, final_norm=True)
    theirs, (source, target) = drawn(EncoderDecoder(ways)), sentences()
    mask, real = (source != PAD)[:, None], target != PAD
    expected = theirs(source, target, mask[:, None], (real[:, None] & ~ahead(target.shape[1]))[:, None])[real]
    ours = translation(weights(theirs.state_dict()), embeddings="separate", output_bias=True, norm_eps=1e-30)
    assert_close(logits(ours, source, target, (~padding(mask)).sum(-1)), expected)


@pytest.mark.parametrize("deviation", [0.25, 0.5, 1.0, 2.0, 8.0])
@torch.no_grad()
def test_what_epsilon_does_to_a_row(deviation):
    """The table of the walk-through; what rounding adds is 100 roundings at most, as everywhere."""

    def relative(norm_eps):
        """How much smaller or larger a row of this (biased) deviation comes out of our norm than out of theirs."""
        x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        x = (x - x.mean()) / x.std(correction=0) * deviation
        norm = fastformer.LayerNorm(64, eps=norm_eps).double()
        norm.weight.fill_((63 / 64) ** 0.5)
        return float((norm(x) / UnbiasedNorm(64, 1e-6).double()(x) - 1).abs().max())

    e, s, rounding = 1e-6 * (63 / 64) ** 0.5, deviation, 100 * torch.finfo(torch.float64).eps
    second = 4 * (e / s) ** 2 / min(s, 1) ** 2  # what the first order leaves out: squares of e/s and e/s²
    assert relative(1e-12) == pytest.approx(e / s, abs=second + 1e-12 / s**2 + rounding)
    assert relative(2 * e + e * e) == pytest.approx(e * abs(1 / s - 1 / s**2), abs=second + rounding)
    assert relative(1e-5) <= 5e-6 / s**2 + second + rounding
    if s >= 1:
        assert relative(2e-6) <= e / 4 + 2e-6 * (1 - (63 / 64) ** 0.5) + second + rounding


class Columns(nn.Module):
    """The model of wikitext2.md: ids `[T, B]` to logits `[T, B, V]`."""

    def __init__(self, vocabulary, final_norm):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(vocabulary, 12), nn.Linear(12, vocabulary)
        layer, norm = nn.TransformerEncoderLayer(12, 3, 20, 0.2), nn.LayerNorm(12) if final_norm else None
        self.transformer_encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.register_buffer("pe", paper_positions(50, 12).float()[:, None])  # [L, 1, D]

    def forward(self, ids, mask):
        x = self.encoder(ids) * math.sqrt(12) + self.pe[: len(ids)]
        return self.decoder(self.transformer_encoder(x, mask))


@pytest.mark.parametrize("final_norm", [False, True])
@torch.no_grad()
def test_wikitext2(final_norm):
    """torch.nn.TransformerEncoder on columns, a mask of 0 and -inf, time first."""
    weights, tokenizer, hidden = defined("wikitext2", "weights", "tokenizer", "hidden")
    known = ["the", "cat", "<unk>", "sat", "<eos>", "on", "a", "mat"]
    theirs, words = drawn(Columns(len(known), final_norm)), tokenizer(known)
    special = {f"{name}_id": getattr(words, f"{name}_id") for name in ("pad", "bos", "eos")}
    settings = LanguageConfig(
        words.size, d_model=12, heads=3, layers=2, feed_forward=20, norm_first=False, final_norm=final_norm,
        embeddings="separate", output_bias=True, **special, **CLASSICAL,
    )  # fmt: skip
    ours = LanguageModel(settings).double().eval()
    ours.load_state_dict(weights(theirs.state_dict()))
    ids = torch.tensor(
        [[*words.encode("the cat sat on a dog"), words.eos_id], words.encode("a mat on the cat the mat")]
    )
    mask = minus_infinity(ahead(7))
    expected = theirs(ids.T, mask).log_softmax(-1).transpose(0, 1).flatten(0, 1)
    actual = ours.logits(ours(ids, torch.tensor([7, 7]))).log_softmax(-1)
    assert_close(actual[:, : len(known)].contiguous(), expected)
    assert actual[:, len(known) :].exp().max() == 0  # <pad> and <bos> are never predicted
    assert torch.equal(hidden(mask), ahead(7))


SETTINGS = {
    "translation": (DataConfig, TranslationConfig, TrainConfig, SearchOptions),
    "language": (LanguageDataConfig, LanguageConfig, LanguageTrainConfig, SamplingOptions),
}


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index"))
def test_tables_name_settings_that_exist(page):
    kind = "language" if page == "wikitext2" else "translation"
    fields = {field.name: field for config in SETTINGS[kind] for field in dataclasses.fields(config)}
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    table = text.partition("\n## Settings")[2].partition("\n## ")[0]
    code = " ".join(actual for row in re.findall(r"^\|.*\|$", table, re.M) for actual in re.findall(r"`([^`]+)`", row))
    flags = re.findall(r"\s*--([a-z-]+)", code)
    assert len(flags) >= 8
    for name in flags:
        plain = name.removeprefix("no-").replace("-", "_")
        assert plain == "checkpoint" or plain in fields, name  # --checkpoint is of evaluate
        assert not name.startswith("no-") or fields[plain].type in (bool, "bool"), name


def test_defaults_are_the_sizes_of_the_paper():
    sizes = TranslationConfig(10, 10)
    assert (sizes.encoder_layers, sizes.decoder_layers, sizes.d_model, sizes.heads) == (6, 6, 512, 8)
    assert (sizes.feed_forward, sizes.dropout, sizes.norm_first, sizes.final_norm) == (2048, 0.1, True, True)
    assert round((sizes.d_model * TrainConfig(steps=1).warmup_steps) ** -0.5, 4) == 7e-4
