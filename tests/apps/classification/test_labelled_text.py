"""Labelled files, what is wrong in them, how they are split, and the scores of predictions."""

import gzip
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from fastformer.apps.classification import Scores, encode_texts, number_texts, read_labelled
from fastformer.apps.classification.classifier import Classifier
from fastformer.apps.classification.corpus import LabelledCorpus, split_labelled
from fastformer.apps.classification.evaluation import score, score_logits
from fastformer.apps.classification.model import ClassifierConfig, SequenceClassifier
from fastformer.apps.text import WordTokenizer, english


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
    # A run that learned both as two classes keeps them.
    assert read_labelled(path, ["cafe\u0301", "bar", "caf\u00e9"]).classes.tolist() == [2, 0, 1]


def test_one_label_is_no_choice_and_many_are_not_all_listed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a\tx\na\ty\n")
    with pytest.raises(ValueError, match="text: every text has the label 'a'; a classifier needs two labels at least"):
        read_labelled(tmp_path / "text")
    with pytest.raises(ValueError, match=r"0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more$"):
        read_labelled(tmp_path / "text", [str(i) for i in range(12)])


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


def test_number_texts_are_labelled_by_their_digits() -> None:
    found = number_texts(400)
    names = {english(n).replace("-", " "): str(len(str(n))) for n in range(1000)}
    short = [i for i, text in enumerate(found.texts) if text in names]
    assert len(short) > 100
    assert all(found.labels[found.classes[i]] == names[found.texts[i]] for i in short)
    assert len(found) == len(set(found.texts)) == 400
    assert found.texts == number_texts(400).texts != number_texts(400, seed=2).texts


def test_every_text_begins_with_bos_and_is_cut() -> None:
    tokenizer = WordTokenizer.from_lines(["a b c d"])
    sequences, cut = encode_texts(["a b c d", "", "b"], tokenizer, 4)
    a, b, c = tokenizer.encode("a b c")
    assert [sequences[i] for i in range(3)] == [[tokenizer.bos_id, a, b, c], [tokenizer.bos_id], [tokenizer.bos_id, b]]
    assert cut == 1


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


@pytest.mark.parametrize(
    ("texts", "sizes", "message"),
    [
        (2, [(1, 3)], r"^logits must be of 2 texts, not of 1$"),
        (2, [], r"^logits must be of 2 texts, not of 0$"),
        (2, [(3, 3)], r"^logits must be of 2 texts and 3 labels, not of 3 or more and 3$"),
        (2, [(2, 3), (1, 3)], r"^logits must be of 2 texts and 3 labels, not of 3 or more and 3$"),
        (2, [(2, 5)], r"^logits must be of 2 texts and 3 labels, not of 2 or more and 5$"),
        (0, [], r"^few must hold at least one text to score$"),
    ],
)
def test_logits_of_other_texts_are_refused(texts: int, sizes: list[tuple[int, int]], message: str) -> None:
    corpus = LabelledCorpus(["x"] * texts, np.zeros(texts, np.int64), ("a", "b", "c"), "few")
    with pytest.raises(ValueError, match=message):
        score_logits([torch.zeros(size) for size in sizes], corpus)


def test_many_labels_take_time_and_memory_of_their_number_not_of_its_square(tmp_path: Path) -> None:
    labels = tuple(f"label {i:06}" for i in range(100_000))
    path = tmp_path / "text"
    path.write_text("".join(f"{label}\tx\n" for label in labels[-3000:]))
    corpus = read_labelled(path, _Counting(labels))
    assert len(corpus) == 3000
    assert _Counting.asked == 0  # a search from the first label to the last, for every line
    few = corpus.take([0, 1, 2], "few")
    logits = torch.zeros(3, len(labels))
    logits[[0, 1, 2], [97_000, 97_001, 0]] = 1.0
    found = score_logits([logits], few)  # a table of all pairs would have 80 GB
    assert found.accuracy == 2 / 3
    assert found.macro_f1 == 2 / 4
    assert found.each[97_000].f1 == 1.0


def test_logits_of_all_texts_are_never_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = WordTokenizer.from_lines(["a b"])
    sizes = {"d_model": 8, "heads": 2, "layers": 1, "feed_forward": 8}
    model = SequenceClassifier(ClassifierConfig(tokenizer.size, 2, **sizes)).eval()
    made: list[weakref.ref[torch.Tensor]] = []
    most, project = [0], model.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        logits = project(hidden)
        made.append(weakref.ref(logits))
        most.append(sum(each() is not None for each in made))
        return logits

    monkeypatch.setattr(model, "logits", counted)
    texts = ["a b", "b", "b b a"] * 100
    corpus = LabelledCorpus(texts, np.zeros(300, np.int64), ("x", "y"))
    found = score(model, corpus, tokenizer, 8)
    labels = Classifier(model, tokenizer, ("x", "y"), 8).classify(texts)
    assert max(most) <= 2 < len(made)  # that of a batch, and the one before
    assert [("x", "y")[i] for i in found.predicted] == labels


class _Counting(tuple[str, ...]):
    """Labels that count how often one is looked for among them."""

    __slots__ = ()
    asked = 0

    def __contains__(self, label: object) -> bool:
        type(self).asked += 1
        return super().__contains__(label)
