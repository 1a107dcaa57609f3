"""convert(also=): subclasses that compute what torch's class does, as the caller declares."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer
from tests.nn.conversion.conversion_cases import FF, B, D, H, S

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


class Casting(nn.LayerNorm):
    """As image libraries have it: in the dtype of the parameters, back in that of the input."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class Other(nn.LayerNorm):
    pass


class Root(nn.RMSNorm):
    pass


class EncoderLayer(nn.TransformerEncoderLayer):
    pass


class Encoder(nn.TransformerEncoder):
    pass


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: Casting(D), fastformer.LayerNorm),
        (lambda: Root(D, 1e-6), fastformer.RMSNorm),
        (lambda: EncoderLayer(D, H, FF, 0.0), fastformer.TransformerEncoderLayer),
        (lambda: Encoder(nn.TransformerEncoderLayer(D, H, FF, 0.0), 2), fastformer.TransformerEncoder),
    ],
)
def test_a_declared_subclass_is_changed_and_given_back(make, kind):
    module = make()
    model, before, x = nn.Sequential(module), type(module), torch.randn(S, B, D)
    state, expected = list(module.__dict__), module(x)
    report = fastformer.convert(model, also={before: kind})
    assert type(module) is kind
    assert not report.left
    torch.testing.assert_close(module(x), expected)
    fastformer.revert(model)
    assert type(module) is before
    assert list(module.__dict__) == state


def test_other_subclasses_stay():
    model = nn.Sequential(Casting(D), Other(D))
    report = fastformer.convert(model, also={Casting: fastformer.LayerNorm})
    assert [type(m) for m in model] == [fastformer.LayerNorm, Other]
    assert [(e.name, e.outcome) for e in report.left] == [("1", "a subclass, which may do something else")]


def test_a_layer_with_such_a_norm_runs_without_padding():
    layer = nn.TransformerEncoderLayer(D, H, FF, batch_first=True)
    layer.norm1, layer.norm2 = Casting(D), Casting(D)
    stack = nn.TransformerEncoder(layer, 1)
    assert [e.outcome for e in fastformer.convert(copy.deepcopy(stack)).padded] == ["layers.0.norm1 is a Casting"]
    assert not fastformer.convert(stack, also={Casting: fastformer.LayerNorm}).padded
    assert not stack(torch.randn(B, S, D), src_key_padding_mask=torch.arange(S).expand(B, S) > 1)[:, 2:].any()


@pytest.mark.parametrize(
    ("also", "error", "message"),
    [
        ({Casting(D): fastformer.LayerNorm}, TypeError, r"also must map classes of modules to fastformer's, not Cas"),
        ({Casting: "LayerNorm"}, TypeError, "also must map classes of modules to fastformer's, not 'LayerNorm'"),
        ({Casting: nn.LayerNorm}, ValueError, r"to torch.nn.LayerNorm, which is none of fastformer's LayerNorm, RMSN"),
        ({nn.Linear: fastformer.LayerNorm}, ValueError, r"torch.nn.Linear to fastformer.LayerNorm: no subclass of"),
        ({Root: fastformer.LayerNorm}, ValueError, r"to fastformer.LayerNorm: no subclass of torch.nn.LayerNorm"),
    ],
)
def test_wrong_maps_are_refused_before_anything_changes(also, error, message):
    model = nn.Sequential(nn.LayerNorm(D))
    with pytest.raises(error, match=message):
        fastformer.convert(model, also=also)
    assert type(model[0]) is nn.LayerNorm
