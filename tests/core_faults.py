r"""Deliberate faults in packing, functional, nn, host and checkpoints, each of which a test must catch.

    python -m tests.core_faults                          # all, `make core-faults`
    python -m tests.core_faults --jobs 2 --only packing  # those with a word in their file or fragment

A copy of the repository gets one fault at a time; the test beside it must then fail. A fault that survives is a gap in
the tests. Each row is a fragment that occurs exactly once in the file, what stands there instead, and the test.
"""

from tests.support.faults import Fault, main

HEADS = "functional/test_packing.py::test_heads_are_spread_from_parts_of_wider_rows"
PACK = "functional/test_packing.py::test_a_layout_says_where_each_token_lies_and_packing_moves_each_once"
VALUES = "functional/test_attention.py::test_values_and_gradients_are_those_of_the_formula"
SPANS = "functional/test_attention.py::test_padding_of_long_sequences_costs_nothing"
DEAD = "functional/test_attention.py::test_a_query_without_keys_gives_zero_and_changes_no_gradient"
BLANK = "nn/test_padding_values.py::test_attention_reads_no_padding"
ALONE = "functional/test_packed_attention.py::test_packed_attention_equals_each_sequence_alone"
LOSS = "functional/test_linear_cross_entropy.py::test_values_and_gradients_are_those_of_the_formula"
FORWARD = "functional/test_feed_forward.py::test_values_and_gradients_are_those_of_the_formula"
OBSTACLE = "nn/test_running_padded.py::test_a_module_that_may_mix_tokens_gets_the_padded_batch"
HOOKS = "nn/test_layers.py::test_hooks_and_replaced_methods_are_called"
COMPILED = "nn/test_compile.py::test_one_compilation_for_all_shapes_or_two_where_the_first_is_of_one_shape"
ORDER = "nn/test_cache.py::test_steps_equal_the_whole_row_after_any_change_of_rows"
CHANGED = "nn/test_fast_path.py::test_a_layer_that_is_modified_between_two_steps"
PACKED = "nn/test_fast_path.py::test_packed_tokens_take_the_fast_path_with_the_same_bits"
LEFT = "nn/test_fast_path.py::test_gradients_masks_modes_and_other_dtypes_leave_the_fast_path"
UNFIT = "nn/test_fast_path.py::test_what_the_kernels_cannot_read_gives_what_compose_gives"
FEW = "nn/test_padding_free.py::test_few_tokens_in_inference_are_those_of_training"
ATTENTION = "nn/test_multihead_attention.py::"
CHECKPOINTS = "apps/train/test_train_checkpoints.py::"
ON_DISK = CHECKPOINTS + "test_every_file_is_on_the_disk_before_a_name_points_to_it"
KILLED = CHECKPOINTS + "test_kill_9_at_any_point_of_a_save_leaves_a_checkpoint_that_loads"
OTHERS = CHECKPOINTS + "test_another_architecture_is_named_by_its_first_differing_setting"
SDPA = "functional/test_sdpa.py::test_values_and_gradients_are_those_of_torch"
READ_ONCE = "functional/test_sdpa.py::test_a_mask_is_read_once_until_it_changes"
COPIES = "host/test_autocast.py::test_modules_hold_copies_within_the_forward_pass_alone"
WARM_UP = "functional/test_warm_up.py::test_kernels_are_not_started_and_the_model_is_restored"
REPORT = "nn/test_conversion.py::test_the_report_says_why_a_stack_runs_padded"
CALLED = "nn/test_running_padded.py::test_a_hook_gets_torchs_arguments"
REDUCED = "nn/test_layers.py::test_dropout_of_one_submodule_in_training_mode"
RESUMED = "apps/train/test_train_resume.py::test_a_run_interrupted_anywhere_and_resumed_equals_the_uninterrupted_one"

# fmt: off
ROWS: dict[str, list[tuple[str, str, str]]] = {
    "modes": [
        ("compiling = torch.compiler.is_compiling ", "compiling = bool ",
         COMPILED + "[TransformerEncoder-None]"),
        ("Functionalize) or is_batched_tensor(x))", "Functionalize))",
         "nn/test_padding_free.py::test_gradients_by_vmap_are_those_of_each_sequence"),
    ],
    "backend": [
        ("process.backend = previous", "pass",
         "functional/test_backend.py::test_context_beats_set_backend_and_nests"),
    ],
    "host/autocast": [
        (" and p.requires_grad and ", " and ", COPIES),
        (' name.endswith(("weight", "bias")) and', "", COPIES),
        ("        for parameters, name, p in places:\n            parameters[name] = p\n", "        pass\n", COPIES),
    ],
    "host/devices": [
        ("fit = fit and (other is None or other.device == device)", "pass",
         "functional/test_arguments.py::test_a_tensor_on_another_device_is_refused_by_name"),
        ("first.device, isinstance(first, Tensor)", "first.device, True",
         "functional/test_arguments.py::test_an_argument_that_is_no_tensor_is_named"),
        ("-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT", "x.nbytes",
         "host/test_devices.py::test_values_shapes_and_dtypes_arrive_in_one_aligned_buffer"),
        ("return torch.float32 if device.type in WITHOUT_FP64 else torch.float64", "return torch.float64",
         "host/test_devices.py::test_fp64_is_refused"),
        ('return torch.device("cpu") if device.type in WITHOUT_FP64 else device', "return device",
         "host/test_devices.py::test_modules_make_no_fp64_where_there_is_none[rotary]"),
    ],
    "functional/sdpa": [
        ("torch.equal(shown, pairs.tril())", "torch.equal(shown.tril(), pairs.tril())", SDPA),
        ("(mask.shape[1] == 1 or mask.stride(1) == 0)", "True", SDPA),
        ('bool((shown | (mask == float("-inf"))).all())', "True", SDPA),
        ("not (last[2] is None or torch.equal(last[2], shown))", "False", READ_ONCE),
        ("if mask.is_inference():", "if False:", READ_ONCE),
        ("out.masked_fill(~visible.queries[:, None, :, None], 0.0)", "out",
         "functional/test_sdpa.py::test_the_call_of_a_gpu_gives_the_same"),
    ],
    "functional/warm_up": [
        ("            parameter.grad = gradient", "            pass", WARM_UP),
        ("buffer.copy_(value)", "pass", WARM_UP),
    ],
    "functional/choice": [
        ("rules.dropout_p == 1.0 or ", "", "functional/test_backend.py::test_auto_leaves_plain_calls_to_sdpa"),
        ("if torch.are_deterministic_algorithms_enabled() or ", "if ",
         "functional/test_backend.py::test_the_backend_and_determinism_decide_first"),
        ("dtype = product_dtype(q)\n", "dtype = q.dtype\n",
         "functional/test_backend.py::test_autocast_decides_by_the_dtype_that_it_computes_in"),
    ],
    "nn/modules": [
        ("if not isinstance(activation, nn.Module) or not is_unmodified(activation, nn.ReLU, nn.GELU):",
         "if not isinstance(activation, nn.ReLU | nn.GELU):",
         "nn/test_layers.py::test_every_setting_computes_what_torch_does"),
    ],
    "packing/layout": [
        ("origin = slots if columns == longest else rows * columns + positions", "origin = slots",
         "functional/test_packing.py::test_lengths_in_a_wider_batch"),
        ("real = ~padding", "real = padding", PACK),
        ("torch.arange(total, device=device) - offsets[rows]", "torch.arange(total, device=device)", PACK),
        ("flat.index_fill_(0, self.origin, True)", "flat.index_fill_(0, self.slots, True)", PACK),
        ("step = x.stride(0) // K", "step = H", HEADS),
        ("x.stride()[1:] != (K, 1) or ", "", HEADS),
        (" or x.stride(0) % K:", ":", HEADS),
        (".index_fill_(0, empty, 0.0)", "", HEADS),
        ("origin % L * B + origin // L", "origin // L * B + origin % L", PACK),
        ("return self.total == self.batch * self.max_length", "return True", PACK),
        ("padded.narrow(1 if batch_first else 0, 0, layout.columns)",
         "padded.narrow(1 if batch_first else 0, 1, layout.columns)", PACK),
        ("(steps() != 1)", "(steps() > 2)",
         "nn/test_options.py::test_packed_sequences_with_gaps_are_refused_where_positions_count"),
        ("self.origin % L == self.positions).all()", "self.origin % L == self.positions).any()",
         "nn/test_options.py::test_packed_cross_attention_by_position_refuses_padding_on_the_left"),
        ("if cached_other is not other:", "if key not in self._memory:",
         "functional/test_packing.py::test_a_layout_forgets_other_layouts_and_is_freed_at_once"),
        ("lengths.tolist() if isinstance(lengths, Tensor | np.ndarray) else lengths,", "lengths,",
         "functional/test_all_ops.py::test_a_layout_copies_its_lengths"),
        ("if total > MOST_TOKENS:", "if False:",
         "functional/test_arguments.py::test_wrong_lengths_and_masks_of_a_layout_are_refused_by_name"),
    ],
    "functional/attention/rules": [
        ("[..., :T, :].flip(-2)", "[..., :T, :]", VALUES),
        ("(bias.shape[1] + 1) // 2 - T", "(bias.shape[1] + 1) // 2 - S", VALUES),
        ("shift = lengths[0] - lengths[1]", "shift = lengths[1] - lengths[0]", VALUES),
        ("bias = bias.to(torch.promote_types(bias.dtype, torch.float32))", "pass",
         "functional/test_attention.py::test_the_gradient_of_the_bias_is_added_up_in_fp32"),
        ("keys <= centre + right", "keys < centre + right", VALUES),
        ("keys >= centre - left", "keys > centre - left", VALUES),
        ("allowed.append(keys < key_ends)", "allowed.append(keys <= key_ends)", VALUES),
        ("allowed.append(queries < query_ends)", "allowed.append(queries <= query_ends)", VALUES),
        ("right = 0 if rules.causal else right", "right = 1 if rules.causal else right", VALUES),
        ("centre = queries + (", "centre = queries - (", VALUES),
        ("else torch.where(allowed, mask, -math.inf)", "else mask", VALUES),
        ("mask & allowed if", "mask if", VALUES),
        ("merged.masked_fill(dead, 0.0)", "merged", VALUES),
    ],
    "functional/attention/reference": [
        ("scores = softcap * (scores / softcap).tanh()", "scores = (scores / softcap).tanh()", VALUES),
        ("weights = sunk.softmax(-1)[..., :-1]", "weights = scores.softmax(-1)", VALUES),
        ("x.repeat_interleave(heads // x.shape[1], 1)", "x.repeat(1, heads // x.shape[1], 1, 1)", VALUES),
        ("scale = q.shape[-1] ** -0.5 if scale is None else scale", "scale = q.shape[-1] ** -0.5", VALUES),
        ("return x.is_cpu and _in_sixteen_bits(x)", "return False",
         "functional/test_numerics.py::test_16_bits_are_as_accurate_as_in_sdpa"),
        ("_SIXTEEN_BITS = (torch.float16, torch.bfloat16)", "_SIXTEEN_BITS = (torch.bfloat16,)",
         "functional/test_numerics.py::test_16_bits_are_as_accurate_as_in_sdpa"),
        ("if dtype == torch.float16 or (q.is_cpu and dtype in _SIXTEEN_BITS):", "if False:",
         "functional/test_numerics.py::test_scores_beyond_the_numbers_of_fp16"),
        ("weights = drop(weights, rules.dropout_p)", "pass",
         "functional/test_attention.py::test_dropout_is_of_the_weights_at_its_rate_and_scale"),
        ("weights = weights.masked_fill(dead, 0.0)", "pass", VALUES),
        ("return out if dead is None else out.masked_fill(dead, 0.0)", "return out", DEAD),
        ("if rules.scale is not None and not rules.scale > _SMALLEST:", "if False:",
         "functional/test_attention.py::test_a_causal_call_takes_any_scale"),
        ("k, v = _blank(reduce(torch.logical_and, real_keys), k, v)", "pass", BLANK),
        ("(q,) = _blank(", "(_,) = _blank(", BLANK),
        ("if is_finite(out):", "if True:", FEW),
        ("mask = rules.mask[(None,) * (4 - rules.mask.dim())]", "mask = rules.mask", VALUES),
        ("if end - first == end_key - first_key", "if True", VALUES),
        ("for length in (first, T - end)", "for length in (T - end, first)", SDPA),
        (", :, first:end, first_key:end_key]", ", :, :end - first, first_key:end_key]", VALUES),
    ],
    "functional/attention/spans": [
        ("torch.equal(end - first, real.sum(1))", "True", SPANS),
        ("or min(end_keys) < S", "", VALUES),
        ("elif any(first_keys):", "elif False:", VALUES),
        ("or makes_masks:", ":", VALUES),
        ("[min(first, end) for first, end in zip(first_keys, ends, strict=True)]", "firsts", VALUES),
        ("(S - least_hidden)", "S", SPANS),
    ],
    "functional/attention/packed_reference": [
        ("stride[members] = len(members) * longest", "stride[members] = longest", ALONE),
        ("needs_no_lengths = group.shortest == S or (rules.causal and same)",
         "needs_no_lengths = group.shortest == S or rules.causal", ALONE),
        (">= k[:, None, None]", "> k[:, None, None]", ALONE),
        (".triu_(1)", ".triu_(2)", ALONE),
        ("key_lengths=key_layout.offsets.diff()", "key_lengths=None",
         "functional/test_packed_attention.py::test_a_graph_attends_in_one_group"),
    ],
    "functional/dropout": [
        ("keep.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))", "keep.to(x.dtype)",
         "functional/test_elementwise_ops.py::test_the_rate_of_dropout_is_binomial_and_the_scale_unbiased"),
        ("random_(-(2**63), None)", "random_()",
         "functional/test_elementwise_ops.py::test_the_rate_of_dropout_is_binomial_and_the_scale_unbiased"),
    ],
    "functional/linear_cross_entropy/reference": [
        ("of_target += label_smoothing * exps - share", "pass", LOSS),
        ("logits.sub_(share)", "pass", LOSS),
        ("return loss if mean is None else loss - label_smoothing * mean", "return loss", LOSS),
        ("dbias += dlogits.sum(0)", "dbias = dlogits.sum(0)", LOSS),
        ("saved[0], saved[1] * grad", "saved[0], saved[1]", LOSS),
        ("losses.masked_fill_(~counts, 0.0)", "losses", LOSS),
        ("torch.log1p(other_exps + of_label.expm1())", "torch.log(other_exps + of_label.exp())",
         "functional/test_linear_cross_entropy.py::test_small_losses_of_large_logits"),
    ],
    "functional/feed_forward/op": [
        ("return F.relu(gate) * value", "return F.relu(value) * gate", FORWARD),
        ('return F.gelu(x, approximate="tanh")', "return F.gelu(x)", FORWARD),
        ("F.linear(drop(hidden, dropout_p) if dropout_p else hidden, weight2", "F.linear(hidden, weight2",
         "functional/test_feed_forward.py::test_dropout_is_of_the_hidden_activations"),
    ],
    "functional/embedding/op": [
        ("x, alpha=scale)", "x)",
         "functional/test_elementwise_ops.py::test_embeddings_and_gradients_are_those_of_the_formula"),
    ],
    "functional/rotary/op": [
        ("((c, c), (-s, s))", "((c, c), (s, s))",
         "functional/test_elementwise_ops.py::test_rotary_and_its_gradients_are_those_of_the_formula"),
        ("[out.to(x.dtype), x[..., R:]]", "[out.to(x.dtype), 0 * x[..., R:]]",
         "functional/test_elementwise_ops.py::test_rotary_and_its_gradients_are_those_of_the_formula"),
    ],
    "nn/inspection": [
        (" and not replaced", "",
         "nn/test_layers.py::test_a_block_that_is_replaced_in_the_instance_is_called"),
        ('if f"{kind.__module__}.{kind.__qualname__}" not in _ADAPTERS:', "if True:",
         "nn/test_wrappers.py::test_lora_changes_the_output_learns_and_equals_its_merged_weights"),
        ('elif "runs_packed" not in vars(type(module)):', "elif False:",
         "nn/test_wrappers.py::test_wrapped_layers_and_attention_run_padded_with_torchs_numbers"),
        ("if has_own_hooks(layer) and not is_sharded(layer):", "if has_own_hooks(layer):",
         "nn/test_wrappers.py::test_layers_that_gather_their_own_parameters_run_packed"),
        ("must_be_called = \"layers.0 has hooks\" if has_global_hooks() else called", "must_be_called = called",
         "nn/test_running_padded.py::test_hooks_of_all_modules_get_torchs_arguments"),
        ('reasons.setdefault("called", f"{where} has hooks")', "pass", OBSTACLE),
        ("if kind not in TOKEN_WISE and kind not in known:", "if False:", OBSTACLE),
        ('return f" normalises over {len(shape)} dimensions" if len(shape) > 1 else None', "return None", OBSTACLE),
        ("if module.bias_k is not None or module.add_zero_attn:", "if False:", OBSTACLE),
        (" and not has_own_hooks(child):", ":", HOOKS),
        ('return bool(hooks or state.get("_backward_pre_hooks") or "forward" in state)', "return bool(hooks)", HOOKS),
        ("if len(batch_firsts) > 1:", "if False:",
         "nn/test_running_padded.py::test_layers_that_differ_in_the_order_of_dimensions"),
    ],
    "nn/layers": [
        ("return out if fused[0] is None or is_finite(out) else None", "return out",
         "nn/test_padding_free.py::test_few_tokens_with_a_sequence_of_padding_alone_are_finite"),
        ("functional.dropout(self.x, self.dropout.p if self.dropout.training else 0.0)", "self.x",
         "nn/test_layers.py::test_dropout_is_applied_where_torch_applies_it"),
        ("if not (plain and self.plain and", "if not (plain and", HOOKS),
        ("(*operands, norm.bias, eps=norm.eps, dropout_p", "(*operands, norm.bias, dropout_p",
         "nn/test_layers.py::test_every_setting_computes_what_torch_does"),
        ("nn.Module.__setstate__(self, state)", "super().__setstate__(state)",
         "nn/test_layers.py::test_copies_and_pickles_keep_the_activation"),
        ("if not runs_composed(self) or src.is_nested or not", "if src.is_nested or not",
         "nn/test_layers.py::test_a_subclass_that_overrides_blocks_is_honoured"),
        ('if any(modules[name].training for name in ("dropout", "dropout1", "dropout2")):', "if False:", REDUCED),
        ("if not number or type(self) is not TransformerEncoderLayer or not runs_composed(self):", "if not number:",
         "nn/test_layers.py::test_a_subclass_that_overrides_blocks_is_honoured"),
        ('if unmodified.issuperset(("linear1", "dropout", "linear2")) else None', "", HOOKS),
        ("dtype = _autocast_dtype(x) if reader in unmodified else None", "dtype = _autocast_dtype(x)",
         "nn/test_stacks.py::test_hooks_of_a_pre_norm_stack_are_called_with_tensors_in_torchs_dtype"),
    ],
    "nn/packed_input": [
        ("return x if hidden is None else x.masked_fill(hidden, 0.0)", "return x",
         "nn/test_padding_free.py::test_padding_of_minus_infinity_comes_out_as_zeros"),
        ("if mask is None or (stated and masks.padding is None):", "if mask is None:",
         "nn/test_stacks.py::test_is_causal_stands_for_a_mask_of_another_size"),
        ("return x.masked_fill(hidden & ~x.isfinite(), 0.0)", "return x",
         "nn/test_padding_values.py::test_padding_changes_no_bit_of_a_stack_that_runs_padded"),
        ("padding.clone() if", "padding if",
         "nn/test_running_padded.py::"
         "test_a_mask_that_changes_before_backward_where_hooks_keep_the_padding"),
        (" and not bool(mask.tril().any())", "",
         "nn/test_padding_free.py::test_an_encoder_computes_torchs_numbers_on_real_tokens_alone"),
        ("return None if bool(((padding != 0) & ~hidden).any()) else hidden", "return hidden",
         "nn/test_padding_free.py::test_an_additive_padding_mask_that_hides_nothing_is_added"),
        (" or padding.requires_grad:", ":",
         "nn/test_padding_free.py::test_masks_that_learn_get_their_gradients"),
        ("one.dtype == other.dtype and ", "",
         "nn/test_padding_free.py::test_a_bias_of_ones_is_not_the_padding_mask_of_the_source"),
        (" or (from_start and not layout.starts_rows)", "",
         "nn/test_options.py::test_cross_attention_counts_positions_in_columns"),
        ("(counts_positions and layout.has_gaps) or ", "",
         "nn/test_options.py::test_padding_changes_nothing"),
    ],
    "nn/cache": [
        ("x[:, :, first:last].masked_fill_(forgotten[:, None, :, None], 0.0)", "pass",
         "nn/test_fast_path.py::test_nan_in_cropped_tokens_reaches_no_output"),
        ("written += [x for layer_cache in self.layers for x in layer_cache.memory or ()]", "pass", ORDER),
        ("memory_lengths = memory_lengths.index_select(0, chosen)", "pass", ORDER),
        ("count if layout is None else layout.lengths", "count", ORDER),
    ],
    "nn/fast_path": [
        ("return not any(child.training for child in modules.values() if type(child) is nn.Dropout)", "return True",
         CHANGED),
        (" or type(out_proj) not in OUT_PROJECTIONS or has_own_hooks(out_proj):",
         " or type(out_proj) not in OUT_PROJECTIONS:", CHANGED),
        (" or attention.softcap is not None", "",
         "nn/test_options.py::test_steps_equal_the_whole"),
        ("x, _ = add_norm(norm, run(x), x)", "x, residual = add_norm(norm, run(x), x)",
         "nn/test_cache.py::test_steps_of_every_kind_of_layer_equal_the_whole_row"),
        ("torch.is_grad_enabled() or ", "", LEFT),
        ("not (mask is None and memory_mask is None)", "False", LEFT),
        ("if autocasts(x) or not all(", "if not all(", LEFT),
        ("p.dtype == x.dtype and ", "", LEFT),
        (" and p.is_contiguous()", "", LEFT),
        (" or side_layout.batch != layout.batch", "", UNFIT),
        (' or any(("multihead_attn" in each) != has_memory for each in modules)', "", UNFIT),
        (" or any(p.shape != x.shape[1:] for p in parameters)", "", UNFIT),
        (" and x.shape != residual.shape", " and False", UNFIT),
        ("attention.check_layouts(layout, key_layout)", "pass", LEFT),
        ("layout, layout, causal, None)", "layout, layout, False, None)", PACKED),
        ('if len(unmodified_children(layer, layer.part_types)) != len(modules) - ("activation" in modules):',
         "if False:", CHANGED),
    ],
    "nn/layer_stack": [
        ("own = torchs_form(masks[0], x, first.self_attn.batch_first, canonical=len(masks) == 1)", "pass", CALLED),
        ("if inspection.obstacle is not None or not (free and has_padding):", "if not (free and has_padding):",
         OBSTACLE),
        ("memory = memory.unpack() if isinstance(memory, PackedInput) else memory", "pass", CALLED),
        ("causal = masks[0].is_causal is True", "causal = masks[0].is_causal",
         "nn/test_module_protocols.py::test_programs_compute_what_the_module_does_with_other_masks_too"),
        ("clean = zero_padding if keeps_padding else finite_padding", "clean = finite_padding", FEW),
        ("if self._compiled() is not None or not all", "if torch.is_grad_enabled() or not all",
         "nn/test_module_protocols.py::test_checkpointing_recomputes_the_same_bits"),
        ('if cache.stack_id != self.__dict__.get("_stack_id"):', "if False:",
         "nn/test_cache.py::test_the_cache_of_another_stack_of_the_same_shape_is_refused"),
    ],
    "nn/multihead_attention": [
        ("return outputs if fused[0] is None or is_finite(outputs[0]) else None", "return outputs",
         "nn/test_padding_free.py::test_few_tokens_with_a_sequence_of_padding_alone_are_finite"),
        ("if mask is not None and not trains and not is_finite(out):", "if False:", FEW),
        ("if dead_rows(mask).any() or (", "if (",
         "nn/test_padding_free.py::test_few_queries_that_see_no_key_have_no_gradient"),
        (" or (states_padding and not are_harmless(k, v))", "",
         "nn/test_padding_free.py::test_few_keys_of_padding_change_no_gradient"),
        ("weights = weights.mean(1)",
         "weights = weights.sum(1)", ATTENTION + "test_every_option_with_every_mask_computes_what_torch_does"),
        (" and not extra and not learns", " and not learns",
         ATTENTION + "test_is_causal_leaves_the_extra_keys_open"),
        ("not extra and not learns", "not extra", ATTENTION + "test_is_causal_computes_what_torch_does"),
    ],
    "nn/position_bias": [
        ("torch.where(i > power, i - power - 0.5, i)", "i", "nn/test_options.py::test_alibi_is_that_of_the_paper"),
        ("(distance > 0) * buckets", "(distance >= 0) * buckets",
         "nn/test_options.py::test_buckets_are_those_of_the_paper"),
    ],
    "nn/rotary": [
        ("frequencies / self.scaling", "frequencies * self.scaling",
         "nn/test_options.py::test_tables_are_those_of_the_paper"),
    ],
    "nn/conversion": [
        ("if converted and not padding_free:", "if not padding_free:", REPORT),
        ('obstacle = stack.obstacle() if stack.padding_free else "padding_free is False"', "obstacle = None", REPORT),
        ('elif getattr(module, "has_extra_options", False):', "elif False:",
         "nn/test_options.py::test_an_option_that_is_set_later_counts_and_is_not_lost_to_torch"),
        ('return "quantised"', "return None",
         "nn/test_conversion.py::test_quantised_parts_are_called_as_they_are"),
        ("(*DROP_INS.values(), subclass_calling_sdpa(before))", "(*DROP_INS.values(),)",
         "functional/test_sdpa.py::test_converted_modules_skip_and_come_back"),
        ('module.__dict__.pop("padding_free", None)', "pass",
         "nn/test_conversion.py::test_convert_changes_a_model_in_place_and_revert_undoes_it"),
        ('"parametrised" if parametrize.is_parametrized(module) else None', "None",
         "nn/test_conversion.py::"
         "test_modules_that_convert_leaves_are_reported"),
        ('elif "forward" in module.__dict__:', "elif False:",
         "nn/test_conversion.py::"
         "test_revert_leaves_a_module_whose_forward_was_replaced_in_the_instance"),
    ],
    "apps/train/checkpoint": [
        ("x.to(torch.promote_types(x.dtype, torch.float64))", "x",
         CHECKPOINTS + "test_average_is_the_mean_in_double_precision_and_keeps_dtypes"),
        ("        check_tensors_fit(tensors, expected, self.path)\n", "",
         CHECKPOINTS + "test_tensors_of_another_optimizer_are_refused_before_torch_gets_them"),
        ("        self.check_architecture(config)\n", "", OTHERS),
        ("        if not same_kind(dtype, tensor.dtype):", "        if False:",
         CHECKPOINTS + "test_weights_of_a_foreign_dtype_are_refused_by_name"),
        ("        if shape != list(tensor.shape):", "        if False:", OTHERS),
    ],
    "apps/train/checkpoint_folder": [
        ("        synchronise(self.folder)\n", "", ON_DISK),
        ("all(map(_NAME.fullmatch, _named(index)))", "True",
         "apps/runs/test_folders.py::test_names_of_files_in_a_checkpoint_resolve_inside_it"),
        ("numbered[-self.keep :]", "numbered", CHECKPOINTS + "test_the_last_k_checkpoints_and_the_best_stay"),
        ("path.name not in _named(index) and ", "", KILLED),
    ],
    "apps/train/trainer": [
        ('            self._sums.load_state_dict(state["sums"])\n', "", RESUMED),
        ('            self._schedule.load_state_dict(state["schedule"])\n', "", RESUMED),
        ('self._update.load_state_dict(optimizer, state["scaler"])', "pass", RESUMED),
        ("        self._at, self._metrics = at,", "        self._metrics =", RESUMED),
    ],
    "apps/train/randomness": [
        ("    torch.set_rng_state(on_cpu)", "    pass", RESUMED),
    ],
    "apps/system/files": [
        ("            os.fsync(file.fileno())", "            pass", ON_DISK),
        ("            synchronise(path)", "            pass", ON_DISK),
        ("        synchronise(folder.parent)", "        pass", ON_DISK),
    ],
}
# fmt: on
FAULTS = [
    Fault(f"{file}: {' '.join(old.split())}"[:64], f"fastformer/{file}.py", old, new, f"tests/{test}", failure=".")
    for file, rows in ROWS.items()
    for old, new, test in rows
]

if __name__ == "__main__":
    main(FAULTS, __doc__)
