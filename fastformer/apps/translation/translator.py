"""Translate text: tokenise, search in batches of similar length, and detokenise in the order of the input."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch

from fastformer.apps.models.common import check_tokenizer
from fastformer.apps.models.sampling import RandomStreams
from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.text import EncodedPairs, Sequences, Tokenizer, collate, collate_source, encode_source
from fastformer.apps.text.files import check_texts
from fastformer.apps.translation.model import TranslationModel, translation_loss
from fastformer.apps.translation.search import SearchOptions, beam_search
from fastformer.host.devices import device_of, send
from fastformer.settings import check_value

Kind = Literal["cross", "encoder", "decoder"]

logger = logging.getLogger("fastformer")


@dataclass(frozen=True)
class Translation:
    """A translation of a sentence, its log probability in nats, and the score that ranked it."""

    text: str
    log_probability: float
    score: float


class Translator:
    """A translation model with its tokenizers.

    Args:
        model: put into evaluation mode.
        source_tokenizer, target_tokenizer: the tokenizers that the model was trained with.
        max_source_length: longer sentences are cut, as in training; tokens with eos. Learned positions may allow less.

    Raises:
        ValueError: a tokenizer does not belong to the model.
    """

    def __init__(
        self,
        model: TranslationModel,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        max_source_length: int = 256,
    ) -> None:
        check_tokenizer("source", source_tokenizer, model.config.source_vocabulary)
        check_tokenizer("target", target_tokenizer, model.config.target_vocabulary, model.config)
        check_value("max_source_length", max_source_length, int, at_least=2)  # a token and eos
        self.model = model.eval()
        self.source_tokenizer, self.target_tokenizer = source_tokenizer, target_tokenizer
        self.max_source_length = min(max_source_length, model.config.longest or max_source_length)

    def translate(
        self, sentences: Sequence[str], options: SearchOptions | None = None, batch_size: int = 64
    ) -> list[str]:
        """Translate sentences; an empty one stays empty.

        Args:
            sentences: plain text, one sentence each.
            options: how to search, or to sample; beam 1 is greedy.
            batch_size: sentences searched at a time.
        """
        options = replace(options or SearchOptions(), n_best=1)
        return [best[0].text for best in self.candidates(sentences, options, batch_size)]

    def candidates(
        self,
        sentences: Sequence[str],
        options: SearchOptions | None = None,
        batch_size: int = 64,
        streams: RandomStreams | None = None,
    ) -> list[list[Translation]]:
        """Return the `n_best` translations of each sentence with their scores.

        Args:
            sentences, options, batch_size: as in `translate`.
            streams: the random numbers, for several calls that sample parts of one text; None: those of `options.seed`.
        """
        options = options or SearchOptions()
        check_value("batch_size", batch_size, int, at_least=1)
        check_texts("sentences", sentences)
        self.model.eval()  # it may have been trained on since the last call
        sequences, streams = self.encode(sentences), streams or RandomStreams(options.seed)
        results: list[list[Translation]] = [[Translation("", 0.0, 0.0)] for _ in sentences]
        lengths = sequences.lengths
        order = sorted(np.flatnonzero(lengths).tolist(), key=lambda i: -lengths[i])
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = [sequences[i] for i in indices]
            ids, source_lengths = collate_source(batch, self.source_tokenizer.special_ids)
            (ids,) = send(device_of(self.model), ids)
            draws = streams.take(batch) if options.sample else ()
            for i, best in zip(indices, beam_search(self.model, ids, source_lengths, options, draws), strict=True):
                results[i] = [
                    Translation(self.target_tokenizer.decode(h.ids), h.log_probability, h.score) for h in best
                ]
        return results

    def encode(self, sentences: Sequence[str]) -> Sequences:
        """Encode source sentences; warn of those that are cut to `max_source_length`."""
        sequences, cut = encode_source(sentences, self.source_tokenizer, self.max_source_length)
        if cut:
            logger.warning("%d of %d sentences cut to %d tokens", cut, len(sentences), self.max_source_length)
        return sequences

    def attend(self, source: str, target: str | None = None, kind: Kind = "cross") -> AttentionMaps:
        """Compute every attention weight of one kind for a sentence and a translation of it.

        Row t of "decoder" and "cross" has the weights with which target token t was predicted: the decoder reads bos
        and the tokens of the target, and predicts the tokens and eos.

        Args:
            source: a sentence; a longer one than the model translates is cut, with a warning.
            target: a translation of the source; None: found by beam search.
            kind: "encoder" or "decoder", self-attention; or "cross", of the decoder to the source.

        Raises:
            ValueError: the source has no token, the target is too long for learned positions, or there is no such kind.
        """
        check_value("kind", kind, str, choices=get_args(Kind))
        model, tokenizer, device = self.model.eval(), self.target_tokenizer, device_of(self.model)
        ids = self.encode([source])
        if not len(ids[0]):
            raise ValueError(f"source must hold at least one token, not {source!r}")
        packed, lengths = collate_source(ids, self.source_tokenizer.special_ids)
        packed = packed.to(device)
        if target is None:
            longest = model.config.longest  # with bos
            options = SearchOptions(max_length=None if longest is None else longest - 1)
            output = beam_search(model, packed, lengths, options)[0][0].ids
            target = tokenizer.decode(output)
        else:
            output = tokenizer.encode(target)
        weights = model.attention_maps(packed, torch.tensor([tokenizer.bos_id, *output], device=device))[kind]
        sources = self.source_tokenizer.pieces(packed.tolist())
        read, written = (tokenizer.pieces(i) for i in ([tokenizer.bos_id, *output], [*output, tokenizer.eos_id]))
        keys, queries, names = {
            "encoder": (sources, sources, ("source token looked at", "source token")),
            "decoder": (read, written, ("target token read", "target token written")),
            "cross": (sources, written, ("source token", "target token")),
        }[kind]
        return AttentionMaps((f"{kind} attention", f"{source} -> {target}"), weights.cpu(), keys, queries, names)

    @torch.inference_mode()
    def score(self, sources: Sequence[str], targets: Sequence[str], batch_size: int = 64) -> list[tuple[float, int]]:
        """Return (log probability in nats, tokens with eos) of each pair of a source and a translation.

        Raises:
            ValueError: the numbers of sentences differ, or a sentence has no token or more than `max_source_length`.
        """
        check_value("batch_size", batch_size, int, at_least=1)
        check_texts("sources", sources)
        check_texts("targets", targets)
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
        first, second = self.source_tokenizer, self.target_tokenizer
        pairs = EncodedPairs(
            self._encode_uncut("source", sources, first),
            self._encode_uncut("target", targets, second),
            first.special_ids,
            second.special_ids,
        )
        self.model.eval()
        scores = []
        for start in range(0, len(pairs), batch_size):
            indices = np.arange(start, min(start + batch_size, len(pairs)))
            batch = collate(pairs.take(indices)).to(device_of(self.model))
            losses = translation_loss(self.model, batch, reduction="none").cpu()
            by_sentence = torch.split(losses, batch.target_lengths.tolist())
            scores += [(-math.fsum(x.tolist()), len(x)) for x in by_sentence]
        return scores

    def _encode_uncut(self, side: str, sentences: Sequence[str], tokenizer: Tokenizer) -> Sequences:
        """Encode sentences; raise ValueError for an empty one, or one that would be cut."""
        sequences = Sequences.from_lists(tokenizer.encode_batch(list(sentences)))
        most = self.max_source_length - 1
        for number, length in enumerate(sequences.lengths.tolist(), start=1):
            if not 1 <= length <= most:
                raise ValueError(
                    f"{side} {number} has {length} tokens, and this model scores sentences of 1 to {most}: leave it out"
                )
        return sequences
