"""The drop-in stacks with padding: what real tokens get is torch's, padded rows are 0, and nothing works on padding."""

import copy
import math
import pickle

import pytest
import torch
from closeness import assert_close, gradients, random
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastformer
from fastformer import functional
from fastformer.packing import Layout, from_nested, to_nested

pytestmark = [
    pytest.mark.usefixtures("slow_path"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]

D, H, FF, B, T, S = 6, 3, 7, 3, 5, 4


def right(lengths: list[int], columns: int) -> Tensor:
    return torch.arange(columns) >= torch.tensor(lengths)[:, None]


def left(lengths: list[int], columns: int) -> Tensor:
    return right(lengths, columns).flip(1)


# Of the targets [B, T] and of the sources [B, S].
PADDING = {
    "right": (right([5, 2, 3], T), right([1, 4, 2], S)),
    "left": (left([5, 2, 3], T), left([1, 4, 2], S)),
    "both sides": (torch.stack([right([3], T)[0], left([2], T)[0], right([5], T)[0]]), left([1, 4, 2], S)),
    "gaps": (torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]]).bool(), right([3, 3, 4], S)),
    "a column of padding": (right([3, 2, 1], T), right([3, 3, 2], S)),
    "none": (right([5, 5, 5], T), right([4, 4, 4], S)),
}
AHEAD = torch.ones(T, T).triu(1).bool()


def minus_infinity(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)


def band(rows: int, columns: int) -> Tensor:
    """Each query ignores its third neighbour; no row is left without keys by any of the paddings above."""
    return (torch.arange(rows)[:, None] - torch.arange(columns)).abs() == 3


# What says who attends to whom among T targets.
MASKS = {
    "none": lambda: {},
    "causal": lambda: {"mask": AHEAD},
    "causal, additive": lambda: {"mask": minus_infinity(AHEAD)},
    "causal, stated": lambda: {"mask": AHEAD, "is_causal": True},
    "causal, near": lambda: {"mask": AHEAD | AHEAD.T.tril(-2)},
    "causal, biased": lambda: {"mask": minus_infinity(AHEAD) + torch.randn(T, T, dtype=torch.float64).tril()},
    "the future is unlikely": lambda: {"mask": -AHEAD.double()},
    "any": lambda: {"mask": band(T, T)},
    "additive": lambda: {"mask": torch.randn(T, T, dtype=torch.float64)},
    "of each head": lambda: {"mask": torch.randn(B * H, T, T, dtype=torch.float64)},
}


def randomise(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4)


def stacks(kind: str, dtype: torch.dtype = torch.float64, **settings: object) -> tuple[nn.Module, nn.Module]:
    made = []
    for library in (fastformer, nn):
        chosen = {"d_model": D, "nhead": H, "dim_feedforward": FF, "dropout": 0.0, "batch_first": True, **settings}
        if kind == "Transformer":
            made.append(library.Transformer(num_encoder_layers=1, num_decoder_layers=2, **chosen, dtype=dtype))
        else:
            layer = getattr(library, kind + "Layer")(**chosen, dtype=dtype)
            made.append(getattr(library, kind)(layer, 2, nn.LayerNorm(D, dtype=dtype)))
    randomise(made[0])
    made[1].load_state_dict(made[0].state_dict(), strict=True)
    return made[0], made[1]


@pytest.fixture
def tokens_seen(monkeypatch):
    """Rows of all feed-forwards and norms that run."""
    seen = []
    for name in ("feed_forward", "dropout_add_layer_norm", "layer_norm"):
        op = getattr(functional, name)

        def counted(x, *args, op=op, **kwargs):
            seen.append(x.shape[:-1].numel())
            return op(x, *args, **kwargs)

        monkeypatch.setattr(functional, name, counted)
    return seen


def check(ours: nn.Module, torchs: nn.Module, inputs: tuple[Tensor, ...], padding: Tensor, **arguments: object) -> None:
    """Compare real rows, and the gradients that come from them; padding `[B, T]` of the output, in its layout."""
    out, expected = ours(*inputs, **arguments), torchs(*inputs, **arguments)
    assert not out[padding].any()
    assert_close(out, expected.masked_fill(padding[..., None], 0.0))
    leaves = [*inputs, *ours.parameters()]
    wanted = gradients(expected.masked_fill(padding[..., None], 0.0), [*inputs, *torchs.parameters()])
    for a, w in zip(gradients(out, leaves), wanted, strict=True):
        assert_close(a, w)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padding", PADDING)
def test_encoder(padding, mask, norm_first, tokens_seen):
    ours, torchs = stacks("TransformerEncoder", norm_first=norm_first, activation="gelu")
    hidden = PADDING[padding][0]
    if mask.startswith("causal") and hidden[:, 0].any():
        pytest.skip("torch gives NaN: the first real query may attend to nothing before it")
    check(ours, torchs, (random(B, T, D),), hidden, src_key_padding_mask=hidden, **MASKS[mask]())
    assert set(tokens_seen) == {int((~hidden).sum())}


@pytest.mark.parametrize("hidden", [left([5, 2, 3], T), PADDING["gaps"][0]], ids=["left", "gaps"])
def test_causal_padding_on_the_left_is_each_sequence_alone(hidden):
    """torch gives NaN for the rows of padding there, which then reach all gradients."""
    ours, torchs = stacks("TransformerEncoder")
    x = random(B, T, D)
    out = ours(x, AHEAD, src_key_padding_mask=hidden)
    expected = torch.zeros_like(x)
    for b in range(B):
        real = (~hidden[b]).nonzero().squeeze(1)
        expected = expected.index_put(
            (torch.tensor(b), real), torchs(x[b, real][None], AHEAD[: len(real), : len(real)])[0]
        )
    assert_close(out, expected)
    leaves = [x, *ours.parameters()]
    for a, w in zip(gradients(out, leaves), gradients(expected, [x, *torchs.parameters()]), strict=True):
        assert_close(a, w)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("which", ["both", "target", "source"])
@pytest.mark.parametrize("padding", PADDING)
def test_decoder(padding, which, batch_first, tokens_seen):
    ours, torchs = stacks("TransformerDecoder", batch_first=batch_first)
    hidden, hidden_keys = PADDING[padding]
    arguments = {"tgt_mask": band(T, T), "memory_mask": torch.randn(T, S, dtype=torch.float64)}
    if not hidden[:, 0].any():
        arguments = {"tgt_mask": minus_infinity(AHEAD), "tgt_is_causal": True}
    if which != "source":
        arguments["tgt_key_padding_mask"] = hidden
    if which != "target":
        arguments["memory_key_padding_mask"] = minus_infinity(hidden_keys)
    shapes = [(B, T, D), (B, S, D)] if batch_first else [(T, B, D), (S, B, D)]
    padded = hidden if which != "source" else torch.zeros(B, T).bool()
    check(ours, torchs, tuple(random(*s) for s in shapes), padded if batch_first else padded.T, **arguments)
    assert set(tokens_seen) == {int((~padded).sum())}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("memory", ["same", "equal", "additive", "other", "none"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer(memory, batch_first, norm_first, tokens_seen):
    """Where the decoder attends to padded sources, it gets what torch's encoder makes of them."""
    ours, torchs = stacks("Transformer", batch_first=batch_first, norm_first=norm_first)
    hidden, hidden_source = PADDING["right"]
    masks = {"same": hidden_source, "equal": hidden_source.clone(), "other": right([2, 3, 3], S), "none": None}
    masks["additive"] = minus_infinity(hidden_source)
    arguments = {
        "src_mask": torch.randn(S, S, dtype=torch.float64),
        "tgt_mask": AHEAD,
        "memory_mask": torch.randn(T, S, dtype=torch.float64),
        "src_key_padding_mask": hidden_source,
        "tgt_key_padding_mask": hidden,
        "memory_key_padding_mask": masks[memory],
    }
    shapes = [(B, S, D), (B, T, D)] if batch_first else [(S, B, D), (T, B, D)]
    check(ours, torchs, tuple(random(*s) for s in shapes), hidden if batch_first else hidden.T, **arguments)
    source = (~hidden_source).sum() if memory in ("same", "equal") else B * S
    assert set(tokens_seen) == {int(source), int((~hidden).sum())}


def test_a_bias_of_ones_is_not_the_padding_mask_of_the_source():
    """torch.equal says that True equals 1.0."""
    ours, torchs = stacks("Transformer")
    hidden = PADDING["right"][1]
    masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden.double()}
    check(ours, torchs, (random(B, S, D), random(B, T, D)), torch.zeros(B, T).bool(), **masks)


def test_a_decoder_projects_no_padding_of_its_sources(monkeypatch):
    seen, project = [], fastformer.MultiheadAttention.keys_values
    monkeypatch.setattr(
        fastformer.MultiheadAttention,
        "keys_values",
        lambda self, x: (seen.append(x.shape[:-1].numel()), project(self, x))[1],
    )
    ours, _ = stacks("TransformerDecoder")
    hidden = PADDING["right"][1]
    ours(random(B, T, D), random(B, S, D), memory_key_padding_mask=hidden)
    assert set(seen) == {int((~hidden).sum())}


def test_transformer_never_pads_in_between(monkeypatch):
    """One gather a side and one scatter at the end, whatever the number of layers."""
    from fastformer import packing

    calls = []
    for name in ("_Gather", "_Spread"):
        before = getattr(packing, name)
        fake = type(name, (), {"apply": staticmethod(lambda *x, b=before, n=name: (calls.append(n), b.apply(*x))[1])})
        monkeypatch.setattr(packing, name, fake)
    ours, _ = stacks("Transformer", activation="gelu")
    hidden, hidden_source = PADDING["right"]
    # The ops of attention may pad the scores.
    monkeypatch.setattr(functional, "packed_attention", lambda q, k, v, *_, **__: q)
    padding = {"src_key_padding_mask": hidden_source, "memory_key_padding_mask": hidden_source}
    ours(random(B, S, D), random(B, T, D), tgt_mask=AHEAD, tgt_key_padding_mask=hidden, **padding)
    assert calls == ["_Gather", "_Gather", "_Spread"]


def test_a_mask_that_is_stated_to_be_causal_is_not_looked_at():
    """That would wait for the device."""
    ours, _ = stacks("Transformer")
    hidden, hidden_source = PADDING["right"]
    masks = {"src_key_padding_mask": hidden_source, "memory_key_padding_mask": hidden_source}
    masks |= {"tgt_key_padding_mask": hidden, "src_is_causal": True, "tgt_is_causal": True}
    inputs, ahead = (random(B, S, D), random(B, T, D)), (AHEAD[:S, :S], AHEAD)
    out, expected = (ours(*inputs, *(mask.to(device) for mask in ahead), **masks) for device in ("meta", "cpu"))
    assert_close(out, expected)


def test_unbatched_input():
    hidden = torch.tensor([False, True, False, False, True])
    for batch_first in (True, False):
        ours, torchs = stacks("TransformerEncoder", batch_first=batch_first)
        check(ours, torchs, (random(T, D),), hidden, src_key_padding_mask=hidden)
        ours.layers[1].register_forward_hook(lambda *_: None)  # padded
        check(ours, torchs, (random(T, D),), hidden, src_key_padding_mask=hidden)
    ours, torchs = stacks("TransformerDecoder", batch_first=False)
    source = torch.tensor([False, False, True, True])
    check(
        ours, torchs, (random(T, D), random(S, D)), hidden,
        tgt_mask=band(T, T), tgt_key_padding_mask=hidden, memory_key_padding_mask=source,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder", "Transformer"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_sequence_of_padding_alone_gives_zeros_and_disturbs_nobody(kind, norm_first):
    ours, _ = stacks(kind, norm_first=norm_first)
    hidden, hidden_source = right([5, 0, 3], T), right([4, 0, 2], S)
    x, memory = random(B, T, D), random(B, S, D)
    rows = torch.tensor([0, 2])

    def run(rows: Tensor | slice) -> Tensor:
        if kind == "TransformerEncoder":
            return ours(x[rows], src_key_padding_mask=hidden[rows])
        masks = {"tgt_key_padding_mask": hidden[rows], "memory_key_padding_mask": hidden_source[rows]}
        if kind == "TransformerDecoder":
            return ours(x[rows], memory[rows], AHEAD, **masks)
        masks["src_key_padding_mask"] = masks["memory_key_padding_mask"]
        return ours(memory[rows], x[rows], tgt_mask=AHEAD, **masks)

    out = run(slice(None))
    assert not out[1].any()
    assert_close(out[rows], run(rows))
    leaves = [x, *([] if kind == "TransformerEncoder" else [memory]), *ours.parameters()]
    for a, w in zip(gradients(out[rows], leaves), gradients(run(rows), leaves), strict=True):
        assert_close(a, w)


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder"])
@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_but_padding(kind, batch):
    ours, _ = stacks(kind)
    x, memory = random(batch, T, D), random(batch, S, D)
    hidden, hidden_keys = torch.ones(batch, T).bool(), torch.ones(batch, S).bool()
    if kind == "TransformerEncoder":
        out = ours(x, src_key_padding_mask=hidden)
    else:
        out = ours(x, memory, AHEAD, tgt_key_padding_mask=hidden, memory_key_padding_mask=hidden_keys)
    assert out.shape == (batch, T, D)
    assert not out.any()
    for gradient in gradients(out, [x, *ours.parameters()]):
        assert not gradient.any()


def test_no_sequence_is_as_long_as_the_others():
    ours, _ = stacks("TransformerDecoder")
    out = ours(random(0, T, D), random(0, S, D), memory_key_padding_mask=torch.ones(0, S).bool())
    assert out.shape == (0, T, D)


def test_targets_without_a_source_are_what_remains():
    """A target whose source is empty attends to nothing: cross attention gives the output bias alone."""
    ours, _ = stacks("TransformerDecoder")
    x, memory = random(1, T, D), random(1, S, D)
    out = ours(x, memory, AHEAD, memory_key_padding_mask=torch.ones(1, S).bool())
    alone = copy.deepcopy(ours)
    with torch.no_grad():
        for layer in alone.layers:
            layer.multihead_attn.out_proj.weight.zero_()
    assert_close(out, alone(x, memory, AHEAD))


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder"])
def test_a_switch_for_a_call_a_stack_and_all_stacks(kind, monkeypatch, tokens_seen):
    ours, torchs = stacks(kind)
    x, hidden = [random(B, T, D)], PADDING["right"][0]
    mask = {"src_key_padding_mask": hidden}
    if kind == "TransformerDecoder":
        x, mask = [*x, random(B, S, D)], {"tgt_key_padding_mask": hidden}
    expected = torchs(*x, **mask)

    def full(**arguments: object) -> bool:
        tokens_seen.clear()
        out = ours(*x, **mask, **arguments)
        if tokens_seen[0] == B * T:
            assert_close(out, expected)
        return tokens_seen[0] == B * T

    assert not full()
    assert full(padding_free=False)
    ours.padding_free = False
    assert full()
    assert not full(padding_free=True)
    assert full(padding_free=None)
    del ours.padding_free
    monkeypatch.setattr(type(ours), "padding_free", False)
    assert full()
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert list(other.state_dict()) == list(torchs.state_dict())


def change(name):
    def hook(layer):
        layer.linear1.register_forward_hook(lambda *_: None)

    def own_hook(layer):
        layer.register_forward_hook(lambda module, args, out: out.flip(1))

    def batch_norm(layer):
        class OfBatch(nn.LayerNorm):
            def forward(self, x):
                return x - x.mean((0, 1))

        layer.norm2 = OfBatch(D, dtype=torch.float64)

    def own_activation(layer):
        layer.activation = lambda x: x.softmax(1)

    def softmax(layer):
        layer.activation = nn.Softmax(1)

    def bias_kv(layer):
        layer.self_attn = fastformer.MultiheadAttention(D, H, add_bias_kv=True, batch_first=True, dtype=torch.float64)

    def norm_over_positions(layer):
        layer.norm2 = nn.LayerNorm((T, D), dtype=torch.float64)

    def own_block(layer):
        layer._ff_block = lambda x: x.flip(1)

    return {
        "a norm over positions": (norm_over_positions, "layers.1.norm2 normalises over 2 dimensions"),
        "own block": (own_block, "layers.1 is a TransformerEncoderLayer with a part of its own"),
        "hooks": (hook, "layers.1.linear1 has hooks"),
        "hooks of its own": (own_hook, "layers.1 has hooks"),
        "another norm": (batch_norm, "layers.1.norm2 is a OfBatch"),
        "another activation": (own_activation, "layers.1.activation is a function of your own"),
        "an activation over positions": (softmax, "layers.1.activation is a Softmax"),
        "bias of keys": (bias_kv, "layers.1.self_attn has add_bias_kv or add_zero_attn"),
    }[name]


CHANGES = [
    "hooks", "hooks of its own", "another norm", "another activation", "an activation over positions", "bias of keys",
    "a norm over positions", "own block",
]  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_may_look_at_a_whole_batch_gets_it(name, tokens_seen):
    ours, torchs = stacks("TransformerEncoder", norm_first=True)
    assert ours.obstacle() is None
    make, reason = change(name)
    make(ours.layers[1])
    assert ours.obstacle() == reason
    torchs.layers[1] = copy.deepcopy(ours.layers[1])
    hidden = PADDING["right"][0]
    check(ours, torchs, (random(B, T, D),), hidden, src_key_padding_mask=hidden)
    assert set(tokens_seen) == {B * T}


class OwnDecoderLayer(fastformer.TransformerDecoderLayer):
    def _ff_block(self, x):
        return x


def test_a_layer_or_norm_of_another_kind_gets_the_whole_batch():
    class Own(fastformer.TransformerEncoderLayer):
        def forward(self, src, **masks):
            return super().forward(src, **masks).flip(1)

    stack = fastformer.TransformerEncoder(Own(D, H, FF, batch_first=True), 2)
    assert stack.obstacle() == "layers.0 is a Own with a part of its own"
    nested = to_nested(torch.zeros(3, D), Layout.from_lengths([2, 1]))
    message = "must not be nested where layers need a padded batch: layers.0 is a Own with a part of its own"
    with pytest.raises(RuntimeError, match="src " + message):
        stack(nested)
    stack = fastformer.TransformerDecoder(OwnDecoderLayer(D, H, FF), 2)
    with pytest.raises(RuntimeError, match="tgt " + message.replace("a Own ", "a OwnDecoderLayer ")):
        stack(nested, nested)
    norm = nn.BatchNorm1d(T)
    stack = fastformer.TransformerEncoder(fastformer.TransformerEncoderLayer(D, H, FF), 2, norm)
    assert stack.obstacle() == "norm is a BatchNorm1d"
    stack.norm = nn.LayerNorm((T, D))
    assert stack.obstacle() == "norm normalises over 2 dimensions"


@pytest.mark.parametrize("where", ["encoder", "decoder", "encoder.layers.0", "decoder.layers.1"])
def test_hooks_inside_a_transformer_see_padded_batches(where):
    ours, torchs = stacks("Transformer")
    shapes = []
    ours.get_submodule(where).register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    hidden, hidden_source = PADDING["right"]
    arguments = {"src_key_padding_mask": hidden_source, "memory_key_padding_mask": hidden_source}
    check(ours, torchs, (random(B, S, D), random(B, T, D)), hidden, tgt_key_padding_mask=hidden, **arguments)
    assert shapes == [(B, S if "encoder" in where else T, D)]


@pytest.mark.parametrize("which", ["encoder", "decoder"])
def test_stacks_of_another_class_are_called(which):
    ours, torchs = stacks("Transformer")
    stack, calls = getattr(ours, which), []

    class Own(type(stack)):
        def forward(self, *inputs, **masks):
            calls.append(1)
            return super().forward(*inputs, **masks)

    stack.__class__ = Own
    hidden, hidden_source = PADDING["right"]
    arguments = {"src_key_padding_mask": hidden_source, "memory_key_padding_mask": hidden_source}
    check(ours, torchs, (random(B, S, D), random(B, T, D)), hidden, tgt_key_padding_mask=hidden, **arguments)
    assert calls == [1]


def test_custom_stacks_are_called_as_torch_calls_them():
    """Without arguments of ours, and with layers whose batch is another dimension."""

    class Own(fastformer.TransformerEncoder):
        def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
            return super().forward(src, mask, src_key_padding_mask, is_causal) + 1

    hidden, hidden_source = PADDING["right"]
    x, memory = random(B, T, D), random(B, S, D)
    ours, torchs = stacks("Transformer")
    own, transposed = (
        kind(fastformer.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=first, dtype=torch.float64), 1)
        for kind, first in ((Own, True), (fastformer.TransformerEncoder, False))
    )
    ours.encoder = own
    masks = {"src_key_padding_mask": hidden_source, "tgt_key_padding_mask": hidden}
    expected = torchs.decoder(x, own(memory, None, hidden_source), tgt_key_padding_mask=hidden)
    assert_close(ours(memory, x, **masks), expected.masked_fill(hidden[..., None], 0.0))
    ours.encoder, torchs.encoder = transposed, copy.deepcopy(transposed)
    square, hidden = random(B, B, D), right([1, 3, 2], B)
    masks = {"src_key_padding_mask": hidden, "tgt_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    check(ours, torchs, (square, random(B, B, D)), hidden, **masks)


def test_custom_stacks_stay_what_they_are():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H), 1)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H), 1)
    model = fastformer.Transformer(D, H, custom_encoder=encoder, custom_decoder=decoder)
    assert type(model.encoder) is nn.TransformerEncoder
    assert type(model.decoder) is nn.TransformerDecoder


def test_a_stack_without_layers_is_its_norm():
    ours, _ = stacks("TransformerDecoder")
    ours.layers = nn.ModuleList()
    assert ours.obstacle() == "it has no layers, which say where the batch is"
    x, hidden = random(B, B, D), right([1, 3, 2], B)
    assert_close(ours(x, random(B, S, D), tgt_key_padding_mask=hidden), ours.norm(x))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("change_layer", [lambda layer: None, change("hooks")[0]])
def test_padding_of_minus_infinity_comes_out_as_zeros(change_layer, batch_first):
    ours, torchs = stacks("TransformerEncoder", batch_first=batch_first)
    change_layer(ours.layers[1])
    hidden = PADDING["left"][0]
    x, padding = (random(B, T, D), hidden) if batch_first else (random(T, B, D), hidden.T)
    check(ours, torchs, (x,), padding, src_key_padding_mask=minus_infinity(hidden))


def test_masks_that_learn_get_their_gradients():
    """A bias that is still 0 and hides the future is not taken for the causal mask, nor one of keys for no padding."""
    ours, torchs = stacks("TransformerEncoder", norm_first=True)
    ours.norm = torchs.norm = None
    x, hidden = random(B, T, D), PADDING["right"][0]
    bias, of_keys = (torch.zeros(*shape, dtype=torch.float64, requires_grad=True) for shape in ((T, T), (B, T)))

    def learned(stack: nn.Module) -> list[Tensor]:
        one = stack(x, bias.masked_fill(AHEAD, -math.inf), src_key_padding_mask=hidden)[~hidden]
        return [*gradients(one, [bias]), *gradients(stack(x, src_key_padding_mask=of_keys), [of_keys])]

    for a, w in zip(learned(ours), learned(torchs), strict=True):
        assert a.any()
        assert_close(a, w)


def test_an_additive_padding_mask_that_hides_nothing_is_added(tokens_seen):
    ours, torchs = stacks("TransformerEncoder")
    bias = -torch.rand(B, T, dtype=torch.float64)
    check(ours, torchs, (random(B, T, D),), torch.zeros(B, T).bool(), src_key_padding_mask=bias)
    assert set(tokens_seen) == {B * T}


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder"])
def test_inference_is_training_without_dropout(kind, tokens_seen):
    ours, _ = stacks(kind, dropout=0.3)
    hidden, hidden_keys = PADDING["left"]
    x = (random(B, T, D),) if "Encoder" in kind else (random(B, T, D), random(B, S, D))
    names = ("src_key_padding_mask",) if "Encoder" in kind else ("tgt_key_padding_mask", "memory_key_padding_mask")
    masks = dict(zip(names, (hidden, hidden_keys), strict=False))
    dropped = ours(*x, **masks)
    expected = ours.eval()(*x, **masks)
    assert not torch.allclose(dropped, expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(ours(*x, **masks), expected.detach())
    assert set(tokens_seen) == {int((~hidden).sum())}


@pytest.mark.parametrize("batch_first", [True, False])  # which means nothing to a nested tensor
def test_nested_tensors_go_in_and_come_out(batch_first):
    ours, _ = stacks("Transformer", batch_first=batch_first)
    layout, source = Layout.from_lengths([5, 2, 3]), Layout.from_lengths([1, 4, 2])
    x, memory = random(layout.total, D), random(source.total, D)
    out = ours(to_nested(memory, source), to_nested(x, layout), tgt_is_causal=True)
    assert out.is_nested
    assert out.layout == torch.jagged
    tokens, again = from_nested(out)
    assert again.lengths.tolist() == [5, 2, 3]
    expected = ours.decoder.packed(x, layout, ours.encoder.packed(memory, source), source)
    assert_close(tokens, expected)
    leaves = [x, memory, *ours.parameters()]
    for a, w in zip(gradients(tokens, leaves), gradients(expected, leaves), strict=True):
        assert_close(a, w)
    tokens, _ = from_nested(ours.encoder(to_nested(memory, source), is_causal=True))
    assert_close(tokens, ours.encoder.packed(memory, source, causal=True))
    tokens, _ = from_nested(ours.decoder(to_nested(x, layout), to_nested(memory, source)))
    assert_close(tokens, ours.decoder.packed(x, layout, memory, source, causal=False))


def test_nested_tensors_take_no_mask():
    ours, _ = stacks("Transformer")
    layout = Layout.from_lengths([5, 2, 3])
    x, mask = to_nested(random(layout.total, D), layout), torch.zeros(5, 5).bool()
    for name in ("mask", "src_key_padding_mask"):
        with pytest.raises(ValueError, match="src must not be nested where a mask is given"):
            ours.encoder(x, **{name: mask})
    for name in ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask"):
        with pytest.raises(ValueError, match="tgt and memory must not be nested where a mask is given"):
            ours.decoder(x, x, **{name: mask})
    with pytest.raises(TypeError, match=r"nested must be a nested tensor, not one of shape \[3, 4, 6\]"):
        ours.decoder(x, torch.zeros(3, 4, D))


def test_compiled_stacks_compute_the_same_without_a_break():
    """Under torch.compile the number of tokens is no constant: the batch stays padded, and its padded rows are 0."""
    ours, _ = stacks("Transformer", dtype=torch.float32)
    ours.decoder.layers = ours.decoder.layers[:1]
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    hidden, hidden_source = PADDING["right"]
    arguments = {"src_key_padding_mask": hidden_source, "memory_key_padding_mask": hidden_source.clone()}
    inputs = (random(B, S, D, dtype=torch.float32), random(B, T, D, dtype=torch.float32))
    arguments |= {"tgt_mask": AHEAD, "tgt_key_padding_mask": hidden}
    out = compiled(*inputs, **arguments)
    assert_close(out, ours(*inputs, **arguments))
    leaves = [*inputs, *ours.parameters()]
    for a, w in zip(gradients(out, leaves), gradients(ours(*inputs, **arguments), leaves), strict=True):
        assert_close(a, w)


def test_packed_stacks_compile_without_a_break():
    ours, _ = stacks("TransformerEncoder", dtype=torch.float32)
    ours.layers, ours.norm = ours.layers[:1], None  # each takes seconds to trace with symbols
    compiled = torch.compile(ours.packed, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([5, 2, 3], [1, 7, 2, 2]):
        layout = Layout.from_lengths(lengths)
        x = random(layout.total, D, dtype=torch.float32)
        out, expected = compiled(x, layout, causal=True), ours.packed(x, layout, causal=True)
        assert_close(out, expected)
        leaves = [x, *ours.parameters()]
        for a, w in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
            assert_close(a, w)


def test_traces_and_fake_tensors_keep_the_padded_form():
    ours, _ = stacks("TransformerEncoder", dtype=torch.float32)
    x, hidden = torch.randn(B, T, D), PADDING["right"][0]
    ours.eval()
    with torch.no_grad():
        exported = torch.export.export(ours, (x,), {"src_key_padding_mask": hidden}).module()
    for other in (hidden, PADDING["left"][0]):
        assert_close(exported(x, src_key_padding_mask=other), ours(x, src_key_padding_mask=other).detach())
    decoder, _ = stacks("TransformerDecoder", dtype=torch.float32)
    memory = torch.randn(B, S, D)
    with torch.no_grad():
        exported = torch.export.export(decoder, (x, memory), {"tgt_key_padding_mask": hidden}).module()
        expected = decoder(x, memory, tgt_key_padding_mask=PADDING["left"][0])
        assert_close(exported(x, memory, tgt_key_padding_mask=PADDING["left"][0]), expected)
    meta = copy.deepcopy(ours).to("meta")
    assert meta(x.to("meta"), src_key_padding_mask=hidden.to("meta")).shape == (B, T, D)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(t) for t in (x, hidden)]
        assert ours(fake[0], src_key_padding_mask=fake[1]).shape == (B, T, D)


def test_autocast_and_activation_checkpointing():
    ours, torchs = stacks("TransformerEncoder", dtype=torch.float32, dropout=0.25)
    x, hidden = random(B, T, D, dtype=torch.float32), PADDING["right"][0]
    torch.manual_seed(3)
    expected = ours(x, src_key_padding_mask=hidden)
    wanted = gradients(expected, [x, *ours.parameters()])
    torch.manual_seed(3)
    out = checkpoint(lambda x: ours(x, src_key_padding_mask=hidden), x, use_reentrant=False)
    assert torch.equal(out, expected)
    for a, w in zip(gradients(out, [x, *ours.parameters()]), wanted, strict=True):
        assert_close(a, w)
    ours.eval(), torchs.eval()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = ours(x, src_key_padding_mask=hidden), torchs(x, src_key_padding_mask=hidden)
    assert_close(out, expected.masked_fill(hidden[..., None], 0.0), roundings=2**18)  # of bf16 products


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_is_right_for_other_masks():
    ours, _ = stacks("TransformerDecoder", dtype=torch.float32)
    given = {"tgt": torch.randn(B, T, D), "memory": torch.randn(B, S, D), "tgt_key_padding_mask": PADDING["right"][0]}
    traced = torch.jit.trace(ours, example_kwarg_inputs=given)
    given["tgt_key_padding_mask"] = PADDING["left"][0]
    assert_close(traced(**given), ours(**given))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # SDPA under vmap
def test_functional_transforms():
    """vmap over inputs with one mask runs without padding; with a mask each, padded. Forward mode, too."""
    ours, _ = stacks("TransformerEncoder")
    ours.eval()
    x, hidden = random(2, B, T, D, grad=False), PADDING["right"][0]
    with torch.no_grad():
        expected = torch.stack([ours(y, src_key_padding_mask=hidden) for y in x])
        assert_close(torch.func.vmap(lambda y: ours(y, src_key_padding_mask=hidden))(x), expected)
        both = torch.stack([hidden, hidden])
        assert_close(torch.func.vmap(lambda y, m: ours(y, src_key_padding_mask=m))(x, both), expected)
        tangent = torch.randn_like(x[0])
        out, along = torch.func.jvp(lambda y: ours(y, src_key_padding_mask=hidden), (x[0],), (tangent,))
        step = 1e-6
        numeric = (ours(x[0] + step * tangent, src_key_padding_mask=hidden) - out) / step
    assert_close(along, numeric, roundings=1e11)
    with torch.no_grad():
        tilted = torch.stack([AHEAD, AHEAD.T])  # a mask of scores each
        expected = torch.stack([ours(x[0], mask, src_key_padding_mask=hidden) for mask in tilted])
        assert_close(torch.func.vmap(lambda m: ours(x[0], m, src_key_padding_mask=hidden))(tilted), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sequence_by_vmap():
    ours, _ = stacks("TransformerEncoder")
    parameters = {name: p.detach() for name, p in ours.named_parameters()}
    x, hidden = random(B, T, D, grad=False), PADDING["gaps"][0]

    def loss(parameters: dict[str, Tensor], x: Tensor, hidden: Tensor) -> Tensor:
        out = torch.func.functional_call(ours, parameters, (x[None],), {"src_key_padding_mask": hidden[None]})
        return out.pow(3).sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, hidden)
    for b in range(B):
        for name, gradient in torch.func.grad(loss)(parameters, x[b], hidden[b]).items():
            assert_close(together[name][b], gradient)


BAD = {
    "mask shape": {"src_key_padding_mask": torch.zeros(B, T + 1).bool()},
    "mask turned": {"src_key_padding_mask": torch.zeros(T, B).bool()},
    "mask of another batch": {"src_key_padding_mask": torch.zeros(B + 1, T).bool()},
    "mask dtype": {"src_key_padding_mask": torch.zeros(B, T).int()},
    "mask of scores": {"src_key_padding_mask": PADDING["right"][0], "mask": torch.zeros(T, T + 1)},
    "dtype of the mask of scores": {"src_key_padding_mask": PADDING["right"][0], "mask": torch.zeros(T, T).int()},
    "causal mask of another size": {
        "src_key_padding_mask": PADDING["right"][0],
        "mask": torch.ones(T + 1, T + 1).triu(1).bool(),
    },
    "causal mask of another size, stated": {
        "src_key_padding_mask": PADDING["right"][0],
        "mask": torch.ones(T + 1, T + 1).triu(1).bool(),
        "is_causal": True,
    },
    "dtype of a stated causal mask": {
        "src_key_padding_mask": PADDING["right"][0],
        "mask": AHEAD.int(),
        "is_causal": True,
    },
    "hint alone": {"src_key_padding_mask": PADDING["right"][0], "is_causal": True},
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_raises_what_torch_raises(name):
    ours, torchs = stacks("TransformerEncoder")
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        torchs(random(B, T, D), **BAD[name])
    with pytest.raises(wanted.type) as raised:
        ours(random(B, T, D), **BAD[name])
    assert raised.type is wanted.type
    assert str(raised.value).strip()


@pytest.mark.parametrize("wrong", ["memory", "tgt", "a batch for one", "mask", "hint"])
def test_a_mistake_in_a_decoder_raises_what_torch_raises(wrong):
    ours, torchs = stacks("TransformerDecoder")
    x, memory = random(B, T, D), random(B + (wrong == "memory"), S, D)
    masks = {"memory_key_padding_mask": torch.zeros(len(memory), S).bool()}
    if wrong == "tgt":
        x = random(B, T, D + 1)
    if wrong == "a batch for one":
        x, memory, masks = random(T, D), memory[:1], {"memory_key_padding_mask": torch.zeros(1, S).bool()}
    if wrong == "mask":
        masks["memory_mask"] = torch.zeros(T, T)
    if wrong == "hint":
        masks["memory_is_causal"] = True
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        torchs(x, memory, **masks)
    with pytest.raises(wanted.type):
        ours(x, memory, **masks)


def test_batches_that_differ_are_named():
    ours, _ = stacks("Transformer")
    with pytest.raises(RuntimeError, match="src and tgt must have the same batch, not 2 and 3"):
        ours(random(2, S, D), random(3, T, D))


@pytest.mark.parametrize("name", ["src", "tgt", "memory"])
def test_a_hint_without_its_mask_raises_what_torch_raises(name):
    hidden = PADDING["right"][1]
    masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    for model in stacks("Transformer"):
        with pytest.raises(RuntimeError, match="is_causal"):
            model(random(B, S, D), random(B, T, D), **masks, **{name + "_is_causal": True})


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_inference_path_has_the_same_zeros():
    """It takes an even number of heads only."""
    torch.backends.mha.set_fastpath_enabled(True)
    layer = nn.TransformerEncoderLayer(8, 2, FF, batch_first=True, dtype=torch.float64)
    torchs = nn.TransformerEncoder(layer, 2).eval()
    ours = fastformer.TransformerEncoder(layer, 2).eval()
    ours.load_state_dict(torchs.state_dict())
    x, hidden = random(B, T, 8, grad=False), PADDING["right"][0]
    expected = torchs(x, src_key_padding_mask=hidden)
    assert not expected[hidden].any()  # it skipped the padding
    assert_close(ours(x, src_key_padding_mask=hidden), expected)
