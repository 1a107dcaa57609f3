"""The drop-in modules against their torch.nn originals on the same padded input; the goal is to be never slower.

Masks as in translation: padding on the source, causal and padding on the target; lengths of Multi30k. "eval" is the
forward pass under no_grad, where torch has its fast path; "train" is forward and backward with dropout 0.1. This
compares the modules alone, both doing the work on padding; the gain from leaving it out is in bench_training_step.

On a CPU, `bench_one_sentence` has one sentence without padding, so short that a module's checks take a visible share,
and `bench_few_sentences` has four that are padded to 16 tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fastformer
from benchmarks.competitors.models import decoder_masks, padding_of, race_models
from benchmarks.harness.lengths import typical_batch
from benchmarks.harness.race import Race
from fastformer.nn.activations import gelu_tanh

WIDTH, HEADS, ROUNDS, SENTENCES = 512, 8, 9, 16
TOLERANCE = 1e-5  # fp32, a few hundred terms a sum


class Input(NamedTuple):
    """Activations `[B, S, D]`, `[B, T, D]` and torch's masks for them (True = ignore); None: nothing is padding."""

    source: Tensor
    target: Tensor
    source_padding: Tensor | None
    target_padding: Tensor | None

    @property
    def target_masks(self) -> dict[str, Any]:
        return decoder_masks(self.target, self.source_padding, self.target_padding)


def _input(device: torch.device) -> Input:
    batch = typical_batch("random")
    lengths = [each[:SENTENCES] for each in (batch.source_lengths, batch.target_lengths)]
    paddings = [padding_of(each, device) for each in lengths]
    source, target = (torch.randn(*padding.shape, WIDTH, device=device) for padding in paddings)
    return Input(source, target, *paddings)


def _attention(x: Input, module: Any, weights: bool) -> Tensor:
    return module(x.source, x.source, x.source, key_padding_mask=x.source_padding, need_weights=weights)[0]


_HEADS: dict[str, Any] = {"embed_dim": WIDTH, "num_heads": HEADS, "dropout": 0.1, "batch_first": True}
_LAYER: dict[str, Any] = {
    "d_model": WIDTH, "nhead": HEADS, "dropout": 0.1, "batch_first": True, "dim_feedforward": 2048
}  # fmt: skip
# Case -> class, its arguments, a call.
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Input, Any], Tensor]]] = {
    "LayerNorm": ("LayerNorm", {"normalized_shape": WIDTH}, lambda x, module: module(x.source)),
    "MultiheadAttention": ("MultiheadAttention", _HEADS, partial(_attention, weights=False)),
    "MultiheadAttention with weights": ("MultiheadAttention", _HEADS, partial(_attention, weights=True)),
    "TransformerEncoderLayer": (
        "TransformerEncoderLayer",
        _LAYER,
        lambda x, module: module(x.source, src_key_padding_mask=x.source_padding),
    ),
    "TransformerDecoderLayer": (
        "TransformerDecoderLayer",
        _LAYER,
        lambda x, module: module(x.target, x.source, **x.target_masks),
    ),
    "Transformer 2+2": (
        "Transformer",
        {**_LAYER, "num_encoder_layers": 2, "num_decoder_layers": 2},
        lambda x, module: module(x.source, x.target, src_key_padding_mask=x.source_padding, **x.target_masks),
    ),
}


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(
    ("size", "case"), [("quick" if case == "TransformerEncoderLayer" else "usual", case) for case in CASES]
)
def bench_module(race: Race, size: str, case: str, mode: str) -> None:
    _race(race, case, case, _input(race.device), mode, goal=0.95)


@pytest.mark.cpu
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("size", "case", "tokens"), [("usual", case, tokens) for case in CASES for tokens in (14, 64)])
def bench_one_sentence(race: Race, size: str, case: str, tokens: int, mode: str) -> None:
    source, target = torch.randn(2, 1, tokens, WIDTH)
    _race(race, f"{case}, {tokens} tokens", case, Input(source, target, None, None), mode, goal=0.97)


@pytest.mark.cpu
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("size", "case"), [("usual", case) for case in CASES if case != "LayerNorm"])
def bench_few_sentences(race: Race, size: str, case: str, mode: str) -> None:
    source, target = torch.randn(2, 4, 16, WIDTH)
    padding = padding_of(torch.tensor([16, 12, 9, 11]), race.device)
    _race(race, f"{case}, 4 x 16 tokens, padded", case, Input(source, target, padding, padding), mode, goal=0.95)


def _race(race: Race, label: str, case: str, x: Input, mode: str, goal: float) -> None:
    name, arguments, call = CASES[case]
    if name == "Transformer" and mode == "train":
        # Smooth: in several layers one rounding at ReLU's kink changes gradients by more than the tolerance.
        label, arguments = f"{label}, GELU by tanh", {**arguments, "activation": gelu_tanh}
    original = getattr(nn, name)(**arguments).to(race.device)
    module = getattr(fastformer, name)(**arguments).to(race.device)
    module.load_state_dict(original.state_dict())
    decodes = name in ("TransformerDecoderLayer", "Transformer")
    padding, like = (x.target_padding, x.target) if decodes else (x.source_padding, x.source)
    # torch's fast path has zeros at padding, its documented path has values
    real = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device) if padding is None else ~padding
    race_models(
        race,
        f"{label}, {mode}",
        {"fastformer": module, f"torch.nn.{name}": original},
        partial(call, x),
        real,
        trains=mode == "train",
        tolerance=TOLERANCE,
        gradient_tolerance=TOLERANCE,
        per_token=False,
        rounds=ROUNDS,
        goal=goal,
    )
