"""Tell the number of digits of a number from its words, on generated number words.

    forty-two -> 2        six hundred -> 3        six hundred thousand two -> 6

A word more or less changes the class (`six thousand`, `six hundred thousand`), and longer texts may have fewer digits
(`nine hundred ninety-nine`, `ten thousand`). Held-out numbers never occur in training. The same on the command line, or
with texts of your own, a line each (label, tab, text): `fastformer train classify [--train-text FILE]`.

    python examples/sequence_classification.py
"""

import tempfile
from pathlib import Path

from fastformer.apps.classification import (
    ClassificationDataConfig,
    ClassificationRun,
    ClassificationTrainConfig,
    evaluate,
    load_classifier,
)


def main(folder: Path, count: int = 4000, epochs: int = 2, d_model: int = 64, pooling: str = "mean") -> float:
    """Train, print what some held-out numbers are taken for, and give back the accuracy on held-out numbers."""
    data = ClassificationDataConfig(dataset="numbers", size=count, tokenizer="words", splitting="whitespace")
    model = {"d_model": d_model, "heads": 4, "layers": 2, "feed_forward": 2 * d_model, "dropout": 0.0}
    train = ClassificationTrainConfig(lr=3e-3, schedule="linear", warmup_steps=20, epochs=epochs, metric="accuracy")
    ClassificationRun.create(folder, data, model | {"pooling": pooling}, train).fit()

    corpus, scores = evaluate(folder, "test")
    texts = corpus.texts[:5]
    for text, digits in zip(texts, load_classifier(folder).classify(texts), strict=True):
        print(f"{digits} digits: {text}")
    print(f"{100 * scores.accuracy:.2f} % of {len(corpus):,} held-out numbers classified right")
    return scores.accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as run:
        main(Path(run) / "run")
