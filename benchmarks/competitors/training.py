"""Compare one training step of the translation model with competitors: loss, gradients and AdamW."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.competitors.known import compiled, require
from benchmarks.competitors.tutorials import FixedLengthTranslation, TorchTranslation
from benchmarks.harness.lengths import VOCABULARY
from benchmarks.harness.race import Contender, Race, flat_gradients
from fastformer.apps.text import Batch, EncodedPairs, collate
from fastformer.apps.train import Processes, TrainConfig
from fastformer.apps.train.graphs import new_update
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss

SMOOTHING, LEARNING_RATE = 0.1, 1e-4
# bf16: matrix products round to 4e-3, which averages out over thousands of tokens.
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
# Against fp64, where both agree to 3e-14, the gradients of fastformer are off by 5e-5 and torch's by 7e-5 (d256, random
# batch): rounding decides on which side of ReLU's kink some activations fall.
GRADIENT_TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 5e-2}
NAMES = {
    "torch.nn": "torch.nn.Transformer",
    "torch.nn-compile": "torch.compile of torch.nn.Transformer",
    "tutorial": "T1, fixed length 200",
    "no-graphs": "fastformer without them",
}
# By size; in the benchmarks of decoding and scaling, too.
CONFIGS = {
    "full": (FULL := TranslationConfig(VOCABULARY, VOCABULARY)),
    "usual": replace(FULL, d_model=256, heads=4, encoder_layers=3, decoder_layers=3, feed_forward=1024),
    "quick": replace(FULL, d_model=128, heads=2, encoder_layers=2, decoder_layers=2, feed_forward=512),
}
TINY = replace(FULL, d_model=32, heads=2, encoder_layers=1, decoder_layers=1, feed_forward=64)
_GRAPH_BELOW = 0.1  # seconds; below some 4,000 tokens the host is slower than the GPU on both sides

Loss = Callable[[], Tensor]


def training_step(model: nn.Module, loss: Loss, batch: Batch) -> Callable[[], None]:
    """Return a function that computes the gradients of the mean loss and makes a step of AdamW."""
    # Capturable: the step count is a tensor on the GPU.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=batch.source.is_cuda)

    def step() -> None:
        optimizer.zero_grad()
        (loss() / batch.tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def race_training(
    race: Race,
    case: str,
    config: TranslationConfig,
    pairs: EncodedPairs,
    *,
    competitor: str = "torch.nn",
    competitor_pairs: EncodedPairs | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> None:
    """Compare a step on packed pairs with a competitor's on the same pairs, padded; by the target token.

    `competitor_pairs` are fewer pairs for a competitor that would take minutes with all. bf16 is by autocast.
    """
    require(competitor, race.device)
    packed = collate(pairs, packed=True).to(race.device)
    shared = pairs if competitor_pairs is None else competitor_pairs
    shared_packed, padded = (collate(shared, packed=form).to(race.device) for form in (True, False))
    model = TranslationModel(config).to(race.device)
    longest = max(padded.source.shape[1], padded.target_in.shape[1])
    other: TorchTranslation | FixedLengthTranslation = (
        FixedLengthTranslation(model) if competitor == "tutorial" else TorchTranslation(model, longest)
    ).to(race.device)
    other_loss = compiled(other.loss) if competitor == "torch.nn-compile" else other.loss

    def loss_of(net: nn.Module, batch: Batch) -> Loss:
        function = partial(translation_loss, model) if net is model else other_loss
        autocast = torch.autocast(race.device.type, dtype, enabled=dtype != torch.float32)
        return autocast(lambda: function(batch, SMOOTHING))

    _compare_losses(race, (model, loss_of(model, shared_packed)), (other, loss_of(other, padded)), dtype)
    sides = []
    for name, net, batch in (("fastformer", model, packed), (NAMES[competitor], other, padded)):
        loss = loss_of(net, batch)
        step = training_step(net, loss, batch)
        if race.watch.on_gpu and race.fault is None and competitor_pairs is None:
            with nullcontext() if net is model else race.competitor():
                step()  # allocates AdamW's moments, and what compilers need
                net.zero_grad()  # the peak memory of a step includes its gradients
        counted = loss if competitor_pairs is None else None
        sides.append(Contender(name, step, batch.tokens, counted, net.parameters()))
    race(case, *sides, dtype=dtype, graph_below=_GRAPH_BELOW, **fields)


def _compare_losses(
    race: Race, side: tuple[nn.Module, Loss], other_side: tuple[nn.Module, Loss], dtype: torch.dtype
) -> None:
    """Compare the losses without dropout, and the gradients of the parameters with the same name."""
    (model, _), (other, _) = side, other_side
    losses = gated_losses(race, side, other_side)
    if race.fault is not None:
        return
    race.gate("loss", losses[0], losses[1], LOSS_TOLERANCE[dtype])
    if isinstance(other, TorchTranslation):
        expected = dict(other.transformer.named_parameters())
        named = model.named_parameters()
        pairs: list[tuple[Tensor, Tensor]] = [(p, expected[name]) for name, p in named if name in expected]
        pairs.append((model.get_parameter("output.weight"), other.embeddings.target.weight))
        a, b = (flat_gradients(each) for each in zip(*pairs, strict=True))
        race.gate("gradients", a, b, GRADIENT_TOLERANCE[dtype])


def gated_losses(race: Race, *sides: tuple[nn.Module, Loss]) -> list[Tensor]:
    """Return the losses of both sides without dropout, fastformer's first; the parameters then have gradients."""
    losses: list[Tensor] = []
    for model, loss in sides:
        model.eval()
        with race.competitor() if losses else nullcontext():
            value = loss()
            value.backward()  # type: ignore[no-untyped-call]
            losses.append(value.detach())
        model.train()
    return losses


def race_graphs(
    race: Race,
    case: str,
    config: TranslationConfig,
    batches: Sequence[EncodedPairs],
    *,
    competitor: str,
    dtype: torch.dtype,
    **fields: Any,
) -> None:
    """Compare the trainer's steps from CUDA graphs with a competitor's on the same batches, which start on the CPU.

    A call makes a step on each batch. "no-graphs" are the trainer's steps without graphs. bf16 is by autocast.
    """
    model = TranslationModel(config).to(race.device)
    packed, padded = ([collate(pairs, packed=form) for pairs in batches] for form in (True, False))
    twin = copy.deepcopy(model)
    _compare_graphs(race, model, batches[0], dtype)
    graphed = _steps(_update(model, dtype, graphs=True), packed)
    if competitor == "no-graphs":
        steps = _steps(_update(twin, dtype, graphs=False), packed)
    else:
        longest = max(max(batch.source.shape[1], batch.target_in.shape[1]) for batch in padded)
        steps = _torch_steps(TorchTranslation(twin, longest).to(race.device), padded, dtype)
    for _ in range(3):  # a shape is captured when it comes for the second time
        graphed()
    tokens = sum(batch.tokens for batch in packed)
    sides = Contender("fastformer", graphed, tokens), Contender(NAMES[competitor], steps, tokens)
    race(case, *sides, dtype=dtype, **fields)


def _update(model: TranslationModel, dtype: torch.dtype, graphs: bool) -> Update:
    precision = "fp32" if dtype == torch.float32 else "bf16"
    settings = TrainConfig(steps=1, clip_norm=0.0, precision=precision, cuda_graphs=graphs)
    return new_update(model, partial(translation_loss, label_smoothing=SMOOTHING), settings, Processes())


def _steps(update: Update, batches: Sequence[Batch]) -> Callable[[], None]:
    def steps() -> None:
        for batch in batches:
            _, norm, _ = update.gradients([batch])
            update.apply(norm, LEARNING_RATE)

    return steps


def _torch_steps(model: TorchTranslation, batches: Sequence[Batch], dtype: torch.dtype) -> Callable[[], None]:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    loss = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)(model.loss)

    def steps() -> None:
        for batch in batches:
            optimizer.zero_grad()
            (loss(batch.to(device, non_blocking=True), SMOOTHING) / batch.tokens).backward()
            optimizer.step()

    return steps


def _compare_graphs(race: Race, model: TranslationModel, pairs: EncodedPairs, dtype: torch.dtype) -> None:
    """Compare losses and gradient norms of replays and of eager steps without dropout, also of a new batch."""
    model.eval()
    backwards = pairs.take(np.arange(len(pairs))[::-1])
    results: list[list[Tensor]] = []
    for graphs in (True, False):
        update = _update(model, dtype, graphs)
        results.append([])
        for batch in [collate(each) for each in (pairs, pairs, backwards, pairs)]:
            loss, norm, _ = update.gradients([batch])
            results[-1] += [loss.clone(), norm.clone()]
            update.apply(norm, 0.0)  # changes nothing
    for index, (value, expected) in enumerate(zip(*results, strict=True)):
        is_loss = index % 2 == 0
        tolerance = (LOSS_TOLERANCE if is_loss else GRADIENT_TOLERANCE)[dtype]
        race.gate("loss" if is_loss else "norm of the gradients", value, expected, tolerance)
    model.zero_grad()
    model.train()
