"""What is set on an attention after it was made, pruned or put elsewhere counts, and counts where padding is."""

import pytest
import torch
from torch import nn

import fastformer
from fastformer.nn import ALiBi, Rotary
from fastformer.packing import Layout, pack, unpack

D, H, B, T, S = 8, 2, 3, 5, 6
LATER = {
    "window": (1, 0),
    "softcap": 0.3,
    "rotary": Rotary(theta=10.0),
    "position_bias": ALiBi(H),
    "sinks": nn.Parameter(torch.tensor([1.0, 2.0])),
}
later = pytest.mark.parametrize("name", LATER)


def attention(**options) -> fastformer.MultiheadAttention:
    torch.manual_seed(1)
    return fastformer.MultiheadAttention(D, H, batch_first=True, **options)


def tokens(length: int = T) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(B, length, D)


@later
@pytest.mark.parametrize("grad", [True, False])  # few tokens take torch's op, in inference, where there are no options
def test_an_option_set_later_is_that_of_the_constructor(name, grad):
    plain, made = attention(), attention(**{name: True if name == "sinks" else LATER[name]})
    setattr(plain, name, LATER[name])
    if name == "sinks":
        made.sinks.data.copy_(LATER["sinks"])
    made.load_state_dict(plain.state_dict())
    x, layout = tokens(), Layout.from_lengths([T, 2, 0])
    with torch.set_grad_enabled(grad):
        expected = made.train()(x, x, x)
        torch.testing.assert_close(plain.eval()(x, x, x), expected)
        assert (attention()(x, x, x)[0] - expected[0]).abs().max() > 1e-3  # it is another attention
        torch.testing.assert_close(plain(x, x, x, need_weights=False)[0], expected[0])
        torch.testing.assert_close(plain.packed(pack(x, layout), layout), made.packed(pack(x, layout), layout))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@later
def test_an_option_set_later_is_not_lost_to_torch(name):
    model = nn.Sequential(nn.MultiheadAttention(D, H, batch_first=True))
    fastformer.convert(model)
    setattr(model[0], name, LATER[name])
    report = fastformer.revert(model)
    assert type(model[0]) is fastformer.MultiheadAttention
    assert "options that torch.nn's class lacks" in str(report)
    with pytest.raises(ValueError, match="must not be nested"):
        model[0].eval()(*[torch.nested.nested_tensor(list(tokens()))] * 3)
    setattr(model[0], name, None)
    if name == "sinks":
        del model[0].sinks
    fastformer.revert(model)
    assert type(model[0]) is nn.MultiheadAttention


@later
def test_an_option_is_not_lost_to_torchs_layer(name):
    torch.backends.mha.set_fastpath_enabled(True)
    layer, x = nn.TransformerEncoderLayer(D, H, 24, batch_first=True).eval(), tokens()
    layer.self_attn = attention().eval()
    setattr(layer.self_attn, name, LATER[name])
    expected = layer(x)  # with gradients, which torch's op has not
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="ignores fastformer's attention options"):
            layer(x)
        fastformer.convert(layer)
        torch.testing.assert_close(layer(x), expected.detach())


def hidden(side: str, length: int) -> torch.Tensor:
    padding = torch.arange(length) >= torch.tensor([[length], [2], [3]])
    return padding.flip(1) if side == "left" else padding


@pytest.mark.parametrize("name", ["window", "rotary", "position_bias"])
@pytest.mark.parametrize(("target", "source"), [("right", "left"), ("left", "right"), ("right", "right")])
@pytest.mark.parametrize("kind", ["decoder", "transformer"])
def test_cross_attention_counts_positions_in_columns(kind, target, source, name):
    torch.manual_seed(3)
    model = fastformer.Transformer(D, H, 1, 1, 16, 0.0, batch_first=True).eval()
    setattr(model.decoder.layers[0].multihead_attn, name, LATER[name])
    x, memory = tokens(), tokens(S)
    masks = {"tgt_key_padding_mask": hidden(target, T), "memory_key_padding_mask": hidden(source, S)}

    def run(free: bool) -> torch.Tensor:
        model.encoder.padding_free = model.decoder.padding_free = free
        if kind == "decoder":
            return model.decoder(x, memory, **masks)
        return model(memory, x, src_key_padding_mask=hidden(source, S), **masks)

    real = ~masks["tgt_key_padding_mask"]
    torch.testing.assert_close(run(True)[real], run(False)[real])


def test_packed_cross_attention_by_position_refuses_padding_on_the_left():
    module, x, memory = attention(rotary=Rotary()), tokens(), tokens(S)
    left, right = Layout.from_mask(hidden("left", S)), Layout.from_mask(hidden("right", S))
    layout = Layout.from_lengths([T] * B)
    with pytest.raises(ValueError, match="no padding on the left"):
        module.packed(pack(x, layout), layout, pack(memory, left), left)
    out = unpack(module.packed(pack(x, layout), layout, pack(memory, right), right), layout)
    torch.testing.assert_close(out, module(x, memory, memory, hidden("right", S))[0])


@pytest.mark.parametrize("name", ["position_bias", "rotary", "window"])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 2, 1]])
def test_no_tokens_and_masks_over_columns(name, lengths):
    """A bias of no position is none to make; a mask is over all columns, though no row fills them."""
    torch.manual_seed(4)
    layer = fastformer.TransformerEncoderLayer(D, H, 16, 0.0, batch_first=True, **{name: LATER[name]})
    stack, x = fastformer.TransformerEncoder(layer, 1).eval(), tokens()
    padding = torch.arange(T) >= torch.tensor(lengths)[:, None]
    for mask in (None, torch.randn(T, T)):
        expected = stack(x, mask, padding, padding_free=False).masked_fill(padding[..., None], 0)
        torch.testing.assert_close(stack(x, mask, padding), expected)
    assert stack.step(x, stack.new_cache(B), torch.tensor(lengths)).shape == x.shape
