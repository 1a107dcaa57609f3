"""Layers with options that torch's have not: padded, packed, with a cache and with weights, the same numbers.

Rotary tables and biases by distance are what the papers write, number by number.

Rounding: everything is in fp64, where the ways differ by the order of sums over at most 64 numbers in a few layers:
1e-12 leaves a factor of a hundred.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.nn import ALiBi, Llama3Scaling, RelativeBias, Rotary
from fastformer.packing import Layout, pack, unpack
from tests.support.all_pairs import all_pairs

D, H, B, L = 32, 4, 3, 9
LENGTHS = torch.tensor([9, 4, 6])
OPTIONS: dict[str, dict[str, Any]] = {
    "kv_heads": {"kv_heads": 2},
    "head_size": {"head_size": 12},
    "qkv_bias": {"qkv_bias": False},
    "rotary": {"rotary": Rotary()},
    "rotary of a share": {"rotary": Rotary(theta=500.0, share=0.5, interleaved=True), "kv_heads": 1, "head_size": 16},
    "qk_norm": {"qk_norm": True, "rotary": Rotary(scaling=Llama3Scaling(original=8))},
    "window": {"window": (2, None)},
    "softcap": {"softcap": 5.0},
    "alibi": {"position_bias": ALiBi(H)},
    "relative bias": {"position_bias": RelativeBias(H, 8, 6, dtype=torch.float64)},
    "sinks": {"sinks": True},
    "rms": {"norm": "rms"},
}
OPTIONS["all"] = {name: value for options in OPTIONS.values() for name, value in options.items()}
each = pytest.mark.parametrize("name", OPTIONS)


def fill(module: nn.Module) -> None:
    """Draw all parameters, so that none is a 0 or a 1 that hides what becomes of it."""
    torch.manual_seed(1)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)


def encoder(name: str, norm_first: bool = True, dropout: float = 0.0) -> fastformer.TransformerEncoder:
    layer = fastformer.TransformerEncoderLayer(
        D, H, 48, dropout, "swiglu", batch_first=True, norm_first=norm_first, dtype=torch.float64, **OPTIONS[name]
    )
    stack = fastformer.TransformerEncoder(layer, 2)
    fill(stack)
    return stack.eval()


def decoder(name: str) -> fastformer.TransformerDecoder:
    layer = fastformer.TransformerDecoderLayer(
        D, H, 48, 0.0, "geglu", batch_first=True, norm_first=True, dtype=torch.float64, **OPTIONS[name]
    )
    stack = fastformer.TransformerDecoder(layer, 2, fastformer.RMSNorm(D, dtype=torch.float64))
    fill(stack)
    return stack.eval()


def batch(length: int = L) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(B, length, D, dtype=torch.float64)


def hidden(side: str) -> Tensor:
    padding = torch.arange(L) >= LENGTHS[:, None]
    if side == "gaps":
        padding[0, 3] = padding[2, 1] = True
    return padding.flip(1) if side == "left" else padding


def ahead(length: int = L) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "side", "norm_first", "causal"),
    all_pairs(OPTIONS, ["right", "left", "gaps"], [False, True], [False, True]),
)
def test_padding_changes_nothing(name, side, norm_first, causal):
    stack, x, padding = encoder(name, norm_first), batch(), hidden(side)
    assert stack.obstacle() is None
    mask = ahead() if causal else None
    real = (~padding)[:, :, None]
    x.requires_grad_()
    outs = [stack(x, mask, padding, is_causal=causal, padding_free=free) for free in (True, False)]
    close(outs[0], outs[1].masked_fill(~real, 0))
    weighed, weights = stack(x, mask, padding, is_causal=causal, need_weights=True)
    close(weighed, outs[0])
    assert weights.shape == (2, B, H, L, L)
    grads = [torch.autograd.grad((out * real).square().sum(), [x, *stack.parameters()]) for out in outs]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max() + 1))
        assert expected.abs().max() > 0  # every parameter matters


@each
def test_steps_equal_the_whole(name):
    stack, x, capacity = encoder(name), batch(), None if len(name) % 2 else L
    whole = stack(x, ahead(), is_causal=True)
    cache = stack.new_cache(B, capacity=capacity)
    read = torch.zeros(B, dtype=torch.int64)
    for counts in ([3, 1, 0], [2, 2, 3], [1, 1, 1], [1, 1, 1], [2, 4, 4]):
        new, longest = torch.tensor(counts), max(counts)
        tokens = torch.zeros(B, longest, D, dtype=torch.float64)
        for b, (first, n) in enumerate(zip(read.tolist(), counts, strict=True)):
            tokens[b, :n] = x[b, first : first + n]
        out = stack.step(tokens, cache, new)
        for b, (first, n) in enumerate(zip(read.tolist(), counts, strict=True)):
            close(out[b, :n], whole[b, first : first + n])
        read += new
    together = stack.new_cache(B, capacity=capacity)
    parts = [stack.step(part, together) for part in x.split([1, 1, 4, 1, 2], 1)]
    close(torch.cat(parts, 1), whole)


@each
def test_a_decoder_reads_its_memory_packed_and_in_steps(name):
    stack, x, memory = decoder(name), batch(), batch(7).flip(0)
    padding = torch.arange(7) >= torch.tensor([[5], [7], [2]])
    given = {"tgt_mask": ahead(), "tgt_is_causal": True, "memory_key_padding_mask": padding}
    whole = stack(x, memory, **given, padding_free=False)
    close(stack(x, memory, **given), whole)
    cache = stack.new_cache(memory, padding)
    close(torch.cat([stack.step(part, cache) for part in x.split([4, 1, 1, 3], 1)], 1), whole)
    assert stack.layers[0].multihead_attn.by_distance is False


@each
def test_packed_sequences_are_those_of_each(name):
    stack, x = encoder(name), batch()
    layout = Layout.from_lengths(LENGTHS, columns=L)
    out = stack.packed(pack(x, layout), layout, causal=True)
    for found, one, n in zip(out.split(LENGTHS.tolist()), x, LENGTHS.tolist(), strict=True):
        close(found, stack(one[None, :n], ahead(n), is_causal=True)[0])


def test_packed_sequences_with_gaps_are_refused_where_positions_count():
    layout = Layout.from_mask(hidden("gaps"))
    x = torch.randn(layout.total, D, dtype=torch.float64)
    with pytest.raises(ValueError, match="layout must have no padding between"):
        encoder("rotary").packed(x, layout)
    encoder("kv_heads").packed(x, layout)
    left = Layout.from_mask(hidden("left"))
    encoder("rotary").packed(torch.randn(left.total, D, dtype=torch.float64), left)


@pytest.mark.parametrize(
    ("bias", "qkv_bias"), [(True, False), (False, True), (True, None), (False, None), (True, True)]
)
def test_queries_keys_and_values_have_a_bias_of_their_own(bias, qkv_bias):
    layer = fastformer.TransformerDecoderLayer(D, H, 48, 0.0, bias=bias, qkv_bias=qkv_bias, dtype=torch.float64)
    own, x = bias if qkv_bias is None else qkv_bias, torch.randn(5, 2, D, dtype=torch.float64)
    for attention in (layer.self_attn, layer.multihead_attn):
        assert (attention.in_proj_bias is not None, attention.out_proj.bias is not None) == (own, bias)
        biases = [x for x in (attention.in_proj_bias, attention.out_proj.bias) if x is not None]
        assert not any(x.any() for x in biases)
        fill(attention)
        theirs = nn.MultiheadAttention(D, H, dtype=torch.float64)  # whose biases are 0
        theirs.load_state_dict(attention.state_dict(), strict=False)
        close(attention(x, x, x)[0], theirs(x, x, x)[0])


def test_wrong_options_are_refused_by_name():
    for options, error, message in (
        ({"kv_heads": 3}, ValueError, "kv_heads must divide num_heads, 4, not 3"),
        ({"head_size": 7, "rotary": Rotary()}, ValueError, "rotary must turn an even number"),
        ({"rotary": True}, ValueError, r"rotary must be a Rotary or None"),
        ({"norm": "batch"}, ValueError, "norm must be one of layer, rms"),
        ({"qk_norm": 1}, ValueError, "qk_norm must be true or false"),
        ({"position_bias": "alibi"}, ValueError, "position_bias must be a Module or None"),
        ({"window": (-1, 0)}, ValueError, "window must be a tuple"),
        ({"softcap": 10**400}, ValueError, "softcap must be a number between"),
        ({"key_heads": 2}, TypeError, "unexpected keyword argument 'key_heads'"),
    ):
        with pytest.raises(error, match=message):
            fastformer.TransformerEncoderLayer(D, H, **options)
    layer = fastformer.TransformerEncoderLayer(D, H, position_bias=ALiBi(2))
    with pytest.raises(ValueError, match="distance_bias"):
        layer(torch.randn(3, 2, D))
    with pytest.raises(ValueError, match="add_bias_kv and add_zero_attn must be False with kv_heads"):
        fastformer.MultiheadAttention(D, H, add_bias_kv=True, kv_heads=2)
    with pytest.raises(RuntimeError, match="activation should be relu/gelu/silu"):
        fastformer.TransformerEncoderLayer(D, H, activation="swish")
    with pytest.raises(ValueError, match="must not be given with both custom_encoder and custom_decoder"):
        fastformer.Transformer(D, H, custom_encoder=nn.Identity(), custom_decoder=nn.Identity(), norm="rms")


LATER = {"window": (1, 0), "softcap": 0.3, "rotary": Rotary(theta=10.0), "position_bias": ALiBi(H)}


@pytest.mark.parametrize("name", LATER)
def test_an_option_that_is_set_later_counts_and_is_not_lost_to_torch(name):
    x = batch().float()
    plain, made = (
        fastformer.MultiheadAttention(D, H, batch_first=True, **options) for options in ({}, {name: LATER[name]})
    )
    made.load_state_dict(plain.state_dict(), strict=False)
    before = plain(x, x, x)[0]
    model = nn.Sequential(nn.MultiheadAttention(D, H, batch_first=True))
    model.load_state_dict({f"0.{key}": value for key, value in plain.state_dict().items()})
    fastformer.convert(model)
    setattr(model[0], name, LATER[name])
    for grad in (True, False):  # in inference, few tokens take torch's op, where there are no options
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model[0](x, x, x), made(x, x, x))
    assert (made(x, x, x)[0] - before).abs().max() > 1e-3  # it is another attention
    assert "options that torch.nn's class lacks" in str(fastformer.revert(model))
    assert type(model[0]) is fastformer.MultiheadAttention
    layer = nn.TransformerEncoderLayer(D, H, 24, batch_first=True).eval()
    layer.self_attn = model[0].eval()
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="ignores fastformer's attention options"):
        layer(x)
    setattr(model[0], name, None)
    fastformer.revert(model)
    assert type(model[0]) is nn.MultiheadAttention


def sided(side: str, length: int) -> Tensor:
    padding = torch.arange(length) >= torch.tensor([[length], [2], [3]])
    return padding.flip(1) if side == "left" else padding


@pytest.mark.parametrize("name", ["window", "rotary", "position_bias"])
@pytest.mark.parametrize(("target", "source"), [("right", "left"), ("left", "right"), ("right", "right")])
def test_cross_attention_counts_positions_in_columns(target, source, name):
    model = fastformer.Transformer(D, H, 1, 1, 16, 0.0, batch_first=True).eval()
    setattr(model.decoder.layers[0].multihead_attn, name, LATER[name])
    x, memory = batch().float(), batch(7).float()
    masks = {"tgt_key_padding_mask": sided(target, L), "memory_key_padding_mask": sided(source, 7)}
    calls = (
        lambda: model.decoder(x, memory, **masks),
        lambda: model(memory, x, src_key_padding_mask=sided(source, 7), **masks),
    )
    for call in calls:
        model.encoder.padding_free = model.decoder.padding_free = True
        packed = call()
        model.encoder.padding_free = model.decoder.padding_free = False
        real = ~masks["tgt_key_padding_mask"]
        torch.testing.assert_close(packed[real], call()[real])


def test_packed_cross_attention_by_position_refuses_padding_on_the_left():
    module = fastformer.MultiheadAttention(D, H, batch_first=True, rotary=Rotary())
    x, memory = batch().float(), batch(7).float()
    left, right = Layout.from_mask(sided("left", 7)), Layout.from_mask(sided("right", 7))
    layout = Layout.from_lengths([L] * B)
    with pytest.raises(ValueError, match="no padding on the left"):
        module.packed(pack(x, layout), layout, pack(memory, left), left)
    out = unpack(module.packed(pack(x, layout), layout, pack(memory, right), right), layout)
    torch.testing.assert_close(out, module(x, memory, memory, sided("right", 7))[0])


@pytest.mark.parametrize("name", ["position_bias", "rotary", "window"])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 2, 1]])
def test_no_tokens_and_masks_over_columns(name, lengths):
    """A bias of no position is none to make; a mask is over all columns, though no row fills them."""
    layer = fastformer.TransformerEncoderLayer(D, H, 16, 0.0, batch_first=True, **{name: LATER[name]})
    stack, x = fastformer.TransformerEncoder(layer, 1).eval(), batch().float()
    padding = torch.arange(L) >= torch.tensor(lengths)[:, None]
    for mask in (None, torch.randn(L, L)):
        expected = stack(x, mask, padding, padding_free=False).masked_fill(padding[..., None], 0)
        torch.testing.assert_close(stack(x, mask, padding), expected)
    assert stack.step(x, stack.new_cache(B), torch.tensor(lengths)).shape == x.shape


def test_tables_are_those_of_the_paper():
    cos, sin = Rotary(theta=100.0).tables(6, 5, torch.zeros(1, dtype=torch.float64))
    assert cos.dtype == torch.float64
    assert cos.shape == sin.shape
    assert cos.shape[0] >= 5
    for position in range(5):
        for i in range(3):
            angle = position * 100.0 ** (-2 * i / 6)
            assert float(cos[position, i]) == pytest.approx(math.cos(angle), abs=1e-14)
            assert float(sin[position, i]) == pytest.approx(math.sin(angle), abs=1e-14)
    assert Rotary().tables(6, 5, torch.zeros(1, dtype=torch.bfloat16))[0].dtype == torch.float32


def test_far_positions_are_rounded_once():
    position = 100_000  # in fp32, position * frequency is off by up to 4e-3 here
    cos, _ = Rotary().tables(8, position + 1, torch.zeros(1))
    for i in range(4):
        exact = math.cos(position * 10_000.0 ** (-2 * i / 8))
        assert abs(float(cos[position, i]) - exact) <= 2**-24


def test_a_share_and_a_scale_change_the_tables():
    like = torch.zeros(1, dtype=torch.float64)
    cos, _ = Rotary(share=0.5, scaling=4.0).tables(8, 9, like)
    plain, _ = Rotary().tables(4, 9, like)
    assert cos.shape[1] == 2
    torch.testing.assert_close(cos[8], plain[2], rtol=0, atol=1e-14)


def test_llama_slows_slow_frequencies_alone():
    scaling = Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=64)
    wavelengths = [2.0, 16.0, 32.0, 64.0, 1000.0]  # of 64 positions: 32, 4, 2, 1 and 0.064 turns
    given = torch.tensor([2 * math.pi / x for x in wavelengths], dtype=torch.float64)
    expected = [1.0, 1.0, (1 - 1 / 3) / 8 + 1 / 3, 1 / 8, 1 / 8]
    torch.testing.assert_close(scaling.scale(given) / given, torch.tensor(expected, dtype=torch.float64))


WRONG = [
    (Rotary, {"theta": float("nan")}, "theta must be a finite number"),
    (Rotary, {"share": 1.5}, "share must be above 0 and at most 1"),
    (Rotary, {"interleaved": 1}, "interleaved must be true or false"),
    (Rotary, {"scaling": 1e-300}, "theta and scaling must leave angles finite"),
    (Llama3Scaling, {"original": 10**400}, "original must be at least 1 and at most"),
    (Llama3Scaling, {"low": 4.0, "high": 1.0}, "high must be above low"),
    (RelativeBias, {"heads": 0}, "heads must be at least 1"),
    (RelativeBias, {"heads": 2, "buckets": 7}, "buckets must be even where bidirectional, not 7"),
    (RelativeBias, {"heads": 2, "max_distance": 8}, "max_distance must be above 8"),
]


def test_wrong_settings_are_refused_by_name():
    for made, settings, message in WRONG:
        with pytest.raises(ValueError, match=message):
            made(**settings)


def test_alibi_is_that_of_the_paper():
    bias = ALiBi(8)(4)
    assert bias.shape == (8, 7)
    for head in range(8):
        for column, distance in enumerate(range(-3, 4)):
            assert float(bias[head, column]) == pytest.approx(-(2.0 ** -(head + 1)) * abs(distance))
    # The paper's code for other numbers: those of 8 heads, then every other one of 16.
    slopes = (-ALiBi(12)(2)[:, 0]).tolist()
    assert slopes == pytest.approx([2.0**-i for i in range(1, 9)] + [2.0 ** -(i / 2) for i in (1, 3, 5, 7)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_counts_beyond_what_a_narrow_dtype_can(dtype):
    length = 70_000  # bf16 has no 257, fp16 nothing above 65,504
    bias = ALiBi(4).to(dtype)(length)
    assert torch.equal(bias, ALiBi(4)(length))


def bucket(distance: int, buckets: int, furthest: int, bidirectional: bool) -> int:
    """Section 2.1 of Raffel et al. 2020, for one distance of a key from its query."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    steps = math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact)
    return first + min(exact + int(steps + 1e-9), buckets - 1)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 6), (16, 1000)])
def test_buckets_are_those_of_the_paper(bidirectional, buckets, furthest):
    bias = RelativeBias(3, buckets, furthest, bidirectional)
    length = 300
    expected = [bucket(d, buckets, furthest, bidirectional) for d in range(1 - length, length)]
    found = bias.bucket(torch.arange(1 - length, length)).tolist()
    # Where a logarithm is a whole number, fp32 may say the bucket before.
    off = [(a, b) for a, b in zip(found, expected, strict=True) if a != b]
    assert all(b - a == 1 for a, b in off)
    assert len(off) <= 4
    out = bias(length)
    assert out.shape == (3, 2 * length - 1)
    assert torch.equal(out[1], bias.weight[found, 1])
    out.sum().backward()
    counts = torch.bincount(torch.tensor(found), minlength=buckets).float()
    assert torch.equal(bias.weight.grad, counts[:, None].expand(-1, 3))
