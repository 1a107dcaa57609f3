"""Token embeddings with positions: what stands before the first layer.

Letters: T packed tokens, D model width, V vocabulary.
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import functional
from fastformer.apps.models.sizes import LARGEST
from fastformer.modes import compiling
from fastformer.nn.inspection import plain
from fastformer.settings import check_value

Positions = Literal["sinusoidal", "sinusoidal_halves", "learned", "none"]
_FIRST = 4096


def sinusoidal_positions(
    length: int, width: int, device: torch.device | str | None = None, halves: bool = False
) -> Tensor:
    """Compute the sinusoidal encoding (Vaswani et al. 2017, section 3.5), fp32 `[length, width]`, on the CPU if None.

    PE(pos, 2i) = sin(pos / 10000^(2i / D)) and PE(pos, 2i + 1) = cos of the same angle; with `halves`, all sines come
    before all cosines, as in Tensor2Tensor and Marian.
    """
    frequencies = torch.exp(
        torch.arange(0, width, 2, dtype=torch.float64, device=device) * (-math.log(10000.0) / width)
    )
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies  # [length, ceil(D / 2)]
    both = angles.sin(), angles.cos()
    table = torch.cat(both, -1) if halves else torch.stack(both, -1).flatten(1)
    return table[:, :width].float()


def _looks_up(part: nn.Module | None) -> bool:
    """Return whether a part does no more than take rows of its weight, forward and backward; True for None."""
    if part is None:
        return True
    options = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
    return plain(part, nn.Embedding) and all(getattr(part, name) in (None, False) for name in options)


class Embedding(nn.Module):
    """dropout(norm(scale * token embedding + position encoding + type embedding)), the norm and types where asked for.

    Parts that were replaced, or have hooks or options of nn.Embedding (a padding_idx, a max_norm), are called.

    Args:
        vocabulary: V.
        width: D.
        positions: "sinusoidal" (any length; the table grows), "sinusoidal_halves" (in the other order, see
            `sinusoidal_positions`), "learned" (up to max_length) or "none".
        max_length: most positions of learned encodings, first size of the sinusoidal table, which begins with at most
            4,096 and grows.
        scale: multiply the token embedding by sqrt(D), as Vaswani et al. (section 3.4); without it positions drown
            the words.
        dropout: of the sum.
        types: kinds of tokens, such as those of a first and a second sentence (Devlin et al. 2019), each with a trained
            vector; 0: none.
        norm: the norm of the sum, or None.
    """

    table: Tensor
    adds_positions: bool = True
    halves: bool = False

    def __init__(
        self,
        vocabulary: int,
        width: int,
        positions: Positions = "sinusoidal",
        max_length: int = 512,
        scale: bool = True,
        dropout: float = 0.1,
        types: int = 0,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("vocabulary", vocabulary), ("width", width), ("max_length", max_length)):
            check_value(name, value, int, at_least=1, at_most=LARGEST)
        check_value("positions", positions, str, choices=get_args(Positions))
        check_value("scale", scale, bool)
        check_value("dropout", dropout, float, at_least=0, below=1)
        check_value("types", types, int, at_least=0, at_most=LARGEST)
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width) if positions == "learned" else None
        self.width, self.adds_positions, self.halves = width, positions != "none", positions == "sinusoidal_halves"
        if types:
            self.types = nn.Embedding(types, width)
        if norm is not None:
            self.norm = norm
        self.scale = math.sqrt(width) if scale else 1.0
        self.dropout = nn.Dropout(dropout)
        # Not part of the checkpoint: it follows from the width.
        rows = min(max_length, _FIRST) if positions.startswith("sinusoidal") else 0
        table = sinusoidal_positions(rows, width, halves=self.halves)
        self.register_buffer("table", table, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, length: int, types: Tensor | None = None) -> Tensor:
        """Embed ids `[...]` at int64 positions `[...]`, all below `length`: `[..., D]`.

        types: int64 `[...]`, the kind of each token; None: 0 for all.

        Raises:
            ValueError: length is beyond what learned positions hold, or there are no types.
        """
        if types is not None and "types" not in self._modules:
            raise ValueError("types must be None where the embedding has none")
        plain_parts = _looks_up(self.tokens) and _looks_up(self.positions) and plain(self.dropout, nn.Dropout)
        if plain_parts and not {"types", "norm"} & self._modules.keys():
            p = self.dropout.p if self.dropout.training else 0.0
            added = (self.encodings(length), positions) if self.adds_positions else ()
            return functional.embedding(ids, self.tokens.weight, *added, scale=self.scale, dropout_p=p)
        x = self.tokens(ids) * self.scale
        if self.positions is not None:
            self._check_length(length)
            x = x + self.positions(positions)
        elif self.adds_positions:
            x = x + F.embedding(positions, self.encodings(length))
        if "types" in self._modules:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        return self.dropout(self.norm(x) if "norm" in self._modules else x)  # type: ignore[no-any-return]

    def padded(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Embed ids `[B, length]` at positions from 0: `[B, length, D]`."""
        length = ids.shape[1]
        return self(ids, torch.arange(length, device=ids.device).expand_as(ids), length, types)  # type: ignore[no-any-return]

    def encodings(self, length: int) -> Tensor:
        """Return the encodings of the first `length` positions or more: `[length or more, D]`.

        Raises:
            ValueError: there are none, or length is beyond what learned positions hold.
        """
        if not self.adds_positions:
            raise ValueError("positions are not added to these embeddings: attention is told of them, if anything is")
        if self.positions is not None:
            self._check_length(length)
            return self.positions.weight
        if compiling():
            # A table that grows, or was grown by others meanwhile, would be another graph each time.
            like = next(self.parameters())
            return sinusoidal_positions(length, self.width, like.device, self.halves).to(like.dtype)
        # A model that was made on "meta" and then got its weights has no table yet.
        if length > self.table.shape[0] or self.table.is_meta:
            # Decoding may be what outgrows it: an inference tensor would be of no use to training afterwards.
            with torch.inference_mode(False):
                rows = max(2 * length, self.table.shape[0])
                table = sinusoidal_positions(rows, self.width, halves=self.halves)
                self.table = table.to(next(self.parameters()).device, self.table.dtype)
        return self.table

    def _check_length(self, length: int) -> None:
        """Raise where learned positions end before; a part of somebody's own without a weight may hold any number."""
        rows = getattr(self.positions, "weight", None)
        if rows is not None and length > len(rows):
            raise ValueError(f"a sequence of {length} is longer than max_length, {len(rows)}")
