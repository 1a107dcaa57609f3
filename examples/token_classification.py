"""Tag every word of a number with the power of ten that it stands for, on generated number words.

    three    hundred  forty  -  two   thousand  seventy  -  one
    10^5     times    10^4      10^3  times     10^1        10^0

The tag of a word depends on its place (`two` is 10^0, 10^2, 10^3 or 10^5), so a tagger must read the whole number.
Hyphens have no tag: their label is -100. Held-out numbers never occur in training.

    python examples/token_classification.py
"""

import random
import tempfile
from pathlib import Path

import torch

from fastformer.apps.classification import ClassifierConfig, TokenClassifier, token_classification_loss
from fastformer.apps.text import LabelledBatches, Sequences, WordTokenizer, english
from fastformer.apps.train import TrainConfig, Trainer

IGNORED = -100
TAGS = ["10^0", "10^1", "10^2", "10^3", "10^4", "10^5", "times"]
TENS = {english(n).split("-")[0] for n in range(10, 100)}  # ten, eleven, …, twenty, thirty, …


def split(number: int) -> list[str]:
    """Return the words of a number, with its hyphens: 21 is twenty, -, one."""
    return english(number).replace("-", " - ").split()


def tags(words: list[str]) -> list[int]:
    """Return the tag of each word, by the grammar of English numbers."""
    thousands = 3 if "thousand" in words else 0
    indices = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("hundred", "thousand"):
            indices.append(TAGS.index("times"))
            thousands = 0 if word == "thousand" else thousands
        elif word == "-":
            indices.append(IGNORED)
        else:
            indices.append(thousands + (2 if following == "hundred" else 1 if word in TENS else 0))
    return indices


def draw_numbers(count: int, seed: int) -> list[int]:
    """Return distinct numbers in random order: all below 100, and up to count // 4 of each larger number of digits."""
    generator = random.Random(seed)
    numbers = list(range(100))
    for digits in (3, 4, 5, 6):
        each = range(10 ** (digits - 1), 10**digits)
        numbers += generator.sample(each, min(count // 4, len(each) // 2))
    generator.shuffle(numbers)
    return numbers


def accuracy(model: TokenClassifier, batches: LabelledBatches) -> float:
    """Return the share of tagged words that get the right tag."""
    right = counted = 0
    with torch.no_grad():
        for batch in batches.epoch(0):
            predicted = model.logits(model(batch.ids, batch.lengths)).argmax(-1)  # [T]
            right += int((predicted == batch.labels).sum())  # no class is -100
            counted += batch.tokens
    return right / counted


def main(folder: Path, count: int = 4000, epochs: int = 2, d_model: int = 64) -> float:
    """Train, print the tags of a held-out number, and return the accuracy on held-out numbers."""
    numbers = [split(number) for number in draw_numbers(count, seed=1)]
    tokenizer = WordTokenizer.from_lines([" ".join(words) for words in numbers], splitting="whitespace")
    ids = [tokenizer.encode(" ".join(words)) for words in numbers]
    labels = [tags(words) for words in numbers]
    cut = len(numbers) * 4 // 5
    train, held_out = (
        LabelledBatches(Sequences.from_lists(ids[part]), Sequences.from_lists(labels[part]), size=32, shuffle=shuffle)
        for part, shuffle in ((slice(cut), True), (slice(cut, None), False))
    )

    config = ClassifierConfig(
        tokenizer.size, len(TAGS), d_model=d_model, heads=4, layers=2, feed_forward=2 * d_model, dropout=0.0
    )
    torch.manual_seed(1)
    model = TokenClassifier(config)
    settings = TrainConfig(lr=3e-3, schedule="linear", warmup_steps=20, epochs=epochs, metric="accuracy")
    Trainer(
        model,
        token_classification_loss,
        train,
        settings,
        folder,
        validate=lambda model: {"accuracy": accuracy(model, held_out)},
    ).fit()

    model.eval()
    with torch.no_grad():
        predicted = model.logits(model(torch.tensor(ids[-1]), torch.tensor([len(ids[-1])]))).argmax(-1)
    for word, tag, label in zip(numbers[-1], predicted.tolist(), labels[-1], strict=True):
        print(f"{word:>10}  {TAGS[tag] if label != IGNORED else ''}")
    result = accuracy(model, held_out)
    print(f"{100 * result:.2f} % of the words of {len(numbers) - cut:,} held-out numbers tagged right")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as run:
        main(Path(run))
