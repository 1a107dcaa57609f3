"""Deliberate faults in the kernels and their wrappers, each of which a test must catch.

    python -m tests.kernels.mutations                               # all, `make faults`
    python -m tests.kernels.mutations --jobs 2 --only embedding     # those with a word in their file or fragment

A copy of the repository gets one fault at a time; the test that stands beside the fault must then fail by an assertion.
A fault that survives is a gap in the tests. All of it runs in Triton's interpreter, also where there is a GPU; faults
that it cannot show, such as two blocks that write one row, run compiled (tests/compiled), after their test has passed
in the interpreter with the fault. Each row is a fragment that occurs exactly once in the file, what stands there
instead, the test, and where that is no assertion how it fails, and for what GPU it is compiled.
"""

from tests.support.faults import Fault, main

EXECUTED = r"tests\.compiled\.ptx\.machine\.KernelFault: \w+: "  # how what runs compiled fails
ATTENTION = "kernels/test_fused_attention.py::"
BACKWARD = "kernels/test_fused_attention_backward.py::"
EXTENDED = "kernels/test_attention_options.py::"
NORMS = "kernels/test_fused_norms.py::"
LOSS = "kernels/test_fused_linear_cross_entropy.py::"
FEED_FORWARD = "kernels/test_fused_feed_forward.py::"
EMBEDDING = "kernels/test_fused_embedding.py::"
PIECES = EMBEDDING + "test_words_that_span_pieces[0.4-64-3]"
ROTARY = "kernels/test_fused_rotary.py::"
CONTRACT = "kernels/test_fused_contract.py::"

SMALL = ATTENTION + "test_shapes_and_causality[{}-shape1-dtype0]"
TILES = ATTENTION + "test_shapes_and_causality[{}-shape2-dtype0]"
CAUSAL = ATTENTION + "test_shapes_and_causality[{'causal': True}-shape1-dtype0]"
CAUSAL_TILES = ATTENTION + "test_shapes_and_causality[{'causal': True}-shape2-dtype1]"
MASKS = BACKWARD + "test_gradients_use_the_mask_of_the_forward_pass[mask]"
FAR_BELOW = BACKWARD + "test_padding_does_not_outweigh_scores_far_below_zero"
DELTA = BACKWARD + "test_delta_has_a_kernel_only_where_dq_has_none"
GAPS = ATTENTION + "test_rules[gaps]"
WINDOW = ATTENTION + "test_rules[window]"
CAUSAL_WINDOW = ATTENTION + "test_rules[causal window]"
ADDITIVE = ATTENTION + "test_rules[additive [T, S]]"
PACKED = ATTENTION + "test_packed_sequences[False]"
DECODING = ATTENTION + "test_decoding_splits_the_keys[one query-1]"
WHOLE_VECTORS = ATTENTION + "test_rows_load_in_whole_vectors_of_all_tensors_or_of_none"
BEYOND = ATTENTION + "test_lengths_beyond_the_tensor_are_cut"
TO_THE_LAST = EXTENDED + "test_rules[to the last key of each-False]"
SINKS = EXTENDED + "test_one_without_the_other[dtype0-('sinks',)]"
PACKED_BIAS = EXTENDED + "test_packed[two layouts]"
WIDER = EXTENDED + "test_values_of_a_head_size_of_their_own[64-128-torch.float32]"
EVERY_OPTION = EXTENDED + "test_every_option_with_weights_and_the_gradient_of_the_mask[40-56-torch.float32]"
LAYER_NORM = NORMS + "test_values_and_gradients[layer_norm-weight and bias-norm-shape1-torch.float32]"
MANY_ROWS = NORMS + "test_values_and_gradients[layer_norm-bias-norm-shape2-torch.float32]"
RMS_NORM = NORMS + "test_values_and_gradients[rms_norm-weight-norm-shape3-torch.float32]"
STEP = NORMS + "test_values_and_gradients[dropout_add_layer_norm-weight and bias-both-shape3-torch.float32]"
ONE_MASK = NORMS + "test_forward_and_backward_have_one_mask[both-131-40-0.25-dropout_add_layer_norm]"
RMS_STEP = NORMS + "test_values_and_gradients[dropout_add_rms_norm-weight-both-shape1-torch.float32]"
LONG_RMS_STEP = NORMS + "test_long_rows[dropout_add_rms_norm-4100-torch.float32]"
OPTIONS = LOSS + "test_options[True-0.1-mean-torch.float32]"
BLOCKS = LOSS + "test_shapes[2-3-9001-dtype0]"
WORDS = EMBEDDING + "test_values_and_gradients[shape1-(True, 22.6)-torch.float32]"
HALVES = ROTARY + "test_values_and_gradients[half-shape1-torch.float32]"
PART_OF_HEADS = ROTARY + "test_values_and_gradients[half-shape3-torch.float32]"

# fmt: off
ROWS: dict[str, list[tuple[str, ...]]] = {
    "kernels/fastformer_kernels/attention/forward": [
        ("for i in tl.range(0, whole):", "for i in tl.range(0, whole - 1):", TILES),
        ("for i in tl.range(0, count - whole,", "for i in tl.range(0, count - whole - 1,", TILES),
        ("n = tl.where(n < full_begin, n, n + whole)", "n = n + 0",
         BACKWARD + "test_tf32[96-None]"),
        ("rows = first_row + tl.arange(0, BLOCK_T)", "rows = tl.arange(0, BLOCK_T)",
         ATTENTION + "test_shapes_and_causality[{}-shape3-dtype0]"),
        ("real_keys = real_columns(at, first_key, last_key, key_mask_ptr, HAS_KEY_MASK)[:, None]",
         "real_keys = (at < S)[:, None]", ATTENTION + "test_what_padding_holds_does_not_matter"),
        ('(peak == float("inf"))) & (rows < last_query)', '(peak == float("inf"))) & (rows >= 0)',
         ATTENTION + "test_rules[query_lengths]"),
        ("problem.scale > 0.0 and", "problem.scale != 0.0 and", ATTENTION + "test_rules[negative scale]"),
        ('highest = tl.where(alive, peak, float("inf"))', "highest = peak",
         ATTENTION + "test_rows_that_see_nothing_are_zero_and_move_nothing"),
        ("second_part + rows, logarithm,", "second_part + rows, 0.0 * logarithm,",
         ATTENTION + "test_rules[additive [S]]"),
        ("keep_scale / tl.where(alive, total, 1.0)", "1.0 / tl.where(alive, total, 1.0)", MASKS),
        ("offset(h, ALIGN, stride_out_h) + offset(q_base, ALIGN, stride_out_t)", "offset(h, ALIGN, stride_out_h)",
         PACKED),
        ("written = (rows < end_row)[:, None] & in_value", "written = in_value & (rows >= 0)[:, None]",
         CONTRACT + "test_kernels_keep_to_their_tensors[packed_attention]"),
        ("loaded = loaded if HAS_KEY_MASK else real_keys", "loaded = in_head", SMALL,
         EXECUTED + "outside all (tensors|allocations)", "sm_90"),
        ("v_dims[None, :] < V", "v_dims[None, :] < K", WIDER),
        ("if MASK >= 2:", "if MASK == 2:", EXTENDED + "test_one_without_the_other[dtype0-('distance_bias',)]"),
        ("total += sink(peak, sinks_ptr, h)", "total += 0.0", SINKS),
    ],
    "kernels/fastformer_kernels/attention/scores": [
        ("members = tl.minimum(together, heads - first)", "members = together",
         "kernels/test_block_order.py::test_every_tile_has_one_program[5-7-3]"),
        ("tl.exp2(peak * factor - shift)", "tl.exp2(peak - shift)",
         ATTENTION + "test_shapes_and_causality[{}-shape4-dtype0]"),
        ("real = real & (tl.load(key_mask_ptr + columns, mask=real, other=0) != 0)", "real = real & (columns >= 0)",
         "nn/test_padding_values.py::test_attention_reads_no_padding[triton-torch.float32-attention-key mask]"),
        ("(columns >= first_key) & (columns < last_key) & (rows >= 0)", "(columns >= first_key) & (rows >= 0)", SMALL),
        ("seen & (columns <= rows + shift + right)", "seen & (columns < rows + shift + right)", CAUSAL),
        ("seen & (columns >= rows + shift - left)", "seen & (columns > rows + shift - left)", WINDOW),
        ("tl.minimum(full_high, first_row + shift + right + 1)", "tl.minimum(full_high, last_row + shift + right + 1)",
         ATTENTION + "test_shapes_and_causality[{'causal': True}-shape2-dtype0]"),
        ("tl.maximum(full_low, last_row + shift - left)", "tl.maximum(full_low, first_row + shift - left)",
         ATTENTION + "test_windows_wider_than_tiles"),
        ("tl.where(gaps != 0, full_begin, full_end)", "full_end", GAPS),
        ("tl.load(key_mask_ptr + columns, mask=columns < last_key, other=0) != 0", "columns >= 0", GAPS),
        ("tl.minimum(high, at + shift + right + 1)", "tl.minimum(high, at + shift + right)", CAUSAL),
        ("tl.maximum(low, at + shift - left)", "tl.maximum(low, at + shift - left + 1)", WINDOW),
        ("low, high = at * 0 + first, at * 0 + last", "low, high = at * 0 + first, at * 0 + last + 1024", FAR_BELOW),
        ("seen & real_columns(columns, 0, last_key, key_mask_ptr, True)", "seen", FAR_BELOW),
        ("v, acc * fade[:, None], input", "v, acc, input", TILES),
        ("total = total * fade +", "total = total +", TILES),
        ("return dots * (scale * LOG2E)", "return dots * scale", SMALL),
        ("tl.maximum(value, LOWEST / LOG2E) * LOG2E)", "tl.maximum(value, LOWEST / LOG2E))", ADDITIVE),
        ("return dropped_p, p * (dp - delta)", "return dropped_p, p * dp", SMALL),
        ("ds *= 1.0 - tanh * tanh", "ds *= 1.0", ATTENTION + "test_rules[softcap]"),
        ("dp = tl.where(stays, dp * keep_scale, 0.0)", "dp = dp * keep_scale", MASKS),
        ("(stride_bias_h // 2 - shift)", "stride_bias_h // 2", TO_THE_LAST),
        ("offset(h, 1, stride_bias_h)", "offset(0, 1, stride_bias_h)", TO_THE_LAST),
        ("tl.load(bias_ptr + (columns - rows)", "tl.load(bias_ptr + (rows - columns)", TO_THE_LAST),
        ("tl.load(sinks_ptr + h).to(tl.float32) * LOG2E", "tl.load(sinks_ptr + h).to(tl.float32)", SINKS),
        ('Return exp2(s - lse), the weights before dropout."""\n    if MASK >= 2:',
         'Return exp2(s - lse), the weights before dropout."""\n    if MASK == 2:', PACKED_BIAS),
    ],
    "kernels/fastformer_kernels/attention/backward": [
        ("tl.where(real & in_head, dk * scale", "tl.where(real & in_head, dk", SMALL),
        ("tl.where(real & in_head, dq * scale", "tl.where(real & in_head, dq", SMALL),
        ("dv * keep_scale, 0.0", "dv, 0.0", MASKS),
        ("for j in tl.range(begin, end):\n            rows", "for j in tl.range(begin, end - 1):\n            rows",
         TILES),
        ("for j in tl.range(begin, end):\n        columns", "for j in tl.range(begin + 1, end):\n        columns",
         TILES),
        ("first + BLOCK_S - 1, 0, last_query, -shift,", "first + BLOCK_S - 1, 0, last_query, shift,", CAUSAL_WINDOW),
        ("columns, 0, last_query, -shift,", "columns, 0, last_query, shift,", CAUSAL_WINDOW),
        ("(j < full_begin) | (j >= full_end), rows[None, :], columns[:, None]",
         "(j < 0) | (j >= full_end), rows[None, :], columns[:, None]", CAUSAL_TILES),
        ("(j < full_begin) | (j >= full_end), rows[:, None], columns[None, :]",
         "(j < full_begin) | (j > full_end), rows[:, None], columns[None, :]", CAUSAL_TILES),
        ("tl.where(real_key, low, 2147483647)", "tl.where(real_key, low, low)", MASKS,
         EXECUTED + "outside all (tensors|allocations)", "sm_90"),
        ("rows, delta, mask=rows", "rows, -delta, mask=rows", DELTA),
        ("if not own_delta:", "if True:", DELTA),
        ("h = hk * GROUP + group", "h = group * heads + hk", ATTENTION + "test_grouped_queries[2-dtype0]"),
        ("last_key)\n            keys = row_keys(tl.load(seed_ptr), rows, b * H + h)",
         "last_key)\n            keys = row_keys(tl.load(seed_ptr), rows, b * H + hk)", MASKS),
        ("tl.float32)\n    keys = row_keys(tl.load(seed_ptr), rows, b * H + h)",
         "tl.float32)\n    keys = row_keys(tl.load(seed_ptr), rows, b + h)", MASKS),
        ("stride_lse_h) + q_base\n    key_mask_ptr += offset(b, 1, stride_key_mask_b)",
         "stride_lse_h) + q_base\n    key_mask_ptr += offset(h, 1, stride_key_mask_b)", GAPS),
        ("row_base = offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h) + q_base",
         "row_base = offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h)", PACKED),
        ("dv_ptr + wide * stride_dv_s", "dv_ptr + wide * stride_dk_s", WIDER),
        ("offset(hk, ALIGN, stride_dv_h)", "offset(hk, ALIGN, stride_dk_h)", EVERY_OPTION),
        ("stride_dout_t * ALIGN + v_dims[None, :], mask=real & in_value",
         "stride_dout_t * ALIGN + v_dims[None, :], mask=real & in_head",
         EXTENDED + "test_values_of_a_head_size_of_their_own[40-56-torch.float32]"),
    ],
    "kernels/fastformer_kernels/attention/mask_gradient": [
        ("total += ds", "total = ds", ADDITIVE),
        ("stride_v_s * ALIGN + v_dims[None, :], mask=real_keys & in_value",
         "stride_v_s * ALIGN + v_dims[None, :], mask=real_keys & in_head", EVERY_OPTION),
    ],
    "kernels/fastformer_kernels/attention/weights": [
        ("written = (rows < T)[:, None] & (columns < S)[None, :]",
         "written = (rows < T)[:, None] & (columns >= 0)[None, :]",
         CONTRACT + "test_kernels_keep_to_their_tensors[attention_with_weights]"),
    ],
    "kernels/fastformer_kernels/attention/problem": [
        ("tl.sum(seen, 0) != 0)", "tl.sum(seen, 0) < 0)", GAPS),
        ("shift = keys - queries if", "shift = b * 0 + S - T if",
         ATTENTION + "test_rules[causal to the last key of each]"),
        ("tl.maximum(high, at + 1)", "tl.maximum(high, at)", GAPS),
        ("keys = tl.minimum(tl.maximum(tl.load(key_lengths_ptr + b).to(tl.int32), 0), S)",
         "keys = tl.load(key_lengths_ptr + b).to(tl.int32)", BEYOND),
        ("None if x is None else x.contiguous()", "x", EXTENDED + "test_any_place_in_memory"),
        ("if any(x.data_ptr() % 16 for x, _ in in_elements):", "if False:", WHOLE_VECTORS + "[keys within 16 bytes]"),
        ("batch | head | row | x.shape[-1]", "batch | head | row", WHOLE_VECTORS + "[odd head size]"),
        ("copy.copy_(once).expand(x.shape)", "x.new_empty(x.shape).copy_(x)",
         ATTENTION + "test_copies_of_expanded_masks_are_expanded"),
        ("or self.softcap > _LARGE_SOFTCAP", "", ATTENTION + "test_softcaps_far_above_the_scores"),
    ],
    "kernels/fastformer_kernels/attention/decode": [
        ("other=0.0) * weight", "other=0.0)", DECODING),
        ("tl.minimum(tl.maximum(tl.load(lengths_ptr + b).to(tl.int32), 0), S)", "tl.load(lengths_ptr + b).to(tl.int32)",
         BEYOND),
        ("h.to(tl.int64) * stride_out_h", "hk.to(tl.int64) * stride_out_h",
         ATTENTION + "test_decoding_splits_the_keys[lengths, one of them 0-2]"),
        ("end = tl.minimum(begin + share, end)", "end = tl.minimum(begin + share - 1, end)", DECODING),
        ("acc, total, peak = fold(", "acc, total, _ = fold(", DECODING),
        ("offset(r // GROUP, ALIGN, stride_out_t)", "offset(r % T, ALIGN, stride_out_t)",
         ATTENTION + "test_decoding_splits_the_keys[three queries, the last at the end-1]"),
        ("part_ptr + row[:, None] * V", "part_ptr + row[:, None] * K", EXTENDED + "test_decoding_values[40-72]"),
        ("bias_of_head(bias_ptr, hk * GROUP + r % GROUP,", "bias_of_head(bias_ptr, hk * GROUP + r * 0,",
         EXTENDED + "test_decoding[('distance_bias',)-one query-1]"),
        ("total += sink(peak, sinks_ptr, h)", "total += 0.0", EXTENDED + "test_decoding[('sinks',)-one query-1]"),
    ],
    "fastformer/functional/attention/fused": [
        ("arguments = Arguments(*ctx.numbers, *tensors)",
         "arguments = Arguments(*ctx.numbers, *tensors)._replace(seed=dropout_seed(q))", MASKS),
        ("else (weights * dweights).sum", "else 0.0 * (weights * dweights).sum",
         ATTENTION + "test_weights_and_their_gradient[key_lengths]"),
        ("q, k, v = to_autocast(q, k, v)", "q, k, v = q, k, v", ATTENTION + "test_autocast_runs_in_low_precision"),
        ("wants_q, wants_k or wants_v, *arguments", "True, True, *arguments",
         BACKWARD + "test_only_the_gradients_that_are_wanted[wanted0]"),
        ("keys if key_mask is None else keys & key_mask", "keys",
         ATTENTION + "test_rules[bool [B, 1, 1, S] and key mask]"),
        ("float(q.shape[-1] ** -0.5", "float(v.shape[-1] ** -0.5", WIDER),
        ("return _like(q, v), q.new_empty(rows", "return _like(q), q.new_empty(rows",
         "kernels/test_registered_ops.py::test_registered_ops_pass_opcheck[attention_forward]",
         "torch\\.testing\\._internal\\.optests"),
        ("lse.unbind() if lse.dim() > delta.dim() else (lse,)",
         "lse.unbind()[:1] if lse.dim() > delta.dim() else (lse,)", TO_THE_LAST),
        ("return -products.sum(", "return products.sum(", SINKS),
        ("any(x is not None and x.requires_grad for x in optional)", "False",
         EXTENDED + "test_a_trained_bias_or_sink_is_no_step_of_decoding", "RuntimeError"),
    ],
    "kernels/fastformer_kernels/attention/bias_gradient": [
        ("total += ds", "total = ds", TO_THE_LAST),
        ("tl.arange(0, BLOCK_T).to(tl.int64)[:, None] * (line + 1)",
         "tl.arange(0, BLOCK_T).to(tl.int64)[:, None] * line", TO_THE_LAST),
        ("for part in tl.range(0, parts):", "for part in tl.range(0, 1):",
         EXTENDED + "test_the_gradient_of_the_bias_is_the_same_every_time[2]"),
        ("met = (distances < longest) & (distances > -longest)", "met = distances < longest",
         EXTENDED + "test_many_positions_of_which_few_are_met"),
        ("distance - BLOCK_T + 1 > right", "distance > right",
         EXTENDED + "test_rules[window to the right, bottom_right-False]"),
        ("offset(h, 1, stride_lse_h) + q_base", "offset(h, 1, stride_lse_h)", PACKED_BIAS),
    ],
    "kernels/fastformer_kernels/norms/short_rows": [
        ("tl.load(means_ptr + M + rows,", "tl.load(means_ptr + rows,",
         NORMS + "test_long_rows[layer_norm-4100-torch.float32]"),
        ("tl.store(y_ptr + starts * N + cols, y, mask)", "tl.store(y_ptr + starts * N + cols, y, cols < N)",
         CONTRACT + "test_kernels_keep_to_their_tensors[layer_norm]"),
        ("rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)\n    starts = rows.to(tl.int64)[:, None]\n    cols",
         "rows = tl.program_id(0) * (BLOCK_M - 1) + tl.arange(0, BLOCK_M)\n"
         "    starts = rows.to(tl.int64)[:, None]\n    cols",
         MANY_ROWS, EXECUTED + "race of blocks", "sm_80"),
        ("            total += load_tile(ds_ptr", "            total += 0.0 * load_tile(ds_ptr", STEP),
        ("cols, dropped(total, seed_ptr, rows, 0, threshold, scale), mask)", "cols, total, mask)", ONE_MASK),
        ("s = residual + dropped(x, seed_ptr, rows, first_column, threshold, scale)",
         "s = residual + dropped(x, seed_ptr, rows, 0, threshold, scale)",
         NORMS + "test_forward_and_backward_have_one_mask[sum-3-4104-0.6-dropout_add_layer_norm]"),
        ("normal, rstd = divide_by_root_mean_square(s, eps, N)", "normal, _, _, rstd = standardise(s, cols, eps, N)",
         RMS_STEP),
        ("mean_gs = tl.sum(g * normal, 1) / N", "mean_gs = tl.sum(g * normal, 1)", RMS_STEP),
    ],
    "kernels/fastformer_kernels/norms/norm": [
        ("row_tensors = (x, weight,", "row_tensors = (x, None,", LONG_RMS_STEP),
        ("= norm_backward(dy, s, weight, mean,", "= norm_backward(dy, s, None, mean,", LONG_RMS_STEP),
    ],
    "kernels/fastformer_kernels/sums": [
        ("total = first + second", "total = first + first",
         NORMS + "test_programs_that_walk_over_many_tiles[layer_norm-torch.float32]"),
    ],
    "kernels/fastformer_kernels/norms/rows": [
        ("deviation = tl.where(cols < N, x - mean[:, None], 0.0)", "deviation = x - mean[:, None]", LAYER_NORM),
        ("deviation - rest[:, None], 0.0)", "deviation, 0.0)",
         NORMS + "test_rows_whose_mean_is_large_beside_their_deviations[layer_norm-nearly equal-512]"),
        ("tl.sum(deviation * deviation, 1) / N + eps", "tl.sum(deviation * deviation, 1) / N", LAYER_NORM),
        ("normal += load_row(bias_ptr, cols, N, BLOCK_M)", "normal += 0.0 * load_row(bias_ptr, cols, N, BLOCK_M)",
         LAYER_NORM),
        ("(g - normal * mean_gx[:, None] - mean_g[:, None])", "(g - normal * mean_gx[:, None])", LAYER_NORM),
        ("mean_g[:, None]) * rstd[:, None]", "mean_g[:, None])", LAYER_NORM),
        ("(rows < programs) & (cols < N)", "(rows < programs - 1) & (cols < N)", MANY_ROWS),
        ("tl.range(0, programs, BLOCK_P, num_stages=3)", "tl.range(0, BLOCK_P, BLOCK_P, num_stages=3)",
         NORMS + "test_many_partial_sums"),
        ("tl.rsqrt(tl.sum(x * x, 1) / N + eps)", "tl.rsqrt(tl.sum(x * x, 1) / N)", RMS_NORM),
        ("(g - normal * mean_gx[:, None]) * rstd", "g * rstd", RMS_NORM),
        ("x -= tl.load(mean_ptr + rows", "x -= 0.0 * tl.load(mean_ptr + rows", STEP),
        ("tl.load(ptr + starts * stride * ALIGN + cols,",
         "tl.load(ptr + tl.multiple_of(starts * stride, [8, 8]) * ALIGN + cols,",
         NORMS + "test_several_normalized_dimensions_and_strides[layer_norm]", EXECUTED + "misaligned", "sm_80"),
    ],
    "kernels/fastformer_kernels/norms/long_rows": [
        ("lanes < N, ALIGN)) / tl.minimum(N, BLOCK_N)", "lanes < 0, ALIGN)) / tl.minimum(N, BLOCK_N)",
         NORMS + "test_rows_whose_mean_is_large_beside_their_deviations[layer_norm-nearly equal-8208]"),
        ("tl.sum(sum_gx) * tl.load(rstd_ptr + row) / N", "tl.sum(sum_gx) / N",
         NORMS + "test_long_rows[rms_norm-4100-torch.float32]"),
    ],
    "fastformer/functional/norms/fused": [
        ("ctx.save_for_backward(*tensors, mean, rstd)", "ctx.save_for_backward(*tensors, rstd, mean)", LAYER_NORM),
        ("if needs_double_backward(NAMES[ctx.centred], ctx.formula):", "if False:",
         CONTRACT + "test_gradients_by_other_ways_are_the_references[second derivative-layer_norm]",
         "RuntimeError: element 0 of tensors does not require grad"),
        ("x.dtype if needed and x is not None else None", "x.dtype if x is not None else None",
         NORMS + "test_only_wanted_gradients[layer_norm]"),
        ("same_gradient = seed is None and x_dtype == residual_dtype", "same_gradient = x_dtype == residual_dtype",
         ONE_MASK),
    ],
    "fastformer/functional/norms/op": [
        ("if device in IN_FLOAT32[op] and torch.is_autocast_enabled(device):", "if False:",
         NORMS + "test_autocast_on_a_gpu_is_torchs[layer_norm-torch.float16-torch.float16]"),
        ("torch.finfo(torch.float32).eps if eps is None else eps", "eps or 0.0",
         NORMS + "test_the_epsilon_of_rms_norm_is_fp32s_unless_given[dropout_add_rms_norm-weight-torch.float32]"),
    ],
    "fastformer/host/autograd_function": [
        ("inputs = [x if x is None else x.view_as(x) for x in inputs]", "inputs = list(inputs)",
         CONTRACT + "test_gradients_that_are_differentiable_are_the_same_gradients"
         "[one tensor in several places-triton-attention]"),
    ],
    "kernels/fastformer_kernels/feed_forward/kernels": [
        ("slope = cdf + x * density", "slope = cdf",
         FEED_FORWARD + "test_recompute_without_biases[gelu-torch.float32]"),
        ("x = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)\n"
         "    a, _ = value_and_slope(x, FUNCTION, ERF)\n    if GATED:\n        a *= tl.load(h_ptr + F + at,",
         "x = tl.load(h_ptr + wide - F + at, mask=inside, other=0.0).to(tl.float32)\n"
         "    a, _ = value_and_slope(x, FUNCTION, ERF)\n    if GATED:\n        a *= tl.load(h_ptr + at,",
         FEED_FORWARD + "test_values_and_gradients[shape1-geglu-torch.float32]"),
        ("total += g * slope", "total = g * slope", FEED_FORWARD + "test_many_rows_a_program"),
        ("for first in range(0, P, BLOCK_P):", "for first in range(0, P - BLOCK_P, BLOCK_P):",
         FEED_FORWARD + "test_many_partial_sums"),
        ("            keep = keep_tile(tl.load(seed_ptr), rows, first_column,",
         "            keep = keep_tile(tl.load(seed_ptr), rows, 0,",
         FEED_FORWARD + "test_dropout_forward_and_backward_agree[gelu-False]"),
        ("g = tl.where(a == 0, 0.0, g * dropout_scale)", "g = tl.where(a == 0, 0.0, g)",
         FEED_FORWARD + "test_dropout_forward_and_backward_agree[relu-False]"),
    ],
    "fastformer/functional/feed_forward/op": [
        ('saved_hidden = (a if activation == "relu" else h) if saves_hidden else None',
         "saved_hidden = h if saves_hidden else None",
         FEED_FORWARD + "test_values_and_gradients[shape1-relu-torch.float32]"),
    ],
    "kernels/fastformer_kernels/linear_cross_entropy/kernels": [
        ("dz -= everywhere", "dz -= 0.0 * everywhere", OPTIONS),
        ("factor = tl.where(counts, factor, 0.0)", "factor = factor + 0.0", LOSS + "test_ignored_rows[2-mean]"),
        ("range(0, tl.where(counts, V, 0), BLOCK)", "range(0, tl.where(counts, V, 0) - BLOCK, BLOCK)", BLOCKS),
        ("for start in range(0, V, BLOCK):", "for start in range(0, V - BLOCK, BLOCK):", BLOCKS),
        ("exps = exps * _shrink(top - new_top) +", "exps = exps +", BLOCKS),
        ("_log1p(others + (of_label - 1.0))", "tl.log(others + of_label)",
         LOSS + "test_small_losses_of_large_logits[True-0.0]"),
        ("beta=float(start > 0)", "beta=0.0", OPTIONS),
    ],
    "fastformer/functional/linear_cross_entropy/op": [
        ("torch.mul(gradient, factor, out=", "torch.mul(gradient, 1.0, out=", OPTIONS),
    ],
    "kernels/fastformer_kernels/embedding/kernels": [
        ("dropout = scale * dropout_scale, threshold", "dropout = dropout_scale, threshold", WORDS),
        ("(table_ptr, positions,", "(table_ptr, ids,", WORDS),
        ("there = (ids >= 0) & (ids < count)", "there = ids < count", EMBEDDING + "test_no_such_row_is_not_a_number"),
        ("dout = tl.where(keep, dout, 0.0)", "dout = tl.where(keep, dout, dout)",
         EMBEDDING + "test_dropout_forward_and_backward_agree"),
        ("begins | (first % PIECE == 0)", "begins", PIECES),
        ("begins & (word_end <= piece_end)", "begins", PIECES),
        ("end = tl.minimum(word_end, piece_end)", "end = word_end", PIECES),
        ("partial_ptr += 2 * N", "partial_ptr += N", PIECES),
        ("(word_end + PIECE - 1) // PIECE", "word_end // PIECE", PIECES),
        ("begins & (word_end > last + 1)", "word_end > last + 1", PIECES),
    ],
    "fastformer/functional/embedding/op": [
        ("if needs_weight:", "if True:", EMBEDDING + "test_only_wanted_gradients"),
    ],
    "kernels/fastformer_kernels/random": [
        ("row, row * 0 + stream,", "row, row * 0 + stream * 0,",
         ATTENTION + "test_dropout_keeps_its_rate_and_its_scale"),
    ],
    "kernels/fastformer_kernels/rotary/kernels": [
        (".to(tl.float32) * sign", ".to(tl.float32)", HALVES),
        ("heads = tl.program_id(1) * BLOCK_H + ", "heads = ", HALVES),
        ("second = tl.load(x_ptrs + PAIRS + pairs", "second = tl.load(x_ptrs + BLOCK_R + pairs",
         ROTARY + "test_values_and_gradients[half-shape2-torch.float32]"),
        ("tl.join(first * cos - second * sin, second * cos + first * sin)",
         "tl.join(first * cos + second * sin, second * cos - first * sin)",
         ROTARY + "test_values_and_gradients[interleaved-shape1-torch.float32]"),
        ("tl.static_range(R, K, 2 * BLOCK_R)", "tl.static_range(K, K, 2 * BLOCK_R)", PART_OF_HEADS),
        ("math.gcd(16 // x.element_size(), *of_x)", "16 // x.element_size()", PART_OF_HEADS),
        ("b * stride_positions_b + t", "b * 0 + t",
         ROTARY + "test_values_and_gradients[half-shape7-torch.float32]"),
        ("heads.to(tl.int64)[None, :, None] * stride_x_h", "heads.to(tl.int64)[None, :, None] * (K // ALIGN)",
         ROTARY + "test_heads_of_a_joint_projection[half]"),
        ("((positions >= 0) & (positions < P))", "(positions < P)",
         ROTARY + "test_positions_that_are_no_row_are_not_a_number"),
        ("x, cos, sin = inner_contiguous(x)", "x, cos, sin = x.contiguous()",
         ROTARY + "test_the_first_heads_are_not_copied"),
    ],
    "fastformer/functional/rotary/op": [
        ("-ctx.sign)", "ctx.sign)", HALVES),
        ("ctx.save_for_backward(*tables)", "ctx.save_for_backward(*tables, inputs[0])",
         ROTARY + "test_x_is_not_saved_for_backward"),
    ],
}
# fmt: on
FAULTS = [
    Fault(f"{file.rpartition('/')[2]}: {' '.join(old.split())}"[:64], f"{file}.py", old, new, f"tests/{test}", *others)
    for file, rows in ROWS.items()
    for old, new, test, *others in rows
]

if __name__ == "__main__":
    main(FAULTS, __doc__)
