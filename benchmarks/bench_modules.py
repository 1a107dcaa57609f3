"""The drop-in modules against their torch.nn originals on the same padded input: never slower is the goal.

Masks as in translation: padding on the source, causal and padding on the target; lengths of Multi30k. "eval" is the
forward pass under no_grad, where torch has its fast path; "train" is forward and backward with dropout 0.1. This
compares the modules alone, both doing the work on padding; the gain from leaving it out is in bench_training_step.

`bench_one_sentence`, on a CPU: one sentence without padding, so short that what a module asks before it computes shows.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import fastformer
from benchmarks.harness.lengths import typical_batch
from benchmarks.harness.race import Contender, Race, flat_gradients

QUICK = "TransformerEncoderLayer"
WIDTH, HEADS, HIDDEN, ROUNDS = 512, 8, 2048, 9
SENTENCES = 16
TOLERANCE = 1e-5  # fp32, a few hundred terms a sum

Call = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Input:
    """Activations `[B, S, D]`, `[B, T, D]` and torch's masks for them (True = ignore); None: nothing is padding."""

    source: Tensor
    target: Tensor
    source_padding: Tensor | None
    target_padding: Tensor | None
    causal: Tensor


def _input(device: torch.device) -> Input:
    batch = typical_batch("random")[0]
    sides, paddings = [], []
    for lengths in (batch.source_lengths[:SENTENCES], batch.target_lengths[:SENTENCES]):
        steps = torch.arange(int(lengths.max()))
        paddings.append((steps >= lengths[:, None]).to(device))
        sides.append(torch.randn(SENTENCES, len(steps), WIDTH, device=device))
    T = sides[1].shape[1]
    return Input(
        sides[0], sides[1], paddings[0], paddings[1], torch.ones(T, T, dtype=torch.bool, device=device).triu(1)
    )


def _one_sentence(tokens: int) -> Input:
    source, target = torch.randn(2, 1, tokens, WIDTH)
    return Input(source, target, None, None, torch.ones(tokens, tokens, dtype=torch.bool).triu(1))


def _layer_norm(x: Input) -> Call:
    return lambda module: module(x.source)


def _attention(x: Input) -> Call:
    return lambda module: module(x.source, x.source, x.source, key_padding_mask=x.source_padding, need_weights=False)[0]


def _attention_with_weights(x: Input) -> Call:
    return lambda module: module(x.source, x.source, x.source, key_padding_mask=x.source_padding)[0]


def _encoder_layer(x: Input) -> Call:
    return lambda module: module(x.source, src_key_padding_mask=x.source_padding)


def _target_masks(x: Input) -> dict[str, Any]:
    return {
        "tgt_mask": x.causal, "tgt_is_causal": True, "tgt_key_padding_mask": x.target_padding,
        "memory_key_padding_mask": x.source_padding,
    }  # fmt: skip


def _decoder_layer(x: Input) -> Call:
    return lambda module: module(x.target, x.source, **_target_masks(x))


def _transformer(x: Input) -> Call:
    return lambda module: module(x.source, x.target, src_key_padding_mask=x.source_padding, **_target_masks(x))


_BOTH: dict[str, Any] = {"dropout": 0.1, "batch_first": True}
_LAYER: dict[str, Any] = {**_BOTH, "dim_feedforward": HIDDEN}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Input], Call]]] = {
    "LayerNorm": ("LayerNorm", {"normalized_shape": WIDTH}, _layer_norm),
    "MultiheadAttention": ("MultiheadAttention", {"embed_dim": WIDTH, "num_heads": HEADS, **_BOTH}, _attention),
    "MultiheadAttention with weights": (
        "MultiheadAttention",
        {"embed_dim": WIDTH, "num_heads": HEADS, **_BOTH},
        _attention_with_weights,
    ),
    "TransformerEncoderLayer": (
        "TransformerEncoderLayer",
        {"d_model": WIDTH, "nhead": HEADS, **_LAYER},
        _encoder_layer,
    ),
    "TransformerDecoderLayer": (
        "TransformerDecoderLayer",
        {"d_model": WIDTH, "nhead": HEADS, **_LAYER},
        _decoder_layer,
    ),
    "Transformer 2+2": (
        "Transformer",
        {"d_model": WIDTH, "nhead": HEADS, "num_encoder_layers": 2, "num_decoder_layers": 2, **_LAYER},
        _transformer,
    ),
}


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("size", "case"), [("quick" if case == QUICK else "usual", case) for case in CASES])
def bench_module(race: Race, size: str, case: str, mode: Literal["eval", "train"]) -> None:
    _compare(race, case, case, _input(race.device), mode, goal=0.95)


@pytest.mark.cpu
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("size", "case", "tokens"), [("usual", case, tokens) for case in CASES for tokens in (14, 64)])
def bench_one_sentence(race: Race, size: str, case: str, tokens: int, mode: Literal["eval", "train"]) -> None:
    _compare(race, f"{case}, {tokens} tokens", case, _one_sentence(tokens), mode, goal=0.97)


def _compare(race: Race, label: str, case: str, x: Input, mode: Literal["eval", "train"], goal: float) -> None:
    name, arguments, make = CASES[case]
    with warnings.catch_warnings():
        # torch warns of its own encoder: first that its nested-tensor path is off, later that it is a prototype.
        warnings.filterwarnings("ignore", message=".*nested.?tensor.*")
        theirs = getattr(nn, name)(**arguments).to(race.device)
        ours = getattr(fastformer, name)(**arguments).to(race.device)
        ours.load_state_dict(theirs.state_dict())
        call = make(x)
        decodes = name in ("TransformerDecoderLayer", "Transformer")
        padding, like = (x.target_padding, x.target) if decodes else (x.source_padding, x.source)
        token = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device) if padding is None else ~padding
        # torch's fast path has zeros at padding, its documented path has values
        direction = torch.randn_like(like) * token[..., None]

        def backward(module: nn.Module) -> Tensor:
            out = call(module)
            out.backward(direction)  # type: ignore[no-untyped-call]
            return out

        trains = mode == "train"
        run: Callable[[nn.Module], Tensor] = backward if trains else torch.no_grad()(call)
        output = run(ours.eval())[token]
        with race.competitor():
            race.gate("output", output, run(theirs.eval())[token], TOLERANCE)
        if trains and race.fault is None:
            a, b = (flat_gradients(module.parameters()) for module in (ours, theirs))
            race.gate("gradients", a, b, TOLERANCE)
        race(
            f"{label}, {mode}",
            *(
                Contender(side, partial(run, m.train(trains)), 1, partial(call, m) if trains else None, m.parameters())
                for side, m in (("fastformer", ours), (f"torch.nn.{name}", theirs))
            ),
            rounds=ROUNDS,
            goal=goal,
        )
