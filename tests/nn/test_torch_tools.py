"""What torch's own tools make of our modules and ops: what they could do before, they can or are told how."""

import copy
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastformer
from fastformer import functional
from fastformer.nn.modules import OURS


@pytest.mark.parametrize("ours", OURS.values())
def test_forward_takes_torchs_arguments_in_torchs_order_and_every_argument_by_position(ours: type[nn.Module]) -> None:
    """torch.onnx's exporter of traces passes every argument of a signature by position."""
    given, expected = (inspect.signature(cls.forward).parameters for cls in (ours, getattr(nn, ours.__name__)))
    assert [*given][: len(expected)] == [*expected]
    assert all(given[name].default is its.default for name, its in expected.items())
    assert {its.kind for its in given.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("length", [100, 20_000])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap_is_torchs(randomness: str, length: int) -> None:
    x = torch.ones(4, length)
    found = []
    for dropout in (functional.dropout, F.dropout):
        torch.manual_seed(0)
        found.append(torch.vmap(lambda row, dropout=dropout: dropout(row, 0.5), randomness=randomness)(x))
    assert torch.equal(*found)
    assert (found[0][0] == found[0][1]).all() == (randomness == "same")


class Own(torch.Tensor):
    """A tensor of somebody's own."""


class Doubling(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Negated(fastformer.TransformerEncoderLayer):
    def compose(self, x, attention):
        return -super().compose(x, attention)


class NegatedSum(fastformer.TransformerEncoderLayer):
    def carry(self, x, attention):
        return super().carry(x, attention)._replace(x=-x)


def _nothing(module, x):
    return x


def _hook(part):
    def change(module, x):
        (module.get_submodule(part) if part else module).register_forward_hook(lambda *_: None)
        return x

    return change


def _set(name, value):
    def change(module, x):
        setattr(module, name, value)
        return x

    return change


def _own_weight(module, x):
    module.linear2.weight = torch.nn.Parameter(module.linear2.weight.detach().as_subclass(Own))
    return x


CHANGES = {
    "none": _nothing,
    "training": lambda module, x: (module.train(), x)[1],
    "hook on its projection": _hook("self_attn.out_proj"),
    "hook on its attention": _hook("self_attn"),
    "hook on its norm": _hook("norm2"),
    "hook on its dropout": _hook("dropout1"),
    "its own linear map": _set("linear1", Doubling(16, 32)),
    "another activation": _set("activation", F.silu),
    "a tensor of one's own": lambda module, x: x.as_subclass(Own),
    "a weight of one's own": _own_weight,
    "no bias": _set("linear1", torch.nn.Linear(16, 32, bias=False)),
    "a class of its own": lambda module, x: (setattr(module, "__class__", Negated), x)[1],
    "a sum of its own": lambda module, x: (setattr(module, "__class__", NegatedSum), x)[1],
    "many tokens": lambda module, x: x.repeat(20, 5, 1),
    "no token": lambda module, x: x[:, :0],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_op_for_a_layer_is_for_layers_with_nothing_else(monkeypatch, change, norm_first):
    given = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True, "norm_first": norm_first, "activation": "gelu"}
    layer = fastformer.TransformerEncoderLayer(16, 4, **given).eval()
    x = CHANGES[change](layer, torch.randn(2, 5, 16))
    calls = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, o=original, n=name: (calls.append(n), o(*a))[1])
    with torch.no_grad():
        found = layer(x)
        causal = torch.zeros(x.shape[1], x.shape[1])  # a mask that hides nothing: the general way
        expected = layer(x, src_mask=causal)
    assert ("_transformer_encoder_layer_fwd" in calls) == (change == "none")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    calls.clear()
    layer(x)  # with gradients
    assert not calls


@pytest.mark.parametrize("training", ["all but attention", "dropout", "dropout1", "dropout2"])
def test_what_trains_alone_drops_out_of_few_tokens_too(training):
    layer = fastformer.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True).eval()
    if training == "all but attention":
        layer.train()
        layer.self_attn.eval()
    else:
        layer.get_submodule(training).train()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        assert not torch.equal(layer(x), layer(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_of_few_nested_tokens_is_torchs():
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    ours = fastformer.MultiheadAttention(16, 4, batch_first=True).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with torch.no_grad():
        found, expected = (module(x, x, x, need_weights=False)[0] for module in (ours, theirs))
    assert all(map(torch.equal, found.unbind(), expected.unbind()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_from_padded_to_nested_tokens_is_refused_as_by_torch():
    x, memory = torch.randn(2, 5, 16), torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    for module in (torch.nn.MultiheadAttention, fastformer.MultiheadAttention):
        with pytest.raises(AssertionError, match="does not support NestedTensor"):
            module(16, 4, batch_first=True)(x, memory, memory, need_weights=False)


@pytest.mark.parametrize("weights", [True, False])
def test_torchs_op_for_attention_gives_torchs_bits(weights):
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    ours = fastformer.MultiheadAttention(16, 4, batch_first=True).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        for a, b in zip(ours(x, x, x, need_weights=weights), theirs(x, x, x, need_weights=weights), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
        ours.out_proj.register_forward_hook(lambda module, inputs, out: 2 * out)
        assert torch.allclose(ours(x, x, x)[0], 2 * theirs(x, x, x)[0], atol=1e-6)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fastformer.MultiheadAttention(16, 4, batch_first=True).eval()(x, x, x)
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("change", ["nothing", "window", "softcap", "sinks", "projection", "hook", "weight"])
@pytest.mark.parametrize("kind", ["self", "cross", "causal"])
def test_torchs_ops_alone_run_for_few_tokens_only_where_attention_is_torchs(monkeypatch, kind, change):
    attention = fastformer.MultiheadAttention(16, 4, batch_first=True).eval()
    changes = {
        "window": lambda: setattr(attention, "window", (2, 0)),
        "softcap": lambda: setattr(attention, "softcap", 5.0),
        "sinks": lambda: setattr(attention, "sinks", nn.Parameter(torch.randn(4))),
        "projection": lambda: setattr(attention, "out_proj", Doubling(16, 16)),
        "hook": lambda: attention.out_proj.register_forward_hook(lambda module, inputs, out: 2 * out),
        "weight": lambda: setattr(
            attention, "in_proj_weight", nn.Parameter(attention.in_proj_weight.detach().as_subclass(Own))
        ),
    }
    changes.get(change, lambda: None)()
    x, calls, few = torch.randn(2, 5, 16), [], fastformer.MultiheadAttention._attend_to_few

    def noted(*given):
        out = few(*given)
        if out is not None:
            calls.append(1)
        return out

    memory = torch.randn(2, 5, 16) if kind == "cross" else x
    given = {"attn_mask": torch.ones(5, 5).triu(1) > 0, "is_causal": True} if kind == "causal" else {}
    monkeypatch.setattr(fastformer.MultiheadAttention, "_attend_to_few", noted)
    with torch.no_grad():
        found = attention(x, memory, memory, need_weights=False, **given)[0]
    assert bool(calls) == (change == "nothing")
    torch.testing.assert_close(found, attention(x, memory, memory, need_weights=False, **given)[0].detach())
    assert len(calls) == (change == "nothing")


def test_script_is_told_to_revert_and_then_compiles() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    fastformer.convert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        with pytest.raises(TypeError, match=r"torch.jit.script cannot compile fastformer\.\w+: call fastformer.revert"):
            torch.jit.script(nn.Sequential(model))
        fastformer.revert(model)
        torch.jit.script(model)


@pytest.mark.filterwarnings("ignore")  # torch says that torchao takes the place of torch.ao
def test_static_quantisation_after_revert_is_that_of_torchs_modules() -> None:
    from torch.ao import quantization

    def quantised(model: nn.Module) -> nn.Module:
        whole = nn.Sequential(quantization.QuantStub(), model, quantization.DeQuantStub()).eval()
        whole.qconfig = quantization.default_qconfig
        prepared = quantization.prepare(whole)
        prepared(x)
        return quantization.convert(prepared)

    x, theirs = torch.randn(3, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    ours = copy.deepcopy(theirs)
    fastformer.convert(ours)
    with pytest.raises(RuntimeError, match="QUInt8"):
        quantised(copy.deepcopy(ours))(x)
    fastformer.revert(ours)
    assert torch.equal(quantised(ours)(x), quantised(theirs)(x))
