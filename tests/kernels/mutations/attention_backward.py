"""Faults in attention's backward pass."""

from collections.abc import Iterator

from tests.kernels.mutations.attention_tests import MASKS, SMALL, TILES, rule
from tests.kernels.mutations.fault import EXECUTED, KERNELS, Fault, at


def faults() -> Iterator[Fault]:
    file = f"{KERNELS}/attention/backward"
    yield at(file, SMALL, "dK without scale", "tl.where(real & in_head, dk * scale", "tl.where(real & in_head, dk")
    yield at(file, SMALL, "dQ without scale", "tl.where(real & in_head, dq * scale", "tl.where(real & in_head, dq")
    yield at(file, MASKS, "dV without scale of dropout", "dv * keep_scale, 0.0", "dv, 0.0")
    yield at(
        file,
        TILES,
        "dK and dV: last tile of queries skipped",
        "for j in tl.range(begin, end):\n            rows",
        "for j in tl.range(begin, end - 1):\n            rows",
    )
    yield at(
        file,
        TILES,
        "dQ: first tile of keys skipped",
        "for j in tl.range(begin, end):\n        columns",
        "for j in tl.range(begin + 1, end):\n        columns",
    )
    yield at(
        file,
        rule("causal window"),
        "dK and dV: diagonal moved the wrong way",
        "first + BLOCK_S - 1, 0, last_query, -shift,",
        "first + BLOCK_S - 1, 0, last_query, shift,",
    )
    yield at(
        file,
        rule("causal window"),
        "dK and dV: what a key sees moved the wrong way",
        "columns, 0, last_query, -shift,",
        "columns, 0, last_query, shift,",
    )
    whole = "attention.py::test_shapes_and_causality[{'causal': True}-shape2-dtype1]"
    yield at(
        file, whole, "dK and dV: tiles on the diagonal taken for whole ones",
        "(j < full_begin) | (j >= full_end), rows[None, :], columns[:, None]",
        "(j < 0) | (j >= full_end), rows[None, :], columns[:, None]",
    )  # fmt: skip
    yield at(
        file, whole, "dQ: tiles on the diagonal taken for whole ones",
        "(j < full_begin) | (j >= full_end), rows[:, None], columns[None, :]",
        "(j < full_begin) | (j > full_end), rows[:, None], columns[None, :]",
    )  # fmt: skip
    below = "attention_backward.py::test_padding_does_not_outweigh_scores_far_below_zero[{}]"
    yield at(
        file,
        below.format("True"),
        "fast dQ: weights of padding",
        "tl.where(real_key, low, 2147483647)",
        "tl.where(real_key, low, low)",
    )
    yield at(
        file,
        below.format("True"),
        "fast dQ: tiles with padding taken for whole ones",
        "(first + BLOCK_S > last_key) | (gaps != 0)",
        "(gaps != 0)",
    )
    delta = "attention_backward.py::test_delta_has_a_kernel_only_where_dq_has_none"
    yield at(file, delta, "dQ: delta stored wrong", "rows, delta, mask=rows", "rows, -delta, mask=rows")
    yield at(
        file,
        delta,
        "delta computed twice",
        "if not own_delta:",
        "if True:",
    )
    yield at(
        file,
        "attention.py::test_grouped_queries[2-dtype0]",
        "dK and dV: heads of another group",
        "h = hk * GROUP + group",
        "h = group * heads + hk",
    )
    yield at(
        file,
        MASKS,
        "dK and dV: dropout of the key head",
        "last_key)\n            keys = row_keys(tl.load(seed_ptr), rows, b * H + h)",
        "last_key)\n            keys = row_keys(tl.load(seed_ptr), rows, b * H + hk)",
    )
    yield at(
        file,
        MASKS,
        "dQ: dropout of another head",
        "tl.float32)\n    keys = row_keys(tl.load(seed_ptr), rows, b * H + h)",
        "tl.float32)\n    keys = row_keys(tl.load(seed_ptr), rows, b + h)",
    )
    yield at(
        file,
        rule("gaps"),
        "dQ: key mask of the first sequence for all",
        "stride_lse_h) + q_base\n    key_mask_ptr += offset(b, 1, stride_key_mask_b)",
        "stride_lse_h) + q_base\n    key_mask_ptr += offset(h, 1, stride_key_mask_b)",
    )
    yield at(
        file,
        "attention.py::test_packed_sequences[False]",
        "dQ: log-sum-exp of the first sequence for all",
        "row_base = offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h) + q_base",
        "row_base = offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h)",
    )
    yield at(
        file,
        "attention_backward.py::test_the_fast_backward_pass",
        "fast dQ without scale",
        "dq_ptrs, dq * scale, mask",
        "dq_ptrs, dq, mask",
    )
    yield at(
        f"{KERNELS}/attention/backward",
        "attention_backward.py::test_the_fast_backward_pass",
        "fast dQ: added without atomics",
        'tl.atomic_add(dq_ptrs, dq * scale, mask=real_rows & in_head, sem="relaxed")',
        "tl.store(dq_ptrs, tl.load(dq_ptrs, real_rows & in_head) + dq * scale, real_rows & in_head)",
        f"{EXECUTED}race of blocks",
        "sm_80",
    )
