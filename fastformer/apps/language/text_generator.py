"""Text to text with a language model: a prompt in, what follows it out, at once or piece by piece."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from numpy.random import Generator

from fastformer.apps.language.model import LanguageModel
from fastformer.apps.language.sampling import RandomStreams, SamplingOptions, random_streams, sample
from fastformer.apps.language.window import check_context
from fastformer.apps.text import SentencePieceTokenizer, Tokenizer, WordTokenizer, check_texts
from fastformer.apps.text.special_ids import UNK
from fastformer.settings import check_value

logger = logging.getLogger("fastformer")

_LISTED = 10  # unknown words in a warning
_REMEMBERED = 16  # tokens of a line that are decoded again with the next; one with text would do
_INCOMPLETE = "\ufffd"  # what a tokenizer shows for the first bytes of a character whose others are yet to come


class TextGenerator:
    """A language model with its tokenizer.

    The text that is returned is what follows the prompt, with a space in front where it begins a new word: prompt and
    text belong one after the other. An empty prompt leaves everything to the model. New lines in a prompt are read as
    eos, and eos is written as a new line where the options let the text go on.

    Args:
        model: runs in evaluation mode and without gradients; its own mode is restored.
        tokenizer: the one that it was trained with.
        context: the number of positions that it was trained with; it never reads more (the rule stands in
            `fastformer.apps.language.window`).
        first_id: what stands before every prompt; bos if None. A model that was trained on a stream without bos knows
            eos as what comes before a line.

    Raises:
        ValueError: the tokenizer does not belong to the model, or context is not what it can read.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, context: int, *, first_id: int | None = None
    ) -> None:
        if tokenizer.size != model.config.vocabulary:
            raise ValueError(f"the tokenizer has {tokenizer.size} entries, the model {model.config.vocabulary}")
        for name in ("pad_id", "bos_id", "eos_id"):
            ours, theirs = getattr(tokenizer, name), getattr(model.config, name)
            if ours != theirs:
                raise ValueError(f"the tokenizer has {name} {ours}, the model {theirs}")
        check_context(model, context)
        check_value("first_id", first_id, int | None, {"vocabulary": tokenizer.size}, at_least=0, below="vocabulary")
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.first_id = tokenizer.bos_id if first_id is None else first_id

    def generate(
        self, prompts: Sequence[str], options: SamplingOptions | None = None, batch_size: int = 32
    ) -> list[str]:
        """Go on from prompts; the same prompt given twice goes on differently, unless the temperature is 0.

        Args:
            prompts: plain text; words that the model does not know and prompts beyond its context give a warning.
            options: how to choose, and when to end.
            batch_size: texts written at a time; does not change them.

        Raises:
            TypeError: prompts is one string.
            ValueError: batch_size is below 1.
            FloatingPointError: the model gives NaN.
        """
        self._check(prompts, batch_size)
        read, options = self.encode(prompts), options or SamplingOptions()
        streams = random_streams(read, options.seed)
        # Rows of the same length take the shortest way through attention.
        order = sorted(range(len(read)), key=lambda i: -len(read[i]))
        texts: dict[int, str] = {}
        for start in range(0, len(order), batch_size):
            texts |= self._finished(read, streams, order[start : start + batch_size], options)
        return [texts[i] for i in range(len(read))]

    def generate_each(
        self, prompts: Iterable[str], options: SamplingOptions | None = None, batch_size: int = 32
    ) -> Iterator[str]:
        """The texts that `generate` returns, each given out once it and those before it are finished.

        Prompts are read in batches and in order, a batch when its first text is asked for. Arguments as in `generate`,
        errors too.
        """
        self._check(prompts, batch_size)
        return self._each(iter(prompts), options or SamplingOptions(), batch_size)

    def _each(self, prompts: Iterator[str], options: SamplingOptions, batch_size: int) -> Iterator[str]:
        streams = RandomStreams(options.seed)
        while batch := list(islice(prompts, batch_size)):
            read = self.encode(batch)
            yield from self._in_order(self._finished(read, streams.take(read), range(len(read)), options))

    @staticmethod
    def _check(prompts: Iterable[str], batch_size: int) -> None:
        check_texts("prompts", prompts)
        check_value("batch_size", batch_size, int, at_least=1)

    @staticmethod
    def _in_order(finished: Iterator[tuple[int, str]]) -> Iterator[str]:
        waiting: dict[int, str] = {}
        count = 0
        for i, text in finished:
            waiting[i] = text
            while count in waiting:
                yield waiting.pop(count)
                count += 1

    def _finished(
        self, read: list[list[int]], streams: list[Generator], indices: Sequence[int], options: SamplingOptions
    ) -> Iterator[tuple[int, str]]:
        """(index, text) of each prompt of a batch as soon as its text ends."""
        eos = self.tokenizer.eos_id
        found: list[list[int]] = [[] for _ in indices]
        batch = [read[i] for i in indices], options, self.context, [streams[i] for i in indices]
        for step in sample(self.model, *batch, self.tokenizer.unk_id):
            for row, token in step:
                found[row].append(token)
                if options.stop_at_eos and token == eos:
                    yield indices[row], self._text(read[indices[row]], found[row], options)
        for i, ids in zip(indices, found, strict=True):
            if not (options.stop_at_eos and ids[-1] == eos):
                yield i, self._text(read[i], ids, options)

    def stream(self, prompt: str, options: SamplingOptions | None = None) -> Iterator[str]:
        """Go on from one prompt, piece by piece; joined, the pieces are what `generate` returns.

        A piece is given out once no later token can change it. Arguments as in `generate`, errors too.
        """
        if not isinstance(prompt, str):
            raise TypeError(f"prompt must be a string, not {type(prompt).__name__}")
        options = options or SamplingOptions()
        [ids] = self.encode([prompt])
        return self._stream(ids, options)  # a function of its own, so that warnings come before the first piece

    def _stream(self, ids: list[int], options: SamplingOptions) -> Iterator[str]:
        pieces = _Pieces(self.tokenizer, ids)
        streams = random_streams([ids], options.seed)
        for [(_, token)] in sample(self.model, [ids], options, self.context, streams, self.tokenizer.unk_id):
            if options.stop_at_eos and token == self.tokenizer.eos_id:
                break
            if piece := pieces.add(token):
                yield piece
        if piece := pieces.end():
            yield piece

    def unknown_words(self, prompt: str) -> list[str]:
        """The words of a prompt that the tokenizer does not know, each once; the model reads the unknown token."""
        unk = self.tokenizer.unk_id
        if isinstance(self.tokenizer, WordTokenizer):
            words = self.tokenizer.split(prompt)
            unknown = [w for w, i in zip(words, self.tokenizer.encode(prompt), strict=True) if i == unk and w != UNK]
        else:
            words = prompt.split()
            unknown = [w for w, ids in zip(words, self.tokenizer.encode_batch(words), strict=True) if unk in ids]
        return list(dict.fromkeys(unknown))

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Prompts as ids that begin with first_id; warns of what the model will not see as it was meant."""
        unknown = list(dict.fromkeys(word for prompt in prompts for word in self.unknown_words(prompt)))
        if unknown:
            more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
            logger.warning("the model does not know these words: %s%s", ", ".join(unknown[:_LISTED]), more)
        read = []
        for prompt in prompts:
            lines = self.tokenizer.encode_batch(prompt.split("\n"))
            read.append(
                [i for n, line in enumerate(lines) for i in (self.tokenizer.eos_id if n else self.first_id, *line)]
            )
        long = sum(len(ids) > self.context for ids in read)
        if long:
            logger.warning(
                "%d of %d prompts are longer than the context: the last %d tokens are read",
                *(long, len(prompts), self.context),
            )
        return read

    def _text(self, prompt: list[int], ids: list[int], options: SamplingOptions) -> str:
        if options.stop_at_eos and ids[-1] == self.tokenizer.eos_id:
            ids = ids[:-1]
        before, whole = self._lines(prompt), self._lines([*prompt, *ids])
        return whole[len(before) :]

    def _lines(self, ids: list[int]) -> str:
        """The text of ids, without the first of them."""
        ends = [n for n, i in enumerate(ids) if n and i == self.tokenizer.eos_id]
        spans = zip([0, *ends], [*ends, len(ids)], strict=True)
        return "\n".join(self.tokenizer.decode(ids[begin + 1 : end]) for begin, end in spans)


class _Pieces:
    """Text as it comes: tokens are decoded with those before them in the line, on which spaces and the like depend.

    What was decoded stays as it is when tokens are added, except for a character of which bytes are missing. So once
    all of a line is given out, only its last tokens are decoded again; the whole line where quotation marks matter.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        # Joined by punctuation, every second of the quotation marks in a line closes.
        self.local = isinstance(tokenizer, SentencePieceTokenizer) or (
            isinstance(tokenizer, WordTokenizer) and tokenizer.splitting == "whitespace"
        )
        begin = max(n for n, i in enumerate(prompt) if n == 0 or i == tokenizer.eos_id)
        self.line = list(prompt[begin + 1 :])
        self.given = len(tokenizer.decode(self.line))  # characters of the line that were given out

    def add(self, token: int) -> str:
        """What one more token makes final."""
        if token == self.tokenizer.eos_id:
            rest = self.end()
            self.line, self.given = [], 0
            return rest + "\n"
        self.line.append(token)
        text = self.tokenizer.decode(self.line)
        piece = self._give(text, len(text.rstrip(_INCOMPLETE)))
        if self.local and len(self.line) >= 2 * _REMEMBERED and self.given == len(text):
            self._shorten()
        return piece

    def end(self) -> str:
        """What was still open."""
        text = self.tokenizer.decode(self.line)
        return self._give(text, len(text))

    def _shorten(self) -> None:
        """Keep the last tokens of the line, of which all text was given out."""
        kept = self.line[-_REMEMBERED:]
        text = self.tokenizer.decode(kept)
        if text.strip():  # else the next token would be taken for the first of a line, whose space goes
            self.line, self.given = kept, len(text)

    def _give(self, text: str, end: int) -> str:
        piece, self.given = text[self.given : end], max(self.given, end)
        return piece
