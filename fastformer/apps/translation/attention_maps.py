"""Attention weights of a translation model for a sentence and a translation of it.

Letters: L layers, H heads, T target positions, S source positions.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.text import collate_source, encode_source
from fastformer.apps.translation.search import beam_search
from fastformer.apps.translation.translator import Translator
from fastformer.host.devices import device_of
from fastformer.settings import check_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["cross", "encoder", "decoder"]

logger = logging.getLogger("fastformer")


@dataclass(frozen=True)
class SentenceAttention:
    """Every attention weight of a translation model for one sentence and a translation of it.

    Attributes:
        source: the sentence.
        target: the translation.
        maps: "encoder" `[L, H, S, S]`, "decoder" `[L, H, T, T]` and "cross" `[L, H, T, S]`, on the CPU; row t of the
            last two has the weights with which target token t was predicted.
        source_tokens: the encoder's input, eos included.
        read: the decoder's input: bos and the tokens of the target.
        written: the decoder's output at the same positions: the tokens of the target and eos.
    """

    source: str
    target: str
    maps: dict[str, Tensor]
    source_tokens: list[str]
    read: list[str]
    written: list[str]

    def figure(
        self,
        kind: Kind = "cross",
        layer: int | Literal["all"] | None = None,
        head: int | Literal["all", "mean"] = "all",
    ) -> "Figure":
        """Draw the maps of one head, of the heads of a layer, or of all layers.

        Args:
            kind: cross-attention, or self-attention of the encoder or the decoder.
            layer, head: see `AttentionMaps.figure`.

        Raises:
            ValueError: there is no such kind, layer or head.
        """
        check_value("kind", kind, str, choices=get_args(Kind))
        keys = self.read if kind == "decoder" else self.source_tokens
        queries = self.source_tokens if kind == "encoder" else self.written
        names = {
            "cross": ("source token", "target token"),
            "encoder": ("source token looked at", "source token"),
            "decoder": ("target token read", "target token written"),
        }
        title = f"{kind} attention", f"{self.source} -> {self.target}"
        return AttentionMaps(title, self.maps[kind], keys, queries, names[kind]).figure(layer, head)


def attend(translator: Translator, source: str, target: str | None = None) -> SentenceAttention:
    """Compute every attention weight for a sentence and a translation of it.

    Args:
        translator: a model with its tokenizers.
        source: a sentence; a longer one than the model translates is cut, with a warning.
        target: a translation of the source; None: found by beam search.

    Raises:
        ValueError: the source has no token, or the target is too long for learned positions.
    """
    model, tokenizer = translator.model.eval(), translator.target_tokenizer
    ids, cut = encode_source([source], translator.source_tokenizer, translator.max_source_length)
    if not len(ids[0]):
        raise ValueError(f"source must hold at least one token, not {source!r}")
    if cut:
        logger.warning("the source was cut to %d tokens", translator.max_source_length)
    device = device_of(model)
    packed, lengths = collate_source(ids, translator.source_tokenizer.special_ids)
    packed = packed.to(device)
    if target is None:
        written = beam_search(model, packed, lengths)[0][0].ids
        target = tokenizer.decode(written)
    else:
        written = tokenizer.encode(target)
    longest = model.config.longest
    if longest is not None and len(written) + 1 > longest:
        raise ValueError(f"target must have at most {longest - 1} tokens, not {len(written)}")
    read = [tokenizer.bos_id, *written]
    maps = model.attention_maps(packed, torch.tensor(read, device=device))
    return SentenceAttention(
        source,
        target,
        {kind: weights.cpu() for kind, weights in maps.items()},
        translator.source_tokenizer.pieces(packed.tolist()),
        tokenizer.pieces(read),
        tokenizer.pieces([*written, tokenizer.eos_id]),
    )
