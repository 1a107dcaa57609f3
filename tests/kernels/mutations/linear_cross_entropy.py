"""Faults in the cross entropy of a linear layer."""

from collections.abc import Iterator

from tests.kernels.mutations.fault import KERNELS, OPS, Fault, at


def faults() -> Iterator[Fault]:
    file = f"{KERNELS}/linear_cross_entropy/kernels"
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
    yield at(
        file,
        "linear_cross_entropy.py::test_small_losses_of_large_logits[True-0.0]",
        "cross entropy: small losses rounded at 1",
        "_log1p(others + (of_label - 1.0))",
        "tl.log(others + of_label)",
    )
    yield at(file, options, "cross entropy: chunks not added up", "beta=float(start > 0)", "beta=0.0")
    yield at(
        f"{OPS}/linear_cross_entropy/op",
        options,
        "cross entropy: gradient of the loss ignored",
        "torch.mul(gradient, factor, out=",
        "torch.mul(gradient, 1.0, out=",
    )
