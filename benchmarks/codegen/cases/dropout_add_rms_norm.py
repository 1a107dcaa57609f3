"""Every launch that changes the code of dropout, sum and RMS norm: those of layer norm, whose kernels these are."""

from collections.abc import Callable, Iterator

from benchmarks.codegen.cases import dropout_add_layer_norm


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a launch on meta tensors."""
    yield from dropout_add_layer_norm.cases(centred=False)
