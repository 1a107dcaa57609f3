"""Faults in the embedding, and in the random numbers of dropout."""

from collections.abc import Iterator

from tests.kernels.mutations.fault import KERNELS, OPS, Fault, at


def faults() -> Iterator[Fault]:
    file = f"{KERNELS}/embedding/kernels"
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
        f"{OPS}/embedding/op",
        "embedding.py::test_only_wanted_gradients",
        "embedding: gradients that nobody wants",
        "ctx.dropout_p) if needs_weight else None",
        "ctx.dropout_p)",
    )

    yield at(
        f"{KERNELS}/random",
        "attention.py::test_dropout_keeps_its_rate_and_its_scale",
        "dropout: one mask for all heads",
        "row, row * 0 + stream,",
        "row, row * 0 + stream * 0,",
    )
