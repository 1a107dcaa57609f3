"""Labelled files, what is wrong in them, how they are split, and the scores of predictions."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from fastformer.apps.classification import ClassificationDataConfig, Scores, read_labelled
from fastformer.apps.classification.classifier import score_logits
from fastformer.apps.classification.corpus import LabelledCorpus
from fastformer.apps.classification.run import read_labelled_corpora


def test_a_line_is_a_label_a_tab_and_a_text(tmp_path: Path) -> None:
    path = tmp_path / "text.tsv"
    path.write_bytes("\ufeffspam\t win a\tprize \r\n\r\nham\thello\nham\t \n two words \té\u2028b\n".encode())
    actual = read_labelled(path)
    assert actual.labels == ("ham", "spam", "two words")
    assert actual.texts == ["win a\tprize", "hello", "é\u2028b"]
    assert actual.classes.tolist() == [1, 0, 2]
    assert str(actual) == "text.tsv: 3 texts of 3 labels, 2 without text dropped"
    packed = tmp_path / "text.tsv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_labelled(packed, name="text.tsv").texts == actual.texts
    # The order of the classes is that of the labels that the caller passes; some may not occur.
    corpus = read_labelled(path, ["two words", "spam", "ham", "other"], "valid")
    assert (corpus.classes.tolist(), corpus.labels) == ([1, 2, 0], ("two words", "spam", "ham", "other"))
    # Composed and decomposed labels are one class.
    path.write_text("caf\u00e9\ta\ncafe\u0301\tb\nbar\tc\n", encoding="utf-8")
    assert (read_labelled(path).labels, read_labelled(path).classes.tolist()) == (("bar", "caf\u00e9"), [1, 1, 0])
    assert read_labelled(path, ["cafe\u0301", "bar"]).classes.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tx\nb y\n", "text:2: no tab; a line is a label, a tab and a text"),
        ("a\tx\n\tx\n", "text:2: no label before the tab"),
        ("a\tx\n\nz\tx\n", "text:3: label 'z' is not among those of training: a, b"),
        ("\n  \n", "text: holds no text with a label"),
        ("a\t\n", "text: holds no text with a label"),
        ("", "text: the file is empty"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "text").write_text(content)
    with pytest.raises(ValueError, match=f"{message}$"):
        read_labelled(tmp_path / "text", ("a", "b"))


def test_held_out_texts_are_not_in_training_and_files_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("".join(f"{'abc'[i % 3]}\ttext {i % 40}\n" for i in range(50)) + "\n" * 4)
    corpora = read_labelled_corpora(ClassificationDataConfig(train_text=path, held_out=0.1))
    train, valid, test = corpora.values()
    assert [len(set(corpus.texts)) for corpus in (train, valid, test)] == [32, 4, 4]
    assert sum(map(len, (train, valid, test))) == 50
    assert not set(train.texts) & {*valid.texts, *test.texts}
    assert train.dropped == 4
    for corpus in (train, valid, test):
        expected = {(f"text {i % 40}", i % 3) for i in range(50)}
        assert set(zip(corpus.texts, corpus.classes.tolist(), strict=True)) <= expected
    (tmp_path / "valid").write_text("a\tother\n")
    data = ClassificationDataConfig(train_text=path, valid_text=tmp_path / "valid", held_out=0.1)
    corpora = read_labelled_corpora(data)
    assert (corpora["valid"].texts, corpora["test"].texts) == (["other"], test.texts)
    assert corpora["train"].texts == [line for i in range(50) if (line := f"text {i % 40}") not in test.texts]
    path.write_text("a\tx\nb\ty\n")
    with pytest.raises(ValueError, match=r"train: 2 different texts are too few .* give valid_text and test_text"):
        read_labelled_corpora(ClassificationDataConfig(train_text=path))


def test_scores_against_counting_by_hand() -> None:
    labels = ("a", "b", "c", "never")
    expected = [0, 0, 0, 1, 1, 2]
    predicted = [0, 0, 1, 1, 2, 1]
    corpus = LabelledCorpus([""] * 6, np.array(expected), labels)
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    logits[range(6), predicted] = 2.0
    actual = score_logits(logits.split([4, 2]), corpus)
    assert actual.accuracy == 3 / 6
    assert actual.each == {
        "a": (3, 1.0, 2 / 3, pytest.approx(0.8)),
        "b": (2, 1 / 3, 1 / 2, pytest.approx(0.4)),
        "c": (1, 0.0, 0.0, 0.0),
        "never": (0, 0.0, 0.0, 0.0),
    }
    assert actual.macro_f1 == pytest.approx((0.8 + 0.4 + 0.0) / 3)  # what neither occurs nor is predicted is left out
    loss = -logits.double().log_softmax(-1)[range(6), expected].mean()
    assert actual.loss == pytest.approx(float(loss), rel=1e-6)
    assert str(Scores(("x", "y"), np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1]), 0.5)) == (
        "accuracy 75.00 % of 4 texts, macro-F1 0.7333, loss 0.5000"
    )


def test_number_words_are_labelled_by_their_digits() -> None:
    corpora = read_labelled_corpora(ClassificationDataConfig(size=200))
    assert [len(corpus) for corpus in corpora.values()] == [160, 20, 20]
    train = corpora["train"]
    assert train.labels == ("1", "2", "3", "4", "5", "6")
    words = {text: train.labels[i] for text, i in zip(train.texts, train.classes, strict=True)}
    assert {label for text, label in words.items() if " " not in text} == {"1", "2"}
