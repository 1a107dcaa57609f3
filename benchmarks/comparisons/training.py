"""One training step of the translation model on both sides: loss, gradients and AdamW; gates first, then time."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from benchmarks.competitors.known import compiled, require
from benchmarks.competitors.tutorials import FixedLengthTranslation, TorchTranslation
from benchmarks.harness.floors import Work
from benchmarks.harness.race import Contender, Memory, Race, flat_gradients
from fastformer.apps.text import Batch, EncodedPairs, collate
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss

SMOOTHING = 0.1
# bf16: matrix products round to 4e-3, which averages out over thousands of tokens.
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
# Against fp64, where both agree to 3e-14, the gradients of ours are off by 5e-5 and torch's by 7e-5 (d256, random
# batch): rounding decides on which side of ReLU's kink some activations fall.
GRADIENT_TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 5e-2}
NAMES = {
    "torch.nn": "torch.nn.Transformer",
    "torch.nn-compile": "torch.compile of torch.nn.Transformer",
    "tutorial": "T1, fixed length 200",
}

Loss = Callable[[], Tensor]


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
    at: Mapping[str, float] | None = None,
) -> None:
    """Compare a step on packed pairs with a competitor's on the same pairs, padded; by the real target token.

    Args:
        race: of this case; skipped with the reason where the machine does not have the competitor.
        case: its name.
        config: of the model; the competitor takes its parameters.
        pairs: the batch.
        competitor: "torch.nn", "torch.nn-compile" or "tutorial".
        competitor_pairs: what the competitor gets where all of `pairs` would take it minutes.
        dtype: fp32, or bf16 by autocast on both sides.
        rounds: to time.
        goal: of the ratio.
        at: axes of the scaling plots.
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

    def autocast() -> torch.autocast | nullcontext[None]:
        return nullcontext() if dtype == torch.float32 else torch.autocast(race.device.type, dtype)

    def loss_of(net: nn.Module, batch: Batch) -> Loss:
        def loss() -> Tensor:
            with autocast():
                if net is model:
                    return translation_loss(model, batch, SMOOTHING)
                return their_loss(batch, SMOOTHING)

        return loss

    _gate(race, (model, loss_of(model, shared_packed)), (theirs, loss_of(theirs, padded)), dtype)
    ours, other = loss_of(model, packed), loss_of(theirs, padded)
    steps = training_step(model, ours, packed), training_step(theirs, other, padded)
    memory = {}
    if competitor_pairs is None:
        sides = list(zip((ours, other), (model, theirs), steps, strict=True))
        if race.watch.on_gpu and race.fault is None:
            for _, net, step in sides:
                with nullcontext() if net is model else race.competitor():
                    step()  # AdamW's moments, and what compilers need, exist from here on
                    net.zero_grad()  # gradients are of what a step takes
        memory = race.memory(*(Memory(loss, net.parameters(), step) for loss, net, step in sides))
    race.note(padding_share=share)
    race(
        case,
        Contender("fastformer", steps[0], packed.tokens),
        Contender(NAMES[competitor], steps[1], padded.tokens),
        rounds=rounds,
        goal=goal,
        work=step_work(model, packed),
        dtype=dtype,
        graph_below=0.1,  # below some 4,000 tokens the host is slower than the GPU on both sides
        at={**(at or {}), "padding": share},
        **memory,
    )


def step_work(model: TranslationModel, batch: Batch) -> Work:
    """What a step on a packed batch must do at least.

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


def _gate(race: Race, ours: tuple[nn.Module, Loss], theirs: tuple[nn.Module, Loss], dtype: torch.dtype) -> None:
    """Without dropout both losses are the same, and so are the gradients of the parameters that have one name."""
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
        output = ours[0].get_parameter("output.weight")
        pairs.append((output, other.embeddings.target.weight))
        a, b = (flat_gradients(side) for side in zip(*pairs, strict=True))
        race.gate("gradients", a, b, GRADIENT_TOLERANCE[dtype])


def training_step(model: nn.Module, loss: Loss, batch: Batch) -> Callable[[], None]:
    """Gradients of the mean loss and a step of AdamW."""
    # Capturable: the number of its steps is a tensor on the GPU.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=batch.source.is_cuda)

    def step() -> None:
        optimizer.zero_grad()
        (loss() / batch.tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
