"""Tell the number of digits of a number from its words, on generated number words.

    forty-two -> 2        six hundred -> 3        six hundred thousand two -> 6

A word more or less changes the class (`six thousand`, `six hundred thousand`), and longer texts may have fewer digits
(`nine hundred ninety-nine`, `ten thousand`). Held-out numbers never occur in training.

    python examples/sequence_classification.py
"""

import random
import tempfile
from pathlib import Path

import numpy as np
import torch

from fastformer.apps.classification import ClassifierConfig, SequenceClassifier, sequence_classification_loss
from fastformer.apps.text import LabelledBatches, Sequences, WordTokenizer, english
from fastformer.apps.train import TrainConfig, Trainer

DIGITS = 6


def draw_numbers(count: int, seed: int) -> list[int]:
    """Distinct numbers in random order: all below 100, and as many of each number of digits above as there are."""
    generator = random.Random(seed)
    numbers = list(range(100))
    for digits in range(3, DIGITS + 1):
        each = range(10 ** (digits - 1), 10**digits)
        numbers += generator.sample(each, min(count // 4, len(each) // 2))
    generator.shuffle(numbers)
    return numbers


def accuracy(model: SequenceClassifier, batches: LabelledBatches) -> float:
    """Share of the numbers that get the right class."""
    right = counted = 0
    with torch.no_grad():
        for batch in batches.epoch(0):
            found = model.logits(model(batch.ids, batch.lengths)).argmax(-1)  # [B]
            right += int((found == batch.labels).sum())
            counted += batch.tokens
    return right / counted


def main(folder: Path, count: int = 4000, epochs: int = 2, d_model: int = 64, pooling: str = "mean") -> float:
    """Train, print what some held-out numbers are taken for, and give back the accuracy on held-out numbers."""
    numbers = draw_numbers(count, seed=1)
    texts = [english(number).replace("-", " ") for number in numbers]
    labels = np.array([len(str(number)) - 1 for number in numbers])  # class 0: one digit
    tokenizer = WordTokenizer.from_lines(texts, splitting="whitespace")
    ids = tokenizer.encode_batch(texts)
    cut = len(numbers) * 4 // 5
    train, held_out = (
        LabelledBatches(Sequences.from_lists(ids[part]), labels[part], size=32, shuffle=shuffle)
        for part, shuffle in ((slice(cut), True), (slice(cut, None), False))
    )

    config = ClassifierConfig(
        tokenizer.size,
        DIGITS,
        d_model=d_model,
        heads=4,
        layers=2,
        feed_forward=2 * d_model,
        dropout=0.0,
        pooling=pooling,
    )
    torch.manual_seed(1)
    model = SequenceClassifier(config)
    settings = TrainConfig(lr=3e-3, schedule="linear", warmup_steps=20, epochs=epochs, metric="accuracy")
    Trainer(
        model,
        sequence_classification_loss,
        train,
        settings,
        folder,
        validate=lambda model: {"accuracy": accuracy(model, held_out)},
        architecture=config,
    ).fit()

    model.eval()
    batch = next(held_out.epoch(0))
    with torch.no_grad():
        found = model.logits(model(batch.ids, batch.lengths)).argmax(-1) + 1
    for text, digits in list(zip(texts[cut:], found.tolist(), strict=False))[:5]:
        print(f"{digits} digits: {text}")
    result = accuracy(model, held_out)
    print(f"{100 * result:.2f} % of {len(numbers) - cut:,} held-out numbers classified right")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as run:
        main(Path(run))
