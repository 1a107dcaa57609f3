"""Labelled files, what is wrong in them, how they are split, and the scores of predictions."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from fastformer.apps.classification import ClassificationDataConfig, Scores, read_labelled
from fastformer.apps.classification.classifier import score_logits
from fastformer.apps.classification.corpus import LabelledCorpus, split_labelled
from fastformer.apps.classification.run import read_labelled_corpora


def test_a_line_is_a_label_a_tab_and_a_text(tmp_path: Path) -> None:
    path = tmp_path / "text.tsv"
    path.write_bytes("\ufeffspam\t win a\tprize \r\n\r\nham\thello\nham\t \n two words \té\u2028b\n".encode())
    found = read_labelled(path)
    assert found.labels == ("ham", "spam", "two words")
    assert found.texts == ["win a\tprize", "hello", "é\u2028b"]
    assert found.classes.tolist() == [1, 0, 2]
    assert str(found) == "text.tsv: 3 texts of 3 labels, 2 without text dropped"
    packed = tmp_path / "text.tsv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_labelled(packed, name="text.tsv").texts == found.texts
    # The order of the classes is that of the labels which are given; some may not occur.
    given = read_labelled(path, ["two words", "spam", "ham", "other"], "valid")
    assert given.classes.tolist() == [1, 2, 0]
    assert given.labels == ("two words", "spam", "ham", "other")


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


def test_composed_and_decomposed_labels_are_one_class(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("caf\u00e9\ta\ncafe\u0301\tb\nbar\tc\n", encoding="utf-8")
    found = read_labelled(path)
    assert found.labels == ("bar", "caf\u00e9")
    assert found.classes.tolist() == [1, 1, 0]
    assert read_labelled(path, ["cafe\u0301", "bar"]).classes.tolist() == [0, 0, 1]


def test_parts_share_no_text_and_what_is_given_stays() -> None:
    texts = [f"text {i % 40}" for i in range(50)]
    corpus = LabelledCorpus(texts, np.arange(50) % 3, ("a", "b", "c"), "mine", dropped=4)
    parts = split_labelled(corpus, 0.1)
    assert [len(set(parts[name].texts)) for name in ("train", "valid", "test")] == [32, 4, 4]  # type: ignore[index]
    assert sum(len(part) for part in parts.values()) == 50
    assert not set(parts["train"].texts) & {*parts["valid"].texts, *parts["test"].texts}
    assert parts["train"].dropped == 4
    for part in parts.values():
        assert all(part.classes[i] == texts.index(text) % 3 or int(text[5:]) < 10 for i, text in enumerate(part.texts))
    with_valid = split_labelled(corpus, 0.1, {"valid": parts["valid"]})
    assert with_valid["test"].texts == parts["test"].texts
    assert len(with_valid["train"]) == len(parts["train"]) + len(parts["valid"])
    assert with_valid["train"].texts == [text for text in texts if text not in parts["test"].texts]
    with pytest.raises(ValueError, match=r"mine: 2 different texts are too few .* give valid_text and test_text"):
        split_labelled(corpus.take([0, 1], "mine"), 0.1)


def test_scores_against_counting_by_hand() -> None:
    labels = ("a", "b", "c", "never")
    wanted = [0, 0, 0, 1, 1, 2]
    predicted = [0, 0, 1, 1, 2, 1]
    corpus = LabelledCorpus([""] * 6, np.array(wanted), labels)
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    logits[range(6), predicted] = 2.0
    found = score_logits(logits.split([4, 2]), corpus)
    assert found.accuracy == 3 / 6
    rows = [(each.label, each.texts, each.precision, each.recall, each.f1) for each in found.each]
    assert rows == [
        ("a", 3, 1.0, 2 / 3, pytest.approx(0.8)),
        ("b", 2, 1 / 3, 1 / 2, pytest.approx(0.4)),
        ("c", 1, 0.0, 0.0, 0.0),
        ("never", 0, 0.0, 0.0, 0.0),
    ]
    assert found.macro_f1 == pytest.approx((0.8 + 0.4 + 0.0) / 3)  # what neither occurs nor is predicted is left out
    loss = -logits.double().log_softmax(-1)[range(6), wanted].mean()
    assert found.loss == pytest.approx(float(loss), rel=1e-6)
    assert str(Scores(("x", "y"), np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1]), 0.5)) == (
        "accuracy 75.00 % of 4 texts, macro-F1 0.7333, loss 0.5000"
    )


def test_number_words_need_no_file() -> None:
    parts = read_labelled_corpora(ClassificationDataConfig(size=200))
    assert [len(parts[name]) for name in ("train", "valid", "test")] == [160, 20, 20]  # type: ignore[index]
    train = parts["train"]
    assert train.labels == ("1", "2", "3", "4", "5", "6")
    assert train.labels[train.classes[train.texts.index(next(t for t in train.texts if " " not in t))]] in ("1", "2")
