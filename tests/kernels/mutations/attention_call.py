"""Faults in attention's smaller kernels, in what all are told, and in the Function around them."""

from collections.abc import Iterator

from tests.kernels.mutations.attention_tests import MASKS, rule
from tests.kernels.mutations.fault import KERNELS, OPS, Fault, at


def faults() -> Iterator[Fault]:
    file = f"{KERNELS}/attention/mask_gradient"
    yield at(file, rule("additive [T, S]"), "gradient of the mask not summed", "total += ds", "total = ds")
    file = f"{KERNELS}/attention/weights"
    yield at(
        file,
        "contract.py::test_kernels_keep_to_their_tensors[attention_with_weights]",
        "weights: columns beyond the keys written",
        "written = (rows < T)[:, None] & (columns < S)[None, :]",
        "written = (rows < T)[:, None] & (columns >= 0)[None, :]",
    )

    file = f"{KERNELS}/attention/problem"
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

    file, decoding = f"{KERNELS}/attention/decode", "attention.py::test_decoding_splits_the_keys"
    yield at(
        file, f"{decoding}[one query-1]", "decoding: shares without weight", "other=0.0) * weight", "other=0.0)"
    )  # fmt: skip
    yield at(
        file,
        "attention.py::test_lengths_beyond_the_tensor_are_cut",
        "decoding: lengths beyond the keys",
        "tl.minimum(tl.maximum(tl.load(lengths_ptr + b).to(tl.int32), 0), S)",
        "tl.load(lengths_ptr + b).to(tl.int32)",
    )
    yield at(
        file,
        f"{decoding}[lengths, one of them 0-2]",
        "decoding: rows of the first query head of the key head",
        "h.to(tl.int64) * stride_out_h",
        "hk.to(tl.int64) * stride_out_h",
    )
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
    file = f"{OPS}/attention/fused"
    yield at(
        file,
        MASKS,
        "attention: seed drawn anew in backward",
        "arguments = Arguments(*ctx.numbers, *tensors)",
        "arguments = Arguments(*ctx.numbers, *tensors)._replace(seed=dropout_seed(q))",
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
        "attention_backward.py::test_only_the_gradients_that_are_wanted[wanted0]",
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
