"""Faults in the norms, and in what all Functions share."""

from collections.abc import Iterator

from tests.kernels.mutations.fault import EXECUTED, KERNELS, OPS, Fault, at


def faults() -> Iterator[Fault]:
    file, values = (
        f"{KERNELS}/norms/layer_norm",
        "norms.py::test_values_and_gradients[layer_norm-weight and bias-shape1-torch.float32]",
    )
    yield at(
        file,
        "norms.py::test_long_rows[layer_norm-4100-torch.float32]",
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
    yield at(
        f"{KERNELS}/sums",
        "norms.py::test_programs_that_walk_over_many_tiles[layer_norm-torch.float32]",
        "layer norm: rows of some warps missing in dw and db",
        "total = first + second",
        "total = first + first",
    )
    file = f"{KERNELS}/norms/rows"
    yield at(
        file,
        values,
        "norms: padding in the variance",
        "deviation = tl.where(cols < N, x - mean[:, None], 0.0)",
        "deviation = x - mean[:, None]",
    )
    large_mean = "norms.py::test_rows_whose_mean_is_large_beside_their_deviations"
    yield at(
        file,
        f"{large_mean}[layer_norm-nearly equal-512]",
        "norms: the mean's rounding left in every deviation",
        "deviation - rest[:, None], 0.0)",
        "deviation, 0.0)",
    )
    yield at(
        f"{KERNELS}/norms/long_rows",
        f"{large_mean}[layer_norm-nearly equal-8208]",
        "norms: means of long rows rounded at the size of their numbers",
        "lanes < N, ALIGN)) / tl.minimum(N, BLOCK_N)",
        "lanes < 0, ALIGN)) / tl.minimum(N, BLOCK_N)",
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
        "norms.py::test_values_and_gradients[layer_norm-weight and bias-shape2-torch.float32]",
        "norms: sums of the last program lost",
        "(rows < programs) & (cols < N)",
        "(rows < programs - 1) & (cols < N)",
    )
    yield at(
        file,
        "norms.py::test_many_partial_sums",
        "norms: sums of many programs lost",
        "tl.range(0, programs, BLOCK_P, num_stages=3)",
        "tl.range(0, BLOCK_P, BLOCK_P, num_stages=3)",
    )
    yield at(
        f"{OPS}/norms/fused",
        values,
        "layer norm: statistics saved in the wrong order",
        "ctx.save_for_backward(*tensors, mean, rstd)",
        "ctx.save_for_backward(*tensors, rstd, mean)",
    )
    yield at(
        f"{OPS}/norms/fused",
        "contract.py::test_gradients_by_other_ways_are_the_references[second derivative-layer_norm]",
        "layer norm: second derivative without the formula",
        "if twice(NAMES[ctx.centred], ctx.formula):",
        "if False:",
        "RuntimeError: element 0 of tensors does not require grad",
    )
    yield at(
        f"{OPS}/norms/fused",
        "norms.py::test_only_wanted_gradients[layer_norm]",
        "norms: gradients that nobody wants",
        "x.dtype if needed and x is not None else None",
        "x.dtype if x is not None else None",
    )
    yield at(
        f"{OPS}/norms/op",
        "norms.py::test_autocast_on_a_gpu_is_torchs[layer_norm-torch.float16]",
        "norms: autocast skipped",
        "if device in IN_FLOAT32[op] and torch.is_autocast_enabled(device):",
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

    file = f"{KERNELS}/norms/rows"
    values = "norms.py::test_values_and_gradients[rms_norm-weight-shape1-torch.float32]"
    yield at(
        file, values, "RMS norm: eps missing", "tl.rsqrt(tl.sum(x * x, 1) / N + eps)", "tl.rsqrt(tl.sum(x * x, 1) / N)"
    )
    yield at(
        file,
        values,
        "RMS norm: own mean missing in dx",
        "(g - normal * mean_gx[:, None]) * rstd",
        "g * rstd",
    )
    yield at(
        f"{KERNELS}/norms/long_rows",
        "norms.py::test_long_rows[rms_norm-4100-torch.float32]",
        "RMS norm: rstd missing for long rows",
        "tl.sum(total) * tl.load(rstd_ptr + row) / N",
        "tl.sum(total) / N",
    )

    file = f"{KERNELS}/norms/dropout_add_norm"
    one_mask = "dropout_add_norm.py::test_forward_and_backward_have_one_mask"
    yield at(
        file,
        "dropout_add_norm.py::test_values_and_gradients[layer norm-both-weight and bias-shape1-torch.float32]",
        "dropout, add, norm: ds not added",
        "            total += load_tile(ds_ptr",
        "            total += 0.0 * load_tile(ds_ptr",
    )
    yield at(
        file,
        f"{one_mask}[layer norm-both-131-40-0.25]",
        "dropout, add, norm: dx without dropout",
        "cols, dropped(total, seed_ptr, rows, 0, threshold, scale), mask)",
        "cols, total, mask)",
    )
    yield at(
        file,
        f"{one_mask}[layer norm-sum-3-4104-0.6]",
        "dropout, add, norm: mask of the first columns for all",
        "s = residual + dropped(x, seed_ptr, rows, first_column, threshold, scale)",
        "s = residual + dropped(x, seed_ptr, rows, 0, threshold, scale)",
    )
    yield at(
        f"{OPS}/norms/fused",
        f"{one_mask}[layer norm-both-131-40-0.25]",
        "dropout, add, norm: dx taken for dresidual",
        "same_gradient = seed is None and x_dtype == residual_dtype",
        "same_gradient = x_dtype == residual_dtype",
    )
    divided = "dropout_add_norm.py::test_values_and_gradients[RMS norm-both-weight-shape1-torch.float32]"
    yield at(
        file,
        divided,
        "dropout, add, RMS norm: layer norm in its place",
        "normal, rstd = divide_by_root_mean_square(s, eps, N)",
        "normal, _, _, rstd = standardise(s, cols, eps, N)",
    )
    yield at(
        file,
        divided,
        "dropout, add, RMS norm: a sum in the place of a mean in dx",
        "tl.sum(g * normal, 1) / N, rstd)",
        "tl.sum(g * normal, 1), rstd)",
    )
    yield at(
        f"{KERNELS}/norms/rows",
        "dropout_add_norm.py::test_values_and_gradients[layer norm-both-weight and bias-shape1-torch.float32]",
        "norms: mean not subtracted in backward",
        "x -= tl.load(mean_ptr + rows",
        "x -= 0.0 * tl.load(mean_ptr + rows",
    )
    wide = "dropout_add_norm.py::test_long_rows[RMS norm-4100-torch.float32]"
    yield at(
        file,
        wide,
        "dropout, add, RMS norm: long rows without their weight",
        "rms_norm.forward(s, weight, eps, dtype)",
        "rms_norm.forward(s, None, eps, dtype)",
    )
    yield at(
        file,
        wide,
        "dropout, add, RMS norm: long rows without their weight in backward",
        "rms_norm.backward(dy, s, weight, rstd, dnorm_dtype, dw)",
        "rms_norm.backward(dy, s, None, rstd, dnorm_dtype, dw)",
    )
    yield at(
        f"{OPS}/norms/op",
        "dropout_add_norm.py::test_the_epsilon_of_rms_norm_is_fp32s_unless_given[torch.float32]",
        "dropout, add, RMS norm: no epsilon unless given",
        "torch.finfo(torch.float32).eps if eps is None else eps",
        "eps or 0.0",
    )
    yield at(
        f"{KERNELS}/norms/layer_norm",
        "norms.py::test_values_and_gradients[layer_norm-weight and bias-shape2-torch.float32]",
        "layer norm: two blocks write one row",
        "rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "rows = tl.program_id(0) * (BLOCK_M - 1) + tl.arange(0, BLOCK_M)",
        f"{EXECUTED}race of blocks",
        "sm_80",
    )
    yield at(
        f"{KERNELS}/norms/rows",
        "norms.py::test_several_normalized_dimensions_and_strides[layer_norm]",
        "norms: rows are said to begin at multiples of 32 bytes",
        "tl.load(ptr + starts * stride * ALIGN + cols,",
        "tl.load(ptr + tl.multiple_of(starts * stride, [8, 8]) * ALIGN + cols,",
        f"{EXECUTED}misaligned",
        "sm_80",
    )
