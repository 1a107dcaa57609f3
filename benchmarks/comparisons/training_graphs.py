"""The trainer's steps from CUDA graphs against steps without them; gates first, then time."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.comparisons.training import GRADIENT_TOLERANCE, LOSS_TOLERANCE, NAMES, SMOOTHING
from benchmarks.competitors.tutorials import TorchTranslation
from benchmarks.harness.race import Contender, Race
from fastformer.apps.text import Batch, EncodedPairs, collate
from fastformer.apps.train import Processes, TrainConfig
from fastformer.apps.train.graphs import new_update
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss

_RATE = 1e-4


def race_graphs(
    race: Race,
    case: str,
    config: TranslationConfig,
    batches: Sequence[EncodedPairs],
    *,
    competitor: str,
    dtype: torch.dtype,
    rounds: int,
    goal: float | None = None,
) -> None:
    """Compare the trainer's steps from CUDA graphs with others on the same batches, which begin on the CPU.

    Args:
        race: of this case.
        case: its name.
        config: of the model; the competitor has equal parameters.
        batches: a call makes a step on each.
        competitor: "no-graphs", the trainer's steps without them; or "torch.nn".
        dtype: fp32, or bf16 by autocast on both sides.
        rounds: to time.
        goal: of the ratio.
    """
    model = TranslationModel(config).to(race.device)
    packed, padded = ([collate(pairs, packed=form) for pairs in batches] for form in (True, False))
    twin = copy.deepcopy(model)
    _gate(race, model, batches[0], dtype)
    ours = _steps(_update(model, dtype, graphs=True), packed)
    if competitor == "no-graphs":
        name, theirs = "fastformer without them", _steps(_update(twin, dtype, graphs=False), packed)
    else:
        longest = max(max(batch.source.shape[1], batch.target_in.shape[1]) for batch in padded)
        name = NAMES[competitor]
        theirs = _torch_steps(TorchTranslation(twin, longest).to(race.device), padded, dtype)
    for _ in range(3):  # each shape is captured when it comes for the second time
        ours()
    tokens = sum(batch.tokens for batch in packed)
    race(
        case,
        Contender("fastformer", ours, tokens),
        Contender(name, theirs, tokens),
        rounds=rounds,
        goal=goal,
        dtype=dtype,
    )


def _update(model: TranslationModel, dtype: torch.dtype, graphs: bool) -> Update:
    precision = "fp32" if dtype == torch.float32 else "bf16"
    settings = TrainConfig(steps=1, clip_norm=0.0, precision=precision, cuda_graphs=graphs)
    return new_update(model, partial(translation_loss, label_smoothing=SMOOTHING), settings, Processes())


def _steps(update: Update, batches: Sequence[Batch]) -> Callable[[], None]:
    def steps() -> None:
        for batch in batches:
            _, norm, _ = update.gradients([batch])
            update.apply(norm, _RATE)

    return steps


def _torch_steps(model: TorchTranslation, batches: Sequence[Batch], dtype: torch.dtype) -> Callable[[], None]:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)

    def steps() -> None:
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = model.loss(batch.to(device, non_blocking=True), SMOOTHING)
            (loss / batch.tokens).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return steps


def _gate(race: Race, model: TranslationModel, pairs: EncodedPairs, dtype: torch.dtype) -> None:
    """Without dropout, repetitions have the losses and norms of eager steps, also of a batch that was not captured."""
    model.eval()
    backwards = pairs.take(np.arange(len(pairs))[::-1])
    batches = [collate(each) for each in (pairs, pairs, backwards, pairs)]
    found, expected = (_losses_and_norms(_update(model, dtype, graphs), batches) for graphs in (True, False))
    for (loss, norm), (eager_loss, eager_norm) in zip(found, expected, strict=True):
        race.gate("loss", loss, eager_loss, LOSS_TOLERANCE[dtype])
        race.gate("norm of the gradients", norm, eager_norm, GRADIENT_TOLERANCE[dtype])
    model.zero_grad()
    model.train()


def _losses_and_norms(update: Update, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for batch in batches:
        loss, norm, _ = update.gradients([batch])
        found.append((loss.clone(), norm.clone()))
        update.apply(norm, 0.0)  # changes nothing
    return found
