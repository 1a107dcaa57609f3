"""Deliberate faults in the kernels and their wrappers, each of which a test must catch.

    python tests/kernels/kernel_mutations.py

A copy of the repository gets one fault at a time; the test that stands beside the fault must then fail by an assertion.
A fault that survives is a gap in the tests. All of it runs in Triton's interpreter, also where there is a GPU; faults
that it cannot show, such as two blocks that write one row, run compiled (tests/compiled).
"""

import argparse
import multiprocessing
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300.0  # seconds for one test, on a busy machine; a fault may make a loop endless
# Most of the time of a small test is that of these imports: a server has them done, and forks. `torch._inductor` is
# imported by `torch.use_deterministic_algorithms`.
PRELOADED = ["pytest", "torch._inductor", "torch.library", "torch.utils.checkpoint", "triton.runtime.interpreter"]


class Fault(NamedTuple):
    name: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    test: str  # which must fail
    failure: str = ""  # how it fails, where that is no assertion
    compiled: str = ""  # for what GPU; else it is interpreted


def _faults() -> Iterator[Fault]:
    kernels, ops = "kernels/fastformer_kernels", "fastformer/functional"

    def at(file: str, test: str, name: str, old: str, new: str, failure: str = "", compiled: str = "") -> Fault:
        return Fault(name, f"{file}.py", old, new, f"tests/kernels/test_fused_{test}", failure, compiled)

    small = "attention.py::test_shapes_and_causality[{}-shape1-dtype0]"
    tiles = "attention.py::test_shapes_and_causality[{}-shape2-dtype0]"
    masks = "attention_backward.py::test_gradients_use_the_mask_of_the_forward_pass[False-{}]"

    def rule(name: str) -> str:
        return f"attention.py::test_rules[{name}]"

    def wanted(*indices: int) -> str:
        return f"attention_backward.py::test_only_the_gradients_that_are_wanted[wanted{indices[0]}]"

    file = f"{kernels}/attention/forward"
    yield at(
        file,
        tiles,
        "forward: whole tile skipped",
        "for i in tl.range(0, whole):",
        "for i in tl.range(0, whole - 1):",
    )
    yield at(
        file,
        tiles,
        "forward: last tile skipped",
        "for i in tl.range(0, count - whole):",
        "for i in tl.range(0, count - whole - 1):",
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
        "rows, dims = first_row + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)",
        "rows, dims = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)",
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
        masks,
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
        "written = (rows < end_row)[:, None] & in_head",
        "written = in_head & (rows >= 0)[:, None]",
    )

    file = f"{kernels}/attention/scores"
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
        "tests/nn/test_padding_values.py::test_attention[triton-key mask-attention]",
    )
    yield at(
        file,
        small,
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
    yield at(file, tiles, "forward: accumulator not rescaled", "v, acc * fade[:, None], input", "v, acc, input")
    yield at(file, tiles, "forward: sum not rescaled", "total = total * fade +", "total = total +")
    yield at(file, small, "log2(e) missing", "return dots * (scale * LOG2E)", "return dots * scale")
    yield at(
        file,
        rule("additive [T, S]"),
        "log2(e) of the mask missing",
        "tl.maximum(value, LOWEST / LOG2E) * LOG2E)",
        "tl.maximum(value, LOWEST / LOG2E))",
    )
    yield at(file, small, "delta missing", "return kept, p * (dp - delta)", "return kept, p * dp")
    yield at(file, rule("softcap"), "slope of the cap missing", "ds *= 1.0 - tanh * tanh", "ds *= 1.0")
    yield at(
        file,
        masks,
        "dropout missing in the gradient of the weights",
        "dp = tl.where(stays, dp * keep_scale, 0.0)",
        "dp = dp * keep_scale",
    )

    file = f"{kernels}/attention/backward"
    yield at(file, small, "dK without scale", "tl.where(real, dk * scale, 0.0)", "tl.where(real, dk, 0.0)")
    yield at(file, small, "dQ without scale", "tl.where(real, dq * scale, 0.0)", "tl.where(real, dq, 0.0)")
    yield at(file, masks, "dV without scale of dropout", "dv * keep_scale, 0.0", "dv, 0.0")
    yield at(
        file,
        tiles,
        "dK and dV: last tile of queries skipped",
        "for j in tl.range(begin, end):\n            rows",
        "for j in tl.range(begin, end - 1):\n            rows",
    )
    yield at(
        file,
        tiles,
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
        masks,
        "dK and dV: dropout of the key head",
        "last_key)\n            keys = row_keys(tl.load(seed_ptr), rows, b * H + h)",
        "last_key)\n            keys = row_keys(tl.load(seed_ptr), rows, b * H + hk)",
    )
    yield at(
        file,
        masks,
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
        "dims[None, :], dq * scale, mask",
        "dims[None, :], dq, mask",
    )

    file = f"{kernels}/attention/mask_gradient"
    yield at(file, rule("additive [T, S]"), "gradient of the mask not summed", "total += ds", "total = ds")
    file = f"{kernels}/attention/weights"
    yield at(
        file,
        "contract.py::test_kernels_keep_to_their_tensors[attention_with_weights]",
        "weights: columns beyond the keys written",
        "written = (rows < T)[:, None] & (columns < S)[None, :]",
        "written = (rows < T)[:, None] & (columns >= 0)[None, :]",
    )

    file = f"{kernels}/attention/problem"
    yield at(file, rule("gaps"), "gaps never seen", "tl.sum(seen, 0) != 0)", "tl.sum(seen, 0) < 0)")
    yield at(
        file,
        rule("causal to the last key of each"),
        "shift of the longest for all",
        "shift = keys - queries if",
        "shift = b * 0 + S - T if",
    )
    yield at(file, rule("gaps"), "last real key lost", "tl.maximum(high, at + 1)", "tl.maximum(high, at)")
    yield at(
        file,
        "attention.py::test_lengths_beyond_the_tensor_are_cut",
        "lengths not cut to the tensor",
        "keys = tl.minimum(tl.maximum(tl.load(key_lengths_ptr + b).to(tl.int32), 0), S)",
        "keys = tl.load(key_lengths_ptr + b).to(tl.int32)",
    )

    file, decoding = f"{kernels}/attention/decode", "attention.py::test_decoding_splits_the_keys"
    yield at(
        file, f"{decoding}[one query-1]", "decoding: shares without weight", "other=0.0) * weight", "other=0.0)"
    )  # fmt: skip
    yield at(
        file,
        f"{decoding}[one query-1]",
        "decoding: last tile of each share skipped",
        "end = tl.minimum(begin + share, end)",
        "end = tl.minimum(begin + share - 1, end)",
    )
    yield at(
        file,
        f"{decoding}[one query-1]",
        "decoding: maximum of the tiles before forgotten",
        "acc, total, peak = fold(",
        "acc, total, _ = fold(",
    )
    yield at(
        file,
        f"{decoding}[three queries, the last at the end-1]",
        "decoding: rows of another query",
        "offset(r // GROUP, ALIGN, stride_out_t)",
        "offset(r % T, ALIGN, stride_out_t)",
    )

    file, masks = (
        f"{ops}/attention/fused",
        "attention_backward.py::test_gradients_use_the_mask_of_the_forward_pass[False-{}]",
    )
    yield at(
        file,
        masks,
        "attention: seed drawn anew in backward",
        "settings = Settings(*ctx.numbers, *tensors)",
        "settings = Settings(*ctx.numbers, *tensors)._replace(seed=dropout_seed(q))",
    )
    yield at(
        file,
        "attention.py::test_weights_and_their_gradient[key_lengths]",
        "attention: gradient of the weights not in delta",
        "else (weights * dweights).sum",
        "else 0.0 * (weights * dweights).sum",
    )
    yield at(
        file,
        "attention.py::test_autocast_runs_in_low_precision",
        "attention: autocast skipped",
        "q, k, v = to_autocast(q, k, v)",
        "q, k, v = q, k, v",
    )
    yield at(
        file,
        wanted(0),
        "attention: gradients that nobody wants",
        "wants_q, wants_k or wants_v, ctx.fast",
        "True, True, ctx.fast",
    )
    yield at(
        file,
        rule("bool [B, 1, 1, S] and key mask"),
        "attention: key mask lost beside a mask",
        "keys if key_mask is None else keys & key_mask",
        "keys",
    )

    file, values = (
        f"{kernels}/norms/layer_norm",
        "layer_norm.py::test_values_and_gradients[weight and bias-shape1-torch.float32]",
    )
    yield at(
        file,
        "layer_norm.py::test_long_rows[4100-torch.float32]",
        "layer norm: means of long rows mixed up",
        "tl.load(means_ptr + M + rows,",
        "tl.load(means_ptr + rows,",
    )
    yield at(
        file,
        "contract.py::test_kernels_keep_to_their_tensors[layer_norm]",
        "layer norm: rows beyond the last written",
        "tl.store(y_ptr + starts * N + cols, y, mask)",
        "tl.store(y_ptr + starts * N + cols, y, cols < N)",
    )
    file = f"{kernels}/norms/rows"
    yield at(
        file,
        values,
        "norms: padding in the variance",
        "deviation = tl.where(cols < N, x - mean[:, None], 0.0)",
        "deviation = x - mean[:, None]",
    )
    yield at(
        file,
        values,
        "norms: eps missing",
        "tl.sum(deviation * deviation, 1) / N + eps",
        "tl.sum(deviation * deviation, 1) / N",
    )
    yield at(
        file,
        values,
        "norms: bias not added",
        "normal += load_row(bias_ptr, cols, N, BLOCK_M)",
        "normal += 0.0 * load_row(bias_ptr, cols, N, BLOCK_M)",
    )
    yield at(
        file,
        values,
        "norms: mean not subtracted in dx",
        "(g - normal * mean_gx[:, None] - mean_g[:, None])",
        "(g - normal * mean_gx[:, None])",
    )
    yield at(
        file,
        values,
        "norms: rstd missing in dx",
        "mean_g[:, None]) * rstd[:, None]",
        "mean_g[:, None])",
    )
    yield at(
        file,
        "layer_norm.py::test_values_and_gradients[weight and bias-shape2-torch.float32]",
        "norms: sums of the last program lost",
        "(rows < programs) & (cols < N)",
        "(rows < programs - 1) & (cols < N)",
    )
    yield at(
        file,
        "layer_norm.py::test_many_partial_sums",
        "norms: sums of many programs lost",
        "tl.range(0, programs, BLOCK_P, num_stages=3)",
        "tl.range(0, BLOCK_P, BLOCK_P, num_stages=3)",
    )
    yield at(
        f"{ops}/norms/layer_norm",
        values,
        "layer norm: statistics saved in the wrong order",
        "ctx.save_for_backward(*tensors, mean, rstd)",
        "ctx.save_for_backward(*tensors, rstd, mean)",
    )
    yield at(
        f"{ops}/norms/layer_norm",
        "layer_norm.py::test_second_derivative",
        "layer norm: second derivative without the formula",
        'if twice("layer_norm", ctx.formula):',
        "if False:",
        "RuntimeError: element 0 of tensors does not require grad",
    )
    yield at(
        f"{ops}/norms/layer_norm",
        "layer_norm.py::test_only_wanted_gradients",
        "norms: gradients that nobody wants",
        "x.dtype if needed and x is not None else None",
        "x.dtype if x is not None else None",
    )
    yield at(
        f"{ops}/norms/layer_norm",
        "layer_norm.py::test_autocast_on_a_gpu_gives_fp32_as_in_torch[torch.float16]",
        "norms: autocast skipped",
        "if device in IN_FLOAT32 and torch.is_autocast_enabled(device):",
        "if False:",
    )
    yield at(
        "fastformer/host/autograd_function",
        "contract.py::test_gradients_that_are_differentiable_are_the_same_gradients"
        "[one tensor in several places-triton-attention]",
        "second derivative: one tensor in several places counted in each",
        "inputs = [x if x is None else x.view_as(x) for x in inputs]",
        "inputs = list(inputs)",
    )

    file = f"{kernels}/norms/rms_norm"
    values = "rms_norm.py::test_values_and_gradients[None-True-shape1-torch.float32]"
    yield at(
        file, values, "RMS norm: eps missing", "tl.rsqrt(tl.sum(x * x, 1) / N + eps)", "tl.rsqrt(tl.sum(x * x, 1) / N)"
    )
    yield at(
        file,
        values,
        "RMS norm: own mean missing in dx",
        "(g - normal * mean[:, None]) * rstd",
        "g * rstd",
    )
    yield at(
        f"{kernels}/norms/long_rows",
        "rms_norm.py::test_long_rows[4100-torch.float32]",
        "RMS norm: rstd missing for long rows",
        "tl.sum(total) * tl.load(rstd_ptr + row) / N",
        "tl.sum(total) / N",
    )

    file = f"{kernels}/norms/dropout_add_layer_norm"
    one_mask = "dropout_add_layer_norm.py::test_forward_and_backward_have_one_mask"
    yield at(
        file,
        "dropout_add_layer_norm.py::test_values_and_gradients[both-weight and bias-shape1-torch.float32]",
        "dropout, add, norm: ds not added",
        "            total += load_tile(ds_ptr",
        "            total += 0.0 * load_tile(ds_ptr",
    )
    yield at(
        file,
        f"{one_mask}[both-131-40-0.25]",
        "dropout, add, norm: dx without dropout",
        "cols, dropped(total, seed_ptr, rows, 0, threshold, scale), mask)",
        "cols, total, mask)",
    )
    yield at(
        file,
        f"{one_mask}[sum-3-4104-0.6]",
        "dropout, add, norm: mask of the first columns for all",
        "s = residual + dropped(x, seed_ptr, rows, first_column, threshold, scale)",
        "s = residual + dropped(x, seed_ptr, rows, 0, threshold, scale)",
    )
    yield at(
        f"{ops}/norms/dropout_add_layer_norm",
        f"{one_mask}[both-131-40-0.25]",
        "dropout, add, norm: dx taken for dresidual",
        "one = seed is None and x_dtype == residual_dtype",
        "one = x_dtype == residual_dtype",
    )

    file = f"{kernels}/feed_forward/kernels"
    feed_forward = "feed_forward.py::test_values_and_gradients[shape1-11-3-{}-torch.float32]"
    yield at(
        file, feed_forward.format("gelu"), "feed-forward: slope of gelu", "slope = cdf + x * density", "slope = cdf"
    )
    yield at(
        file,
        feed_forward.format("geglu"),
        "feed-forward: gate and value swapped",
        "x = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)\n    a, _ = value_and_slope(x, FUNCTION, ERF)\n"
        "    if GATED:\n        a *= tl.load(h_ptr + F + at,",
        "x = tl.load(h_ptr + wide - F + at, mask=inside, other=0.0).to(tl.float32)\n"
        "    a, _ = value_and_slope(x, FUNCTION, ERF)\n    if GATED:\n        a *= tl.load(h_ptr + at,",
    )
    yield at(
        file,
        "feed_forward.py::test_many_rows_a_program",
        "feed-forward: bias gradient of the last tile alone",
        "total += g * slope",
        "total = g * slope",
    )
    yield at(
        file,
        "feed_forward.py::test_many_partial_sums",
        "feed-forward: last partial sums lost",
        "for first in range(0, P, BLOCK_P):",
        "for first in range(0, P - BLOCK_P, BLOCK_P):",
    )
    yield at(
        file,
        "feed_forward.py::test_dropout_forward_and_backward_agree[gelu-False]",
        "feed-forward: mask of the first columns for all",
        "            keep = keep_tile(tl.load(seed_ptr), rows, first_column,",
        "            keep = keep_tile(tl.load(seed_ptr), rows, 0,",
    )
    yield at(
        file,
        "feed_forward.py::test_dropout_forward_and_backward_agree[relu-False]",
        "feed-forward: scale of dropout missing for ReLU",
        "g = tl.where(a == 0, 0.0, g * dropout_scale)",
        "g = tl.where(a == 0, 0.0, g)",
    )
    yield at(
        f"{ops}/feed_forward/op",
        feed_forward.format("relu"),
        "feed-forward: wrong tensor saved",
        'kept = (a if activation == "relu" else h) if keeps else None',
        "kept = h if keeps else None",
    )

    file = f"{kernels}/linear_cross_entropy/kernels"
    options, long = (
        f"linear_cross_entropy.py::test_{name}]" for name in ("options[True-0.1-mean-dtype0", "shapes[2-3-9001-dtype0")
    )
    yield at(
        file, options, "cross entropy: smoothing missing in the gradient", "dz -= everywhere", "dz -= 0.0 * everywhere"
    )
    yield at(
        file,
        "linear_cross_entropy.py::test_ignored_rows[2-mean]",
        "cross entropy: gradient of ignored rows",
        "factor = tl.where(counts, factor, 0.0)",
        "factor = factor + 0.0",
    )
    yield at(
        file,
        long,
        "cross entropy: last block of classes not summed",
        "range(0, tl.where(counts, V, 0), BLOCK)",
        "range(0, tl.where(counts, V, 0) - BLOCK, BLOCK)",
    )
    yield at(
        file,
        long,
        "cross entropy: last block of classes without gradient",
        "for start in range(0, V, BLOCK):",
        "for start in range(0, V - BLOCK, BLOCK):",
    )
    yield at(
        file, long, "cross entropy: sum not rescaled", "exps = exps * _shrink(top - new_top) +", "exps = exps +"
    )  # fmt: skip
    yield at(file, options, "cross entropy: chunks not added up", "beta=float(start > 0)", "beta=0.0")
    yield at(
        f"{ops}/linear_cross_entropy/op",
        options,
        "cross entropy: gradient of the loss ignored",
        "torch.mul(gradient, factor, out=",
        "torch.mul(gradient, 1.0, out=",
    )

    file = f"{kernels}/embedding/kernels"
    values = "embedding.py::test_values_and_gradients[22.6-True-shape1-5-4-11-torch.float32]"
    yield at(file, values, "embedding: scale missing in backward", "N, scale * dropout_scale,", "N, dropout_scale,")
    yield at(file, values, "embedding: position of the word", "(table_ptr, positions,", "(table_ptr, ids,")
    yield at(
        file,
        "embedding.py::test_no_such_row_is_not_a_number",
        "embedding: rows before the first are read",
        "there = (ids >= 0) & (ids < count)",
        "there = ids < count",
    )
    yield at(
        file,
        "embedding.py::test_dropout_forward_and_backward_agree",
        "embedding: no dropout in backward",
        "dx = tl.where(keep, dx, 0.0)",
        "dx = tl.where(keep, dx, dx)",
    )
    yield at(
        f"{ops}/embedding/op",
        "embedding.py::test_only_wanted_gradients",
        "embedding: gradients that nobody wants",
        "ctx.dropout_p) if needs_weight else None",
        "ctx.dropout_p)",
    )

    yield at(
        f"{kernels}/random",
        "attention.py::test_dropout_keeps_its_rate_and_its_scale",
        "dropout: one mask for all heads",
        "row, row * 0 + stream,",
        "row, row * 0 + stream * 0,",
    )

    fault = r"tests\.compiled\.ptx\.machine\.KernelFault: \w+: "
    yield at(
        f"{kernels}/norms/layer_norm",
        "layer_norm.py::test_values_and_gradients[weight and bias-shape2-torch.float32]",
        "layer norm: two blocks write one row",
        "rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "rows = tl.program_id(0) * (BLOCK_M - 1) + tl.arange(0, BLOCK_M)",
        f"{fault}race of blocks",
        "sm_80",
    )
    yield at(
        f"{kernels}/norms/rows",
        "layer_norm.py::test_several_normalized_dimensions_and_strides",
        "norms: rows are said to begin at multiples of 32 bytes",
        "tl.load(ptr + starts * stride * ALIGN + cols,",
        "tl.load(ptr + tl.multiple_of(starts * stride, [8, 8]) * ALIGN + cols,",
        f"{fault}misaligned",
        "sm_80",
    )
    yield at(
        f"{kernels}/attention/forward",
        small,
        "forward: keys beyond the tensor are read",
        "loaded = loaded if HAS_KEY_MASK else real_keys",
        "loaded = in_head",
        f"{fault}outside all (tensors|allocations)",
        "sm_90",
    )
    yield at(
        f"{kernels}/attention/backward",
        "attention_backward.py::test_the_fast_backward_pass",
        "fast dQ: added without atomics",
        "tl.atomic_add(\n                    dq_head + wide_rows * stride_dq_t * ALIGN + dims[None, :], dq * scale, "
        'mask=real_rows, sem="relaxed"',
        "places = dq_head + wide_rows * stride_dq_t * ALIGN + dims[None, :]\n"
        "                tl.store(\n                    places, tl.load(places, real_rows) + dq * scale, real_rows",
        f"{fault}race of blocks",
        "sm_80",
    )


FAULTS = list(_faults())


def _copy(to: Path) -> Path:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


# NumPy's warnings of what a fault makes infinite would end the test before its assertion.
OPTIONS = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore::RuntimeWarning"]


def _pytest(folder: Path, log: Path, tests: list[str]) -> None:
    """Run tests in a process of their own."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "kernels")]  # before the installed ones
    import pytest

    sys.exit(int(pytest.main([*OPTIONS, *tests])))


def run(folder: Path, tests: list[str], compiled: str) -> tuple[int | None, str]:
    """Return the exit status of pytest, None for too long, and what it printed."""
    log = folder.parent / f"{folder.name}.log"
    if compiled:  # which the server cannot do: the interpreter is in it
        paths = os.pathsep.join([str(folder), str(folder / "kernels")])
        command = [sys.executable, "-m", "pytest", *OPTIONS, "--compiled", compiled, *tests]
        with log.open("w") as output:
            try:
                status: int | None = subprocess.run(
                    command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, timeout=LIMIT * len(tests),
                    stdout=output, stderr=subprocess.STDOUT, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = None
        return status, log.read_text()
    process = multiprocessing.get_context("forkserver").Process(target=_pytest, args=(folder, log, tests))
    process.start()
    process.join(LIMIT * len(tests))
    if process.is_alive():
        process.kill()
        process.join()
        return None, log.read_text()
    return process.exitcode, log.read_text()


def judge(fault: Fault, folder: Path) -> str:
    file = folder / fault.file
    text = file.read_text()
    file.write_text(text.replace(fault.old, fault.new))
    try:
        status, output = run(folder, [fault.test], fault.compiled)
    finally:
        file.write_text(text)
    if status == 0:
        return "SURVIVED"
    expected = fault.failure or r"assert |AssertionError|Failed: DID NOT RAISE"
    if status == 1 and re.search(rf"^FAILED .* - ({expected})", output, re.MULTILINE):
        return "caught"
    lines = [line for line in output.splitlines() if line.startswith(("E  ", "ERROR", "FAILED"))]
    return f"broken: status {status}, {lines[-1] if lines else output[-200:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="SUBSTRING", help="of the names or files of faults")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if any(part in fault.name or part in fault.file for part in arguments.only)]
    if not chosen:
        parser.error(f"no fault has one of {arguments.only} in its name or file")
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",  # a fault of the same size, in the same second, would pass for the file before
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "COLUMNS": "1000",  # pytest shortens its summary to the terminal
    }
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for index in range(arguments.jobs):
            folders.put(_copy(Path(temporary) / str(index)))

        def with_folder(fault: Fault) -> tuple[str, float]:
            folder, begin = folders.get(), time.perf_counter()
            try:
                return judge(fault, folder), time.perf_counter() - begin
            finally:
                folders.put(folder)

        folder = folders.get()
        for compiled in sorted({fault.compiled for fault in chosen}):
            tests = list(dict.fromkeys(fault.test for fault in chosen if fault.compiled == compiled))
            status, output = run(folder, tests, compiled)
            if status != 0 or "skipped" in output:
                sys.exit(f"without any fault:\n{output}")
            passed = f"{len(tests)} tests pass without any fault, {compiled or 'interpreted'}"
            print(f"{passed}, {time.perf_counter() - start:.0f} s", flush=True)
        folders.put(folder)
        verdicts = []
        for fault, (verdict, seconds) in zip(chosen, pool.map(with_folder, chosen), strict=True):
            print(f"{fault.name:<64} {verdict:<8} {seconds:5.1f} s  {fault.test.removeprefix('tests/')}", flush=True)
            verdicts.append(verdict)
    survived, broken = verdicts.count("SURVIVED"), sum(verdict.startswith("broken") for verdict in verdicts)
    caught = len(verdicts) - survived - broken
    print(f"{caught} caught, {survived} survived, {broken} broken, {time.perf_counter() - start:.0f} s")
    sys.exit(bool(survived or broken))


if __name__ == "__main__":
    main()
