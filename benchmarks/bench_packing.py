"""torch.nn's models with padding masks, as their users run them, against the same models after `fastformer.convert`.

Only the line `fastformer.convert(model)` differs: modules, parameters, padded batches and masks are the same. A
training step is forward and backward with dropout 0.1; "inference" is under no_grad in evaluation mode. Speeds are real
positions a second. Shares of padding: 55 % and 6.5 %, what random and bucketed batches of Multi30k en-de have; the
encoder alone gets 32 sequences of up to 64 (d512, 6 layers) with those shares. In inference torch's post-norm encoder
skips padding too (batch first, no other mask), so there is little left to gain: counted in matrix products, at most
1.0x for the encoder and 1.7x for nn.Transformer at 55 %. "quick" is an encoder of 2 layers, d256.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import fastformer
from benchmarks.harness.lengths import typical_batch
from benchmarks.harness.race import Contender, Race, flat_gradients

WIDTH, LAYERS, SEQUENCES, LONGEST = 512, 6, 32, 64  # of the encoder
TINY_WIDTH, TINY_LONGEST = 64, 12
HEAD = 64  # width of a head; feed-forward layers are 4 times as wide as the model
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # bf16: by autocast
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the output at real positions
# Rounding decides on which side of ReLU's kink one activation in some millions falls; each time, one of some thousand
# tokens has another gradient. Against fp64 (nn.Transformer d256 3+3, two seeds) torch's gradients are off by 2e-4 and
# 5e-7, ours by 7e-4 and 1e-4.
GRADIENT_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class PaddedCall:
    """A padded batch for a model: what it is called with, and which positions of its output are real."""

    call: Callable[[nn.Module], Tensor]
    real: Tensor  # bool [B, T]
    share: float

    @property
    def tokens(self) -> int:
        return int(self.real.sum())


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of its own encoder: that its nested-tensor path is off, or that it is a prototype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested.?tensor.*")
        yield


def _lengths(share: float, longest: int) -> Tensor:
    """Lengths of which `share` of `[SEQUENCES, longest]` is padding: one is the longest, the others spread evenly."""
    lengths = torch.full((SEQUENCES,), longest)
    mean = ((1 - share) * SEQUENCES * longest - longest) / (SEQUENCES - 1)
    spread = min(longest - mean, mean - 1)
    lengths[1:] = torch.linspace(mean - spread, mean + spread, SEQUENCES - 1).round().long()
    return lengths


def _encoder_call(share: float, width: int, longest: int, device: torch.device) -> PaddedCall:
    hidden = (torch.arange(longest) >= _lengths(share, longest)[:, None]).to(device)
    x = torch.randn(SEQUENCES, longest, width, device=device)
    return PaddedCall(lambda m: m(x, src_key_padding_mask=hidden), ~hidden, float(hidden.float().mean()))


def _transformer_call(batches: str, width: int, device: torch.device) -> PaddedCall:
    batch, _, _ = typical_batch(batches)
    hidden, sides = [], []
    for lengths in (batch.source_lengths, batch.target_lengths):
        steps = torch.arange(int(lengths.max()))
        hidden.append((steps >= lengths[:, None]).to(device))
        sides.append(torch.randn(len(lengths), len(steps), width, device=device))
    T = sides[1].shape[1]
    ahead = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)

    def call(model: nn.Module) -> Tensor:
        out: Tensor = model(
            sides[0],
            sides[1],
            tgt_mask=ahead,
            src_key_padding_mask=hidden[0],
            tgt_key_padding_mask=hidden[1],
            memory_key_padding_mask=hidden[0],
            tgt_is_causal=True,
        )
        return out

    return PaddedCall(call, ~hidden[1], float(torch.cat([x.flatten() for x in hidden]).float().mean()))


def _race(
    race: Race,
    case: str,
    theirs: nn.Module,
    padded: PaddedCall,
    mode: str,
    dtype: torch.dtype,
    goal: float | None,
    rounds: int,
) -> None:
    """Convert a copy of their model, compare outputs and gradients, then time both."""
    if dtype == torch.bfloat16 and race.device.type == "cpu" and not race.tiny:
        pytest.skip("bf16 at this size takes minutes on a CPU without instructions for it")
    ours = copy.deepcopy(theirs)
    report = fastformer.convert(ours)
    assert not report.padded, str(report)

    def forward(model: nn.Module) -> Tensor:
        with torch.autocast(race.device.type, dtype, enabled=dtype != torch.float32):
            return padded.call(model)

    with torch.no_grad():
        direction = torch.randn_like(forward(ours))
    direction = direction * padded.real[..., None] / padded.tokens

    def step(model: nn.Module) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = (forward(model) * direction).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    trains, infer = mode == "training step", torch.no_grad()(forward)
    run = step if trains else infer
    for model in (ours, theirs):
        model.eval()
    output = infer(ours)[padded.real]
    with race.competitor():
        race.gate("output", output, infer(theirs)[padded.real], TOLERANCE[dtype])
    if trains:
        step(ours)
        with race.competitor():
            step(theirs)
            a, b = (flat_gradients(model.parameters()) for model in (ours, theirs))
            race.gate("gradients", a, b, GRADIENT_TOLERANCE[dtype])
    race.note(padding_share=padded.share)
    race(
        f"{case}, {mode}, {100 * padded.share:.1f} % padding{'' if dtype == torch.float32 else ', bf16'}",
        *(
            Contender(
                name,
                partial(run, model.train(trains)),
                padded.tokens,
                partial(forward, model) if trains else None,
                model.parameters(),
            )
            for name, model in (("fastformer.convert", ours), (f"torch.nn.{type(theirs).__name__}", theirs))
        ),
        rounds=rounds,
        goal=goal,
        dtype=dtype,
    )


@pytest.mark.parametrize("mode", ["training step", "inference"])
@pytest.mark.parametrize(("share", "goal"), [(0.55, 1.8), (0.065, 1.0)])
@pytest.mark.parametrize(
    ("size", "norm_first", "dtype"),
    [
        pytest.param("quick", True, "fp32", marks=pytest.mark.cpu),
        ("usual", True, "fp32"),
        ("full", False, "fp32"),
        ("full", True, "bf16"),
    ],
    ids=["quick-pre", "usual-pre", "full-post", "full-pre-bf16"],
)
def bench_encoder(race: Race, size: str, norm_first: bool, dtype: str, share: float, goal: float, mode: str) -> None:
    width, layers = (TINY_WIDTH, 1) if race.tiny else (256, 2) if size == "quick" else (WIDTH, LAYERS)
    longest = TINY_LONGEST if race.tiny else LONGEST
    with _quiet():
        heads, hidden = width // HEAD, 4 * width
        layer = nn.TransformerEncoderLayer(width, heads, hidden, 0.1, batch_first=True, norm_first=norm_first)
        theirs = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width) if norm_first else None).to(race.device)
        padded = _encoder_call(share, width, longest, race.device)
        case = f"TransformerEncoder d{width} x{layers}, {'pre' if norm_first else 'post'}-norm"
        rounds = 5 if mode == "inference" else 3
        _race(race, case, theirs, padded, mode, DTYPES[dtype], None if size == "quick" else goal, rounds)


@pytest.mark.parametrize(("size", "dtype"), [("usual", "fp32"), ("full", "fp32"), ("full", "bf16")])
@pytest.mark.parametrize(
    ("mode", "norm_first"), [("training step", False), ("inference", False), ("inference", True)], ids=str
)
@pytest.mark.parametrize(("batches", "goal"), [("random", 1.9), ("bucketed", 1.0)])
def bench_transformer(
    race: Race, batches: str, goal: float, mode: str, norm_first: bool, size: Literal["usual", "full"], dtype: str
) -> None:
    width, layers = (TINY_WIDTH, 1) if race.tiny else (256, 3) if size == "usual" else (WIDTH, LAYERS)
    settings = {"dropout": 0.1, "batch_first": True, "norm_first": norm_first}
    with _quiet():
        theirs = nn.Transformer(width, width // HEAD, layers, layers, 4 * width, **settings).to(race.device)  # type: ignore[arg-type]
        padded = _transformer_call(batches, width, race.device)
        case = f"Transformer d{width} {layers}+{layers}, {'pre' if norm_first else 'post'}-norm, {batches} batches"
        rounds = (5 if mode == "inference" else 3) if size == "usual" else 2
        _race(race, case, theirs, padded, mode, DTYPES[dtype], goal, rounds)
