"""Token embeddings with positions, the input of the first layer.

Letters: T packed tokens, D model width, V vocabulary.
"""

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import functional
from fastformer.host.devices import device_with_fp64
from fastformer.modes import compiling
from fastformer.nn.inspection import is_unmodified
from fastformer.settings import check_value

Positions = Literal["sinusoidal", "sinusoidal_halves", "learned", "none"]
_FIRST = 4096


def sinusoidal_positions(
    length: int, width: int, device: torch.device | str | None = None, halves: bool = False
) -> Tensor:
    """Compute the sinusoidal encoding (Vaswani et al. 2017, section 3.5), fp32 `[length, width]`.

    PE(pos, 2i) = sin(pos / 10000^(2i / D)) and PE(pos, 2i + 1) = cos of the same angle; with `halves`, all sines come
    before all cosines, as in Tensor2Tensor and Marian.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    exact: Any = {"dtype": torch.float64, "device": device_with_fp64(device)}
    frequencies = torch.exp(torch.arange(0, width, 2, **exact) * (-math.log(10000.0) / width))
    angles = torch.arange(length, **exact)[:, None] * frequencies  # [length, ceil(D / 2)]
    waves = angles.sin(), angles.cos()
    table = torch.cat(waves, -1) if halves else torch.stack(waves, -1).flatten(1)
    return table[:, :width].float().to(device)


def _is_plain_lookup(module: nn.Module | None) -> bool:
    """Return whether a module only takes rows of its weight, forward and backward; True for None."""
    options = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
    return module is None or (
        is_unmodified(module, nn.Embedding) and all(getattr(module, name) in (None, False) for name in options)
    )


class Embedding(nn.Module):
    """dropout(norm(scale * token embedding + position encoding + type embedding)); norm and types are optional.

    Submodules that were replaced, or have hooks or options of nn.Embedding (padding_idx, max_norm), are called.

    Args:
        vocabulary: number of entries V.
        width: size D of an embedding.
        positions: "sinusoidal" (any length; the table grows), "sinusoidal_halves" (in the other order, see
            `sinusoidal_positions`), "learned" (up to max_length) or "none".
        max_length: most positions of learned encodings, first size of the sinusoidal table, which begins with at most
            4,096 and grows.
        scale: multiply the token embedding by sqrt(D), as Vaswani et al. (section 3.4); unscaled, it is small
            against the positions.
        dropout: rate for the sum.
        types: number of token types, such as first and second sentence (Devlin et al. 2019), each with a trained
            vector; 0: none.
        norm: the norm of the sum, or None.
    """

    table: Tensor

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
        check_value("positions", positions, str, choices=get_args(Positions))
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width) if positions == "learned" else None
        self.width, self.adds_positions, self.halves = width, positions != "none", positions == "sinusoidal_halves"
        self.types = nn.Embedding(types, width) if types else None
        self.norm = norm
        self.scale = math.sqrt(width) if scale else 1.0
        self.dropout = nn.Dropout(dropout)
        # Not part of the checkpoint: it follows from the width.
        rows = min(max_length, _FIRST) if positions.startswith("sinusoidal") else 0
        table = sinusoidal_positions(rows, width, halves=self.halves)
        self.register_buffer("table", table, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, length: int, types: Tensor | None = None) -> Tensor:
        """Embed ids `[...]` at int64 positions `[...]`, all below `length`: `[..., D]`.

        types: int64 `[...]`, the type of each token; None: 0 for all.

        Raises:
            ValueError: length exceeds the learned positions, or types are given to an embedding without them.
        """
        if types is not None and self.types is None:
            raise ValueError("types must be None for an embedding without types")
        encodings = self.encodings(length) if self.adds_positions else None
        lookups = _is_plain_lookup(self.tokens) and _is_plain_lookup(self.positions)
        if lookups and is_unmodified(self.dropout, nn.Dropout) and self.types is None and self.norm is None:
            added = () if encodings is None else (encodings, positions)
            p = self.dropout.p if self.dropout.training else 0.0
            return functional.embedding(ids, self.tokens.weight, *added, scale=self.scale, dropout_p=p)
        x = self.tokens(ids) * self.scale
        if self.positions is not None:
            x = x + self.positions(positions)
        elif encodings is not None:
            x = x + F.embedding(positions, encodings)
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        return self.dropout(x if self.norm is None else self.norm(x))  # type: ignore[no-any-return]

    def padded(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Embed ids `[B, length]` at positions from 0: `[B, length, D]`."""
        length = ids.shape[1]
        return self(ids, torch.arange(length, device=ids.device).expand_as(ids), length, types)  # type: ignore[no-any-return]

    def encodings(self, length: int) -> Tensor:
        """Return the encodings of the first `length` positions or more: `[length or more, D]`.

        Raises:
            ValueError: length exceeds the learned positions.
        """
        if self.positions is not None:
            weight: Tensor | None = getattr(self.positions, "weight", None)
            if weight is None:  # a user's module, of any number of positions
                return self.table
            if length > len(weight):
                raise ValueError(f"a sequence of {length} is longer than max_length, {len(weight)}")
            return weight
        if compiling():
            # A table that grows, here or in other calls, would need another graph each time.
            like = next(self.parameters())
            return sinusoidal_positions(length, self.width, like.device, self.halves).to(like.dtype)
        # A model that was constructed on "meta" and then loaded has no table yet.
        if length > self.table.shape[0] or self.table.is_meta:
            # The table may grow in inference mode, but training cannot use an inference tensor.
            with torch.inference_mode(False):
                rows = max(2 * length, self.table.shape[0])
                table = sinusoidal_positions(rows, self.width, halves=self.halves)
                self.table = table.to(next(self.parameters()).device, self.table.dtype)
        return self.table
