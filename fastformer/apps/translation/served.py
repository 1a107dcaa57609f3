"""`POST /api/translate` of `fastformer serve`."""

from pathlib import Path
from typing import Any

from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.serve.served_model import ServedModel, once_each
from fastformer.apps.translation.run import load_translator
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import attend
from fastformer.nn import pack_weights


class Served(ServedModel):
    """A translation model: the n best translations with their scores."""

    action, settings, length = "translate", SearchOptions, "max_length"
    most, not_offered = {"beam": 16}, frozenset({"cuda_graphs"})

    def __init__(self, run: Path, checkpoint: str, device: str) -> None:
        self.translator = load_translator(run, checkpoint, device)
        pack_weights(self.translator.model)

    def compute(self, texts: list[str], options: SearchOptions) -> list[Any]:
        """Translate texts."""

        def translate(sentences: list[str]) -> list[Any]:
            return [
                {"translations": [{"text": best.text, "score": round(best.score, 4)} for best in each]}
                for each in self.translator.candidates(sentences, options, len(sentences))
            ]

        return translate(texts) if options.seed is None else once_each(texts, translate)

    def attention(self, text: str) -> AttentionMaps:
        """Return the weights with which each target token was predicted, over the source."""
        return attend(self.translator, text).maps["cross"]
