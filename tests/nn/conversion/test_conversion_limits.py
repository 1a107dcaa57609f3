"""What convert leaves and reports, and what goes on being called: subclasses, hooks, replaced parts, other blocks."""

import pytest
import torch
from torch import nn

import fastformer
from tests.support.closeness import assert_close, random

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]
D, H, FF, B, S = 8, 2, 12, 3, 4


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def parametrised():
    norm = nn.LayerNorm(D)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    return norm


def replaced(module):
    module.forward = lambda x: x + 1
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Doubled(D), "a subclass, which may do something else"),
        (parametrised, "parametrised"),
        (lambda: replaced(nn.LayerNorm(D)), "its forward was replaced in the instance"),
        (lambda: torch.jit.script(nn.LayerNorm(D)), "scripted"),
    ],
)
def test_a_module_that_may_do_something_else_stays_and_is_reported(make, reason):
    module = make()
    model, x = nn.ModuleDict({"norm": nn.LayerNorm(D), "own": module}), torch.randn(B, D)
    kind, expected = type(module), module(x)
    report = fastformer.convert(model)
    assert [(entry.name, entry.outcome) for entry in report.left] == [("own", reason)]
    assert type(module) is kind
    assert torch.equal(module(x), expected)
    assert str(report).splitlines() == [
        "1 modules changed, 1 left as they were",
        "  changed  norm  torch.nn.LayerNorm -> fastformer.LayerNorm",
        f"  left  own  {report.left[0].before} : {reason}",
    ]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantised_parts_are_called_as_they_are():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, FF, batch_first=True), 1).eval()
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    x = torch.randn(B, S, D)
    with torch.no_grad():
        expected = model(x)
        report = fastformer.convert(model)
        assert_close(model(x), expected)
    assert "DynamicQuantizedLinear" in str(model)
    assert [entry.outcome for entry in report.padded] == ["layers.0.linear1 is a Linear"]
    attention = torch.ao.nn.quantizable.MultiheadAttention(D, H)
    assert [entry.outcome for entry in fastformer.convert(attention).left] == ["quantised"]


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_every_kind_go_on_being_called(kind):
    calls = []
    model = nn.Sequential(nn.LayerNorm(D), nn.TransformerEncoderLayer(D, H, FF, dropout=0.0))
    for part in (model[0], model[1], model[1].linear1, model[1].dropout, model[1].norm1):
        getattr(part, f"register_{kind}_hook")(lambda module, *_, calls=calls: calls.append(module))
    x = random(S, B, D, dtype=torch.float32)
    model(x).sum().backward()
    before, calls[:] = list(calls), []
    fastformer.convert(model)
    model(x).sum().backward()
    assert len(before) == 5
    assert calls == before


class OwnReLU(nn.ReLU):
    def forward(self, x):
        return x.tanh()


class OwnGELU(nn.GELU):
    def forward(self, x):
        return x.tanh()


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("own", [OwnReLU, OwnGELU, Adapted])
def test_subclasses_of_activations_and_linear_maps_are_called(own):
    model = nn.TransformerEncoderLayer(D, H, FF, dropout=0.0)
    if own is Adapted:
        model.linear1.__class__ = Adapted
    else:
        model.activation = own()
    x = random(S, B, D, dtype=torch.float32)
    expected = model(x)
    fastformer.convert(model)
    assert_close(model(x), expected)


def test_a_class_that_changed_since_stays_until_that_is_undone():
    model = nn.Sequential(nn.LayerNorm(D), nn.RMSNorm(D))
    fastformer.convert(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    x = torch.randn(B, D)
    expected, report = model(x), fastformer.revert(model)
    assert [entry.name for entry in report.changed] == ["1"]
    assert [(e.name, e.outcome) for e in report.left] == [("0", "its class has changed since it was converted")]
    assert_close(model(x), expected)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    fastformer.revert(model)
    assert [type(m) for m in model] == [nn.LayerNorm, nn.RMSNorm]


def test_revert_leaves_a_module_whose_forward_was_replaced_in_the_instance():
    model = nn.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=True)
    fastformer.convert(model)
    inner = model.self_attn.forward
    model.self_attn.forward = lambda *args, **options: inner(*args, **{**options, "need_weights": True})
    x = torch.randn(B, S, D)
    expected, report = model(x), fastformer.revert(model)
    assert [entry.name for entry in report.left] == ["self_attn"]
    assert type(model) is nn.TransformerEncoderLayer
    assert_close(model(x), expected)


def test_norms_inside_a_part_of_your_own_stay_in_a_layer_of_ours():
    layer = fastformer.TransformerEncoderLayer(D, H, FF, activation=nn.Sequential(nn.LayerNorm(FF)))
    assert type(layer.activation[0]) is nn.LayerNorm
