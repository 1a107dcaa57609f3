"""Transformer layers against torch.nn's."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastformer
from fastformer.packing import Layout
from tests.nn.layer_cases import (
    FF,
    KINDS,
    MASKS,
    B,
    D,
    H,
    T,
    Twice,
    arguments_for,
    check,
    inputs_for,
    layers,
    transformers,
)
from tests.support.closeness import assert_close, gradients, random

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


SETTINGS = {
    "default": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "eps": {"layer_norm_eps": 0.1},
    "'relu'": {"activation": "relu"},
    "'gelu'": {"activation": "gelu"},
    "F.gelu": {"activation": F.gelu},
    "nn.ReLU()": {"activation": nn.ReLU()},
    "nn.GELU()": {"activation": nn.GELU()},
    "nn.GELU(tanh)": {"activation": nn.GELU("tanh")},
    "nn.SiLU()": {"activation": nn.SiLU()},
    "torch.tanh": {"activation": torch.tanh},
    "own module": {"activation": Twice()},
    "lambda": {"activation": lambda x: x * x.sigmoid()},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_setting(kind, norm_first, name, dtype):
    ours, torchs = layers(kind, dtype, norm_first=norm_first, **SETTINGS[name])
    inputs = inputs_for(kind, "batch" in name, dtype)
    for training in (True, False):
        check(ours.train(training), torchs.train(training), inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("mask_kind", ["bool", "float"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_every_mask(kind, masks, mask_kind, batch_first):
    ours, torchs = layers(kind, batch_first=batch_first, norm_first=batch_first)
    check(ours, torchs, inputs_for(kind, batch_first), **arguments_for(kind, masks, mask_kind))


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_input(kind):
    ours, torchs = layers(kind)
    check(ours, torchs, inputs_for(kind, batched=False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_sequences_of_padding_alone_stay_finite(kind, norm_first):
    """torch gives NaN here: the one deliberate difference. The attention part of the output is the bias."""
    ours, _ = layers(kind, batch_first=True, norm_first=norm_first)
    inputs = inputs_for(kind, True)
    dead = torch.tensor([[False] * T, [True] * T])
    name = "src_key_padding_mask" if "Encoder" in kind else "tgt_key_padding_mask"
    out = ours(*inputs, **{name: dead})
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in gradients(out, [*inputs, *ours.parameters()]))
    with torch.no_grad():
        ours.self_attn.out_proj.bias.zero_()
        alone = copy.deepcopy(ours)
        alone.self_attn.out_proj.weight.zero_()  # a layer whose self-attention is 0
    assert_close(ours(*inputs, **{name: dead})[1], alone(*inputs)[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_is_applied_where_torch_applies_it(kind, norm_first):
    """Every nn.Dropout has its own rate, also one that is changed later; all are off in evaluation mode."""
    ours, torchs = layers(kind, torch.float32, dropout=0.5, norm_first=norm_first)
    inputs = inputs_for(kind, dtype=torch.float32)
    torch.manual_seed(1)
    first = ours(*inputs)
    torch.manual_seed(1)
    assert torch.equal(ours(*inputs), first)
    assert not torch.equal(ours(*inputs), first)
    names = [name for name, module in ours.named_modules() if isinstance(module, nn.Dropout)]
    assert names == [name for name, module in torchs.named_modules() if isinstance(module, nn.Dropout)]
    for certain in names:  # with p = 1 for one and 0 for the others there is nothing random left
        for module in (ours, torchs):
            for name, child in module.named_modules():
                if isinstance(child, nn.Dropout):
                    child.p = float(name == certain)
                if isinstance(child, nn.MultiheadAttention):
                    child.dropout = 0.0
        check(ours, torchs, inputs)
    check(ours.eval(), torchs.eval(), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_keep_the_activation(kind):
    """torch's decoder layer turns an activation that is a module into ReLU there."""
    for activation in (nn.SiLU(), nn.GELU("tanh"), Twice(), F.gelu, "relu"):
        ours, _ = layers(kind, activation=activation)
        inputs = inputs_for(kind)
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert type(other) is type(ours)
            assert_close(other(*inputs), ours(*inputs))
    stack = getattr(fastformer, kind.removesuffix("Layer"))(layers(kind, activation=Twice())[0], 2)
    assert all(isinstance(layer.activation, Twice) for layer in stack.layers)


@pytest.mark.parametrize("kind", [*KINDS, "Transformer"])
def test_initial_values_names_and_repr_are_torchs(kind):
    made = []
    for library in (fastformer, nn):
        torch.manual_seed(3)
        made.append(getattr(library, kind)(8, 2, dim_feedforward=16))
    ours, torchs = (module.state_dict() for module in made)
    assert list(ours) == list(torchs)
    assert all(torch.equal(ours[name], value) for name, value in torchs.items())
    made[0].load_state_dict(torchs, strict=True)
    made[1].load_state_dict(ours, strict=True)
    assert repr(made[0]) == repr(made[1])
    assert all(type(m).__module__.startswith("fastformer") for m in made[0].modules() if hasattr(m, "forward_packed"))
    attentions = [m for m in made[0].modules() if isinstance(m, nn.MultiheadAttention | nn.LayerNorm)]
    assert all(type(m) in (fastformer.MultiheadAttention, fastformer.LayerNorm) for m in attentions)


class Doubled:
    """A mixin that overrides a block: twice the self-attention."""

    def _sa_block(self, *args, **kwargs):
        return 2 * super()._sa_block(*args, **kwargs)


class DoubledFeedForward:
    def _ff_block(self, *args, **kwargs):
        return 2 * super()._ff_block(*args, **kwargs)


@pytest.mark.parametrize("mixin", [Doubled, DoubledFeedForward])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_subclass_that_overrides_a_block_is_honoured(mixin, kind, grad):
    """In every mode: torch's own inference fast path would skip the block."""
    settings = {"d_model": 8, "nhead": 2, "dim_feedforward": FF, "dropout": 0.0, "batch_first": True}
    own = type("Own", (type("Base", (mixin, getattr(fastformer, kind)), {}),), {})(**settings).eval()
    torchs = type("Theirs", (mixin, getattr(nn, kind)), {})(**settings).eval()
    torchs.load_state_dict(own.state_dict())
    inputs = [torch.randn(B, T, 8)] * (1 if "Encoder" in kind else 2)
    expected = torchs(*inputs)
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.set_grad_enabled(grad):
        assert_close(own(*inputs).detach(), expected.detach())
    layout = Layout.from_lengths([T])
    packed = [layout] if "Encoder" in kind else [layout, inputs[1][0], layout]
    with pytest.raises(RuntimeError, match="Own overrides a block of its layer; only forward calls that"):
        own.packed(inputs[0][0], *packed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("where", ["linear1", "linear2", "dropout", "norm1", "norm2", "dropout1", "self_attn"])
def test_hooks_and_replaced_submodules_are_honoured(kind, norm_first, where):
    inputs = inputs_for(kind)

    def forward_hook(module, args, out):
        return (out[0] * 2, out[1]) if isinstance(out, tuple) else out * 2

    def with_pre_hook(child):
        child.register_forward_pre_hook(lambda module, args: (args[0].cos(), *args[1:]))

    def with_hook(child):
        child.register_forward_hook(forward_hook)

    def with_forward(child):
        before = child.forward
        child.forward = lambda *args, **kwargs: forward_hook(child, args, before(*args, **kwargs))

    for change in (with_pre_hook, with_hook, with_forward):
        ours, torchs = layers(kind, norm_first=norm_first)
        plain = ours(*inputs)
        for module in (ours, torchs):
            change(getattr(module, where))
        check(ours, torchs, inputs)
        assert not torch.allclose(ours(*inputs), plain)
    if "norm" in where:
        ours, torchs = layers(kind, norm_first=norm_first)
        for module in (ours, torchs):
            setattr(module, where, nn.RMSNorm(D, dtype=torch.float64))
        check(ours, torchs, inputs)
    if where == "linear1":
        ours, torchs = layers(kind, norm_first=norm_first)
        for module in (ours, torchs):
            nn.utils.parametrizations.weight_norm(module.linear1)
        check(ours, torchs, inputs)


def test_torchs_stack_around_our_layer_computes_the_same_in_every_mode():
    """torch's stack would hand nested tensors to its own layer in inference."""
    ours, torchs = layers("TransformerEncoderLayer", batch_first=True, nhead=2)
    stack, expected_stack = nn.TransformerEncoder(ours, 2).eval(), nn.TransformerEncoder(torchs, 2).eval()
    x = random(B, T, D)
    mask = torch.arange(T) >= torch.tensor([[5], [2]])
    expected = expected_stack(x, src_key_padding_mask=mask)
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad():
        assert_close(stack(x, src_key_padding_mask=mask), expected.detach())


x = torch.zeros(T, B, D)
BAD_CALLS = {
    "Encoder width": ("TransformerEncoderLayer", (x[..., :4],), {}),
    "Encoder mask shape": ("TransformerEncoderLayer", (x,), {"src_mask": torch.zeros(4, 4)}),
    "Encoder mask dtype": ("TransformerEncoderLayer", (x,), {"src_mask": torch.zeros(T, T).int()}),
    "Encoder padding shape": ("TransformerEncoderLayer", (x,), {"src_key_padding_mask": torch.zeros(B, 3).bool()}),
    "Encoder padding dtype": ("TransformerEncoderLayer", (x,), {"src_key_padding_mask": torch.zeros(B, T).int()}),
    "Encoder dtype": ("TransformerEncoderLayer", (x.double(),), {}),
    "Decoder memory width": ("TransformerDecoderLayer", (x, x[..., :4]), {}),
    "Decoder memory batch": ("TransformerDecoderLayer", (x, x[:, :1]), {}),
    "Decoder mask shape": ("TransformerDecoderLayer", (x, x), {"memory_mask": torch.zeros(T, 3)}),
    "Decoder mask dtype": ("TransformerDecoderLayer", (x, x), {"tgt_mask": torch.zeros(T, T).int()}),
    "Decoder without memory": ("TransformerDecoderLayer", (x,), {}),
    "Transformer batches": ("Transformer", (x, x[:, :1]), {}),
    "Transformer width": ("Transformer", (x, x[..., :4]), {}),
    "Transformer padding": ("Transformer", (x, x), {"memory_key_padding_mask": torch.zeros(B, 2).bool()}),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_mistake_raises_what_torch_raises(name):
    kind, inputs, arguments = BAD_CALLS[name]
    ours, torchs = layers(kind, torch.float32) if "Layer" in kind else transformers(torch.float32)
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        torchs(*inputs, **arguments)
    with pytest.raises(wanted.type) as raised:
        ours(*inputs, **arguments)
    assert raised.type is wanted.type
    assert str(raised.value).strip()


@pytest.mark.parametrize("kind", [*KINDS, "Transformer"])
@pytest.mark.parametrize("settings", [{"nhead": 4}, {"activation": "tanh"}, {"dropout": 1.5}, {"nhead": 0}], ids=str)
def test_a_bad_constructor_raises_what_torch_raises(kind, settings):
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        getattr(nn, kind)(**{"d_model": D, "nhead": H, **settings})
    with pytest.raises(wanted.type):
        getattr(fastformer, kind)(**{"d_model": D, "nhead": H, **settings})


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("name", ["linear1", "dropout", "linear2"])
def test_parts_of_a_feed_forward_network_are_called_where_they_do_more(name, activation):
    ours = fastformer.FeedForward(6, 4, 0.5, activation).double().eval()
    x = random(3, 6)
    plain = ours(x)
    handle = getattr(ours, name).register_forward_hook(lambda module, given, out: out * 2.0)
    hidden = ours.linear1(x)
    hidden = hidden.relu() if activation == "relu" else F.silu(hidden[:, :4]) * hidden[:, 4:]
    assert_close(ours(x), ours.linear2(ours.dropout(hidden)))
    handle.remove()
    assert_close(ours(x), plain)
    ours.dropout.train()  # Monte Carlo dropout
    assert not torch.equal(ours(x), plain)
