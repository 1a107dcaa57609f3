"""What convert leaves as it is, and what goes on being called: subclasses, hooks, replaced parts, other blocks."""

import pytest
import torch
from torch import nn

import fastformer
from tests.nn.conversion.conversion_cases import FF, B, D, H, S, subclass
from tests.support.closeness import assert_close, gradients, random

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


def parametrised():
    norm = nn.LayerNorm(D)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    return norm


def replaced():
    norm = nn.LayerNorm(D)
    norm.forward = lambda x: x + 1
    return norm


def replaced_block():
    block = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D))
    block.forward = lambda x: x + 1
    return block


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (subclass, "a subclass, which may do something else"),
        (parametrised, "parametrised"),
        (replaced, "its forward was replaced in the instance"),
        (replaced_block, "its forward was replaced in the instance"),
        (lambda: torch.jit.script(nn.LayerNorm(D)), "scripted"),
    ],
)
def test_what_may_do_something_else_stays_and_is_reported(make, reason):
    module = make()
    model, x = nn.Sequential(nn.Linear(D, D), module), random(B, D, dtype=torch.float32)
    kind, expected = type(module), model(x)
    report = fastformer.convert(model)
    assert not report.changed
    assert [(entry.name, entry.outcome) for entry in report.left] == [("1", reason)]
    assert type(module) is kind
    assert torch.equal(model(x), expected)
    assert f"left  1  {report.left[0].before} : {reason}" in str(report)


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


def test_hooks_go_on_working():
    calls = []
    model = nn.Sequential(nn.LayerNorm(D), nn.TransformerEncoderLayer(D, H, FF, dropout=0.0))
    for module in (model[0], model[1], model[1].self_attn, model[1].linear1):
        module.register_forward_hook(lambda module, args, out, calls=calls: calls.append(module))
    x = random(S, B, D, dtype=torch.float32)
    expected = model(x)
    before, calls[:] = list(calls), []
    fastformer.convert(model)
    assert_close(model(x), expected)
    assert calls == before


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_every_kind_of_hook_is_called(kind):
    model, calls = nn.TransformerEncoderLayer(D, H, FF, dropout=0.0), []
    for part in (model.linear1, model.dropout, model.norm1):
        getattr(part, f"register_{kind}_hook")(lambda module, *_, calls=calls: calls.append(module))
    x = random(S, B, D, dtype=torch.float32)
    model(x).sum().backward()
    before, calls[:] = list(calls), []
    fastformer.convert(model)
    model(x).sum().backward()
    assert len(before) == 3
    assert calls == before


@pytest.mark.parametrize("kind", [nn.ReLU, nn.GELU])
def test_a_subclass_of_an_activation_is_called(kind):
    class Own(kind):
        def forward(self, x):
            return x.tanh()

    model = nn.TransformerEncoderLayer(D, H, FF, dropout=0.0, activation=Own())
    block = nn.Sequential(nn.Linear(D, FF), Own(), nn.Linear(FF, D))
    x = random(S, B, D, dtype=torch.float32)
    expected = model(x), block(x)
    fastformer.convert(nn.ModuleList([model, block]))
    assert_close(model(x), expected[0])
    assert_close(block(x), expected[1])


def test_a_subclass_of_a_linear_map_is_called():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.TransformerEncoderLayer(D, H, FF, dropout=0.0)
    model.linear1 = Adapted(D, FF)
    block = nn.Sequential(Adapted(D, FF), nn.ReLU(), nn.Linear(FF, D))
    x = random(S, B, D, dtype=torch.float32)
    expected = model(x), block(x)
    fastformer.convert(nn.ModuleList([model, block]))
    assert_close(model(x), expected[0])
    assert_close(block(x), expected[1])


def test_a_class_that_changed_since_stays_until_that_is_undone():
    model = nn.Sequential(nn.LayerNorm(D), nn.RMSNorm(D))
    fastformer.convert(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    x = random(B, D, dtype=torch.float32)
    expected, report = model(x), fastformer.revert(model)
    assert [entry.name for entry in report.changed] == ["1"]
    assert [(e.name, e.outcome) for e in report.left] == [("0", "its class has changed since it was converted")]
    assert_close(model(x), expected)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    fastformer.revert(model)
    assert [type(m) for m in model] == [nn.LayerNorm, nn.RMSNorm]


def test_norms_inside_a_part_of_your_own_stay_in_a_layer_of_ours():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(FF)

        def forward(self, x):
            return self.norm(x)

    layer = fastformer.TransformerEncoderLayer(D, H, FF, activation=Own())
    assert type(layer.activation.norm) is nn.LayerNorm


def test_a_stack_of_ours_from_a_layer_of_torchs_leaves_that_as_it_is():
    layer = nn.TransformerEncoderLayer(D, H, FF)
    layer.norm2 = layer.norm1
    stack = fastformer.TransformerEncoder(layer, 1)
    assert type(layer.norm1) is type(layer.norm2) is nn.LayerNorm
    assert stack.layers[0].norm1 is stack.layers[0].norm2
    assert type(stack.layers[0].norm1) is fastformer.LayerNorm


def test_one_module_in_two_places_stays_one():
    norm = nn.LayerNorm(D)
    model = nn.ModuleDict({"a": norm, "b": norm})
    report = fastformer.convert(model)
    assert model["a"] is model["b"]
    assert len(report.changed) == 1


class TestFeedForwardBlocks:
    """nn.Sequential of linear, activation and linear."""

    @pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.ReLU(inplace=True)], ids=str)
    @pytest.mark.parametrize("form", ["plain", "inner", "outer", "both"])
    @pytest.mark.parametrize("bias", [True, False])
    def test_recognised(self, activation, form, bias):
        parts = [nn.Linear(D, FF, bias), activation, nn.Linear(FF, D, bias)]
        if form in ("inner", "both"):
            parts.insert(2, nn.Dropout(0.5))
        if form in ("outer", "both"):
            parts.append(nn.Dropout(0.25))
        block = nn.Sequential(*parts).double().eval()
        x = random(B, S, D)
        expected = block(x)
        wanted = gradients(expected, [x, *block.parameters()])
        assert fastformer.convert(block).changed
        assert_close(block(x), expected)
        for a, b in zip(gradients(block(x), [x, *block.parameters()]), wanted, strict=True):
            assert_close(a, b)
        dropped = block.train()(x)
        assert torch.equal(dropped, block(x)) == (form == "plain")

    def test_each_dropout_keeps_its_rate_and_mode(self):
        block = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Dropout(1.0), nn.Linear(FF, D), nn.Dropout(0.0))
        fastformer.convert(block)
        x = random(B, D, dtype=torch.float32)
        assert_close(block(x), block[3].bias.expand(B, D))
        block[2].eval()
        assert not torch.allclose(block(x), block[3].bias.expand(B, D))
        block[4].p = 1.0
        assert not block(x).any()

    def test_it_looks_at_its_parts_in_every_call(self):
        block = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D))
        fastformer.convert(block)
        x, seen = random(B, D, dtype=torch.float32), []
        for part in block:
            handle = part.register_forward_hook(lambda module, args, out: seen.append(module))
            block(x)
            handle.remove()
        assert seen == list(block)
        block[1] = nn.Tanh()
        assert_close(block(x), block[2](block[0](x).tanh()))
        assert_close(block[:2](x), block[0](x).tanh())

    @pytest.mark.parametrize(
        "parts",
        [
            (nn.Linear(D, FF), nn.Tanh(), nn.Linear(FF, D)),
            (nn.Linear(D, FF), nn.ReLU()),
            (nn.Linear(D, FF), nn.Linear(FF, D), nn.ReLU()),
            (nn.Linear(D, FF), nn.ReLU(), nn.Linear(D, FF)),
            (nn.Linear(D, FF), nn.ReLU(), nn.AlphaDropout(0.5), nn.Linear(FF, D), nn.Dropout(0.5)),
            (nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D), nn.AlphaDropout(0.5)),
            (nn.Linear(D, FF), nn.ReLU(), nn.BatchNorm1d(FF), nn.Linear(FF, D)),
        ],
        ids=str,
    )
    def test_others_stay(self, parts):
        block = nn.Sequential(*parts)
        assert not fastformer.convert(block).changed
        assert type(block) is nn.Sequential


def test_revert_leaves_what_has_got_a_forward_around_ours():
    model = nn.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=True)
    fastformer.convert(model)
    inner = model.self_attn.forward
    model.self_attn.forward = lambda *args, **options: inner(*args, **{**options, "need_weights": True})
    x = random(B, S, D, dtype=torch.float32)
    expected, report = model(x), fastformer.revert(model)
    assert [entry.name for entry in report.left] == ["self_attn"]
    assert type(model) is nn.TransformerEncoderLayer
    assert_close(model(x), expected)
    del model.self_attn.forward
    fastformer.revert(model)
    assert type(model.self_attn) is nn.MultiheadAttention
