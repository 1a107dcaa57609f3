"""Classify numbers that are written in words by how many digits they have.

    forty-two -> 2        six hundred -> 3        six hundred thousand two -> 6

One word can change the class (`six thousand`, `six hundred thousand`), and longer texts may have fewer digits (`nine
hundred ninety-nine`, `ten thousand`). Held-out numbers never occur in training. On the command line the same is
`fastformer train classify`; with `--train-text FILE` it reads your own texts, one line each: label, tab, text.

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
    """Train, print the predicted classes of some held-out numbers, and return the accuracy on held-out numbers."""
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
