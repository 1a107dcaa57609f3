"""convert and revert: existing models on our modules, in place, and back; what the report says."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer
from tests.nn.layer_cases import BESIDE_TORCH
from tests.support.closeness import assert_close, gradients, random
from tests.support.masks import right

pytestmark = BESIDE_TORCH
V, D, H, FF, B, T, S = 11, 8, 2, 12, 3, 5, 4
HIDDEN_SOURCE, HIDDEN_TARGET = right([4, 2, 1], S), right([3, 5, 2], T)
BATCH = (torch.randint(V, (B, S)), torch.randint(V, (B, T)), HIDDEN_SOURCE, HIDDEN_TARGET)


class Translator(nn.Module):
    """A model as its author wrote it: tied weights, a stack, loose modules, one twice, a feed-forward block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.norm = self.same_norm = nn.LayerNorm(D)
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
            self.same_norm(self.embedding(target)),
            tgt_mask=ahead,
            src_key_padding_mask=hidden_source,
            tgt_key_padding_mask=hidden_target,
            memory_key_padding_mask=hidden_source,
        )
        x = x + self.attention(x, x, x, key_padding_mask=hidden_target, attn_mask=ahead, need_weights=False)[0]
        return self.output(self.rms(self.head(x)))


def loss(model: nn.Module) -> torch.Tensor:
    target = torch.arange(B * T).view(B, T).remainder(V).masked_fill(HIDDEN_TARGET, -100)
    return F.cross_entropy(model(*BATCH).flatten(0, 1), target.flatten())


def test_a_model_computes_the_same_and_keeps_its_parameters_and_names():
    model = Translator().double()
    original = copy.deepcopy(model)
    parameters, names, state = list(model.parameters()), list(model.state_dict()), torch.get_rng_state()
    modules = dict(model.named_modules(remove_duplicate=False))
    report = fastformer.convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    assert dict(model.named_modules(remove_duplicate=False)) == modules
    assert not report.left
    assert not report.padded
    changed = {x.name for x in report.changed}
    for name, module in model.named_modules():
        torchs = next((cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn")), nn.Module)
        expected = getattr(fastformer, torchs.__name__, None)
        assert (name in changed) == (expected is not None)
        assert expected is None or type(module) is expected
    assert_close(loss(model), loss(original))
    assert_close(gradients(loss(model), parameters), gradients(loss(original), original.parameters()))


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
    ],
)
def test_convert_changes_a_model_in_place_and_revert_undoes_it(make):
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


def encoder(library=nn):
    return library.TransformerEncoder(library.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=True), 2)


def test_the_report_says_why_a_stack_runs_padded():
    own = encoder(fastformer)
    model, x = nn.ModuleDict({"one": encoder(), "own": own}), torch.randn(B, S, D)
    assert not fastformer.convert(model).padded
    assert not model["one"](x, src_key_padding_mask=HIDDEN_SOURCE)[HIDDEN_SOURCE].any()
    fastformer.revert(model)
    report = fastformer.convert(model, padding_free=False)
    assert [(e.name, e.outcome) for e in report.padded] == [("one", "padding_free is False")]
    assert own.padding_free
    assert model["one"](x, src_key_padding_mask=HIDDEN_SOURCE)[HIDDEN_SOURCE].any()
    fastformer.revert(model)
    model["one"].layers[0].linear1.register_forward_hook(lambda *_: None)
    assert "works on padding  one  fastformer.TransformerEncoder : layers.0.linear1 has hooks" in str(
        fastformer.convert(model)
    )


def test_the_report_says_which_stacks_give_zeros_at_padding_and_what_to_do():
    """A mean over all positions changes."""
    model = nn.ModuleDict({"one": encoder(), "two": nn.Transformer(D, H, 1, 1, FF), "own": encoder(fastformer)})
    x = torch.randn(B, S, D)
    expected = model["one"](x, src_key_padding_mask=HIDDEN_SOURCE).mean(1)
    report = fastformer.convert(model)
    assert [entry.name for entry in report.zeroed] == ["one", "two.encoder", "two.decoder"]  # own is the user's choice
    assert not torch.allclose(model["one"](x, src_key_padding_mask=HIDDEN_SOURCE).mean(1), expected)
    line = next(line for line in str(report).splitlines() if "zeros at padding" in line)
    assert all(word in line for word in ("rows", "0", "training", "mean", "padding_free=False"))
    fastformer.revert(model)
    assert not fastformer.convert(model, padding_free=False).zeroed
    torch.testing.assert_close(model["one"](x, src_key_padding_mask=HIDDEN_SOURCE).mean(1), expected)


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
def test_modules_that_convert_leaves_are_reported(make, reason):
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
    for module in (model[0], model[1], model[1].linear1, model[1].dropout, model[1].norm1):
        getattr(module, f"register_{kind}_hook")(lambda module, *_, calls=calls: calls.append(module))
    x = random(S, B, D, dtype=torch.float32)
    model(x).sum().backward()
    before, calls[:] = list(calls), []
    fastformer.convert(model)
    model(x).sum().backward()
    assert len(before) == 5
    assert calls == before


def test_revert_leaves_a_module_whose_class_changed():
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
