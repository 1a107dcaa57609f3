"""What convert's report says about zeros at padding."""

import pytest
import torch
from torch import nn

import fastformer
from tests.nn.conversion.conversion_cases import FF, B, D, H, S

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


def encoder(batch_first: bool = True) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=batch_first), 1)


class Pooling(nn.Module):
    """A mean over all positions, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x, hidden):
        return self.encoder(x, src_key_padding_mask=hidden).mean(1)


def test_a_mean_over_padding_changes_and_the_report_says_where_and_what_to_do():
    model, x, hidden = Pooling(), torch.randn(B, S, D), torch.arange(S).expand(B, S) > 1
    expected = model(x, hidden)
    report = fastformer.convert(model)
    assert not torch.allclose(model(x, hidden), expected)
    assert [(entry.name, entry.before) for entry in report.zeroed] == [("encoder", "fastformer.TransformerEncoder")]
    line = next(line for line in str(report).splitlines() if "zeros at padding" in line)
    for word in ("encoder", "rows", "0", "training", "mean", "padding_free=False"):
        assert word in line
    fastformer.revert(model)
    assert not fastformer.convert(model, padding_free=False).zeroed
    torch.testing.assert_close(model(x, hidden), expected)


def test_each_stack_is_named_whether_it_works_on_padding_or_not():
    model = nn.ModuleDict({"one": encoder(), "two": nn.Transformer(D, H, 1, 1, FF), "ours": nn.Identity()})
    model["one"].layers[0].linear1.register_forward_hook(lambda *_: None)
    model["ours"] = fastformer.TransformerEncoder(fastformer.TransformerEncoderLayer(D, H, FF), 1)
    report = fastformer.convert(model)
    assert [entry.name for entry in report.zeroed] == ["one", "two.encoder", "two.decoder"]  # not who chose it: ours
    x, hidden = torch.randn(B, S, D), torch.arange(S).expand(B, S) > 1
    assert not model["one"](x, src_key_padding_mask=hidden)[hidden].any()
    assert [entry.name for entry in report.padded] == ["one"]
