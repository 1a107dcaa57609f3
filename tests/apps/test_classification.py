"""Classifiers: labelled files, runs on the command line and in Python, labels and scores, and what is refused."""

import gzip
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from fastformer.apps.classification import (
    ClassificationDataConfig,
    ClassificationRun,
    ClassificationTrainConfig,
    Classifier,
    ClassifierConfig,
    Scores,
    SequenceClassifier,
    evaluate,
    load_classifier,
    read_labelled,
)
from fastformer.apps.classification.classifier import score_logits
from fastformer.apps.classification.corpus import LabelledCorpus
from fastformer.apps.classification.run import read_labelled_corpora
from fastformer.apps.text import WordTokenizer
from fastformer.apps.train import CheckpointFolder, read_weights
from tests.support.command_line import Done, fastformer, succeed


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


WORDS = {"animal": ("cat", "dog", "hen"), "plant": ("oak", "elm", "rose"), "tool": ("saw", "axe", "pen")}
LINES = [
    f"{label}\t{begin} {word} {verb}"
    for label, words in WORDS.items()
    for word in words
    for begin in ("the", "a", "my")
    for verb in ("stands", "falls", "is here", "is there")
]
TRAIN = (
    "train classify --train-text text.tsv --held-out 0.15 --tokenizer words --d-model 16 --heads 2 --layers 1 "
    "--feed-forward 32 --dropout 0 --lr 0.02 --warmup-steps 4 --batch-sentences 16 --validate-every 5 --threads 1 "
    "--device cpu"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a labelled file and a run of 30 steps in `run/`."""
    folder = tmp_path_factory.mktemp("classification")
    (folder / "text.tsv").write_text("\n".join(LINES) + "\n")
    out = succeed(*TRAIN.split(), "--steps", "30", "--run", "run", cwd=folder)
    assert "train: 76 texts of 3 labels\nvalid: 16 texts of 3 labels\ntest: 16 texts of 3 labels\n" in out
    assert ", 3 labels: animal, plant, tool\n" in out  # a header line, or texts before labels, can be seen here
    assert "vocabulary 21, classes 3" in out
    return folder


def command(folder: Path, text: str, stdin: bytes = b"") -> str:
    return succeed(*text.split(), cwd=folder, stdin=stdin)


def test_the_run_folder_describes_itself(folder: Path) -> None:
    config = tomllib.loads((folder / "run" / "config.toml").read_text())
    assert config["run"]["kind"] == "classification"
    assert (config["data"]["labels"], config["model"]["classes"]) == (["animal", "plant", "tool"], 3)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    validations = [record for record in records if record["kind"] == "validation"]
    assert len(validations) == 6
    assert {"loss", "accuracy", "macro_f1"} <= validations[0].keys()
    assert "run: classification run, " in command(folder, "info --run run")


def test_a_trained_run_is_evaluated_on_its_texts_and_on_files(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = command(folder, "evaluate --run run").splitlines()
    assert out[0] == "test: 16 texts of 3 labels; checkpoint best"
    assert [line.split()[0] for line in out[1:5]] == ["label", "animal", "plant", "tool"]
    assert out[-1].startswith("accuracy 100.00 % of 16 texts, macro-F1 1.0000, loss 0.")
    (folder / "other.tsv").write_text("plant\tmy cat falls\ntool\tthe saw\n")
    assert "accuracy 50.00 % of 2 texts" in command(folder, "evaluate --run run --source other.tsv")
    corpus, actual = evaluate(folder / "run", folder / "other.tsv")
    assert (len(corpus), actual.predicted.tolist()) == (2, [0, 2])
    assert not caplog.records
    (folder / "long.tsv").write_text("plant\tmy oak" + " is here" * 200 + "\ntool\tthe saw\n")
    evaluate(folder / "run", folder / "long.tsv")
    assert [record.getMessage() for record in caplog.records] == ["1 of 2 texts were cut to 256 tokens"]
    assert "valid: 16 texts" in command(folder, "evaluate --run run --split valid --checkpoint last")


def test_labels_and_probabilities(folder: Path) -> None:
    classifier = load_classifier(folder / "run")
    maps = classifier.attend("my oak")
    assert (maps.keys, maps.weights.shape) == (["<bos>", "my", "oak"], (1, 2, 3, 3))
    texts = ["my oak is here", "a pen", "the hen"]
    assert fastformer("classify", "--run", "run", *texts, cwd=folder).stdout == "plant\ntool\nanimal\n"
    assert command(folder, "classify --run run", stdin=b"\n\n").count("\n") == 2  # a label for every line
    lines = fastformer("classify", "--run", "run", "--probabilities", *texts, cwd=folder).stdout.splitlines()
    for line, p in zip(lines, classifier.probabilities(texts), strict=True):
        ranked = sorted(zip(classifier.labels, p.tolist(), strict=True), key=lambda pair: -pair[1])
        assert line == "\t".join(f"{label}\t{probability:.4f}" for label, probability in ranked)
    assert classifier.classify([]) == []


def test_a_diverged_model_says_so(folder: Path) -> None:
    """NaN is larger than any number to torch, and would be a label."""
    classifier = load_classifier(folder / "run", "last")
    with torch.no_grad():
        classifier.model.output.weight[0] = float("nan")
    for ask in (classifier.classify, classifier.probabilities):
        with pytest.raises(FloatingPointError, match="diverged"):
            ask(["oak"])


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.tsv").write_text((folder / "text.tsv").read_text())
    settings = TRAIN.replace("--dropout 0 ", "--dropout 0.2 ").split()
    for name, steps in (("whole", "12"), ("parts", "7")):
        succeed(*settings, "--schedule", "constant", "--steps", steps, "--run", name, cwd=tmp_path)
    command(tmp_path, "train classify --run parts --resume --steps 12 --device cpu")
    whole, parts = (
        read_weights(CheckpointFolder(tmp_path / name / "checkpoints").last() / "model.safetensors")  # type: ignore[operator]
        for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    # Another text is not what the run began with, nor is a label that it does not have.
    text = (tmp_path / "text.tsv").read_text()
    for changed in (text.replace("cat", "cow"), text.replace("animal", "tool", 9)):
        (tmp_path / "text.tsv").write_text(changed)
        error = refused(tmp_path, "train classify --run parts --resume --steps 14 --device cpu")
        assert "parts: the training data differs from what this run was started with" in error
    (tmp_path / "text.tsv").write_text(text + "stone\tthe flint\n")
    error = refused(tmp_path, "train classify --run parts --resume --steps 14 --device cpu")
    assert "text.tsv:109: label 'stone' is not among those of training: animal, plant, tool" in error


def test_given_parts_and_a_file_of_settings(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lines in (("train", LINES[:90]), ("valid", LINES[90:100]), ("test", LINES[100:])):
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "own.toml").write_text('[model]\npooling = "first"\n')
    files = " ".join(f"--{name}-text {name}.tsv" for name in ("train", "valid", "test"))
    text = TRAIN.replace("--train-text text.tsv --held-out 0.15", files)
    out = command(tmp_path, f"{text} --steps 2 --run new --config own.toml")
    assert "train: 90 texts of 3 labels\nvalid: 10 texts of 1 labels\ntest: 8 texts of 1 labels\n" in out
    assert load_classifier(tmp_path / "new").model.config.pooling == "first"
    # In Python, labels may have another order, and some may not occur.
    data = ClassificationDataConfig(train_text=tmp_path / "train.tsv", labels=("tool", "stone", "plant", "animal"))
    model = {"d_model": 16, "heads": 2, "layers": 1, "feed_forward": 16}
    run = ClassificationRun.create(tmp_path / "own", data, model, ClassificationTrainConfig(steps=1, threads=1))
    run.fit()
    assert " texts/s  left " in capsys.readouterr().err
    assert load_classifier(tmp_path / "own").labels == ("tool", "stone", "plant", "animal")
    assert run.model_config.classes == 4


def refused(folder: Path, text: str) -> str:
    done: Done = fastformer(*text.split(), cwd=folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    return done.stderr


def test_what_a_classifier_cannot_do_is_refused_in_python_too() -> None:
    with pytest.raises(ValueError, match="cuda_graphs=True is not for classifiers"):
        ClassificationTrainConfig(steps=1, cuda_graphs=True)
    with pytest.raises(ValueError, match="batch_sentences must be a whole number, at least 1, not None"):
        ClassificationTrainConfig(steps=1, batch_sentences=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="texts must be a list of texts, not one string"):
        by_hand()[0].probabilities("cat")
    for labels in (["a", "b", "b"], ["a"]):
        with pytest.raises(ValueError, match="labels must be"):
            ClassificationDataConfig(labels=labels)  # type: ignore[arg-type]


def test_a_classifier_has_no_dropout_after_its_model_was_trained() -> None:
    classifier, _ = by_hand()
    probabilities, weights = classifier.probabilities(["cat"]), classifier.attend("cat").weights
    classifier.model.train()
    torch.testing.assert_close(classifier.probabilities(["cat"]), probabilities)
    classifier.model.train()
    torch.testing.assert_close(classifier.attend("cat").weights, weights)


def by_hand() -> tuple[Classifier, WordTokenizer]:
    tokenizer = WordTokenizer.from_lines([line.split("\t")[1] for line in LINES])
    config = ClassifierConfig(tokenizer.size, 3, d_model=16, heads=2, layers=1, feed_forward=16)
    torch.manual_seed(1)
    return Classifier(SequenceClassifier(config), tokenizer, list(WORDS), 9), tokenizer
