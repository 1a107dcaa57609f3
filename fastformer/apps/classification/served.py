"""`POST /api/classify` of `fastformer serve`."""

from pathlib import Path
from typing import Any

from fastformer.apps.classification.run import load_classifier
from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.serve.served_model import ServedModel
from fastformer.apps.settings import Settings


class NoSettings(Settings):
    """The settings of a request: none."""


class Served(ServedModel):
    """A classifier: every label with its probability, the most probable first."""

    action, settings = "classify", NoSettings

    def __init__(self, run: Path, checkpoint: str, device: str) -> None:
        self.classifier = load_classifier(run, checkpoint, device)

    def compute(self, texts: list[str], options: NoSettings) -> list[Any]:
        """Classify texts."""
        ranked = self.classifier.ranked(texts, len(texts))
        return [{"labels": [{"label": label, "probability": round(p, 4)} for label, p in row]} for row in ranked]

    def attention(self, text: str) -> AttentionMaps:
        """Return the weights of each token over the tokens of the text."""
        return self.classifier.attend(text)
