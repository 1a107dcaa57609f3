"""`translate --sample`: seeded, independent of the batch, and greedy search with one candidate."""

import pytest

from fastformer.apps.translation import SearchOptions, load_translator
from tests.apps.cli.test_streaming import LINES, runs  # noqa: F401
from tests.support.command_line import fastformer

SENTENCES = [*LINES[:12], *LINES[:12]]  # each twice


@pytest.fixture
def translator(runs):  # noqa: F811
    return load_translator(runs / "translation")


def test_a_seed_gives_the_same_translations_in_batches_of_any_size(translator):
    texts = translator.translate(SENTENCES, SearchOptions(sample=True, seed=3), batch_size=5)
    assert texts == translator.translate(SENTENCES, SearchOptions(sample=True, seed=3), batch_size=24)
    assert texts != translator.translate(SENTENCES, SearchOptions(sample=True, seed=4))
    assert texts[:12] != texts[12:]  # an equal sentence draws other numbers


def test_one_candidate_is_greedy_search_with_its_log_probability(translator):
    sampled = translator.candidates(LINES, SearchOptions(sample=True, top_k=1))
    greedy = translator.candidates(LINES, SearchOptions(beam=1))
    assert [each[0].text for each in sampled] == [each[0].text for each in greedy]
    for drawn, best in zip(sampled, greedy, strict=True):
        assert drawn[0].log_probability == pytest.approx(best[0].log_probability, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sample --beam 2", "beam has an effect only with sample=False"),
        ("--top-p 0.9", "top_p has an effect only with sample=True"),
        ("--sample --temperature 0", "temperature must be above 0"),
    ],
)
def test_settings_without_effect_are_refused(runs, options, message):  # noqa: F811
    done = fastformer("translate", "--run", "translation", *options.split(), "w1", cwd=runs)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
