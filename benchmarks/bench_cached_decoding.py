"""A decoder of torch.nn as it is, against the same one converted, with a cache: 512 tokens, d512, 2 layers, fp32.

torch.nn.TransformerDecoder has no cache: for every token the whole prefix goes through it with a causal mask. Both have
the same parameters, read the same tokens beside a memory of 25 positions, and must give the same outputs. torch.nn is
timed at 16 prefixes, in the middle of 16 equal parts of the text, and compared by the token: its time a token grows
with the prefix almost linearly, so these cost a 32nd of all (the midpoint rule). On a GPU fastformer's steps are
replayed as CUDA graphs.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from benchmarks.harness.race import Contender, Race
from fastformer.host.cuda_graphs import ReplayedStep, recorder

TOKENS, QUICK_TOKENS, TINY_TOKENS, SOURCES, TIMED = 512, 128, 16, 25, 16


@pytest.mark.parametrize(
    ("size", "batch", "goal"),
    [
        pytest.param("quick", 1, None, marks=pytest.mark.cpu),
        ("usual", 1, 14.0),
        ("usual", 32, 37.0),
    ],
)
def bench_cached_decoding(race: Race, size: str, batch: int, goal: float | None) -> None:
    d_model = 32 if race.tiny else 128 if size == "quick" else 512
    length = TINY_TOKENS if race.tiny else QUICK_TOKENS if size == "quick" else TOKENS
    timed = range(length // TIMED // 2, length, length // TIMED)
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(d_model, d_model // 32, 4 * d_model, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2).to(race.device).eval()
    converted: Any = copy.deepcopy(decoder)
    fastformer.convert(converted)
    x = torch.randn(batch, length, d_model, device=race.device)
    memory = torch.randn(batch, SOURCES, d_model, device=race.device)

    @torch.inference_mode()
    def read() -> Tensor:
        graphs = recorder(race.device, keeps_memory=True)
        cache = converted.new_cache(memory, capacity=None if graphs is None else length)
        token = torch.empty_like(x[:, :1])
        step = ReplayedStep(graphs, converted, lambda: converted.step(token, cache), "decoding")
        outputs = []
        for each in torch.split(x, 1, 1):
            token.copy_(each)
            outputs.append(step().clone())
        return torch.cat(outputs, 1)

    @torch.inference_mode()
    def prefixes(ends: range) -> Tensor:
        masks = (nn.Transformer.generate_square_subsequent_mask(t + 1, race.device) for t in ends)
        return torch.cat([decoder(x[:, : t + 1], memory, mask)[:, -1:] for t, mask in zip(ends, masks, strict=True)], 1)

    outputs = read()
    with race.competitor():
        mask = nn.Transformer.generate_square_subsequent_mask(length, race.device)
        race.gate("outputs", outputs, decoder(x, memory, mask).detach(), 1e-4)
        race.gate("outputs of prefixes", outputs[:, timed.start :: timed.step], prefixes(timed), 1e-4)
    race(
        f"{length} tokens one by one, batch {batch}, d{d_model} 2 layers",
        Contender("fastformer", read, batch * length),
        Contender(f"torch.nn, whole prefix each token ({TIMED} timed)", lambda: prefixes(timed), batch * len(timed)),
        rounds=3,
        goal=goal,
    )
