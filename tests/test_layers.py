"""Transformer layers and stacks against torch.nn's, and padded against packed."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_close, gradients, random
from torch import nn

import fastformer
from fastformer.packing import Layout, pack

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

D, H, FF, B, T, S = 6, 3, 7, 2, 5, 4
KINDS = ("TransformerEncoderLayer", "TransformerDecoderLayer")


class Twice(nn.Module):
    """An activation that no library knows."""

    def forward(self, x):
        return 2 * x.sin()


def randomise(module):
    """Values that leave no bias zero and no norm weight one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4)


def layers(kind, dtype=torch.float64, **settings):
    settings = {"d_model": D, "nhead": H, "dim_feedforward": FF, "dropout": 0.0, **settings}
    ours, torchs = getattr(fastformer, kind)(**settings, dtype=dtype), getattr(nn, kind)(**settings, dtype=dtype)
    randomise(ours)
    torchs.load_state_dict(ours.state_dict(), strict=True)
    return ours, torchs


def inputs_for(kind, batch_first=False, dtype=torch.float64, batched=True):
    def make(length):
        shape = (length, D) if not batched else (B, length, D) if batch_first else (length, B, D)
        return random(*shape, dtype=dtype)

    return (make(T),) if "Encoder" in kind else (make(T), make(S))


def check(ours, torchs, inputs, **arguments):
    out, expected = ours(*inputs, **arguments), torchs(*inputs, **arguments)
    assert_close(out, expected)
    actual = gradients(out, [*inputs, *ours.parameters()])
    for a, w in zip(actual, gradients(expected, [*inputs, *torchs.parameters()]), strict=True):
        assert_close(a, w)


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


def causal_mask(length, kind):
    mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
    return mask.isinf() if kind == "bool" else mask


def arguments_for(kind, masks, mask_kind):
    """Torch's arguments for a form of masks; no query is left without keys."""
    padding, memory_padding = torch.zeros(B, T).bool(), torch.zeros(B, S).bool()
    padding[0, 3:], memory_padding[1, 1:] = True, True
    if mask_kind == "float":
        padding, memory_padding = (
            torch.zeros(x.shape, dtype=torch.float64).masked_fill(x, -math.inf) for x in (padding, memory_padding)
        )
    causal = causal_mask(T, mask_kind)
    heads = causal[None].repeat(B * H, 1, 1)
    memory_mask = torch.rand(T, S) < 0.4
    memory_mask[:, 0] = False
    if mask_kind == "float":
        memory_mask = torch.randn(T, S, dtype=torch.float64).masked_fill(memory_mask, -math.inf)
    encoder = {
        "padding": {"src_key_padding_mask": padding},
        "causal": {"src_mask": causal},
        "causal hint": {"src_mask": causal, "is_causal": True},
        "3-D and padding": {"src_mask": heads, "src_key_padding_mask": padding},
        "hint and padding": {"src_mask": causal, "src_key_padding_mask": padding, "is_causal": True},
    }
    decoder = {
        "padding": {"tgt_key_padding_mask": padding, "memory_key_padding_mask": memory_padding},
        "causal": {"tgt_mask": causal, "memory_mask": memory_mask},
        "causal hint": {"tgt_mask": causal, "tgt_is_causal": True},
        "3-D and padding": {"tgt_mask": heads, "memory_key_padding_mask": memory_padding},
        "hint and padding": {
            "tgt_mask": causal,
            "tgt_key_padding_mask": padding,
            "memory_key_padding_mask": memory_padding,
            "tgt_is_causal": True,
        },
    }
    return (encoder if "Encoder" in kind else decoder)[masks]


MASKS = ("padding", "causal", "causal hint", "3-D and padding", "hint and padding")


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


def stacks(kind, norm, dtype=torch.float64, num_layers=2, **settings):
    settings = {"d_model": D, "nhead": H, "dim_feedforward": FF, "dropout": 0.0, **settings}
    made = []
    for library in (fastformer, nn):
        layer = getattr(library, kind + "Layer")(**settings, dtype=dtype)
        final = library.LayerNorm(D, dtype=dtype) if norm else None
        made.append(getattr(library, kind)(layer, num_layers, final))
    randomise(made[0])
    made[1].load_state_dict(made[0].state_dict(), strict=True)
    return made


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("masks", [None, *MASKS])
def test_stacks(kind, norm, masks):
    ours, torchs = stacks(kind, norm, norm_first=norm)
    arguments = {} if masks is None else arguments_for(kind, masks, "float")
    if "src_mask" in arguments:
        arguments["mask"] = arguments.pop("src_mask")
    ours.padding_free = False  # to compare padded rows too
    check(ours, torchs, inputs_for(kind), **arguments)


def transformers(dtype=torch.float64, **settings):
    settings = {
        "d_model": D,
        "nhead": H,
        "num_encoder_layers": 2,
        "num_decoder_layers": 1,
        "dim_feedforward": FF,
        "dropout": 0.0,
        **settings,
    }
    ours, torchs = fastformer.Transformer(**settings, dtype=dtype), nn.Transformer(**settings, dtype=dtype)
    randomise(ours)
    torchs.load_state_dict(ours.state_dict(), strict=True)
    return ours, torchs


@pytest.mark.parametrize("settings", [{}, {"norm_first": True, "batch_first": True}, {"bias": False}], ids=str)
def test_transformer(settings):
    ours, torchs = transformers(activation="gelu", layer_norm_eps=0.01, **settings)
    inputs = inputs_for("Decoder", settings.get("batch_first", False))[::-1]
    check(ours, torchs, inputs)
    padding = torch.tensor([[False, False, True, True], [False] * 4])
    arguments = {
        "tgt_mask": causal_mask(T, "bool"),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    check(ours, torchs, inputs, **arguments)
    check(ours, torchs, inputs, tgt_is_causal=True, **arguments)


def test_transformer_with_custom_stacks():
    class Encoder(nn.Module):
        def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=False):
            return src * 2

    class Decoder(nn.Module):
        def forward(self, tgt, memory, **masks):
            return tgt + memory.mean(0)

    encoder, decoder = Encoder(), Decoder()
    module = fastformer.Transformer(D, H, custom_encoder=encoder, custom_decoder=decoder)
    assert module.encoder is encoder
    assert module.decoder is decoder
    src, tgt = random(S, B, D), random(T, B, D)
    assert_close(module(src, tgt), tgt + 2 * src.mean(0))
    torchs = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H), 1)
    assert fastformer.Transformer(D, H, custom_encoder=torchs).encoder is torchs


LENGTHS = [([5, 2, 3], [1, 4, 2]), ([3, 3], [2, 2]), ([0, 3], [2, 4]), ([], [])]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", ["encoder", "causal encoder", "decoder"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_packed_stacks_are_padded_ones_on_real_tokens(lengths, kind, norm_first):
    which = "TransformerDecoder" if kind == "decoder" else "TransformerEncoder"
    ours, _ = stacks(which, True, norm_first=norm_first, batch_first=True, activation="gelu")
    layout, memory_layout = (Layout.from_lengths(x) for x in lengths)
    causal = torch.ones(layout.max_length, layout.max_length).triu(1).bool()
    x, memory = random(layout.total, D), random(memory_layout.total, D)
    padded, keys = (
        t.new_zeros(y.batch, y.max_length, D).masked_scatter(y.mask()[:, :, None], t)
        for t, y in ((x, layout), (memory, memory_layout))
    )
    if kind == "decoder":
        actual = ours.packed(x, layout, memory, memory_layout)
        expected = ours(padded, keys, tgt_mask=causal, memory_key_padding_mask=~memory_layout.mask())
    elif kind == "encoder":
        actual, expected = ours.packed(x, layout), ours(padded, src_key_padding_mask=~layout.mask())
    else:
        actual, expected = ours.packed(x, layout, causal=True), ours(padded, mask=causal)
    expected = pack(expected, layout)
    assert_close(actual, expected)
    leaves = [x, *([memory] if kind == "decoder" else []), *ours.parameters()]
    for a, w in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
        assert_close(a, w)


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_future_is_not_seen(norm_first):
    ours, _ = stacks("TransformerDecoder", True, norm_first=norm_first, batch_first=True)
    x, memory = random(1, T, D, grad=False), random(1, S, D)
    changed = x.clone()
    changed[:, 3:] = 5.0
    layout, memory_layout = Layout.from_lengths([T]), Layout.from_lengths([S])
    mask = causal_mask(T, "bool")
    for run in (
        lambda x: ours(x, memory, tgt_mask=mask)[0],
        lambda x: ours(x, memory, tgt_mask=mask, tgt_is_causal=True)[0],
        lambda x: ours.packed(x[0], layout, memory[0], memory_layout),
    ):
        assert_close(run(changed)[:3], run(x)[:3])
        assert not torch.allclose(run(changed)[3:], run(x)[3:])


def test_more_padding_changes_nothing():
    ours, _ = stacks("TransformerEncoder", True, batch_first=True)
    x = random(B, T, D)
    mask = torch.arange(T) >= torch.tensor([[5], [2]])
    wide = torch.cat([x, torch.full((B, 3, D), 7.0, dtype=torch.float64)], 1)
    wide_mask = torch.cat([mask, torch.ones(B, 3).bool()], 1)
    expected = ours(x, src_key_padding_mask=mask)
    assert_close(ours(wide, src_key_padding_mask=wide_mask)[:, :T][~mask], expected[~mask])


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


def test_one_step_of_training_in_lower_precision():
    ours, torchs = transformers(torch.float32)
    src, tgt = random(S, B, D, dtype=torch.float32), random(T, B, D, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = ours(src, tgt), torchs(src, tgt)
    assert_close(out, expected, roundings=2**18)  # of bf16 products
    wide = copy.deepcopy(ours).to(torch.float64)
    assert_close(wide(src.double(), tgt.double()).float(), ours(src, tgt))


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


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder"])
def test_a_stack_makes_torchs_layer_its_own(kind):
    layer = getattr(nn, kind + "Layer")(D, H, FF, activation=Twice(), dtype=torch.float64, batch_first=True)
    stack = getattr(fastformer, kind)(layer, 2)
    assert all(type(x) is getattr(fastformer, kind + "Layer") for x in stack.layers)
    assert all(isinstance(x.activation, Twice) for x in stack.layers)
    assert type(layer) is getattr(nn, kind + "Layer")


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


def test_inference_agrees_with_training_where_torchs_fast_path_does_not():
    """tanh-GELU stays tanh-GELU and a float mask gives no NaN."""
    torch.backends.mha.set_fastpath_enabled(True)
    layer = fastformer.TransformerEncoderLayer(8, 2, 16, 0.0, nn.GELU("tanh"), batch_first=True)
    ours = fastformer.TransformerEncoder(layer, 2)
    x = 3 * torch.randn(B, T, 8)
    mask = torch.arange(T) >= torch.tensor([[5], [2]])
    for padding in (mask, torch.zeros(B, T).masked_fill(mask, -math.inf)):
        expected = ours.train()(x, src_key_padding_mask=padding)
        with torch.no_grad():
            assert_close(ours.eval()(x, src_key_padding_mask=padding), expected.detach())


x = torch.zeros(T, B, D)
BAD_CALLS = {
    "Encoder width": ("TransformerEncoderLayer", (x[..., :4],), {}),
    "Encoder mask shape": ("TransformerEncoderLayer", (x,), {"src_mask": torch.zeros(4, 4)}),
    "Encoder mask dtype": ("TransformerEncoderLayer", (x,), {"src_mask": torch.zeros(T, T).int()}),
    "Encoder padding shape": ("TransformerEncoderLayer", (x,), {"src_key_padding_mask": torch.zeros(B, 3).bool()}),
    "Encoder padding dtype": ("TransformerEncoderLayer", (x,), {"src_key_padding_mask": torch.zeros(B, T).int()}),
    "Encoder hint alone": ("TransformerEncoderLayer", (x,), {"is_causal": True}),
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
