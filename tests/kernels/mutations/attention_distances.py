"""Faults in attention's bias by distance and in its sinks."""

from collections.abc import Iterator

from tests.kernels.mutations.fault import KERNELS, OPS, Fault

TESTS = "tests/kernels/test_attention_distances.py"
RULE = f"{TESTS}::test_rules[False-{{}}]"
ALONE = f"{TESTS}::test_one_without_the_other[dtype0-('{{}}',)]"
PACKED = TESTS + "::test_packed[{}-dtype0-([5, 0, 70, 3], [9, 4, 0, 33])]"


def faults() -> Iterator[Fault]:
    to_the_last = RULE.format("to the last key of each")
    file = f"{KERNELS}/attention/scores.py"
    yield Fault(
        "bias: the diagonal of all sequences",
        file,
        "(stride_bias_h // 2 - shift)",
        "stride_bias_h // 2",
        to_the_last,
    )
    yield Fault(
        "bias: of the first head", file, "offset(h, 1, stride_bias_h)", "offset(0, 1, stride_bias_h)", to_the_last
    )
    yield Fault(
        "bias: by the distance of query from key",
        file,
        "tl.load(bias_ptr + (columns - rows)",
        "tl.load(bias_ptr + (rows - columns)",
        to_the_last,
    )
    yield Fault(
        "sinks: log2(e) missing",
        file,
        "tl.load(sinks_ptr + h).to(tl.float32) * LOG2E",
        "tl.load(sinks_ptr + h).to(tl.float32)",
        ALONE.format("sinks"),
    )
    yield Fault(
        "weights of packed heads from one part of the log-sum-exp",
        file,
        'Return exp2(s - lse), the weights before dropout."""\n    if MASK >= 2:',
        'Return exp2(s - lse), the weights before dropout."""\n    if MASK == 2:',
        PACKED,
    )
    file = f"{KERNELS}/attention/forward.py"
    yield Fault(
        "log-sum-exp with a bias in one part", file, "if MASK >= 2:", "if MASK == 2:", ALONE.format("distance_bias")
    )
    yield Fault(
        "sinks: not in the sum", file, "total += sink(peak, sinks_ptr, h)", "total += 0.0", ALONE.format("sinks")
    )
    file = f"{KERNELS}/attention/problem.py"
    yield Fault(
        "bias: a slice of a table taken as it lies",
        file,
        "None if x is None else x.contiguous()",
        "x",
        f"{TESTS}::test_any_place_in_memory",
    )
    file = f"{KERNELS}/attention/bias_gradient.py"
    yield Fault("bias gradient: last tile alone", file, "total += ds", "total = ds", to_the_last)
    yield Fault(
        "bias gradient: rows that do not move",
        file,
        "tl.arange(0, BLOCK_T).to(tl.int64)[:, None] * (line + 1)",
        "tl.arange(0, BLOCK_T).to(tl.int64)[:, None] * line",
        to_the_last,
    )
    yield Fault(
        "bias gradient: first part of the sequences alone",
        file,
        "for part in tl.range(0, parts):",
        "for part in tl.range(0, 1):",
        f"{TESTS}::test_the_gradient_of_the_bias_is_the_same_every_time[2]",
    )
    yield Fault(
        "bias gradient: distances that are not met",
        file,
        "met = (distances < longest) & (distances > -longest)",
        "met = distances < longest",
        f"{TESTS}::test_many_positions_of_which_few_are_met",
    )
    yield Fault(
        "bias gradient: diagonals beyond the window cut too early",
        file,
        "distance - BLOCK_T + 1 > right",
        "distance > right",
        RULE.format("window to the right, bottom_right"),
    )
    yield Fault(
        "bias gradient: other sequences' rows",
        file,
        "offset(h, 1, stride_lse_h) + q_base",
        "offset(h, 1, stride_lse_h)",
        PACKED,
    )
    file = f"{KERNELS}/attention/decode.py"
    yield Fault(
        "decoding: bias of the first head of the key head",
        file,
        "bias_of_head(bias_ptr, hk * GROUP + r % GROUP,",
        "bias_of_head(bias_ptr, hk * GROUP + r * 0,",
        f"{TESTS}::test_decoding[('distance_bias',)-one query-1]",
    )
    yield Fault(
        "decoding: sinks not in the sum",
        file,
        "total += sink(peak, sinks_ptr, h)",
        "total += 0.0",
        f"{TESTS}::test_decoding[('sinks',)-one query-1]",
    )
    file = f"{OPS}/attention/fused.py"
    yield Fault(
        "sinks: gradient of one part of the log-sum-exp",
        file,
        "lse.unbind() if lse.dim() > delta.dim() else (lse,)",
        "lse.unbind()[:1] if lse.dim() > delta.dim() else (lse,)",
        to_the_last,
    )
    yield Fault(
        "sinks: sign of the gradient", file, "return -products.sum(", "return products.sum(", ALONE.format("sinks")
    )
    yield Fault(
        "a trained bias is a step of decoding",
        file,
        "any(x is not None and x.requires_grad for x in optional)",
        "False",
        f"{TESTS}::test_a_trained_bias_or_sink_is_no_step_of_decoding",
        r"RuntimeError",
    )
