"""torch.nn's models with padding masks, as their users run them, against the same models after `fastformer.convert`.

A training step is forward and backward with dropout 0.1; "inference" is under no_grad in evaluation mode. Speeds are
real positions a second. Shares of padding: 55 % and 6.5 %, those of random and bucketed batches of Multi30k en-de; the
encoder alone gets 32 sequences of up to 64 (d512, 6 layers). In inference torch's post-norm encoder skips padding too:
counted in matrix products, at most 1.0x is possible for the encoder and 1.7x for nn.Transformer at 55 %. "quick" is an
encoder of 2 layers, d256. "compiled": ours after `compile` into CUDA graphs, on a GPU.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import fastformer
from benchmarks.competitors.models import decoder_masks, padding_of, race_models
from benchmarks.harness.lengths import typical_batch, uniform_lengths
from benchmarks.harness.race import Race

WIDTH, LAYERS, SEQUENCES, LONGEST = 512, 6, 32, 64  # of the encoder
TINY_WIDTH, TINY_LONGEST = 64, 12
HEAD = 64  # width of a head; feed-forward layers are 4 times as wide as the model
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # bf16: by autocast
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the output at real positions
# Rounding decides on which side of ReLU's kink one activation in some millions falls; each time, one of some thousand
# tokens has another gradient. Against fp64 (nn.Transformer d256 3+3, two seeds) torch's gradients are off by 2e-4 and
# 5e-7, fastformer's by 7e-4 and 1e-4.
GRADIENT_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 5e-2}


def _race(
    race: Race,
    case: str,
    original: nn.Module,
    call: Callable[[Any], Tensor],
    paddings: list[Tensor],
    mode: str,
    dtype: torch.dtype,
    compiles: bool = False,
    **fields: Any,
) -> None:
    """Convert a copy of a model of torch.nn, and compile the copy if `compiles`; the last padding is of the output."""
    if dtype == torch.bfloat16 and race.device.type == "cpu" and not race.tiny:
        pytest.skip("bf16 at this size takes minutes on a CPU without instructions for it")
    converted = copy.deepcopy(original)
    report = fastformer.convert(converted)
    assert not report.padded, str(report)
    if compiles:
        options: dict[str, str] = {"backend": "aot_eager"} if race.tiny else {"mode": "reduce-overhead"}
        converted.compile(buckets=True, **options)

    def forward(model: nn.Module) -> Tensor:
        with torch.autocast(race.device.type, dtype, enabled=dtype != torch.float32):
            return call(model)

    share = float(torch.cat([each.flatten() for each in paddings]).float().mean())
    race_models(
        race,
        f"{case}, {mode}, {100 * share:.1f} % padding{'' if dtype == torch.float32 else ', bf16'}",
        {"fastformer.convert": converted, f"torch.nn.{type(original).__name__}": original},
        forward,
        ~paddings[-1],
        trains=mode == "training step",
        tolerance=TOLERANCE[dtype],
        gradient_tolerance=GRADIENT_TOLERANCE[dtype],
        dtype=dtype,
        **fields,
    )


@pytest.mark.parametrize("mode", ["training step", "inference"])
@pytest.mark.parametrize(("share", "goal"), [(0.55, 1.8), (0.065, 1.0)])
@pytest.mark.parametrize(
    ("size", "norm_first", "dtype", "compiles"),
    [
        pytest.param("quick", True, "fp32", False, marks=pytest.mark.cpu),
        ("usual", True, "fp32", False),
        ("full", False, "fp32", False),
        ("full", True, "bf16", False),
        pytest.param("full", True, "bf16", True, marks=pytest.mark.gpu),
    ],
    ids=["quick-pre", "usual-pre", "full-post", "full-pre-bf16", "full-pre-bf16-compiled"],
)
def bench_encoder(
    race: Race, size: str, norm_first: bool, dtype: str, compiles: bool, share: float, goal: float, mode: str
) -> None:
    width, layers = (TINY_WIDTH, 1) if race.tiny else (256, 2) if size == "quick" else (WIDTH, LAYERS)
    longest = TINY_LONGEST if race.tiny else LONGEST
    layer = nn.TransformerEncoderLayer(width, width // HEAD, 4 * width, 0.1, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width) if norm_first else None).to(race.device)
    padding = padding_of(torch.from_numpy(uniform_lengths(SEQUENCES, longest, share)), race.device)
    x = torch.randn(SEQUENCES, longest, width, device=race.device)
    _race(
        race,
        f"TransformerEncoder d{width} x{layers}, {'pre' if norm_first else 'post'}-norm{', compiled' * compiles}",
        model,
        lambda net: net(x, src_key_padding_mask=padding),
        [padding],
        mode,
        DTYPES[dtype],
        compiles,
        rounds=5 if mode == "inference" else 3,
        goal=None if size == "quick" else goal,
    )


@pytest.mark.parametrize(("size", "dtype"), [("usual", "fp32"), ("full", "fp32"), ("full", "bf16")])
@pytest.mark.parametrize(
    ("mode", "norm_first"), [("training step", False), ("inference", False), ("inference", True)], ids=str
)
@pytest.mark.parametrize(("batches", "goal"), [("random", 1.9), ("bucketed", 1.0)])
def bench_transformer(
    race: Race, batches: str, goal: float, mode: str, norm_first: bool, size: Literal["usual", "full"], dtype: str
) -> None:
    width, layers = (TINY_WIDTH, 1) if race.tiny else (256, 3) if size == "usual" else (WIDTH, LAYERS)
    settings: dict[str, Any] = {"dropout": 0.1, "batch_first": True, "norm_first": norm_first}
    model = nn.Transformer(width, width // HEAD, layers, layers, 4 * width, **settings).to(race.device)
    batch = typical_batch(batches)
    paddings = [padding_of(lengths, race.device) for lengths in (batch.source_lengths, batch.target_lengths)]
    source, target = (torch.randn(*each.shape, width, device=race.device) for each in paddings)
    masks = {"src_key_padding_mask": paddings[0], **decoder_masks(target, *paddings)}
    _race(
        race,
        f"Transformer d{width} {layers}+{layers}, {'pre' if norm_first else 'post'}-norm, {batches} batches",
        model,
        lambda net: net(source, target, **masks),
        paddings,
        mode,
        DTYPES[dtype],
        rounds=2 if size == "full" else 5 if mode == "inference" else 3,
        goal=goal,
    )
