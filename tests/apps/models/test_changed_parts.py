"""Adapters, hooks and options on parts of the applications' models are computed with, in losses, logits and loading."""

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
BATCH = torch.tensor([2, 5, 6, 7, 8, 2, 9]), torch.tensor([5, 6, 7, 8, 3, 9, 3]), torch.tensor([5, 2])


class Adapter(nn.Module):
    """A low-rank addition to a module; it shows the weight and bias of the module, as adapter libraries do."""

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
        return self.base(x) + more(x, self.more)  # type: ignore[no-any-return]


class Bare(Adapter):
    """An adapter without weight and bias."""

    weight = bias = property()  # type: ignore[assignment]


class Shift(nn.Module):
    """A parametrisation."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1.0


def language_model(**settings: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageConfig(V, layers=2, **{"embeddings": "separate", **settings}, **SIZES)).double()


def token_classifier() -> TokenClassifier:
    torch.manual_seed(0)
    return TokenClassifier(ClassifierConfig(V, V, layers=1, **SIZES)).double()


def adapted(model: Any) -> None:
    model.output = Adapter(model.output)


def hooked(model: Any) -> None:
    model.output.register_forward_hook(lambda module, given, out: out * 1.5)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.output, "weight", 0.5)
    with torch.no_grad():
        model.output.weight_orig.mul_(2)  # an optimiser's step: the weight follows in the next call only


@pytest.mark.parametrize("change", [adapted, hooked, pruned])
@pytest.mark.parametrize("make", [language_model, token_classifier])
def test_the_loss_is_that_of_the_logits(make: Callable[[], Any], change: Callable[[Any], None]) -> None:
    model, (ids, targets, lengths) = make().eval(), BATCH
    change(model)
    if make is language_model:
        actual = language_model_loss(model, LanguageBatch(*BATCH), label_smoothing=0.1)
    else:
        actual = token_classification_loss(model, LabelledBatch(*BATCH), label_smoothing=0.1)
    logits = model.logits(model(ids, lengths))
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    assert_close(actual, expected)
    parameters = list(model.output.parameters())
    for gradient, wanted in zip(*(torch.autograd.grad(x, parameters) for x in (actual, expected)), strict=True):
        assert_close(gradient, wanted)


OPTIONS: dict[str, dict[str, Any]] = {
    "padding_idx": {"padding_idx": 5},
    "max_norm": {"max_norm": 0.5},
    "scale_grad_by_freq": {"scale_grad_by_freq": True},
}


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("change", [*OPTIONS, "adapter", "hook", "sparse"])
def test_a_changed_embedding_is_called(change: str, positions: Any) -> None:
    torch.manual_seed(0)
    embedding = Embedding(V, D, positions, 6, dropout=0.0)
    if change == "adapter":
        embedding.tokens = Adapter(embedding.tokens)  # type: ignore[assignment]
        if embedding.positions is not None:
            embedding.positions = Adapter(embedding.positions)  # type: ignore[assignment]
    elif change == "hook":
        embedding.tokens.register_forward_hook(lambda module, given, out: out * 1.5)
    else:
        embedding.tokens = nn.Embedding(V, D, **OPTIONS.get(change, {"sparse": True}))
    ids, places = torch.tensor([5, 5, 1, 5]), torch.tensor([0, 1, 2, 3])
    out = embedding(ids, places, 4)
    out.square().sum().backward()
    actual = [p.grad for p in embedding.parameters()]
    embedding.zero_grad()
    encoded = sinusoidal_positions(6, D)[places] if embedding.positions is None else embedding.positions(places)
    expected = embedding.tokens(ids) * math.sqrt(D) + encoded
    expected.square().sum().backward()
    assert_close(out, expected)
    for gradient, parameter in zip(actual, embedding.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert gradient.layout == parameter.grad.layout
        assert_close(gradient.to_dense(), parameter.grad.to_dense())


CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "adapter": lambda parent, name: setattr(parent, name, Adapter(getattr(parent, name))),
    "bare adapter": lambda parent, name: setattr(parent, name, Bare(getattr(parent, name))),
    "parametrised": lambda parent, name: register_parametrization(getattr(parent, name), "weight", Shift()),
    "pruned": lambda parent, name: prune.l1_unstructured(getattr(parent, name), "weight", 0.5),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("place", ["output", "embedding.tokens"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_parts_that_are_tied_load_what_they_saved(change: str, place: str, assign: bool) -> None:
    models = []
    for _ in range(2):
        model = language_model(embeddings="tied").eval()
        parent, _, name = place.rpartition(".")
        CHANGES[change](model.get_submodule(parent), name)
        models.append(model)
    saved, loaded = models
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.25)
    ids, _, lengths = BATCH
    expected = saved.logits(saved(ids, lengths))
    loaded.load_state_dict({name: x.clone() for name, x in saved.state_dict().items()}, assign=assign)
    for _ in range(2):  # a pruned weight is made anew by each call
        assert_close(loaded.logits(loaded(ids, lengths)), expected)
