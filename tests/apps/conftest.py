"""Run folders that several files of tests read and do not change."""

from pathlib import Path

import pytest
import torch

from fastformer.apps.classification import ClassifierConfig, SequenceClassifier
from fastformer.apps.language import LanguageConfig, LanguageModel
from fastformer.apps.text import WordTokenizer
from fastformer.apps.translation import TranslationConfig, TranslationModel
from tests.support.command_line import save_run

LINES = [" ".join(f"w{(i * k) % 7}" for k in range(1, 2 + i % 5)) for i in range(40)]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of each kind with random weights, named by its kind, and a file of `lines`."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = WordTokenizer.from_lines(LINES, splitting="whitespace")
    sizes = {"d_model": 8, "heads": 2, "feed_forward": 8}
    torch.manual_seed(0)
    translation = TranslationConfig(tokenizer.size, tokenizer.size, encoder_layers=1, decoder_layers=1, **sizes)  # type: ignore[arg-type]
    language = LanguageConfig(tokenizer.size, layers=1, **sizes)  # type: ignore[arg-type]
    classifier = ClassifierConfig(tokenizer.size, classes=3, layers=1, **sizes)  # type: ignore[arg-type]
    save_run(folder / "translation", TranslationModel(translation), tokenizer, tokenizer, max_length=9)
    save_run(folder / "language", LanguageModel(language), tokenizer, context=9)
    labels = ("x", "y", "z")
    save_run(folder / "classification", SequenceClassifier(classifier), tokenizer, labels=labels, max_length=9)
    (folder / "lines").write_text("".join(f"{line}\n" for line in LINES))
    return folder
