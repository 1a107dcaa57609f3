"""Initial values of the models' matrices and embeddings: drawn as the settings say, with the range that they say."""

import re
from pathlib import Path

import pytest
import torch

from fastformer.apps.classification.model import ClassifierConfig, SequenceClassifier
from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.language.run import APPLICATION as LANGUAGE
from fastformer.apps.translation.model import TranslationConfig, TranslationModel

SIZES = {"d_model": 96, "heads": 4, "feed_forward": 192, "positions": "learned", "max_positions": 80}
# settings -> standard deviation, largest absolute value; None: no bound.
DRAWN = {
    ("uniform", None): (0.1 / 3**0.5, 0.1),
    ("uniform", 0.5): (0.5 / 3**0.5, 0.5),
    ("normal", 0.3): (0.3, None),
}


def models(**settings):
    """One model of each kind; vocabularies of 90, so that every matrix has 7,680 numbers at least."""
    torch.manual_seed(0)
    given = SIZES | settings
    separate = {"embeddings": "separate"}
    return [
        TranslationModel(TranslationConfig(90, 90, encoder_layers=1, decoder_layers=1, **separate, **given)),
        LanguageModel(LanguageConfig(90, layers=1, **separate, **given)),
        SequenceClassifier(ClassifierConfig(90, 85, layers=1, **given)),
    ]


def check(name, weight, deviation, bound=None):
    # The deviation of n numbers is known to 1 / sqrt(2 n), 0.8 %: five times that.
    assert weight.std().item() == pytest.approx(deviation, rel=0.04), name
    assert bound is None or 0.99 * bound < weight.abs().max().item() <= bound, name


@pytest.mark.parametrize(("how", "width"), DRAWN)
@pytest.mark.parametrize("section", ["embedding", "matrices"])
def test_embeddings_separate_outputs_and_matrices_have_the_stated_initialisation(section, how, width):
    changes = {"initialisation": how, "initialisation_range": width}
    if section == "embedding":
        changes = {"embedding_initialisation": how, "embedding_range": width}
    for model in models(**changes):
        for name, weight in ((name, p) for name, p in model.named_parameters() if p.dim() > 1):
            over_vocabulary = name == "output.weight" and not isinstance(model, SequenceClassifier)
            embedding = name.endswith(("tokens.weight", "positions.weight"))
            if section == "matrices":
                check(name, weight, *((96**-0.5,) if embedding else DRAWN[how, width]))
            elif embedding or over_vocabulary:
                check(name, weight, *DRAWN[how, width])
            else:
                xavier = (2 / sum(weight.shape)) ** 0.5
                check(name, weight, xavier, 3**0.5 * xavier)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding_range": 0.1}, "embedding_range has an effect only with embedding_initialisation=normal or "
         "uniform, not without embedding_initialisation; leave it out"),
        ({"initialisation_range": 0.1}, "initialisation_range has an effect only with initialisation=normal or "
         "uniform, not with initialisation=xavier_uniform; leave it out"),
    ],
)  # fmt: skip
def test_a_range_of_what_has_none_is_refused(settings, message):
    for make in (
        lambda: TranslationConfig(9, 9, **settings),
        lambda: LanguageConfig(9, **settings),
        lambda: ClassifierConfig(9, 2, **settings),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            make()


def test_runs_of_before_load(tmp_path: Path):
    """Their config.toml knows one of the settings; where others had another default since, they are what they were."""
    text = '[run]\nkind = "language"\n[model]\nvocabulary = 9\ninitialisation = "normal"\n'
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    config = LanguageConfig(**LANGUAGE.read_config(tmp_path)["model"])
    assert config == LanguageConfig(9, initialisation="normal", feed_forward=2048, **CLASSICAL)
