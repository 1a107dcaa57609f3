"""docs/tutorials/multi30k.md: post-norm, embeddings not scaled, masks of 1 and 0, `[B, 1, 1, S]`."""

import re
from dataclasses import replace

import pytest
import torch

from fastformer import functional
from fastformer.apps.translation import TranslationModel
from tests.support.closeness import assert_close
from tests.support.translation_task import PAD, config
from tests.support.tutorial_models import (
    PAGES,
    EncoderDecoder,
    Ways,
    defined,
    drawn,
    look_ahead,
    prepared,
    python_of,
    sentences,
)

weights, padding = defined("multi30k", "weights", "padding")
WAYS = Ways(scale=False)


def masks(source, target):
    own = (source != PAD).int()[:, None, None]  # [B, 1, 1, S]
    return own, (target != PAD).int()[:, None, None] * look_ahead(target.shape[1]).int()


def ours_like(theirs, **changes):
    settings = {"norm_first": False, "final_norm": False, "scale_embeddings": False, "embeddings": "separate"}
    ours = TranslationModel(config(**{**settings, "output_bias": True, **changes})).double().eval()
    ours.load_state_dict(weights(theirs.state_dict()))
    return ours


def logits(ours, source, target):
    mask, _ = masks(source, target)
    return ours.logits(ours(source, (~padding(mask)).sum(-1), target, (target != PAD).sum(-1)))


@torch.no_grad()
def test_its_weights_give_its_outputs():
    theirs = drawn(EncoderDecoder(WAYS))
    source, target = sentences()
    given = theirs(source, target, *masks(source, target))[target != PAD]
    assert_close(logits(ours_like(theirs), source, target), given)
    scaled = logits(ours_like(theirs, scale_embeddings=True), source, target)
    assert (scaled - given).abs().max() > 1e-2


@torch.no_grad()
def test_a_mask_on_the_query_axis_is_right_without_padding_only():
    theirs = drawn(EncoderDecoder(WAYS))
    ours = ours_like(theirs)

    def difference(lengths):
        source, target = sentences(lengths)
        own, both = masks(source, target)
        cross = own.transpose(2, 3)  # [B, 1, S, 1]
        memory = theirs.embed(theirs.source, source)
        for layer in theirs.encoder:
            memory = layer(memory, cross)
        x = theirs.embed(theirs.target, target)
        for layer in theirs.decoder:
            x = layer(x, both, memory, torch.ones_like(own))  # nothing to hide on the axis of the target
        return (theirs.output(x)[target != PAD] - logits(ours, source, target)).abs().max()

    assert difference(((7, 4),)) < 1e-12
    assert difference(((7, 4), (3, 4))) > 1e-2


@torch.no_grad()
def test_its_mask_is_one_of_functional_attention():
    attention = drawn(EncoderDecoder(WAYS)).encoder[0].attentions[0]
    own, _ = masks(*sentences())
    x = torch.randn(2, 7, WAYS.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = (attention.split(projection, x) for projection in (attention.w_q, attention.w_k, attention.w_v))

    def by_function(mask):
        return attention.w_o(functional.attention(q, k, v, mask).transpose(1, 2).reshape(x.shape))

    given = attention(x, x, own)
    assert_close(by_function(own.bool()), given)
    assert (by_function(own == 0) - given).abs().max() > 1e-2


@torch.no_grad()
def test_the_wrong_way_round_it_sees_padding_alone():
    theirs = drawn(EncoderDecoder(replace(WAYS, layers=1)))
    source, target = sentences()
    own, both = masks(source, target)
    theirs(source, target, 1 - own, both)
    assert theirs.maps(theirs.encoder)[0, 1, :, :, :3].max() == 0  # the three words of the shorter one
    assert padding(own).sum(-1).tolist() == [0, 4]
    assert padding(1 - own).sum(-1).tolist() == [7, 3]


@pytest.mark.slow
def test_the_program_on_the_real_data(tmp_path, monkeypatch, capsys):
    """As the page has it, four small steps, and the share of padding that it names."""
    pytest.importorskip("sacrebleu")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "multi30k").symlink_to(prepared("multi30k"))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for program in python_of("multi30k"):
        exec(compile(program, "multi30k.md", "exec"), names)
    (said,) = re.findall(r"prints `(.*?)`", (PAGES / "multi30k.md").read_text(encoding="utf-8"))
    assert said in capsys.readouterr().out
    assert len(names["translations"]) == 5
