"""What convert's report says of zeros at padding, and of attention and feed-forward networks written by hand."""

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


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))


class Mixer(nn.Module):
    """By its linear maps."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(D, D))


class PositionwiseFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(D, FF), nn.Linear(FF, D)

    def forward(self, x):
        return self.w_2(F.relu(self.w_1(x)))


class Inner(nn.Module):
    """By its shape."""

    def __init__(self, width: int = FF, gated: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, width), nn.Linear(FF, D)
        if gated:
            self.gate = nn.Linear(D, FF)
            self.down = self._modules.pop("down")  # the last of them
            self._modules["down"] = self._modules.pop("down")


class LayerNormResidual(nn.Module):
    """As hand-written models name what holds a norm."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(D), inner


class AttentionBlock(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention


class MLPBlock(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, FF), activation, nn.Linear(FF, D))


def told(model: nn.Module) -> list[tuple[str, str]]:
    report = fastformer.convert(model)
    return [(entry.name, entry.outcome.split(";")[0].split(" with ")[0]) for entry in report.left]


ATTENTION, FEED_FORWARD, NORM = (
    "an attention", "a feed-forward network", "not torch.nn's class, and may do something else"
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (SelfAttention, [("", ATTENTION)]),
        (lambda: Mixer("q_proj", "k_proj", "v_proj", "out_proj"), [("", ATTENTION)]),
        (lambda: Mixer("to_q", "to_k", "to_v", "to_out"), [("", ATTENTION)]),
        (lambda: Mixer("Wq", "Wk", "Wv", "Wo"), [("", ATTENTION)]),
        (lambda: Mixer("qkv", "proj"), [("", ATTENTION)]),
        (lambda: Mixer("c_attn", "c_proj"), [("", ATTENTION)]),
        (lambda: Mixer("query_key_value", "dense"), [("", ATTENTION)]),
        (lambda: Mixer("encoder", "decoder"), []),
        (PositionwiseFeedForward, [("", FEED_FORWARD)]),
        (Inner, [("", FEED_FORWARD)]),
        (lambda: Inner(gated=True), [("", FEED_FORWARD)]),
        (lambda: Inner(2 * FF), [("", FEED_FORWARD)]),
        (lambda: Inner(FF + 1), []),
        (lambda: nn.Sequential(nn.Linear(D, FF), nn.SiLU(), nn.Linear(FF, D)), [("", FEED_FORWARD)]),
        (lambda: nn.Sequential(nn.Linear(FF, D), nn.Tanh(), nn.Linear(D, FF)), []),
        (LayerNormResidual, []),
        (lambda: LayerNormResidual(PositionwiseFeedForward()), [("inner", FEED_FORWARD)]),
        (lambda: AttentionBlock(nn.MultiheadAttention(D, H)), []),
        (lambda: AttentionBlock(SelfAttention()), [("attention", ATTENTION)]),
        (lambda: AttentionBlock(nn.LayerNorm(D)), [("", ATTENTION)]),
        (lambda: MLPBlock(nn.GELU()), []),
        (lambda: MLPBlock(nn.SiLU()), [("net", FEED_FORWARD)]),
        (lambda: fastformer.FeedForward(D, FF), []),
        (lambda: nn.TransformerEncoderLayer(D, H, FF), []),
    ],
)
def test_attention_and_feed_forward_of_a_models_own_are_named_and_containers_are_not(make, expected):
    model = make()
    kinds = [type(m) for m in model.modules() if isinstance(m, SelfAttention | Mixer | Inner | nn.Linear)]
    assert told(model) == expected
    assert [type(m) for m in model.modules() if isinstance(m, SelfAttention | Mixer | Inner | nn.Linear)] == kinds


def test_the_report_says_what_to_do():
    report = str(fastformer.convert(nn.ModuleList([SelfAttention(), PositionwiseFeedForward()])))
    assert "left  0  tests.SelfAttention : an attention with a forward of its own" in report
    for name in ("MultiheadAttention", "functional.attention", "FeedForward", "functional.feed_forward"):
        assert f"fastformer.{name}" in report
