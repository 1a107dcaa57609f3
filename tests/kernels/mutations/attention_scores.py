"""Faults in what attention's kernels share: tiles, masks, scores and their gradients."""

from collections.abc import Iterator

from tests.kernels.mutations.attention_tests import MASKS, SMALL, TILES, rule
from tests.kernels.mutations.fault import KERNELS, Fault, at


def faults() -> Iterator[Fault]:
    file = f"{KERNELS}/attention/scores"
    yield Fault(
        "tiles of heads beyond the last group",
        f"{file}.py",
        "members = tl.minimum(together, heads - first)",
        "members = together",
        "tests/kernels/test_block_order.py::test_every_tile_has_one_program[5-7-3]",
    )
    yield at(
        file,
        "attention.py::test_shapes_and_causality[{}-shape4-dtype0]",
        "what was summed fades by the raw peak",
        "tl.exp2(peak * factor - shift)",
        "tl.exp2(peak - shift)",
    )
    yield Fault(
        "what gaps of a key mask hold is read",
        f"{file}.py",
        "real = real & (tl.load(key_mask_ptr + columns, mask=real, other=0) != 0)",
        "real = real & (columns >= 0)",
        "tests/nn/test_padding_values.py::test_attention_reads_no_padding[triton-torch.float32-attention-key mask]",
    )
    yield at(
        file,
        SMALL,
        "bound of the keys missing",
        "(columns >= first_key) & (columns < last_key) & (rows >= 0)",
        "(columns >= first_key) & (rows >= 0)",
    )
    yield at(
        file,
        "attention.py::test_shapes_and_causality[{'causal': True}-shape1-dtype0]",
        "causality off by one",
        "seen & (columns <= rows + shift + right)",
        "seen & (columns < rows + shift + right)",
    )
    yield at(
        file,
        rule("window"),
        "left side of the window off by one",
        "seen & (columns >= rows + shift - left)",
        "seen & (columns > rows + shift - left)",
    )
    yield at(
        file,
        "attention.py::test_shapes_and_causality[{'causal': True}-shape2-dtype0]",
        "whole tiles beyond the diagonal",
        "tl.minimum(full_high, first_row + shift + right + 1)",
        "tl.minimum(full_high, last_row + shift + right + 1)",
    )
    yield at(
        file,
        "attention.py::test_windows_wider_than_tiles",
        "whole tiles before the window",
        "tl.maximum(full_low, last_row + shift - left)",
        "tl.maximum(full_low, first_row + shift - left)",
    )
    yield at(
        file,
        rule("gaps"),
        "whole tiles in spite of gaps",
        "tl.where(gaps != 0, full_begin, full_end)",
        "full_end",
    )
    yield at(
        file,
        rule("gaps"),
        "key mask not looked up",
        "tl.load(key_mask_ptr + columns, mask=columns < last_key, other=0) != 0",
        "columns >= 0",
    )
    yield at(
        file,
        "attention.py::test_shapes_and_causality[{'causal': True}-shape1-dtype0]",
        "backward: causality off by one",
        "tl.minimum(high, at + shift + right + 1)",
        "tl.minimum(high, at + shift + right)",
    )
    yield at(
        file,
        rule("window"),
        "backward: left side of the window off by one",
        "tl.maximum(low, at + shift - left)",
        "tl.maximum(low, at + shift - left + 1)",
    )
    yield at(
        file,
        "attention_backward.py::test_padding_does_not_outweigh_scores_far_below_zero[False]",
        "dQ: weights of padding on the right",
        "low, high = at * 0 + first, at * 0 + last",
        "low, high = at * 0 + first, at * 0 + last + 1024",
    )
    yield at(
        file,
        "attention_backward.py::test_padding_does_not_outweigh_scores_far_below_zero[False]",
        "dQ: weights of gaps",
        "seen & real_columns(columns, 0, last_key, key_mask_ptr, True)",
        "seen",
    )
    yield at(file, TILES, "forward: accumulator not rescaled", "v, acc * fade[:, None], input", "v, acc, input")
    yield at(file, TILES, "forward: sum not rescaled", "total = total * fade +", "total = total +")
    yield at(file, SMALL, "log2(e) missing", "return dots * (scale * LOG2E)", "return dots * scale")
    yield at(
        file,
        rule("additive [T, S]"),
        "log2(e) of the mask missing",
        "tl.maximum(value, LOWEST / LOG2E) * LOG2E)",
        "tl.maximum(value, LOWEST / LOG2E))",
    )
    yield at(file, SMALL, "delta missing", "return dropped_p, p * (dp - delta)", "return dropped_p, p * dp")
    yield at(file, rule("softcap"), "slope of the cap missing", "ds *= 1.0 - tanh * tanh", "ds *= 1.0")
    yield at(
        file,
        MASKS,
        "dropout missing in the gradient of the weights",
        "dp = tl.where(stays, dp * keep_scale, 0.0)",
        "dp = dp * keep_scale",
    )
