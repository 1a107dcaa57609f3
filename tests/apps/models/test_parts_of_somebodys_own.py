"""Adapters, hooks and options on parts of the applications' models: training, logits and generation agree on them.

A model is a module like any other: what somebody put in place of its output or its embeddings, or hooked to a layer,
takes part in everything that is computed, or is refused by name.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from fastformer.apps.classification.model import ClassifierConfig, TokenClassifier, token_classification_loss
from fastformer.apps.language.model import LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.models.embeddings import Embedding, sinusoidal_positions
from fastformer.apps.text import LabelledBatch, LanguageBatch
from tests.support.closeness import assert_close

V, D = 11, 8
SIZES: dict[str, Any] = {"d_model": D, "heads": 2, "feed_forward": 12, "dropout": 0.0}
IDS = torch.tensor([2, 5, 6, 7, 8, 2, 9])
TARGETS = torch.tensor([5, 6, 7, 8, 3, 9, 3])
LENGTHS = torch.tensor([5, 2])


class Adapter(nn.Module):
    """A low-rank addition to a module, whose weight and bias it still shows, as such libraries do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.more = base, nn.Parameter(torch.randn_like(base.weight))

    @property
    def weight(self) -> Tensor:
        return self.base.weight  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.base, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        more = F.embedding if isinstance(self.base, nn.Embedding) else F.linear
        added = more(x, self.more)
        return self.base(x) + added  # type: ignore[no-any-return]


class Bare(Adapter):
    """Another, which shows nothing."""

    weight = bias = property()  # type: ignore[assignment]


class Shift(nn.Module):
    """A parametrisation."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1.0


def language(**settings: Any) -> LanguageModel:
    torch.manual_seed(0)
    settings = {"embeddings": "separate", **settings}
    return LanguageModel(LanguageConfig(vocabulary=V, layers=2, **settings, **SIZES)).double()


def classifier() -> TokenClassifier:
    torch.manual_seed(0)
    return TokenClassifier(ClassifierConfig(V, V, layers=1, **SIZES)).double()


def language_loss(model: Any) -> Tensor:
    return language_model_loss(model, LanguageBatch(IDS, TARGETS, LENGTHS), label_smoothing=0.1)


def classifier_loss(model: Any) -> Tensor:
    return token_classification_loss(model, LabelledBatch(IDS, TARGETS, LENGTHS), label_smoothing=0.1)


def adapted(model: Any) -> None:
    model.output = Adapter(model.output)


def hooked(model: Any) -> None:
    model.output.register_forward_hook(lambda module, given, out: out * 1.5)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.output, "weight", 0.5)
    with torch.no_grad():
        model.output.weight_orig.mul_(2)  # an optimiser's step: the weight follows in the next call only


@pytest.mark.parametrize("change", [adapted, hooked, pruned])
@pytest.mark.parametrize(("make", "loss"), [(language, language_loss), (classifier, classifier_loss)])
def test_the_loss_is_that_of_the_logits(
    make: Callable[[], Any], loss: Callable[[Any], Tensor], change: Callable[[Any], None]
) -> None:
    model = make().eval()
    change(model)
    found = loss(model)
    logits = model.logits(model(IDS, LENGTHS))
    expected = F.cross_entropy(logits, TARGETS, label_smoothing=0.1, reduction="sum")
    assert_close(found, expected)
    parameters = list(model.output.parameters())
    for gradient, wanted in zip(*(torch.autograd.grad(x, parameters) for x in (found, expected)), strict=True):
        assert_close(gradient, wanted)


OPTIONS: dict[str, dict[str, Any]] = {
    "padding_idx": {"padding_idx": 5},
    "max_norm": {"max_norm": 0.5},
    "scale_grad_by_freq": {"scale_grad_by_freq": True},
}


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("change", [*OPTIONS, "adapter", "hook", "sparse"])
def test_an_embedding_is_called_as_it_is(change: str, positions: Any) -> None:
    torch.manual_seed(0)
    ours = Embedding(V, D, positions, 6, dropout=0.0)
    if change == "adapter":
        ours.tokens = Adapter(ours.tokens)  # type: ignore[assignment]
        if ours.positions is not None:
            ours.positions = Adapter(ours.positions)  # type: ignore[assignment]
    elif change == "hook":
        ours.tokens.register_forward_hook(lambda module, given, out: out * 1.5)
    else:
        ours.tokens = nn.Embedding(V, D, **OPTIONS.get(change, {"sparse": True}))
    ids, places = torch.tensor([5, 5, 1, 5]), torch.tensor([0, 1, 2, 3])
    out = ours(ids, places, 4)
    out.square().sum().backward()
    found = [p.grad for p in ours.parameters()]
    ours.zero_grad()
    encoded = sinusoidal_positions(6, D)[places] if ours.positions is None else ours.positions(places)
    expected = ours.tokens(ids) * math.sqrt(D) + encoded
    expected.square().sum().backward()
    assert_close(out, expected)
    for gradient, parameter in zip(found, ours.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert gradient.layout == parameter.grad.layout
        assert_close(gradient.to_dense(), parameter.grad.to_dense())


# By what a change does to a part of a model.
CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "adapter": lambda parent, name: setattr(parent, name, Adapter(getattr(parent, name))),
    "bare adapter": lambda parent, name: setattr(parent, name, Bare(getattr(parent, name))),
    "parametrised": lambda parent, name: register_parametrization(getattr(parent, name), "weight", Shift()),
    "pruned": lambda parent, name: prune.l1_unstructured(getattr(parent, name), "weight", 0.5),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("place", ["output", "embedding.tokens"])
@pytest.mark.parametrize("change", CHANGES)
def test_tied_parts_that_were_changed_load_what_they_saved(change: str, place: str, assign: bool) -> None:
    models = []
    for _ in range(2):
        model = language(embeddings="tied").eval()
        parent, _, name = place.rpartition(".")
        CHANGES[change](model.get_submodule(parent), name)
        models.append(model)
    saved, loaded = models
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.25)
    expected = saved.logits(saved(IDS, LENGTHS))
    loaded.load_state_dict({name: x.clone() for name, x in saved.state_dict().items()}, assign=assign)
    for _ in range(2):  # a pruned weight is made anew by each call
        assert_close(loaded.logits(loaded(IDS, LENGTHS)), expected)
