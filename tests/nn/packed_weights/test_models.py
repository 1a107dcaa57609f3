"""Models with packed weights: they write the same, are changed, saved and copied like others, and what stays."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.apps.models.common import summed_cross_entropy
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.nn import inference_weights, pack_weights
from fastformer.nn.inference_weights import PackedWeight

MODERN = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "kv_heads": 1, "bias": False}


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, MODERN, {"embeddings": "shared"}], ids=["classical", "modern", "shared"])
@pytest.mark.parametrize("blocks", [True, False])
def test_a_packed_model_writes_the_same(monkeypatch: pytest.MonkeyPatch, options: dict, blocks: bool) -> None:
    """Encoder, forward, maps, loss, and both kinds of search, with oneDNN, where this machine has it, and without."""
    monkeypatch.setattr(inference_weights, "_BLOCKS", blocks and inference_weights._BLOCKS)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 48}
    model = TranslationModel(TranslationConfig(40, 40, **sizes, **options)).eval()
    packed = copy.deepcopy(model)
    pack_weights(packed)
    source, lengths = torch.randint(4, 40, (8,)), torch.tensor([5, 3])
    hidden, expected = (each(source, lengths, source, lengths) for each in (packed, model))
    torch.testing.assert_close(hidden, expected)
    losses = (summed_cross_entropy(each.output, expected, source, lengths, 0.1) for each in (packed, model))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(each.attention_maps(source[:5], source[:5]) for each in (packed, model)))
    for search, beam in ((greedy_search, 1), (beam_search, 3)):
        found, wanted = (search(each, source, lengths, SearchOptions(beam=beam)) for each in (packed, model))
        for one, other in zip(found, wanted, strict=True):
            (one,), (other,) = ([each] if beam == 1 else each[:1] for each in (one, other))
            assert one.ids == other.ids
    assert type(packed.target_embedding.tokens.weight) is nn.Parameter
    assert isinstance(packed.output.weight, PackedWeight) == inference_weights._BLOCKS


@torch.no_grad()
@pytest.mark.parametrize("few", [True, False])
def test_without_blocks_weights_are_parameters_by_columns(monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """Where a weight is small, and where there is no oneDNN; an embedding that shares it keeps its rows."""
    monkeypatch.setattr(inference_weights, *(("_MIN_PACKED_SIZE", 1 << 18) if few else ("_BLOCKS", False)))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    before = model[1](model[0](torch.tensor([1, 2])))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    pack_weights(model)
    assert [type(x) is nn.Parameter for x in model.parameters()] == [True] * 5
    assert [module.weight.stride() for module in model] == [(4, 1), (1, 5), (1, 5)]
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(model[1](model[0](torch.tensor([1, 2]))), before)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def test_what_stays() -> None:
    """A subclass; a parametrised layer; norms, embeddings, torch's attention; other dtypes; what is packed already."""
    parametrised = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    others = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, device="meta"), nn.MultiheadAttention(4, 2)
    model = nn.Sequential(Doubled(3, 3), parametrised, nn.LayerNorm(3), nn.Embedding(3, 3), *others, nn.Linear(3, 3))
    before = dict(model.named_parameters())
    pack_weights(model)
    changed = {name for name, x in model.named_parameters() if x is not before[name]}
    assert changed == {"7.weight"}
    weight = model[7].weight
    pack_weights(model)
    assert model[7].weight is weight


def test_a_packed_model_is_copied_saved_moved_and_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(fastformer.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)).eval()
    state = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 16)
    expected = model(x).detach()
    pack_weights(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), copy.deepcopy(model).double().float()):
        with torch.no_grad():
            torch.testing.assert_close(other(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(model).double()(x.double()), expected.double(), atol=1e-5, rtol=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    trained = fastformer.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True).eval()
    trained.load_state_dict(model[0].state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), trained(x))
        assert not torch.allclose(model(x), expected)
