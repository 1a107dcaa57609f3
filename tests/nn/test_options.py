"""Options of layers that torch.nn lacks: padded, packed, cached and with weights, they compute the same numbers.

Rotary tables and biases by distance are compared with the formulas of the papers.

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
from tests.support.masks import ahead, right

D, H, B, L = 32, 4, 3, 9
LENGTHS, SOURCE = [9, 4, 6], [7, 2, 3]
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
every_option = pytest.mark.parametrize("name", OPTIONS)


def randomise(module: nn.Module) -> Any:
    """Draw all parameters, so that no 0 or 1 hides how a parameter is used."""
    torch.manual_seed(1)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module.eval()


def encoder(name: str, norm_first: bool = True) -> Any:
    settings = {"batch_first": True, "norm_first": norm_first, "dtype": torch.float64, **OPTIONS[name]}
    layer = fastformer.TransformerEncoderLayer(D, H, 48, 0.0, "swiglu", **settings)
    return randomise(fastformer.TransformerEncoder(layer, 2))


def decoder(name: str) -> Any:
    settings = {"batch_first": True, "norm_first": True, "dtype": torch.float64, **OPTIONS[name]}
    layer = fastformer.TransformerDecoderLayer(D, H, 48, 0.0, "geglu", **settings)
    return randomise(fastformer.TransformerDecoder(layer, 2, fastformer.RMSNorm(D, dtype=torch.float64)))


def batch(length: int = L) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(B, length, D, dtype=torch.float64)


def hidden(side: str, lengths: list[int] = LENGTHS) -> Tensor:
    padding = right(lengths, lengths[0])
    if side == "gaps":
        padding[0, 3] = padding[2, 1] = True
    return padding.flip(1) if side == "left" else padding


def assert_equal_numbers(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "side", "norm_first", "causal"),
    all_pairs(OPTIONS, ["right", "left", "gaps"], [False, True], [False, True]),
)
def test_padding_changes_nothing(name, side, norm_first, causal):
    stack, x, padding = encoder(name, norm_first), batch().requires_grad_(), hidden(side)
    assert stack.obstacle() is None
    mask = ahead(L) if causal else None
    real = ~padding[:, :, None]
    packed, padded = (stack(x, mask, padding, is_causal=causal, padding_free=free) for free in (True, False))
    assert_equal_numbers(packed, padded.masked_fill(~real, 0))
    out, weights = stack(x, mask, padding, is_causal=causal, need_weights=True)
    assert_equal_numbers(out, packed)
    assert weights.shape == (2, B, H, L, L)
    leaves = [x, *stack.parameters()]
    gradients = [torch.autograd.grad((out * real).square().sum(), leaves) for out in (packed, padded)]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max() + 1))
        assert expected.abs().max() > 0  # every parameter matters


@every_option
def test_steps_equal_the_whole(name):
    """Equal numbers of tokens a row, then ragged ones, with a growing or a static cache."""
    stack, x = encoder(name), batch()
    whole = stack(x, ahead(L), is_causal=True)
    cache = stack.new_cache(B, capacity=None if len(name) % 2 else L)
    starts = [0] * B
    for counts in ([1, 1, 1], [2, 2, 2], [1, 1, 1], [3, 1, 0], [1, 1, 1], [1, 3, 3]):
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        rows = [slice(*each) for each in zip(starts, ends, strict=True)]
        tokens = nn.utils.rnn.pad_sequence([x[b, rows[b]] for b in range(B)], batch_first=True)
        out = stack.step(tokens, cache, None if len(set(counts)) == 1 else torch.tensor(counts))
        for b in range(B):
            assert_equal_numbers(out[b, : counts[b]], whole[b, rows[b]])
        starts = ends


@every_option
def test_a_decoder_reads_its_memory_packed_and_in_steps(name):
    stack, x, memory, padding = decoder(name), batch(), batch(7).flip(0), right([5, 7, 2], 7)
    masks = {"tgt_mask": ahead(L), "tgt_is_causal": True, "memory_key_padding_mask": padding}
    whole = stack(x, memory, **masks, padding_free=False)
    assert_equal_numbers(stack(x, memory, **masks), whole)
    cache = stack.new_cache(memory, padding)
    assert_equal_numbers(torch.cat([stack.step(part, cache) for part in x.split([4, 1, 1, 3], 1)], 1), whole)
    assert stack.layers[0].multihead_attn.by_distance is False


@every_option
def test_packed_sequences_are_those_of_each(name):
    stack, x, layout = encoder(name), batch(), Layout.from_lengths(LENGTHS, columns=L)
    out = stack.packed(pack(x, layout), layout, causal=True)
    for actual, row, n in zip(out.split(LENGTHS), x, LENGTHS, strict=True):
        assert_equal_numbers(actual, stack(row[None, :n], ahead(n), is_causal=True)[0])


def test_packed_sequences_with_gaps_are_refused_where_positions_count():
    layout, left = (Layout.from_mask(hidden(side)) for side in ("gaps", "left"))
    x = torch.randn(left.total, D, dtype=torch.float64)
    with pytest.raises(ValueError, match="layout must have no padding between"):
        encoder("rotary").packed(x[: layout.total], layout)
    encoder("kv_heads").packed(x[: layout.total], layout)
    encoder("rotary").packed(x, left)


@pytest.mark.parametrize(("bias", "qkv_bias"), [(True, False), (False, True), (True, None), (False, None)])
def test_projections_to_queries_keys_and_values_have_a_switch_for_their_bias(bias, qkv_bias):
    layer = fastformer.TransformerDecoderLayer(D, H, 48, 0.0, bias=bias, qkv_bias=qkv_bias, dtype=torch.float64)
    expected, x = bias if qkv_bias is None else qkv_bias, torch.randn(5, 2, D, dtype=torch.float64)
    for attention in (layer.self_attn, layer.multihead_attn):
        assert (attention.in_proj_bias is not None, attention.out_proj.bias is not None) == (expected, bias)
        assert not any(p.any() for name, p in attention.named_parameters() if "bias" in name)
        randomise(attention)
        reference = nn.MultiheadAttention(D, H, dtype=torch.float64)  # whose biases are 0
        reference.load_state_dict(attention.state_dict(), strict=False)
        assert_equal_numbers(attention(x, x, x)[0], reference(x, x, x)[0])


LAYER = fastformer.TransformerEncoderLayer
WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (LAYER, {"kv_heads": 3}, ValueError, "kv_heads must divide num_heads, 4, not 3"),
    (LAYER, {"head_size": 7, "rotary": Rotary()}, ValueError, "rotary must turn an even number"),
    (LAYER, {"rotary": True}, ValueError, r"rotary must be a Rotary or None"),
    (LAYER, {"norm": "batch"}, ValueError, "norm must be one of layer, rms"),
    (LAYER, {"qk_norm": 1}, ValueError, "qk_norm must be true or false"),
    (LAYER, {"position_bias": "alibi"}, ValueError, "position_bias must be a Module or None"),
    (LAYER, {"window": (-1, 0)}, ValueError, "window must be a tuple"),
    (LAYER, {"key_heads": 2}, TypeError, "unexpected keyword argument 'key_heads'"),
    (LAYER, {"activation": "swish"}, RuntimeError, "activation should be relu/gelu/silu"),
    (
        fastformer.MultiheadAttention,
        {"add_bias_kv": True, "kv_heads": 2},
        ValueError,
        "add_bias_kv and add_zero_attn must be False with kv_heads",
    ),
    (
        fastformer.Transformer,
        {"custom_encoder": nn.Identity(), "custom_decoder": nn.Identity(), "norm": "rms"},
        ValueError,
        "must not be given with both custom_encoder and custom_decoder",
    ),
    (Rotary, {"theta": float("nan")}, ValueError, "theta must be a finite number"),
    (Rotary, {"share": 1.5}, ValueError, "share must be above 0 and at most 1"),
    (Rotary, {"interleaved": 1}, ValueError, "interleaved must be true or false"),
    (Rotary, {"scaling": 1e-300}, ValueError, "theta and scaling must leave angles finite"),
    (Llama3Scaling, {"original": 10**400}, ValueError, "original must be at least 1 and at most"),
    (Llama3Scaling, {"low": 4.0, "high": 1.0}, ValueError, "high must be above low"),
    (RelativeBias, {"heads": 2, "buckets": 7}, ValueError, "buckets must be even where bidirectional, not 7"),
    (RelativeBias, {"heads": 2, "max_distance": 8}, ValueError, "max_distance must be above 8"),
]


def test_wrong_options_are_refused_by_name():
    for cls, options, error, message in WRONG:
        sizes = (D, H) if issubclass(cls, nn.Module) and cls is not RelativeBias else ()
        with pytest.raises(error, match=message):
            cls(*sizes, **options)
    layer = LAYER(D, H, position_bias=ALiBi(2))
    with pytest.raises(ValueError, match="distance_bias"):
        layer(torch.randn(3, 2, D))


BY_POSITION = {"window": (1, 0), "rotary": Rotary(theta=10.0), "position_bias": ALiBi(H)}
SET_LATER = {"softcap": 0.3, **BY_POSITION}


@pytest.mark.parametrize("name", SET_LATER)
def test_an_option_that_is_set_later_counts_and_is_not_lost_to_torch(name):
    x, options = batch().float(), {name: SET_LATER[name]}
    plain, expected = (fastformer.MultiheadAttention(D, H, batch_first=True, **each) for each in ({}, options))
    expected.load_state_dict(plain.state_dict(), strict=False)
    model = nn.Sequential(nn.MultiheadAttention(D, H, batch_first=True))
    model[0].load_state_dict(plain.state_dict())
    fastformer.convert(model)
    setattr(model[0], name, SET_LATER[name])
    for grad in (True, False):  # in inference, few tokens take torch's op, where there are no options
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model[0](x, x, x), expected(x, x, x))
    assert (expected(x, x, x)[0] - plain(x, x, x)[0]).abs().max() > 1e-3
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


@pytest.mark.parametrize(
    ("name", "target", "source"),
    [(name, *sides) for name in BY_POSITION for sides in (("right", "left"), ("left", "right"), ("right", "right"))],
)
def test_cross_attention_counts_positions_in_columns(name, target, source):
    model = fastformer.Transformer(D, H, 1, 1, 16, 0.0, batch_first=True).eval()
    setattr(model.decoder.layers[0].multihead_attn, name, BY_POSITION[name])
    x, memory, real = batch().float(), batch(7).float(), ~hidden(target)
    masks = {"tgt_key_padding_mask": ~real, "memory_key_padding_mask": hidden(source, SOURCE)}
    for call in (
        lambda: model.decoder(x, memory, **masks),
        lambda: model(memory, x, src_key_padding_mask=hidden(source, SOURCE), **masks),
    ):
        results = []
        for free in (True, False):
            model.encoder.padding_free = model.decoder.padding_free = free
            results.append(call()[real])
        torch.testing.assert_close(*results)


def test_packed_cross_attention_by_position_refuses_padding_on_the_left():
    module = fastformer.MultiheadAttention(D, H, batch_first=True, rotary=Rotary())
    x, memory = batch().float(), batch(7).float()
    layout = Layout.from_lengths([L] * B)
    to_left, to_right = (Layout.from_mask(hidden(side, SOURCE)) for side in ("left", "right"))
    with pytest.raises(ValueError, match="no padding on the left"):
        module.packed(pack(x, layout), layout, pack(memory, to_left), to_left)
    out = unpack(module.packed(pack(x, layout), layout, pack(memory, to_right), to_right), layout)
    torch.testing.assert_close(out, module(x, memory, memory, hidden("right", SOURCE))[0])


@pytest.mark.parametrize("name", BY_POSITION)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 2, 1]])
def test_batches_without_tokens_and_masks_over_more_columns_than_tokens(name, lengths):
    layer = LAYER(D, H, 16, 0.0, batch_first=True, **{name: BY_POSITION[name]})
    stack, x, padding = fastformer.TransformerEncoder(layer, 1).eval(), batch().float(), right(lengths, L)
    for mask in (None, torch.randn(L, L)):
        expected = stack(x, mask, padding, padding_free=False).masked_fill(padding[..., None], 0)
        torch.testing.assert_close(stack(x, mask, padding), expected)
    whole, cache = stack(x, ahead(L), is_causal=True), stack.new_cache(B)
    for turn in range(2):  # steps with more columns than all tokens that a row has read
        tokens = torch.stack([row.roll(-turn * n, 0) for row, n in zip(x, lengths, strict=True)])
        out = stack.step(tokens, cache, torch.tensor(lengths))
        for b, n in enumerate(lengths):
            torch.testing.assert_close(out[b, :n], whole[b, turn * n : (turn + 1) * n])
            assert not out[b, n:].any()


def test_tables_are_those_of_the_paper():
    like = torch.zeros(1, dtype=torch.float64)
    cos, sin = Rotary(theta=100.0).tables(6, 5, like)
    assert cos.dtype == torch.float64
    assert cos.shape == sin.shape
    for position in range(5):
        for i in range(3):
            angle = position * 100.0 ** (-2 * i / 6)
            assert float(cos[position, i]) == pytest.approx(math.cos(angle), abs=1e-14)
            assert float(sin[position, i]) == pytest.approx(math.sin(angle), abs=1e-14)
    assert Rotary().tables(6, 5, like.bfloat16())[0].dtype == torch.float32
    shared, plain = Rotary(share=0.5, scaling=4.0).tables(8, 9, like)[0], Rotary().tables(4, 9, like)[0]
    assert shared.shape[1] == 2
    torch.testing.assert_close(shared[8], plain[2], rtol=0, atol=1e-14)


def test_far_positions_are_rounded_once():
    position = 100_000  # in fp32, position * frequency is off by up to 4e-3 here
    cos, _ = Rotary().tables(8, position + 1, torch.zeros(1))
    for i in range(4):
        exact = math.cos(position * 10_000.0 ** (-2 * i / 8))
        assert abs(float(cos[position, i]) - exact) <= 2**-24


def test_llama_scaling_slows_low_frequencies_alone():
    scaling = Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=64)
    wavelengths = [2.0, 16.0, 32.0, 64.0, 1000.0]  # of 64 positions: 32, 4, 2, 1 and 0.064 turns
    frequencies = torch.tensor([2 * math.pi / x for x in wavelengths], dtype=torch.float64)
    expected = [1.0, 1.0, (1 - 1 / 3) / 8 + 1 / 3, 1 / 8, 1 / 8]
    torch.testing.assert_close(scaling.scale(frequencies) / frequencies, torch.tensor(expected, dtype=torch.float64))


def test_alibi_is_that_of_the_paper():
    bias = ALiBi(8)(4)
    expected = [[-(2.0 ** -(head + 1)) * abs(distance) for distance in range(-3, 4)] for head in range(8)]
    torch.testing.assert_close(bias, torch.tensor(expected))
    # The paper's code for other numbers: those of 8 heads, then every other one of 16.
    slopes = (-ALiBi(12)(2)[:, 0]).tolist()
    assert slopes == pytest.approx([2.0**-i for i in range(1, 9)] + [2.0 ** -(i / 2) for i in (1, 3, 5, 7)])
    length = 70_000  # bf16 has no 257, fp16 nothing above 65,504
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(ALiBi(4).to(dtype)(length), ALiBi(4)(length))


def bucket(distance: int, buckets: int, furthest: int, bidirectional: bool) -> int:
    """Return the bucket for one distance of a key from its query (section 2.1 of Raffel et al. 2020)."""
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
    bias, length = RelativeBias(3, buckets, furthest, bidirectional), 300
    distances = torch.arange(1 - length, length)
    actual = bias.bucket(distances)
    expected = torch.tensor([bucket(d, buckets, furthest, bidirectional) for d in distances.tolist()])
    # Where a logarithm is a whole number, fp32 may say the bucket before.
    assert set((expected - actual).tolist()) <= {0, 1}
    assert (expected != actual).sum() <= 4
    out = bias(length)
    assert torch.equal(out, bias.weight[actual].T)
    out.sum().backward()
    counts = torch.bincount(actual, minlength=buckets).float()
    assert torch.equal(bias.weight.grad, counts[:, None].expand(-1, 3))
