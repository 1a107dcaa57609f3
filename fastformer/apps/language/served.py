"""`POST /api/generate` of `fastformer serve`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastformer.apps.language.run import load_generator
from fastformer.apps.language.sampling import SamplingOptions
from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.serve.served_model import ServedModel, once_each
from fastformer.nn import pack_weights


class Served(ServedModel):
    """A language model: the continuation of a prompt, whole or as a stream."""

    action, settings, length = "generate", SamplingOptions, "max_new_tokens"

    def __init__(self, run: Path, checkpoint: str, device: str) -> None:
        self.generator = load_generator(run, checkpoint, device)
        pack_weights(self.generator.model)

    def compute(self, texts: list[str], options: SamplingOptions) -> list[Any]:
        """Continue prompts; with a seed, the text of a prompt does not depend on other requests."""

        def generate(prompts: list[str]) -> list[Any]:
            return [{"text": text} for text in self.generator.generate(prompts, options, len(prompts))]

        return generate(texts) if options.seed is None else once_each(texts, generate)

    def stream(self, text: str, options: SamplingOptions) -> Iterator[str]:
        """Yield the pieces of a continuation."""
        return self.generator.stream(text, options)

    def attention(self, text: str) -> AttentionMaps:
        """Return the weights with which the token after each token is predicted."""
        return self.generator.attend(text)
