"""Models with packed weights: every place where a weight is used takes them, and what stays, or is refused."""

import copy
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.models.common import summed_cross_entropy
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.nn import inference_weights, pack_weights
from fastformer.nn.inference_weights import PRECISIONS, PackedWeight


class Exact(PackedWeight):
    """A weight that is not rounded, so that models must give the numbers that they gave."""

    weight: Tensor
    products = 0

    @classmethod
    def of(cls, weight: Tensor) -> "Exact":
        made: Any = cls.empty(*weight.shape)
        made.weight = weight.clone()
        return made

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        type(self).products += 1
        return F.linear(x, self.weight, bias)

    def cut(self, first: int, last: int) -> "Exact":
        return self.of(self.weight[first:last])


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> type[Exact]:
    for name in ("_Int8", "_BFloat16"):
        monkeypatch.setattr(f"fastformer.nn.inference_weights.{name}", Exact)
    monkeypatch.setattr(Exact, "products", 0)
    return Exact


MODERN = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "kv_heads": 1, "bias": False}


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, MODERN], ids=["classical", "modern"])
def test_translation(options: dict[str, Any], exact: type[Exact]) -> None:
    """Encoder, forward, loss, prompts, and steps of both kinds of search: on the plain way, and not."""
    torch.manual_seed(0)
    config = TranslationConfig(
        40, 40, d_model=32, heads=2, encoder_layers=2, decoder_layers=2, feed_forward=48, **options
    )
    model = TranslationModel(config).eval()
    narrow = copy.deepcopy(model)
    pack_weights(narrow, "int8")
    lengths = torch.tensor([5, 3, 4])
    source = torch.randint(4, 40, (12,))
    torch.testing.assert_close(narrow(source, lengths, source, lengths), model(source, lengths, source, lengths))
    assert exact.products == 2 * (4 + 7)  # of encoder layers four, of decoder layers in, out, q, kv, out and two
    maps = (each.attention_maps(source[:5], source[:5]) for each in (narrow, model))
    torch.testing.assert_close(*maps)
    for search, beam in ((greedy_search, 1), (beam_search, 3)):
        before = exact.products
        found, expected = (search(each, source, lengths, SearchOptions(beam=beam)) for each in (narrow, model))
        for one, other in zip(found, expected, strict=True):
            (one,), (other,) = ([each] if beam == 1 else each[:1] for each in (one, other))
            assert one.ids == other.ids
            assert one.log_probability == pytest.approx(other.log_probability, abs=1e-3)
        assert exact.products > before


@torch.no_grad()
@pytest.mark.parametrize("positions", [3, 1500], ids=["one part", "two"])
def test_a_language_models_loss(positions: int, exact: type[Exact]) -> None:
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(50, d_model=16, heads=2, layers=1, feed_forward=24)).eval()
    narrow = copy.deepcopy(model)
    pack_weights(narrow, "bf16")
    hidden, target = torch.randn(positions, 16), torch.randint(50, (positions,))
    losses = (
        summed_cross_entropy(each.output, hidden, target, torch.tensor([positions]), 0.1) for each in (narrow, model)
    )
    torch.testing.assert_close(*losses)
    assert isinstance(narrow.output.weight, PackedWeight)
    assert not isinstance(narrow.embedding.tokens.weight, PackedWeight)


@torch.no_grad()
def test_torchs_own_modules_and_separate_projections(exact: type[Exact]) -> None:
    torch.manual_seed(0)
    ours = fastformer.MultiheadAttention(16, 2, kdim=8, vdim=12, batch_first=True)
    given = torch.randn(2, 3, 16), torch.randn(2, 4, 8), torch.randn(2, 4, 12)
    expected = ours(*given)
    pack_weights(ours, "int8")
    torch.testing.assert_close(ours(*given), expected)
    assert exact.products == 4


@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("widths", [{}, {"vdim": 8}], ids=str)
def test_torchs_attention_stays_as_it_is(precision: str, widths: dict[str, Any]) -> None:
    """By itself, and within a layer of torch's, whose linear layers change."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True, **widths)
    x, values = torch.randn(2, 3, 16), torch.randn(2, 3, widths.get("vdim", 16))
    expected = attention(x, x, values)[0]
    pack_weights(attention, precision)
    assert torch.equal(attention(x, x, values)[0], expected)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()
    before = layer(x)
    pack_weights(layer, precision)
    assert isinstance(layer.linear1.weight, PackedWeight)
    torch.testing.assert_close(layer(x), before, atol=0.2, rtol=0)  # some 24 roundings of 2**-8 of numbers below 2
    assert precision == "fp32" or not torch.equal(layer(x), before)


@torch.no_grad()
@pytest.mark.parametrize("embeddings", ["separate", "shared"])
@pytest.mark.parametrize("blocks", [True, False])
def test_a_packed_model_writes_the_same(monkeypatch: pytest.MonkeyPatch, embeddings: str, blocks: bool) -> None:
    """With oneDNN, whether this machine has it or not asked, and without; embeddings keep their rows."""
    monkeypatch.setattr("fastformer.nn.inference_weights._BLOCKS", blocks and inference_weights._BLOCKS)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 48}
    model = TranslationModel(TranslationConfig(40, 40, embeddings=embeddings, **sizes)).eval().double()
    source, lengths = torch.randint(4, 40, (8,)), torch.tensor([5, 3])
    expected = greedy_search(model, source, lengths, SearchOptions(beam=1))
    other = copy.deepcopy(model).float()
    pack_weights(other)
    assert type(other.target_embedding.tokens.weight) is nn.Parameter
    found = greedy_search(other, source, lengths, SearchOptions(beam=1))
    assert [h.ids for h in found] == [h.ids for h in expected]
    assert isinstance(other.output.weight, PackedWeight) == inference_weights._BLOCKS


@torch.no_grad()
@pytest.mark.parametrize("few", [True, False])
def test_without_blocks_weights_are_parameters_by_columns(monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """Where a weight is small, and where there is no oneDNN; an embedding that shares it keeps its rows."""
    monkeypatch.setattr(inference_weights, *(("_LEAST", 1 << 18) if few else ("_BLOCKS", False)))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    before = model[1](model[0](torch.tensor([1, 2])))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    pack_weights(model)
    assert [type(x) is nn.Parameter for x in model.parameters()] == [True] * 5
    assert [module.weight.stride() for module in model] == [(4, 1), (1, 5), (1, 5)]
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(model[1](model[0](torch.tensor([1, 2]))), before)


def test_other_dtypes_and_devices_stay_as_they_are_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, device="meta"))
    pack_weights(model)
    assert all(type(x) is nn.Parameter for x in model.parameters())


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def test_what_stays() -> None:
    """A subclass; a parametrised layer; a norm, an embedding; what is narrow already."""
    parametrised = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    model = nn.Sequential(Doubled(3, 3), parametrised, nn.LayerNorm(3), nn.Embedding(3, 3), nn.Linear(3, 3))
    pack_weights(model, "int8")
    kept = [type(p) for p in model.parameters()]
    assert kept.count(nn.Parameter) == len(kept) - 1
    weight = model[4].weight
    pack_weights(model, "bf16")
    assert model[4].weight is weight


@pytest.mark.parametrize("precision", PRECISIONS)
def test_misuse(precision: str, tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    pack_weights(model, precision)
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="have no gradients: call the model under torch"):
        model(x)
    with pytest.raises(RuntimeError, match="have no gradients"):
        model(x.detach())  # whose bias would learn alone
    with torch.no_grad(), pytest.raises(RuntimeError, match="have no gradients"):
        torch.func.jvp(model, (x.detach(),), (x.detach(),))  # int8's kernels know no tangents, and gave 0
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(x), model(x))
        assert torch.equal(model.float().to("cpu")(x), model(x))
    assert "2 x 3" in repr(model[0].weight)
    with pytest.raises(TypeError, match=r"cannot be compiled by torch\.jit\.script: do so before"):
        torch.jit.script(model)  # saved, its weights were 0
    state = model.state_dict()
    for use in (
        lambda: setattr(model[0].weight, "data", torch.zeros(2, 3)),  # changed nothing
        lambda: model.share_memory(),  # ended the process
        lambda: safetensors.torch.save(state),
        lambda: model[0].weight.data_ptr(),
    ):
        with pytest.raises(TypeError, match="cannot be saved, shared or set: do so before"):
            use()
    with pytest.raises(TypeError, match="cannot be saved: save the model before"):
        torch.save(model, tmp_path / "model.pt")
    for use in (
        lambda: model.double(),
        lambda: model.to(torch.float16),
        lambda: x @ model[0].weight.t(),
        lambda: model[0].weight[0],
        lambda: nn.init.zeros_(model[0].weight),
    ):
        with pytest.raises(TypeError, match="are for products alone"):
            use()


@pytest.mark.parametrize("precision", ["int4", "FP32", 8, None])
def test_another_precision_is_refused(precision: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="precision must be"):
        pack_weights(nn.Linear(3, 2), precision)


@pytest.mark.parametrize("kind", [{"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"device": "meta"}], ids=str)
def test_another_dtype_or_device_is_refused(kind: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, **kind))
    with pytest.raises(ValueError, match=r"model must be in fp32 on a CPU for int8, and 1\.weight is torch"):
        pack_weights(model, "int8")
    assert not isinstance(model[0].weight, PackedWeight)
