"""Methods that libraries put into torch's classes, and into instances whose model is compiled already."""

import copy

import pytest
import torch
from torch import nn

import fastformer
from tests.support.closeness import assert_close

HIDDEN = torch.tensor([[False, False, False], [False, False, True]])


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(8), enable_nested_tensor=False)


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.0), nn.Linear(12, 8))


def twice(function):
    return lambda *args, **options: 2 * function(*args, **options)


@pytest.fixture
def doubled(monkeypatch):
    """Put a method that doubles into a class, as adapters of image generators put one into nn.Linear."""
    return lambda kind, name="forward": monkeypatch.setattr(kind, name, twice(getattr(kind, name)))


CALLS = ("__call__", "_call_impl")  # torch's classes call one, which calls the other


@pytest.mark.parametrize(("kind", "name"), [
    *((kind, name) for kind in (nn.Linear, nn.Dropout, nn.ReLU) for name in ("forward", *CALLS)),
    *((kind, name) for kind in (nn.LayerNorm, nn.TransformerEncoderLayer, nn.TransformerEncoder) for name in CALLS),
])  # fmt: skip
@pytest.mark.parametrize("make", [encoder, block])
def test_a_method_put_into_a_class_of_parts_is_called(make, kind, name, doubled):
    theirs = make()
    ours = copy.deepcopy(theirs)
    fastformer.convert(ours)
    x = torch.randn(2, 3, 8)
    doubled(kind, name)
    assert_close(ours(x), theirs(x))
    if make is encoder:
        found, expected = (model(x, src_key_padding_mask=HIDDEN) for model in (ours, theirs))
        assert_close(found[~HIDDEN], expected[~HIDDEN])


@pytest.mark.parametrize("around", [lambda method: method, torch.enable_grad(), torch.compiler.disable])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.Module])
def test_a_call_put_into_a_class_of_many_is_called(kind, name, around, monkeypatch):
    call = getattr(kind, name)

    def tripled(*args, **options):
        found = call(*args, **options)
        return 3 * found if isinstance(found, torch.Tensor) else (3 * found[0], *found[1:])

    theirs = encoder().eval()
    ours = copy.deepcopy(theirs)
    fastformer.convert(ours)
    x = torch.randn(2, 3, 8)
    monkeypatch.setattr(kind, name, around(tripled))
    for masks in ({}, {"src_key_padding_mask": HIDDEN}):
        found, expected = (model(x.requires_grad_(), **masks) for model in (ours, theirs))
        assert_close(found[~HIDDEN], expected[~HIDDEN])


@pytest.mark.parametrize("path", ["layers.0", "layers.1.self_attn", "layers.1.linear1", "layers.0.norm1", "norm"])
def test_the_call_of_an_instance_is_called(path):
    theirs = nn.TransformerEncoder(encoder().layers[0], 2, nn.LayerNorm(8), enable_nested_tensor=False).eval()
    ours = copy.deepcopy(theirs)
    fastformer.convert(ours)
    x = torch.randn(2, 3, 8).requires_grad_()
    for model in (theirs, ours):
        part = model.get_submodule(path)
        call = part._call_impl
        part._call_impl = (
            twice(call)
            if path[-4:] != "attn"
            else lambda *args, _call=call, **options: (_call(*args, **options)[0] * 2, None)
        )
    for masks in ({}, {"src_key_padding_mask": HIDDEN}):
        found, expected = (model(x, **masks) for model in (ours, theirs))
        assert_close(found[~HIDDEN], expected[~HIDDEN])


def test_a_forward_put_into_a_class_is_called_in_steps(doubled):
    theirs = encoder()
    ours = copy.deepcopy(theirs).eval()
    fastformer.convert(ours)
    x = torch.randn(2, 3, 8)
    cache = ours.new_cache(2)
    doubled(nn.Linear)
    steps = [ours.step(x[:, i : i + 1], cache) for i in range(3)]
    assert_close(torch.cat(steps, 1), theirs(x, torch.ones(3, 3, dtype=torch.bool).triu(1)))


@pytest.mark.parametrize(("kind", "name"), [
    (nn.LayerNorm, "forward"), (nn.MultiheadAttention, "forward"), (nn.TransformerEncoderLayer, "_ff_block"),
])  # fmt: skip
def test_what_has_a_changed_class_stays_as_it_is(kind, name, monkeypatch):
    method = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *args, **options: method(*args, **options))
    model = encoder()
    left = fastformer.convert(model).left
    assert {entry.outcome for entry in left} == {"a method of its class was replaced"}
    assert len(left) == sum(type(part) is kind for part in model.modules()) > 0


@pytest.mark.parametrize("name", ["_sa_block", "_mha_block", "_ff_block"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_block_put_into_a_class_of_layers_is_called(norm_first, name, monkeypatch):
    kinds = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    theirs = nn.Transformer(8, 2, 1, 2, 12, 0.0, batch_first=True, norm_first=norm_first).eval()
    ours = copy.deepcopy(theirs)
    fastformer.convert(ours)
    x, cache = torch.randn(2, 3, 8), ours.decoder.new_cache(torch.randn(2, 3, 8))
    for kind in kinds if name != "_mha_block" else kinds[1:]:
        monkeypatch.setattr(kind, name, twice(getattr(kind, name)))
    masks = dict.fromkeys(("src_key_padding_mask", "memory_key_padding_mask"), HIDDEN)
    assert_close(ours(x, x), theirs(x, x))
    assert_close(ours(x, x, **masks), theirs(x, x, **masks))
    with pytest.raises(RuntimeError, match="overrides a block of its layer"):
        ours.decoder.step(x[:, :1], cache)


@pytest.mark.parametrize(("path", "name"), [
    ("linear1", "forward"), ("norm1", "forward"), ("dropout", "forward"), ("", "_ff_block"), ("", "compose"),
])  # fmt: skip
def test_a_method_put_into_an_instance_is_called_where_the_model_was_compiled_before(path, name):
    layer = fastformer.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(2, 3, 8)
    before = compiled(x)
    part = layer.get_submodule(path)
    setattr(part, name, twice(getattr(part, name)))
    assert_close(compiled(x), layer(x))
    assert not torch.allclose(compiled(x), before)


def test_sinks_that_come_after_a_compilation():
    attention = fastformer.MultiheadAttention(8, 2, batch_first=True)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    x = torch.randn(2, 3, 8)
    given = {"key_padding_mask": HIDDEN, "need_weights": False}
    compiled(x, x, x, **given)
    attention.sinks = torch.ones(2)
    assert_close(compiled(x, x, x, **given)[0], attention(x, x, x, **given)[0])
