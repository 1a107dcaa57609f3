"""One training step of the classical word-level language model (T2): forward, backward, its SGD; fp32, one thread.

On a GPU fastformer's trainer repeats the step as a CUDA graph, as by default.

2 layers, d 200, 2 heads, feed-forward 200, post-norm with a norm after the last, dropout 0.1 and of the embeddings 0.2,
untied with an output bias, the 33,278 words of WikiText-2; 20 columns, windows of 35: 700 tokens a step. The output
projection and its softmax are 9/10 of the multiplications, and T2 moves logits of 93 MB through memory several times.
Random ids stand for words. T2's parameters are copied from fastformer's model.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks.competitors.training import gated_losses
from benchmarks.competitors.tutorials import TutorialLanguageModel
from benchmarks.harness.race import Contender, Race, flat_gradients
from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.text import LanguageBatch
from fastformer.apps.train import Processes, TrainConfig
from fastformer.apps.train.graphs import new_update

COLUMNS, BPTT, CLIP, LR = 20, 35, 0.25, 1e-3
CONFIG = LanguageConfig(
    vocabulary=33_278,
    d_model=200,
    heads=2,
    layers=2,
    feed_forward=200,
    dropout=0.1,
    embedding_dropout=0.2,
    norm_first=False,
    embeddings="separate",
    output_bias=True,
    embedding_initialisation="uniform",
    embedding_range=0.1,
    **CLASSICAL,
)

VOCABULARIES = {"quick": 4000, "usual": CONFIG.vocabulary}


@pytest.mark.parametrize("size", [pytest.param("quick", marks=pytest.mark.cpu), "usual"])
def bench_training_step_of_the_language_model(race: Race, size: str) -> None:
    config = replace(CONFIG, vocabulary=64 if race.tiny else VOCABULARIES[size])
    ids = torch.randint(4, config.vocabulary, (COLUMNS, BPTT + 1), generator=torch.Generator().manual_seed(0))
    ids = ids.to(race.device)
    data, target = (ids[:, s : s + BPTT].t().contiguous() for s in (0, 1))  # [T, B]
    lengths = torch.full((COLUMNS,), BPTT)
    batch = LanguageBatch(ids[:, :-1].flatten(), ids[:, 1:].flatten(), lengths)
    model = LanguageModel(config).to(race.device)
    tutorial = TutorialLanguageModel(model, BPTT).to(race.device)
    loss: Callable[[], Tensor] = lambda: language_model_loss(model, batch) / batch.tokens  # noqa: E731
    tutorial_loss: Callable[[], Tensor] = lambda: tutorial.loss(data, target)  # noqa: E731

    losses = gated_losses(race, (model, loss), (tutorial, tutorial_loss))
    if race.fault is None:
        _gate(race, losses, model, tutorial)
    step = _trainer_step(model, batch)
    tutorial_step = _step(tutorial, tutorial_loss, partial(_plain_sgd, tutorial))
    name = "T2, torch.nn.TransformerEncoder"
    sides = (
        Contender("fastformer", step, batch.tokens, loss, model.parameters()),
        Contender(name, tutorial_step, batch.tokens, tutorial_loss, tutorial.parameters()),
    )
    if race.device.type == "cuda":  # a replayed graph allocates nothing, so peaks of memory would not compare
        sides = replace(sides[0], forward=None), replace(sides[1], forward=None)
    race(
        f"training step of a word-level language model, d200 2 layers{'' if size == 'usual' else ', 4,000 words'}",
        *sides,
        rounds=5,
        goal=1.3 if size == "usual" else None,
    )


def _gate(race: Race, losses: Sequence[Tensor], model: LanguageModel, competitor: TutorialLanguageModel) -> None:
    """Require equal losses and gradients of all parameters."""
    race.gate("loss", losses[0], losses[1], 1e-5)
    expected: dict[str, Tensor] = dict(competitor.encoder.named_parameters(prefix="decoder"))
    expected |= {"output.weight": competitor.output.weight, "output.bias": competitor.output.bias}
    expected["embedding.tokens.weight"] = competitor.tokens.weight
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    # fp32: rounding decides on which side of ReLU's kink some activations fall.
    race.gate("gradients", flat_gradients(parameters.values()), flat_gradients(expected[n] for n in parameters), 5e-4)


def _trainer_step(model: LanguageModel, batch: LanguageBatch) -> Callable[[], None]:
    """Return a step as `fastformer train` makes it: on a GPU from CUDA graphs, of a batch on the CPU."""
    config = TrainConfig(steps=1, optimizer="sgd", momentum=0.0, clip_norm=CLIP, cuda_graphs=True)
    update, on_cpu = new_update(model, language_model_loss, config, Processes()), batch.to(torch.device("cpu"))

    def step() -> None:
        _, norm, _ = update.gradients([on_cpu])
        update.apply(norm, LR)

    for _ in range(3):  # a shape is captured when it comes for the second time
        step()
    return step


def _step(model: nn.Module, loss: Callable[[], Tensor], update: Callable[[], object]) -> Callable[[], None]:
    """Return a step: gradients, clipping to a norm, and an update of the parameters."""

    def step() -> None:
        model.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        update()

    return step


def _plain_sgd(model: nn.Module) -> None:
    """Update the parameters as the tutorial does, without an optimiser."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-LR)
