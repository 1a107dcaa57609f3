"""Compare one training step of the translation model with competitors: loss, gradients and AdamW."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.competitors.known import compiled, require
from benchmarks.competitors.tutorials import FixedLengthTranslation, TorchTranslation
from benchmarks.harness.clock import Work
from benchmarks.harness.race import Contender, Race, flat_gradients
from fastformer.apps.text import Batch, EncodedPairs, collate
from fastformer.apps.train import Processes, TrainConfig
from fastformer.apps.train.graphs import new_update
from fastformer.apps.train.update import Update
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss

SMOOTHING, LEARNING_RATE = 0.1, 1e-4
# bf16: matrix products round to 4e-3, which averages out over thousands of tokens.
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
# Against fp64, where both agree to 3e-14, the gradients of ours are off by 5e-5 and torch's by 7e-5 (d256, random
# batch): rounding decides on which side of ReLU's kink some activations fall.
GRADIENT_TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 5e-2}
NAMES = {
    "torch.nn": "torch.nn.Transformer",
    "torch.nn-compile": "torch.compile of torch.nn.Transformer",
    "tutorial": "T1, fixed length 200",
    "no-graphs": "fastformer without them",
}
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
    rounds: int,
    goal: float | None = None,
) -> None:
    """Compare a step on packed pairs with a competitor's on the same pairs, padded; by the target token.

    Args:
        race: of this case; skipped if the machine lacks the competitor.
        case: its name.
        config: of the model; the competitor gets its parameters.
        pairs: the batch.
        competitor: "torch.nn", "torch.nn-compile" or "tutorial".
        competitor_pairs: fewer pairs for a competitor that would take minutes with all.
        dtype: fp32, or bf16 by autocast on both sides.
        rounds: to time.
        goal: of the ratio.
    """
    require(competitor, race.device)
    packed = collate(pairs, packed=True).to(race.device)
    shared = pairs if competitor_pairs is None else competitor_pairs
    shared_packed, padded = (collate(shared, packed=form).to(race.device) for form in (True, False))
    whole = collate(pairs, packed=False)
    share = 1 - (packed.source.numel() + packed.target_in.numel()) / (whole.source.numel() + whole.target_in.numel())
    model = TranslationModel(config).to(race.device)
    longest = max(padded.source.shape[1], padded.target_in.shape[1])
    theirs: TorchTranslation | FixedLengthTranslation = (
        FixedLengthTranslation(model) if competitor == "tutorial" else TorchTranslation(model, longest)
    ).to(race.device)
    their_loss = compiled(theirs.loss) if competitor == "torch.nn-compile" else theirs.loss

    def loss_of(net: nn.Module, batch: Batch) -> Loss:
        def loss() -> Tensor:
            with torch.autocast(race.device.type, dtype, enabled=dtype != torch.float32):
                if net is model:
                    return translation_loss(model, batch, SMOOTHING)
                return their_loss(batch, SMOOTHING)

        return loss

    _compare_losses(race, (model, loss_of(model, shared_packed)), (theirs, loss_of(theirs, padded)), dtype)
    sides = []
    for name, net, batch in (("fastformer", model, packed), (NAMES[competitor], theirs, padded)):
        loss = loss_of(net, batch)
        step = training_step(net, loss, batch)
        if race.watch.on_gpu and race.fault is None and competitor_pairs is None:
            with nullcontext() if net is model else race.competitor():
                step()  # allocates AdamW's moments, and what compilers need
                net.zero_grad()  # the peak memory of a step includes its gradients
        counted = loss if competitor_pairs is None else None
        sides.append(Contender(name, step, batch.tokens, counted, net.parameters()))
    race.note(padding_share=share)
    race(
        case,
        *sides,
        rounds=rounds,
        goal=goal,
        work=step_work(model, packed),
        dtype=dtype,
        graph_below=_GRAPH_BELOW,
    )


def step_work(model: TranslationModel, batch: Batch) -> Work:
    """Return the least work of a step on a packed batch.

    Operations of the matrix products of real tokens, and of attention's real pairs, once forward and twice backward.
    Bytes: every parameter in fp32 is read forward and backward, its gradient written and read, and AdamW reads and
    writes it and its two moments: 10 passes. Activations are left out.
    """
    c = model.config
    d, f = c.d_model, c.feed_forward
    s, t = (lengths.double() for lengths in (batch.source_lengths, batch.target_lengths))
    S, T = float(s.sum()), float(t.sum())
    layer = 4 * d * d + 2 * d * f  # weights of self-attention and feed-forward
    products = c.encoder_layers * S * layer + c.decoder_layers * (T * (layer + 2 * d * d) + S * 2 * d * d)
    products += T * d * c.target_vocabulary
    pairs = c.encoder_layers * float((s * s).sum())
    pairs += c.decoder_layers * float((t * (t + 1) / 2 + s * t).sum())
    parameters = sum(p.numel() for p in model.parameters())
    return Work(3 * (2 * products + 4 * d * pairs), 10 * 4.0 * parameters)


def _compare_losses(
    race: Race, ours: tuple[nn.Module, Loss], theirs: tuple[nn.Module, Loss], dtype: torch.dtype
) -> None:
    """Compare the losses without dropout, and the gradients of the parameters with the same name."""
    losses = []
    for model, loss in (ours, theirs):
        model.eval()
        with race.competitor() if model is theirs[0] else nullcontext():
            value = loss()
            value.backward()  # type: ignore[no-untyped-call]
            losses.append(value)
        model.train()
    if race.fault is not None:
        return
    race.gate("loss", losses[0], losses[1], LOSS_TOLERANCE[dtype])
    other = theirs[0]
    if isinstance(other, TorchTranslation):
        expected = dict(other.transformer.named_parameters())
        named = ours[0].named_parameters()
        pairs: list[tuple[Tensor, Tensor]] = [(p, expected[name]) for name, p in named if name in expected]
        pairs.append((ours[0].get_parameter("output.weight"), other.embeddings.target.weight))
        a, b = (flat_gradients(side) for side in zip(*pairs, strict=True))
        race.gate("gradients", a, b, GRADIENT_TOLERANCE[dtype])


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
    """Compare the trainer's steps from CUDA graphs with a competitor's on the same batches, which start on the CPU.

    Args:
        race: of this case.
        case: its name.
        config: of the model; the competitor has equal parameters.
        batches: a call makes a step on each.
        competitor: "no-graphs", the trainer's steps without graphs; or "torch.nn".
        dtype: fp32, or bf16 by autocast on both sides.
        rounds: to time.
        goal: of the ratio.
    """
    model = TranslationModel(config).to(race.device)
    packed, padded = ([collate(pairs, packed=form) for pairs in batches] for form in (True, False))
    twin = copy.deepcopy(model)
    _compare_graphs(race, model, batches[0], dtype)
    ours = _steps(_update(model, dtype, graphs=True), packed)
    if competitor == "no-graphs":
        theirs = _steps(_update(twin, dtype, graphs=False), packed)
    else:
        longest = max(max(batch.source.shape[1], batch.target_in.shape[1]) for batch in padded)
        theirs = _torch_steps(TorchTranslation(twin, longest).to(race.device), padded, dtype)
    for _ in range(3):  # a shape is captured when it comes for the second time
        ours()
    tokens = sum(batch.tokens for batch in packed)
    sides = Contender("fastformer", ours, tokens), Contender(NAMES[competitor], theirs, tokens)
    race(case, *sides, rounds=rounds, goal=goal, dtype=dtype)


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

    def steps() -> None:
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = model.loss(batch.to(device, non_blocking=True), SMOOTHING)
            (loss / batch.tokens).backward()  # type: ignore[no-untyped-call]
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
