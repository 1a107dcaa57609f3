"""convert and revert: existing models on our modules, in place, and back."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer
from fastformer.nn.modules import SequentialFeedForward
from tests.nn.conversion.conversion_cases import FF, B, D, H, S, T, V, subclass
from tests.support.closeness import assert_close, gradients, random

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


class Translator(nn.Module):
    """A model as its author wrote it: tied weights, a stack, loose modules, a feed-forward block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.norm = nn.LayerNorm(D)
        self.transformer = nn.Transformer(D, H, 1, 2, FF, dropout, batch_first=True)
        self.head = nn.Sequential(
            nn.Linear(D, FF), nn.GELU(), nn.Dropout(dropout), nn.Linear(FF, D), nn.Dropout(dropout)
        )
        self.rms = nn.RMSNorm(D)
        self.attention = nn.MultiheadAttention(D, H, batch_first=True)
        self.output = nn.Linear(D, V, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, source, target, hidden_source, hidden_target):
        ahead = torch.ones(target.shape[1], target.shape[1]).triu(1).bool()
        x = self.transformer(
            self.norm(self.embedding(source)),
            self.embedding(target),
            tgt_mask=ahead,
            src_key_padding_mask=hidden_source,
            tgt_key_padding_mask=hidden_target,
            memory_key_padding_mask=hidden_source,
        )
        x = x + self.attention(x, x, x, key_padding_mask=hidden_target, attn_mask=ahead, need_weights=False)[0]
        return self.output(self.rms(self.head(x)))


HIDDEN_SOURCE = torch.arange(S) >= torch.tensor([[4], [2], [1]])
HIDDEN_TARGET = torch.arange(T) >= torch.tensor([[3], [5], [2]])
BATCH = (torch.randint(V, (B, S)), torch.randint(V, (B, T)), HIDDEN_SOURCE, HIDDEN_TARGET)


def loss(model: nn.Module) -> torch.Tensor:
    target = torch.arange(B * T).view(B, T).remainder(V).masked_fill(HIDDEN_TARGET, -100)
    return F.cross_entropy(model(*BATCH).flatten(0, 1), target.flatten())


def test_a_model_computes_the_same_and_keeps_its_parameters_and_names():
    model = Translator().double()
    original = copy.deepcopy(model)
    parameters, names, state = list(model.parameters()), list(model.state_dict()), torch.get_rng_state()
    modules = dict(model.named_modules())
    report = fastformer.convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    assert all(module is modules[name] for name, module in model.named_modules())
    assert model.output.weight is model.embedding.weight
    assert type(model.transformer) is fastformer.Transformer
    assert type(model.transformer.decoder.layers[1].multihead_attn) is fastformer.MultiheadAttention
    assert (type(model.norm), type(model.rms)) == (fastformer.LayerNorm, fastformer.RMSNorm)
    assert type(model.head) is SequentialFeedForward
    assert not report.left
    assert not report.padded
    kinds = (nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.Sequential)
    layers = (nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    expected = [name for name, module in modules.items() if type(module) in convertible(kinds, layers)]
    assert sorted(x.name for x in report.changed) == sorted(expected)
    assert_close(loss(model), loss(original))
    for a, b in zip(gradients(loss(model), parameters), gradients(loss(original), original.parameters()), strict=True):
        assert_close(a, b)


def convertible(*groups):
    """Classes that convert leaves nowhere."""
    torchs = {cls for group in groups for cls in group}
    ours = {getattr(fastformer, cls.__name__) for cls in torchs if hasattr(fastformer, cls.__name__)}
    return torchs | ours | {SequentialFeedForward}


def test_training_goes_on_with_the_same_optimiser():
    """Three steps, a change, three steps, a change back, three steps: the same weights as without any change."""
    model, original = Translator().double(), Translator().double()
    original.load_state_dict(model.state_dict())
    optimisers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, original)]
    for change in (None, fastformer.convert, fastformer.revert):
        if change is not None:
            change(model)
        for _ in range(3):
            for m, optimiser in zip((model, original), optimisers, strict=True):
                optimiser.zero_grad()
                loss(m).backward()
                optimiser.step()
    for a, b in zip(model.parameters(), original.parameters(), strict=True):
        assert_close(a, b, roundings=1e5)
    assert type(model.transformer) is nn.Transformer


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(D),
        lambda: nn.RMSNorm(D),
        lambda: nn.MultiheadAttention(D, H),
        lambda: nn.TransformerEncoderLayer(D, H, FF),
        lambda: nn.TransformerDecoderLayer(D, H, FF),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, FF), 2),
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, FF), 2),
        lambda: nn.Transformer(D, H, 1, 1, FF),
        lambda: nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Linear(FF, D)),
    ],
)
def test_the_model_itself_changes_and_changes_back_completely(make):
    model = make().eval()
    before = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}
    report = fastformer.convert(model, padding_free=False)
    assert report.changed[0].name == ""
    assert type(model).__module__.startswith("fastformer.")
    assert not any(m.training for m in model.modules())
    again = fastformer.convert(model)
    assert not again.changed
    assert not again.left
    reverted = fastformer.revert(model)
    assert len(reverted.changed) == len(report.changed)
    assert {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()} == before
    assert not fastformer.revert(model).changed


def test_revert_opens_torchs_fast_path_again_and_leaves_our_own_modules_alone():
    own = fastformer.TransformerEncoderLayer(D, H, FF, batch_first=True)
    layer = nn.TransformerEncoderLayer(D, H, FF, batch_first=True)
    model = nn.ModuleList([own, layer])
    fastformer.convert(model)
    assert layer.activation_relu_or_gelu == 0
    fastformer.revert(model)
    assert layer.activation_relu_or_gelu == 1
    assert type(own) is fastformer.TransformerEncoderLayer


def test_copies_and_pickles_of_a_converted_model_can_be_reverted():
    model = Translator()
    fastformer.convert(model)
    expected = loss(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)):
        assert type(other.transformer) is fastformer.Transformer
        assert_close(loss(other), expected)
        fastformer.revert(other)
        assert type(other.transformer) is nn.Transformer
        assert_close(loss(other), expected)


def test_stacks_skip_padding_or_say_why_not():
    encoder, decoder, ours = (
        kind(layer(D, H, FF, batch_first=True), 2)
        for kind, layer in (
            (nn.TransformerEncoder, nn.TransformerEncoderLayer),
            (nn.TransformerDecoder, nn.TransformerDecoderLayer),
            (fastformer.TransformerEncoder, fastformer.TransformerEncoderLayer),
        )
    )
    model = nn.ModuleDict({"one": encoder, "other": decoder, "ours": ours})
    x, hidden = random(B, S, D, dtype=torch.float32), HIDDEN_SOURCE
    assert not fastformer.convert(model).padded
    assert not model["one"](x, src_key_padding_mask=hidden)[hidden].any()
    fastformer.revert(model)
    report = fastformer.convert(model, padding_free=False)
    assert [(e.name, e.outcome) for e in report.padded] == [(n, "padding_free is False") for n in ("one", "other")]
    assert ours.padding_free
    assert model["one"](x, src_key_padding_mask=hidden)[hidden].any()
    fastformer.revert(model)
    model["one"].layers[0].linear1.register_forward_hook(lambda *_: None)
    report = fastformer.convert(model)
    assert [(e.name, e.outcome) for e in report.padded] == [("one", "layers.0.linear1 has hooks")]
    assert "works on padding  one  fastformer.TransformerEncoder : layers.0.linear1 has hooks" in str(report)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_inside_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, original = Translator(), Translator()
        original.load_state_dict(model.state_dict())
        fastformer.convert(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        loss(wrapped).backward()
        loss(original).backward()
        for a, b in zip(model.parameters(), original.parameters(), strict=True):
            assert_close(a.grad, b.grad, roundings=1e3)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_torchs_fast_path_reach_a_converted_attention():
    """A layer of another class in torch's stack, in inference: its attention is ours, and gets nested tensors."""
    torch.backends.mha.set_fastpath_enabled(True)

    class Layer(nn.TransformerEncoderLayer):
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            return self.self_attn(src, src, src, need_weights=False)[0]

    model = nn.Sequential(nn.TransformerEncoder(Layer(D, H, FF, batch_first=True), 1)).eval()
    x = torch.randn(B, S, D)
    hidden = torch.zeros(B, S).bool()
    with torch.no_grad():
        expected = model[0](x, src_key_padding_mask=hidden)
        report = fastformer.convert(model)
        assert [e.name for e in report.left] == ["0.layers.0"]
        assert_close(model[0](x, src_key_padding_mask=hidden), expected)


def test_the_report_reads_well():
    model = nn.ModuleDict({"norm": nn.LayerNorm(D), "own": subclass()})
    assert str(fastformer.convert(model)).splitlines() == [
        "1 modules changed, 1 left as they were",
        "  changed  norm  torch.nn.LayerNorm -> fastformer.LayerNorm",
        "  left  own  tests.Doubled : a subclass, which may do something else",
    ]
