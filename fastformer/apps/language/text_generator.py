"""Continue text prompts with a language model."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from fastformer.apps.language.model import LanguageModel
from fastformer.apps.language.sampling import SamplingOptions, check_context, sample
from fastformer.apps.models.common import check_tokenizer
from fastformer.apps.models.sampling import RandomStreams
from fastformer.apps.plots.attention_maps import AttentionMaps, attend_ids
from fastformer.apps.text import Tokenizer
from fastformer.apps.text.files import check_texts
from fastformer.settings import check_value

logger = logging.getLogger("fastformer")

_INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of an incomplete character to


class TextGenerator:
    """A language model with its tokenizer.

    The returned text follows the prompt, and begins with a space if it begins a new word. Prompts may be empty. New
    lines in a prompt are read as eos. Eos is written as a new line if the options let the text go on.

    Args:
        model: put into evaluation mode.
        tokenizer: the tokenizer that the model was trained with.
        context: the number of positions that the model was trained with, and the most tokens that it reads (see
            `fastformer.apps.language.sampling`).
        first_id: the id before every prompt; None: bos. Models that were trained on a stream without bos need eos,
            which precedes each line there.

    Raises:
        ValueError: the tokenizer does not belong to the model, or context is below 1 or exceeds learned positions.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, context: int, *, first_id: int | None = None
    ) -> None:
        check_tokenizer("", tokenizer, model.config.vocabulary, model.config)
        check_context(model, context)
        check_value("first_id", first_id, int | None, {"vocabulary": tokenizer.size}, at_least=0, below="vocabulary")
        self.model, self.tokenizer, self.context = model.eval(), tokenizer, context
        self.first_id = tokenizer.bos_id if first_id is None else first_id

    def generate(
        self, prompts: Sequence[str], options: SamplingOptions | None = None, batch_size: int = 32
    ) -> list[str]:
        """Continue prompts; equal prompts get different texts, unless the temperature is 0.

        Args:
            prompts: plain text; unknown words, and prompts beyond the model's context, give a warning.
            options: how to choose, and when to end.
            batch_size: texts written at a time; does not change them.

        Raises:
            TypeError: prompts is one string.
            ValueError: batch_size is below 1.
            FloatingPointError: the model gives NaN.
        """
        check_texts("prompts", prompts)
        # Attention is fastest for rows of the same length.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        texts = self.generate_each([prompts[i] for i in order], options, batch_size)
        return [text for _, text in sorted(zip(order, texts, strict=True))]

    def generate_each(
        self, prompts: Iterable[str], options: SamplingOptions | None = None, batch_size: int = 32
    ) -> Iterator[str]:
        """Yield the texts that `generate` returns, each once it and those before it are finished.

        Prompts are read in batches and in order, a batch when its first text is requested. Arguments and errors as in
        `generate`.
        """
        check_texts("prompts", prompts)
        check_value("batch_size", batch_size, int, at_least=1)
        return self._batches(iter(prompts), options or SamplingOptions(), batch_size)  # errors are raised above

    def _batches(self, prompts: Iterator[str], options: SamplingOptions, batch_size: int) -> Iterator[str]:
        self.model.eval()  # it may have been trained on since the last call
        streams, eos = RandomStreams(options.seed), self.tokenizer.eos_id
        while batch := list(islice(prompts, batch_size)):
            encoded = self.encode(batch)
            generated: list[list[int]] = [[] for _ in encoded]
            ended, yielded = [False] * len(encoded), 0
            steps = sample(self.model, encoded, options, self.context, streams.take(encoded), self.tokenizer.unk_id)
            for step in steps:
                for row, token in step:
                    generated[row].append(token)
                    ended[row] = options.stop_at_eos and token == eos
                while yielded < len(encoded) and ended[yielded]:
                    yield self._text(encoded[yielded], generated[yielded][:-1])
                    yielded += 1
            for row in range(yielded, len(encoded)):
                yield self._text(encoded[row], generated[row][:-1] if ended[row] else generated[row])

    def stream(self, prompt: str, options: SamplingOptions | None = None) -> Iterator[str]:
        """Yield the text that `generate` returns for one prompt in pieces, which later tokens do not change.

        Raises:
            FloatingPointError: the model gives NaN.
        """
        self.model.eval()
        options, eos = options or SamplingOptions(), self.tokenizer.eos_id
        [prompt_ids] = self.encode([prompt])
        generated: list[int] = []
        text, length = "", 0
        streams = RandomStreams(options.seed).take([prompt_ids])
        for [(_, token)] in sample(self.model, [prompt_ids], options, self.context, streams, self.tokenizer.unk_id):
            if token == eos and options.stop_at_eos:
                break
            generated.append(token)
            text = self._text(prompt_ids, generated)
            end = len(text.rstrip(_INCOMPLETE))
            if end > length:
                yield text[length:end]
                length = end
        if length < len(text):
            yield text[length:]

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Encode prompts as ids that begin with first_id; warn of unknown words and of too long prompts."""
        encoded = []
        for prompt in prompts:
            lines = self.tokenizer.encode_batch(prompt.split("\n"))
            encoded.append(
                [i for n, line in enumerate(lines) for i in (self.tokenizer.eos_id if n else self.first_id, *line)]
            )
        unknown = sum(ids.count(self.tokenizer.unk_id) for ids in encoded)
        if unknown:
            logger.warning("the model does not know %d words or characters of the prompts", unknown)
        long = sum(len(ids) > self.context for ids in encoded)
        if long:
            logger.warning(
                "%d of %d prompts are longer than the context: the last %d tokens are read",
                *(long, len(prompts), self.context),
            )
        return encoded

    def _text(self, prompt: list[int], ids: list[int]) -> str:
        """Decode the ids that follow a prompt; spaces and quotation marks depend on the tokens before."""
        before, whole = (self._decode(each[1:]) for each in (prompt, [*prompt, *ids]))
        return whole[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        """Decode ids line by line: eos ends a line."""
        ends = [i for i, token in enumerate(ids) if token == self.tokenizer.eos_id]
        starts = [0, *(i + 1 for i in ends)]
        return "\n".join(self.tokenizer.decode(ids[i:end]) for i, end in zip(starts, [*ends, len(ids)], strict=True))


def attend_text(generator: TextGenerator, text: str) -> AttentionMaps:
    """Compute every attention weight of a language model that reads a text.

    Row t has the weights with which the token after token t is predicted.

    Args:
        generator: the model, its tokenizer and its context; of a longer text, the last tokens are read, with a
            warning.
        text: read like a prompt of `TextGenerator`; an empty text is `first_id` alone.
    """
    [ids] = generator.encode([text])
    ids = ids[-generator.context :]
    return attend_ids(generator.model.eval(), ids, generator.tokenizer.pieces(ids), text)
