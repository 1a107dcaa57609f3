"""Faults in attention's forward pass."""

from collections.abc import Iterator

from tests.kernels.mutations.attention_tests import MASKS, SMALL, TILES, rule
from tests.kernels.mutations.fault import EXECUTED, KERNELS, Fault, at


def faults() -> Iterator[Fault]:
    file = f"{KERNELS}/attention/forward"
    yield at(
        file,
        TILES,
        "forward: whole tile skipped",
        "for i in tl.range(0, whole):",
        "for i in tl.range(0, whole - 1):",
    )
    yield at(
        file,
        TILES,
        "forward: last tile skipped",
        "for i in tl.range(0, count - whole,",
        "for i in tl.range(0, count - whole - 1,",
    )
    yield at(
        file,
        "attention.py::test_tiles_of_long_sequences[520-520-128-{'causal': True, 'alignment': 'bottom_right'}-dtype0]",
        "forward: wrong tile ahead of time",
        "n = tl.where(n < full_begin, n, n + whole)",
        "n = n + 0",
    )
    yield at(
        file,
        "attention.py::test_shapes_and_causality[{}-shape3-dtype0]",
        "forward: rows of the first tile for all",
        "rows = first_row + tl.arange(0, BLOCK_T)",
        "rows = tl.arange(0, BLOCK_T)",
    )
    yield at(
        file,
        "attention.py::test_what_padding_holds_does_not_matter",
        "forward: values of padding are read",
        "real_keys = real_columns(at, first_key, last_key, key_mask_ptr, HAS_KEY_MASK)[:, None]",
        "real_keys = (at < S)[:, None]",
    )
    yield at(
        file,
        rule("query_lengths"),
        "forward: padded queries attend",
        '(peak == float("inf"))) & (rows < last_query)',
        '(peak == float("inf"))) & (rows >= 0)',
    )
    yield at(
        file,
        rule("negative scale"),
        "forward: the highest of raw scores with a negative scale",
        "problem.scale > 0.0 and",
        "problem.scale != 0.0 and",
    )
    yield at(
        file,
        "attention.py::test_rows_that_see_nothing_are_zero_and_move_nothing",
        "forward: log-sum-exp of dead rows is -inf",
        'highest = tl.where(alive, peak, float("inf"))',
        "highest = peak",
    )
    yield at(
        file,
        rule("additive [S]"),
        "forward: logarithm of the sum lost",
        "second_part + rows, logarithm,",
        "second_part + rows, 0.0 * logarithm,",
    )
    yield at(
        file,
        MASKS,
        "forward: scale of dropout missing",
        "keep_scale / tl.where(alive, total, 1.0)",
        "1.0 / tl.where(alive, total, 1.0)",
    )
    yield at(
        file,
        "attention.py::test_packed_sequences[False]",
        "forward: packed rows written at the batch's start",
        "offset(h, ALIGN, stride_out_h) + offset(q_base, ALIGN, stride_out_t)",
        "offset(h, ALIGN, stride_out_h)",
    )
    yield at(
        file,
        "contract.py::test_kernels_keep_to_their_tensors[packed_attention]",
        "forward: rows beyond the sequence written",
        "written = (rows < end_row)[:, None] & in_value",
        "written = in_value & (rows >= 0)[:, None]",
    )
    yield at(
        f"{KERNELS}/attention/forward",
        SMALL,
        "forward: keys beyond the tensor are read",
        "loaded = loaded if HAS_KEY_MASK else real_keys",
        "loaded = in_head",
        f"{EXECUTED}outside all (tensors|allocations)",
        "sm_90",
    )
