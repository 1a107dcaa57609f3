"""docs/tutorials/attention-french.md: fixed lengths of 200, dense masks, positions with a faulty exponent."""

import pytest
import torch

from benchmarks.competitors.tutorials import FixedLengthTranslation
from fastformer.apps.models import sinusoidal_positions
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import DataConfig, TranslationModel, TranslationRun
from tests.support.closeness import assert_close
from tests.support.translation_task import PAD, config, random_model
from tests.support.tutorial_models import PAGES, defined, drawn, prepared, python_of, sentences

weights, lengths = defined("attention-french", "weights", "lengths")


def faulty_positions(length, width):
    dimension = torch.arange(width)
    angles = torch.arange(length)[:, None] / 10000 ** (2 * dimension / width)
    return torch.where(dimension % 2 == 0, angles.sin(), angles.cos())


def tutorial(faulty):
    """Its model with weights of its own."""
    theirs = drawn(FixedLengthTranslation(random_model(norm_eps=1e-6)))
    table = (faulty_positions if faulty else sinusoidal_positions)(theirs.LENGTH, 12)
    theirs.embeddings.table.copy_(table)
    return theirs


def ours_like(theirs, faulty):
    places = {"positions": "learned", "max_positions": 200} if faulty else {}
    ours = TranslationModel(config(norm_eps=1e-6, **places)).double().eval()
    ours.load_state_dict(weights(theirs.state_dict(), sinusoidal=not faulty))
    return ours


@pytest.mark.parametrize("faulty", [True, False])
@torch.no_grad()
def test_its_weights_give_its_outputs(faulty):
    theirs = tutorial(faulty)
    ours = ours_like(theirs, faulty)
    source, target = sentences()
    real = target != PAD
    memory, mask = theirs.encode(theirs.pad(source))
    given = theirs.decode(theirs.pad(target), memory, mask)[:, : target.shape[1]][real]
    logits = ours.logits(ours(source, lengths(mask), target, real.sum(-1)))
    assert_close(logits, given)
    # With the right positions instead of its own it is another model.
    other = ours_like(theirs, not faulty)
    if faulty:
        assert (other.logits(other(source, lengths(mask), target, real.sum(-1))) - given).abs().max() > 1e-3


@torch.no_grad()
def test_the_wrong_way_round_it_reads_no_source():
    """With the mask inverted, of a source only its length counts."""
    theirs = tutorial(faulty=True)
    source, target = sentences(((7, 4), (7, 4)))
    target[1] = target[0]
    mask = theirs.encode(theirs.pad(source))[1]

    def logits(mask):
        x = theirs.embeddings.embed(theirs.embeddings.source, theirs.pad(source))
        for layer in theirs.encoder:
            x = layer(x, mask)
        return theirs.decode(theirs.pad(target), theirs.encoder_norm(x), mask)[:, :4]

    right, wrong = logits(mask), logits(~mask)
    assert (right[0] - right[1]).abs().max() > 1e-2
    assert (wrong - right).abs().max() > 1e-2
    assert_close(wrong[0], wrong[1])
    assert lengths(mask).tolist() == [7, 7]
    assert lengths(~mask).tolist() == [193, 193]


@pytest.mark.slow
def test_the_padding_of_the_real_data(tmp_path, capsys):
    """What the page says its lines print."""
    dataset = str(prepared("multi30k"))
    data = DataConfig(dataset, target="fr", tokenizer="unigram", vocabulary=8000, joint=False, max_length=200)
    run = TranslationRun.create(tmp_path / "run", data, {}, TrainConfig(steps=1))
    exec(python_of("attention-french")[-1], {"run": run})
    printed = capsys.readouterr().out
    assert f"```text\n{printed}```" in (PAGES / "attention-french.md").read_text(encoding="utf-8")
