"""Transformer layers against torch.nn's."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer
from tests.nn.layer_cases import BESIDE_TORCH, FF, LAYERS, B, T, Twice, check, inputs_for, twins
from tests.support.all_pairs import all_pairs
from tests.support.closeness import assert_close, random

pytestmark = BESIDE_TORCH
both_kinds = pytest.mark.parametrize("kind", LAYERS)
both_orders = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])


class OwnReLU(nn.ReLU):
    def forward(self, x):
        return x.tanh()


SETTINGS = {
    "default": {},
    "batch second": {"batch_first": False},
    "no bias": {"bias": False},
    "eps": {"layer_norm_eps": 0.1},
    "'gelu'": {"activation": "gelu"},
    "F.gelu": {"activation": F.gelu},
    "nn.ReLU()": {"activation": nn.ReLU()},
    "nn.GELU()": {"activation": nn.GELU()},
    "nn.GELU(tanh)": {"activation": nn.GELU("tanh")},
    "nn.SiLU()": {"activation": nn.SiLU()},
    "torch.tanh": {"activation": torch.tanh},
    "own module": {"activation": Twice()},
    "subclass of ReLU": {"activation": OwnReLU()},
    "lambda": {"activation": lambda x: x * x.sigmoid()},
}


@pytest.mark.parametrize(
    ("name", "kind", "norm_first", "dtype"), all_pairs(SETTINGS, LAYERS, [True, False], [torch.float64, torch.float32])
)
def test_every_setting_computes_what_torch_does(name, kind, norm_first, dtype):
    model, torchs = twins(kind, dtype, norm_first=norm_first, **SETTINGS[name])
    for inputs in (inputs_for(kind, "batch" not in name, dtype), inputs_for(kind, dtype=dtype, batched=False)):
        for training in (True, False):
            check(model.train(training), torchs.train(training), inputs)


@both_kinds
@both_orders
def test_dropout_is_applied_where_torch_applies_it(kind, norm_first):
    """Every nn.Dropout has its own rate, also one that is changed later; all are off in evaluation mode."""
    model, torchs = twins(kind, torch.float32, dropout=0.5, norm_first=norm_first)
    inputs = inputs_for(kind, dtype=torch.float32)
    torch.manual_seed(1)
    first = model(*inputs)
    torch.manual_seed(1)
    assert torch.equal(model(*inputs), first)
    assert not torch.equal(model(*inputs), first)
    names = [name for name, module in torchs.named_modules() if isinstance(module, nn.Dropout)]
    for certain in names:  # with p = 1 for one and 0 for the others there is nothing random left
        for module in (model, torchs):
            for name, child in module.named_modules():
                if isinstance(child, nn.Dropout):
                    child.p = float(name == certain)
                if isinstance(child, nn.MultiheadAttention):
                    child.dropout = 0.0
        check(model, torchs, inputs)
    check(model.eval(), torchs.eval(), inputs)


@pytest.mark.parametrize("part", ["all but attention", "dropout", "dropout1", "dropout2"])
def test_dropout_of_one_submodule_in_training_mode(part):
    layer = fastformer.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True).eval()
    if part == "all but attention":
        layer.train().self_attn.eval()
    else:
        layer.get_submodule(part).train()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        assert not torch.equal(layer(x), layer(x))


@both_kinds
def test_copies_and_pickles_keep_the_activation(kind):
    """torch's decoder layer turns an activation that is a module into ReLU there."""
    for activation in (nn.SiLU(), nn.GELU("tanh"), Twice(), F.gelu, "relu"):
        model, _ = twins(kind, activation=activation)
        inputs = inputs_for(kind)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other) is type(model)
            assert_close(other(*inputs), model(*inputs))
    stack = getattr(fastformer, kind.removesuffix("Layer"))(twins(kind, activation=Twice())[0], 2)
    assert all(isinstance(layer.activation, Twice) for layer in stack.layers)


CONSTRUCTED = [
    *((kind, {"dim_feedforward": 16}) for kind in (*LAYERS, "Transformer")),
    *(
        ("MultiheadAttention", options)
        for options in ({}, {"kdim": 4, "vdim": 9}, {"add_bias_kv": True, "bias": False})
    ),
]


@pytest.mark.parametrize(("kind", "settings"), CONSTRUCTED, ids=str)
def test_initial_values_names_and_repr_are_torchs(kind, settings):
    modules = []
    for library in (fastformer, nn):
        torch.manual_seed(3)
        modules.append(getattr(library, kind)(8, 2, dropout=0.1, **settings))
    model, torchs = (module.state_dict() for module in modules)
    assert list(model) == list(torchs)
    assert all(torch.equal(model[name], value) for name, value in torchs.items())
    assert repr(modules[0]) == repr(modules[1])
    attentions = [m for m in modules[0].modules() if isinstance(m, nn.MultiheadAttention | nn.LayerNorm)]
    assert all(type(m) in (fastformer.MultiheadAttention, fastformer.LayerNorm) for m in attentions)


class Doubled:
    """Twice the self-attention, and half the feed-forward network."""

    def _sa_block(self, *args, **kwargs):
        return 2 * super()._sa_block(*args, **kwargs)

    def _ff_block(self, *args, **kwargs):
        return 0.5 * super()._ff_block(*args, **kwargs)


@both_kinds
@pytest.mark.parametrize("grad", [True, False])
def test_a_subclass_that_overrides_blocks_is_honoured(kind, grad):
    """In every mode: torch's own inference fast path would skip the block."""
    settings = {"d_model": 8, "nhead": 2, "dim_feedforward": FF, "dropout": 0.0, "batch_first": True}
    own = type("Own", (type("Base", (Doubled, getattr(fastformer, kind)), {}),), {})(**settings).eval()
    torchs = type("Theirs", (Doubled, getattr(nn, kind)), {})(**settings).eval()
    torchs.load_state_dict(own.state_dict())
    inputs = [torch.randn(B, T, 8)] * (1 if "Encoder" in kind else 2)
    expected = torchs(*inputs)
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.set_grad_enabled(grad):
        assert_close(own(*inputs).detach(), expected.detach())


@pytest.mark.parametrize(
    ("kind", "block"),
    [(LAYERS[0], "_sa_block"), (LAYERS[0], "_ff_block"), (LAYERS[1], "_sa_block"), (LAYERS[1], "_mha_block")],
)
def test_a_block_that_is_replaced_in_the_instance_is_called(kind, block):
    """As by code that keeps attention weights; in inference, too, where torch's fast path would skip it."""
    model, torchs = twins(kind, nhead=2)
    inputs = inputs_for(kind)
    for layer in (model, torchs):
        run = getattr(layer, block)
        setattr(layer, block, lambda *args, run=run, **options: 2 * run(*args, **options))
    check(model, torchs, inputs)
    expected = torchs(*inputs).detach()
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad():
        assert_close(model.eval()(*inputs), expected)


def doubled(module, args, out):
    return (out[0] * 2, out[1]) if isinstance(out, tuple) else out * 2


def replace_forward(child):
    before = child.forward
    child.forward = lambda *args, **kwargs: doubled(child, args, before(*args, **kwargs))


CHANGES = {
    "pre-hook": lambda child: child.register_forward_pre_hook(lambda module, args: (args[0].cos(), *args[1:])),
    "hook": lambda child: child.register_forward_hook(doubled),
    "forward": replace_forward,
}


PARTS = ["linear1", "linear2", "dropout", "norm1", "norm2", "dropout1", "self_attn"]


@pytest.mark.parametrize(("part", "change", "kind", "norm_first"), all_pairs(PARTS, CHANGES, LAYERS, [True, False]))
def test_hooks_and_replaced_methods_are_called(part, change, kind, norm_first):
    """In inference, too, where torch's fast path would skip them."""
    model, torchs = twins(kind, norm_first=norm_first, nhead=2)
    inputs = inputs_for(kind)
    plain = model(*inputs)
    for module in (model, torchs):
        CHANGES[change](module.get_submodule(part))
    check(model, torchs, inputs)
    expected = torchs(*inputs).detach()
    assert not torch.allclose(expected, plain)
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad():
        assert_close(model.eval()(*inputs), expected)


@both_kinds
def test_hooks_of_the_last_projection_of_attention_are_called(kind):
    """torch reads its weight and calls no hook."""
    model, torchs = twins(kind, nhead=2)
    inputs = inputs_for(kind)
    model.self_attn.out_proj.register_forward_hook(doubled)
    with torch.no_grad():
        for parameter in torchs.self_attn.out_proj.parameters():
            parameter.mul_(2)
    expected = torchs(*inputs).detach()
    torch.backends.mha.set_fastpath_enabled(True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert_close(model.train(grad)(*inputs).detach(), expected)


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("name", ["linear1", "dropout", "linear2"])
def test_parts_of_a_feed_forward_network_are_called_where_they_do_more(name, activation):
    model = fastformer.FeedForward(6, 4, 0.5, activation).double().eval()
    x = random(3, 6)
    plain = model(x)
    handle = getattr(model, name).register_forward_hook(doubled)
    hidden = model.linear1(x)
    hidden = hidden.relu() if activation == "relu" else F.silu(hidden[:, :4]) * hidden[:, 4:]
    assert_close(model(x), model.linear2(model.dropout(hidden)))
    handle.remove()
    assert_close(model(x), plain)
    model.dropout.train()  # Monte Carlo dropout
    assert not torch.equal(model(x), plain)
