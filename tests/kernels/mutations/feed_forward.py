"""Faults in the feed-forward network."""

from collections.abc import Iterator

from tests.kernels.mutations.fault import KERNELS, OPS, Fault, at


def faults() -> Iterator[Fault]:
    file = f"{KERNELS}/feed_forward/kernels"
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
        f"{OPS}/feed_forward/op",
        feed_forward.format("relu"),
        "feed-forward: wrong tensor saved",
        'saved_hidden = (a if activation == "relu" else h) if saves_hidden else None',
        "saved_hidden = h if saves_hidden else None",
    )
