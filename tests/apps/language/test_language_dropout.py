"""The language model's rates of dropout: each at its place and only there, and none but in training."""

import pytest
import torch
from torch import Tensor

from fastformer.apps.language.model import LanguageModel
from tests.support.language_task import random_batch, random_model

LENGTHS = [70, 1, 29]
NONE = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0}
PLACES = ("embedding", "attention", "output")


def model_of(**rates: float | None) -> LanguageModel:
    return random_model(d_model=48, **rates).train()


def hidden_of(model: LanguageModel, seed: int = 0) -> Tensor:
    """Hidden states of ragged documents: [100, 48]."""
    batch = random_batch(LENGTHS)
    torch.manual_seed(seed)
    return model(batch.ids_in, batch.lengths).detach()


def zeroed(model: LanguageModel) -> dict[str, float]:
    """Share of zeros at each place; without dropout there are none."""
    ids = random_batch([100]).ids_in
    torch.manual_seed(0)
    embedded = model.embedding(ids, torch.arange(100), 100)
    seen = ~torch.ones(100, 100, dtype=torch.bool).triu(1)
    maps = model.attention_maps(ids)[..., seen]  # [layers, H, 5050]
    shares = maps.eq(0).float().mean((1, 2))  # of each layer
    assert shares.max() - shares.min() < 0.03
    places = {"embedding": embedded, "attention": maps, "output": hidden_of(model)}
    return {place: float((x == 0).float().mean()) for place, x in places.items()}


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (NONE, (0.0, 0.0, 0.0)),
        ({**NONE, "embedding_dropout": 0.3}, (0.3, 0.0, 0.0)),
        ({**NONE, "attention_dropout": 0.3}, (0.0, 0.3, 0.0)),
        ({**NONE, "output_dropout": 0.3}, (0.0, 0.0, 0.3)),
        ({**NONE, "dropout": 0.3}, (0.0, 0.0, 0.0)),
        ({"dropout": 0.3}, (0.3, 0.3, 0.0)),
        ({"dropout": 0.4, "embedding_dropout": 0.1, "attention_dropout": 0.2, "output_dropout": 0.6}, (0.1, 0.2, 0.6)),
    ],
)
def test_each_rate_is_that_of_its_place(rates: dict[str, float], expected: tuple[float, ...]) -> None:
    model = model_of(**rates)
    found = zeroed(model)
    for place, rate in zip(PLACES, expected, strict=True):
        assert found[place] == (pytest.approx(rate, abs=0.03) if rate else 0.0), place
    for layer in model.decoder.layers:
        assert {layer.dropout.p, layer.dropout1.p, layer.dropout2.p} == {rates["dropout"]}
    # No place beside these: with every rate at 0 the model is the same each time, with any other it is not.
    assert torch.equal(hidden_of(model, 1), hidden_of(model, 2)) == (not any(rates.values()))
    assert torch.equal(hidden_of(model, 1), hidden_of(model, 1))
    model.eval()
    assert zeroed(model) == dict.fromkeys(PLACES, 0.0)
    assert torch.equal(hidden_of(model, 1), hidden_of(model_of(**NONE)))
