"""Continue text prompts with a language model: options, the cache, the choice of tokens, and `TextGenerator`.

A text depends on the prompt, the options and the seed. It does not depend on other prompts in the batch, up to the last
bits of the logits: each text draws one number a token from a separate stream, seeded by the seed, the prompt, and how
often the prompt occurred before.

The window rule. A row reads at most `context` tokens, at positions 0 to context - 1. Of a longer prompt it reads the
last `context` tokens. Before another token, a full row drops all but its last context // 2 tokens and reads these
again from position 0, in one pass: memory does not grow, and about one token is read again for each token written.
Cached keys cannot be shifted instead, because positions were added before the projection.

Letters: B rows, T packed tokens, D model width, V vocabulary.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from fastformer.apps.language.model import LanguageModel
from fastformer.apps.models import decoding
from fastformer.apps.models.common import check_tokenizer
from fastformer.apps.models.decoding import next_logits, recorder_of
from fastformer.apps.models.sampling import RandomStreams, choose_ids
from fastformer.apps.plots.attention_maps import AttentionMaps, attend_ids
from fastformer.apps.settings import Settings, setting
from fastformer.apps.text import Tokenizer
from fastformer.apps.text.files import check_texts
from fastformer.host.cuda_graphs import Recorder, ReplayedStep
from fastformer.host.devices import device_of, send
from fastformer.packing import Layout
from fastformer.settings import check_value

logger = logging.getLogger("fastformer")
_INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of an incomplete character to
_DRAWN = {"draws": "a temperature above 0"}


class SamplingOptions(Settings):
    """Options of sampling; the help text of each setting describes it."""

    max_new_tokens: int = setting(100, "at most this many tokens after the prompt", at_least=1)
    min_new_tokens: int = setting(0, "at least this many tokens before the end", at_least=0, at_most="max_new_tokens")
    temperature: float = setting(
        1.0, "logits are divided by it; 0: the most probable token each time (greedy)", at_least=0
    )
    top_k: int | None = setting(None, "only the k most probable tokens; unset or 0: all", at_least=0, only=_DRAWN)
    top_p: float = setting(
        1.0,
        "only the fewest tokens that together have at least this probability; 1: all",
        above=0,
        at_most=1,
        only=_DRAWN,
    )
    seed: int | None = setting(None, "random seed; unset: another text each time", at_least=0, only=_DRAWN)
    stop_at_eos: bool = setting(True, "end at the end token; otherwise it is an end of line, and the text continues")
    allow_unk: bool = setting(False, "allow the unknown token")
    cuda_graphs: bool | None = setting(
        None, "replay each step as a CUDA graph, which needs a CUDA GPU; unset: on such a GPU, if memory allows"
    )

    @property
    def draws(self) -> str:
        """Whether tokens are drawn, in words."""
        return "a temperature above 0" if self.temperature > 0 else "temperature 0"


class LanguageState:
    """Unfinished texts, a row each; rows may have different lengths and are independent.

    Args:
        model: call `.eval()` first; the mode (train or eval) is not changed.
        prompts: ids of each row, at least one.
        context: the most tokens that a row reads, see the window rule above.
        recorder: captures the steps as CUDA graphs. The cache then holds `context` tokens a row from the start.

    Attributes:
        logits: `[B, V]`, of the token after each prompt.

    Raises:
        ValueError: there is no prompt, or one is empty; context is below 1 or exceeds the number of learned positions.
        RuntimeError: a layer, or attention in it, has hooks or a class that fastformer does not know.
    """

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Sequence[int]], context: int, recorder: Recorder | None = None
    ) -> None:
        _check_context(model, context)
        if not prompts or not all(prompts):
            raise ValueError("prompts must hold at least one prompt, and each at least one id")
        self.model, self.context = model, context
        self.windows = [list(ids[-context:]) for ids in prompts]  # what each row has read
        self.cache = model.decoder.new_cache(len(prompts), **{"capacity" if recorder else "longest": context})
        hidden, layout = self._read(self.windows)
        self.logits = model.logits(hidden.index_select(0, layout.offsets[1:] - 1))
        self._new_step(recorder)

    @torch.inference_mode(False)
    def _new_step(self, recorder: Recorder | None) -> None:
        """Make the step of the rows, which reads their tokens from one tensor."""
        # Without a reference to self, which would keep the cache and the graph until Python collects garbage.
        self._ids = torch.zeros(len(self.windows), dtype=torch.int64, device=self.logits.device)
        step = partial(next_logits, self.model, self.model.embedding, self.cache, self._ids)
        self._step = ReplayedStep(recorder, self.model.embedding, step, "generation")

    def step(self, ids: Tensor) -> Tensor:
        """Feed the next token of each row, int64 `[B]`; return the logits of the one after, `[B, V]`.

        With a recorder, the next step may overwrite the logits.
        """
        full = [len(window) == self.context for window in self.windows]
        if any(full):
            self._slide(full)
        for window, token in zip(self.windows, ids.tolist(), strict=True):
            window.append(token)
        self._ids.copy_(ids)
        return self._step()  # type: ignore[no-any-return]

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only, int64, ascending."""
        self.windows = [self.windows[row] for row in rows.tolist()]
        self.cache.keep(rows)
        self._new_step(self._step.recorder)

    def _slide(self, full: Sequence[bool]) -> None:
        """Drop the first tokens of full rows and read the rest again; see the window rule above."""
        sizes = [0 if each else len(window) for window, each in zip(self.windows, full, strict=True)]
        self.cache.crop(torch.tensor(sizes, device="cpu"))
        first = self.context - self.context // 2
        self.windows = [window[first:] if each else window for window, each in zip(self.windows, full, strict=True)]
        if self.context > 1:
            self._read([window if each else [] for window, each in zip(self.windows, full, strict=True)])

    def _read(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Layout]:
        """Read ids into empty rows, none into the others; return packed hidden states `[T, D]` and the layout."""
        device = device_of(self.model)
        layout = Layout.from_lengths([len(row) for row in rows], device)
        (ids,) = send(device, torch.tensor([i for row in rows for i in row], device="cpu"))  # [T]
        x = self.model.embedding(ids, layout.positions, layout.max_length)
        return self.model.decoder.step(x, self.cache, layout), layout


def _check_context(model: LanguageModel, context: int) -> None:
    longest = model.config.longest
    most = None if longest is None else "max_positions"
    check_value("context", context, int, {"max_positions": longest}, at_least=1, at_most=most)


@torch.inference_mode()
def sample(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    context: int,
    streams: RandomStreams,
    unk_id: int | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """Continue prompts in one batch, which texts that have ended leave.

    With CUDA graphs they leave once their rows have cost as much as a new graph.

    Args:
        model: call `.eval()` first.
        prompts: ids, at least one each.
        options: how to choose, and when to end.
        context: the most tokens that the model reads at a time; see `fastformer.apps.language.sampling`.
        streams: the random numbers.
        unk_id: the unknown token, forbidden unless options.allow_unk. pad and bos are always forbidden.

    Yields:
        For every step, (index of the prompt, id) of each unfinished text; the last id of a text may be eos.

    Raises:
        ValueError: a prompt is empty, or context is below 1 or exceeds the number of learned positions.
        FloatingPointError: the model gives NaN.
    """
    c = model.config
    special = {c.pad_id, c.bos_id} - {c.eos_id}
    if unk_id is not None and not options.allow_unk:
        special.add(unk_id)
    _check_context(model, context)
    # A row never reads more than its prompt and what follows, of which the last token is not read.
    context = min(context, max(map(len, prompts), default=1) + options.max_new_tokens - 1)
    recorder = recorder_of(model, c.layers, len(prompts) * context, options.cuda_graphs)
    state = LanguageState(model, prompts, context, recorder)
    logits, active = state.logits, list(enumerate(streams.take(prompts)))
    ended, idle_rows = set[int](), 0  # rows of `active` that have ended; how many, summed over steps
    for t in range(options.max_new_tokens):
        draws = [stream.random() for _, stream in active] if options.temperature > 0 else ()
        forbidden = special | ({c.eos_id} if t < options.min_new_tokens else set())
        ids = choose_ids(logits, options, draws, sorted(forbidden))
        chosen = ids.tolist()
        if -1 in chosen:
            raise FloatingPointError("the model's scores are not numbers: it has diverged")
        yield [(active[row][0], i) for row, i in enumerate(chosen) if row not in ended]
        ended |= {row for row, i in enumerate(chosen) if options.stop_at_eos and i == c.eos_id}
        if len(ended) == len(active) or t + 1 == options.max_new_tokens:
            return
        idle_rows += len(ended)
        if ended and (recorder is None or idle_rows > decoding.IDLE_ROWS):
            rows = [row for row in range(len(active)) if row not in ended]
            (unfinished,) = send(ids.device, torch.tensor(rows, device="cpu"))
            state.keep(unfinished)
            ids, active, ended, idle_rows = ids[unfinished], [active[row] for row in rows], set(), 0
        logits = state.step(ids)


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
        _check_context(model, context)
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
        return list(self.generate_each(prompts, options, batch_size))

    def generate_each(
        self, prompts: Iterable[str], options: SamplingOptions | None = None, batch_size: int = 32
    ) -> Iterator[str]:
        """Yield the texts of `generate`; prompts are read by batch, a batch when its first text is requested."""
        check_texts("prompts", prompts)
        check_value("batch_size", batch_size, int, at_least=1)
        return self._texts(iter(prompts), options or SamplingOptions(), batch_size)  # errors are raised above

    def _texts(self, prompts: Iterator[str], options: SamplingOptions, batch_size: int) -> Iterator[str]:
        streams = RandomStreams(options.seed)
        while batch := list(islice(prompts, batch_size)):
            encoded, written = self.encode(batch), [list[int]() for _ in batch]
            for step in self._sample(encoded, options, streams):
                for row, token in step:
                    written[row].append(token)
            yield from map(self._text, encoded, written)

    def stream(self, prompt: str, options: SamplingOptions | None = None) -> Iterator[str]:
        """Yield the text that `generate` returns for one prompt in pieces, which later tokens do not change.

        Raises:
            FloatingPointError: the model gives NaN.
        """
        options, text, length = options or SamplingOptions(), "", 0
        [encoded], written = self.encode([prompt]), list[int]()
        for step in self._sample([encoded], options, RandomStreams(options.seed)):
            written += [token for _, token in step]
            text = self._text(encoded, written)
            end = len(text.rstrip(_INCOMPLETE))
            if end > length:
                yield text[length:end]
                length = end
        if length < len(text):
            yield text[length:]

    def _sample(
        self, encoded: list[list[int]], options: SamplingOptions, streams: RandomStreams
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield the steps of `sample` without the eos that ends a text."""
        model, eos = self.model.eval(), self.tokenizer.eos_id  # it may have been trained on since the last call
        for step in sample(model, encoded, options, self.context, streams, self.tokenizer.unk_id):
            yield [(row, token) for row, token in step if not (options.stop_at_eos and token == eos)]

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Encode prompts as ids that begin with first_id; warn of unknown words and of too long prompts."""
        encoded = []
        for prompt in prompts:
            lines = self.tokenizer.encode_batch(prompt.split("\n"))
            encoded.append(
                [i for n, line in enumerate(lines) for i in (self.tokenizer.eos_id if n else self.first_id, *line)]
            )
        if unknown := sum(ids.count(self.tokenizer.unk_id) for ids in encoded):
            logger.warning("the model does not know %d words or characters of the prompts", unknown)
        if long := sum(len(ids) > self.context for ids in encoded):
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

    def attend(self, text: str) -> AttentionMaps:
        """Compute every attention weight of the model that reads a text like a prompt, the last `context` tokens of it.

        Row t has the weights with which the token after token t is predicted.
        """
        [ids] = self.encode([text])
        ids = ids[-self.context :]
        return attend_ids(self.model.eval(), ids, self.tokenizer.pieces(ids), text)
