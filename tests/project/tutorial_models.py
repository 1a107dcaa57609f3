"""Translation models as tutorials write them, from the description of the algorithm, with what differs among them.

They share no code with the package: padded batches, softmax(QK^T) V written out, a mask in whichever convention.

Letters: B batch, H heads, T target and S source positions, D model width, K head size.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.project.documents import ROOT, blocks
from tests.support.translation_task import paper_positions, random_batch

PAGES = ROOT / "docs" / "tutorials"


def defined(page: str, *names: str) -> list[Any]:
    """Functions of a page of the site, so that the page is what is tested; its blocks with a `def` are run."""
    actual: dict[str, Any] = {}
    for program in python_of(page):
        if re.search("^def ", program, re.M):
            exec(compile(program, f"{page}.md", "exec"), actual)
    return [actual[name] for name in names]


def python_of(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return [block.text for block in blocks(text) if block.language == "python"]


class UnbiasedNorm(nn.Module):
    """a_2 (x - mean) / (std + eps) + b_2 with the standard deviation of D - 1, eps outside of the root."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2, self.b_2, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b_2


def visible_is_one(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask == 0, -1e9)


def hidden_is_true(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -1e9)


@dataclass(frozen=True)
class Ways:
    """How a tutorial does what others do in another way."""

    norm_first: bool = False
    norm: Callable[[int], nn.Module] = nn.LayerNorm
    by_head: bool = False
    bias: bool = True  # of the projections of attention
    scale: bool = True
    final_norm: bool = False
    positions: Callable[[int, int], Tensor] = paper_positions
    hide: Callable[[Tensor, Tensor], Tensor] = visible_is_one
    width: int = 12
    heads: int = 3
    hidden: int = 20
    layers: int = 2
    vocabulary: int = 17


class Attention(nn.Module):
    """Projections of all heads at once (w_q, w_k, w_v), or of each head in a module of its own; keeps its weights."""

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        D, K, self.ways = ways.width, ways.width // ways.heads, ways
        sizes = [K] * ways.heads if ways.by_head else [D]
        for name in ("w_q", "w_k", "w_v"):
            projections = nn.ModuleList(nn.Linear(D, size, bias=ways.bias) for size in sizes)
            self.add_module(name, projections if ways.by_head else projections[0])
        self.w_o = nn.Linear(D, D)
        self.weights = torch.empty(0)

    def split(self, projection: Any, x: Tensor) -> Tensor:
        """Project `[B, L, D]` to heads `[B, H, L, K]`."""
        if self.ways.by_head:
            return torch.stack([head(x) for head in projection], 1)
        return projection(x).view(len(x), -1, self.ways.heads, x.shape[2] // self.ways.heads).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.w_q, x), self.split(self.w_k, memory), self.split(self.w_v, memory)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        self.weights = self.ways.hide(scores, mask).softmax(-1)  # [B, H, T, S]
        return self.w_o((self.weights @ v).transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    """Attention, in a decoder attention to the source, and a feed-forward network of ReLU, each with its norm."""

    def __init__(self, ways: Ways, cross: bool) -> None:
        super().__init__()
        self.norm_first = ways.norm_first
        self.attentions = nn.ModuleList(Attention(ways) for _ in range(1 + cross))
        self.w_1, self.w_2 = nn.Linear(ways.width, ways.hidden), nn.Linear(ways.hidden, ways.width)
        self.norms = nn.ModuleList(ways.norm(ways.width) for _ in range(2 + cross))

    def around(self, norm: nn.Module, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        return x + part(norm(x)) if self.norm_first else norm(x + part(x))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        x = self.around(self.norms[0], x, lambda h: self.attentions[0](h, h, mask))
        if memory is not None:
            x = self.around(self.norms[1], x, lambda h: self.attentions[1](h, memory, seen))
        return self.around(self.norms[-1], x, lambda h: self.w_2(self.w_1(h).relu()))


class EncoderDecoder(nn.Module):
    """Ids `[B, S]` and `[B, T]` with their masks to logits `[B, T, V]`."""

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self.ways = ways
        self.source, self.target = (nn.Embedding(ways.vocabulary, ways.width) for _ in range(2))
        self.encoder = nn.ModuleList(Layer(ways, cross=False) for _ in range(ways.layers))
        self.decoder = nn.ModuleList(Layer(ways, cross=True) for _ in range(ways.layers))
        ends = (ways.norm(ways.width) if ways.final_norm else nn.Identity() for _ in range(2))
        self.encoder_norm, self.decoder_norm = ends
        self.output = nn.Linear(ways.width, ways.vocabulary)

    def embed(self, tokens: nn.Embedding, ids: Tensor) -> Tensor:
        x = tokens(ids) * (math.sqrt(self.ways.width) if self.ways.scale else 1.0)
        # Rounded to fp32, as a buffer of a model that was in fp32 is.
        return x + self.ways.positions(ids.shape[1], self.ways.width).float().to(x.dtype)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor, target_mask: Tensor) -> Tensor:
        memory = self.embed(self.source, source)
        for layer in self.encoder:
            memory = layer(memory, source_mask)
        memory = self.encoder_norm(memory)
        x = self.embed(self.target, target)
        for layer in self.decoder:
            x = layer(x, target_mask, memory, source_mask)
        return self.output(self.decoder_norm(x))

    def maps(self, stack: nn.ModuleList, which: int = 0) -> Tensor:
        """The weights of the last call, `[layers, B, H, T, S]`."""
        return torch.stack([layer.attentions[which].weights for layer in stack])


def drawn(model: nn.Module, seed: int = 0) -> nn.Module:
    """A model in fp64 and evaluation mode, every parameter of which is random, so that swapped ones show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.double().parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            vector = parameter.dim() == 1
            parameter.copy_(1 + 0.3 * values if vector else values / math.sqrt(parameter.shape[1]))
    return model.eval()


def sentences() -> tuple[Tensor, Tensor]:
    """Return padded ids of two pairs: source with eos `[B, S]`, and target with bos `[B, T]`."""
    batch = random_batch([(6, 3), (2, 5)], packed=False)
    return batch.source, batch.target_in
