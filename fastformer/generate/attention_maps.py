"""Where a model looks: every attention weight for a text, with what to call its rows and columns.

`attend` for a sentence and its translation, `attend_text` for a language model, `attend_ids` for any model that reads
one sequence, classifiers among them.

Letters: L layers, H heads, T query positions (of a translation: of the target), S key positions (of the source).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from fastformer.generate.search import beam_search
from fastformer.generate.text_generator import TextGenerator
from fastformer.generate.translator import Translator
from fastformer.models import LanguageModel, SequenceClassifier, TokenClassifier
from fastformer.text import collate_source, encode_source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["cross", "encoder", "decoder"]

logger = logging.getLogger("fastformer")


@dataclass(frozen=True)
class AttentionMaps:
    """Every weight of one kind of attention.

    Attributes:
        title: what attends to what: the begin of a figure's title, and its end.
        weights: `[L, H, T, S]`, on the CPU; row t is how query t spreads over the keys.
        keys: the S tokens that are looked at.
        queries: the T tokens that look.
        axis_names: of the keys and of the queries.
    """

    title: tuple[str, str]
    weights: Tensor
    keys: list[str]
    queries: list[str]
    axis_names: tuple[str, str]

    def figure(self, layer: int | Literal["all"] | None = None, head: int | Literal["all", "mean"] = "all") -> "Figure":
        """Draw the maps of one head, of the heads of a layer, or of all layers.

        Args:
            layer: from 1, None for the last one; or "all".
            head: from 1; or "all", a panel for each; or "mean", their average.

        Raises:
            ValueError: there is no such layer or head.
        """
        from fastformer.plots import plot_attention, plot_attention_heads, plot_attention_layers

        weights = self.weights
        layers, heads = weights.shape[:2]
        layer = layers if layer is None else layer
        _check_choice("layer", layer, layers, ("all",))
        _check_choice("head", head, heads, ("all", "mean"))
        which = "all layers" if layer == "all" else f"layer {layer}"
        if head == "mean":
            weights, which = weights.mean(1), f"{which}, mean of {heads} heads"
        elif head != "all":
            weights, which = weights[:, head - 1], f"{which}, head {head}"
        draw = plot_attention_layers
        if layer != "all":
            weights = weights[layer - 1]
            draw = plot_attention_heads if head == "all" else plot_attention
        what, text = self.title
        return draw(weights, self.keys, self.queries, f"{what}, {which}: {text}", self.axis_names)


@dataclass(frozen=True)
class SentenceAttention:
    """Every attention weight of a translation model for one sentence and a translation of it.

    Attributes:
        source, target: the two texts.
        maps: "encoder" `[L, H, S, S]`, "decoder" `[L, H, T, T]` and "cross" `[L, H, T, S]`, on the CPU; row t of the
            last two is where the model looked to write token t.
        source_tokens: what the encoder reads, eos included.
        read: what the decoder reads: bos and the tokens of the target.
        written: what it writes at the same positions: the tokens of the target and eos.
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
            kind: which attention: of the decoder to the source, or within the encoder or the decoder.
            layer, head: see `AttentionMaps.figure`.

        Raises:
            ValueError: there is no such kind, layer or head.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, not {kind!r}")
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
        target: a translation of it; None: the model's own, by beam search.

    Raises:
        ValueError: the source has no token, or the target is too long for learned positions.
    """
    model, tokenizer = translator.model.eval(), translator.target_tokenizer
    ids, cut = encode_source([source], translator.source_tokenizer, translator.max_source_length)
    if not len(ids[0]):
        raise ValueError(f"source must hold at least one token, not {source!r}")
    if cut:
        logger.warning("the source was cut to %d tokens", translator.max_source_length)
    device = model.output.weight.device
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


def attend_text(generator: TextGenerator, text: str) -> AttentionMaps:
    """Compute every attention weight of a language model that reads a text.

    Row t is where the model looked when it had read token t, and was about to predict the next one.

    Args:
        generator: a model with its tokenizer and its context; of a longer text, the last tokens are read, with a
            warning.
        text: read as a prompt of `TextGenerator` is; an empty one leaves what stands before every text.
    """
    [ids] = generator.encode([text])
    ids = ids[-generator.context :]
    return attend_ids(generator.model.eval(), ids, generator.tokenizer.pieces(ids), text)


def attend_ids(
    model: LanguageModel | SequenceClassifier | TokenClassifier,
    ids: Sequence[int],
    tokens: Sequence[str],
    text: str = "",
) -> AttentionMaps:
    """Compute every attention weight of a model that reads one sequence.

    Args:
        model: call `.eval()` first, or dropout takes some weights away.
        ids: of the sequence.
        tokens: what to call them.
        text: for the title; empty: the tokens.

    Raises:
        ValueError: there is no token, not a name for each, or more than learned positions hold.
    """
    if not len(ids) or len(ids) != len(tokens):
        raise ValueError(f"ids and tokens must be equally many and at least one, not {len(ids)} and {len(tokens)}")
    weights = model.attention_maps(torch.tensor(ids, device=model.output.weight.device)).cpu()
    title = "attention", text or " ".join(tokens)
    return AttentionMaps(title, weights, list(tokens), list(tokens), ("token looked at", "token"))


def _check_choice(name: str, value: int | str, count: int, words: tuple[str, ...]) -> None:
    if value in words or (isinstance(value, int) and 1 <= value <= count):
        return
    raise ValueError(f"{name} must be 1 to {count} or {' or '.join(words)}, not {value!r}")
