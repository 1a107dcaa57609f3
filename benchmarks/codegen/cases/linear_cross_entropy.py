"""The launches of the output loss: each kernel with and without its options, for each dtype, and rows of any length."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fastformer_kernels.linear_cross_entropy import kernels as linear_cross_entropy

ALL, NONE = [True] * 3, [False] * 3


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    def inputs(dtype: torch.dtype, V: int, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        x, weight = (torch.empty(rows, 512, dtype=dtype, device="meta") for rows in (1000, V))
        target = torch.empty(1000, dtype=torch.int64, device="meta")
        return x, weight, torch.empty(V, dtype=dtype, device="meta") if bias else None, target

    def forward(dtype: torch.dtype, V: int, bias: bool, smoothing: float, wanted: list[bool]) -> Callable[[], object]:
        return lambda: linear_cross_entropy.forward(*inputs(dtype, V, bias), -100, smoothing, wanted)

    def backward(dtype: torch.dtype, V: int, bias: bool, smoothing: float) -> Callable[[], object]:
        grad = torch.empty(1000, device="meta")
        return lambda: linear_cross_entropy.backward(grad, *inputs(dtype, V, bias), -100, smoothing, ALL)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield f"{name} V=32768 bias smooth", forward(dtype, 32768, True, 0.1, ALL)
    yield "bfloat16 V=32768", forward(torch.bfloat16, 32768, False, 0.0, ALL)
    yield "bfloat16 V=50257 bias smooth", forward(torch.bfloat16, 50257, True, 0.1, ALL)
    yield "bfloat16 V=1000 bias smooth", forward(torch.bfloat16, 1000, True, 0.1, ALL)
    yield "bfloat16 V=32768 bias smooth none", backward(torch.bfloat16, 32768, True, 0.1)
    yield "bfloat16 V=32768 bias smooth loss", forward(torch.bfloat16, 32768, True, 0.1, NONE)
    yield "float32 V=32768 loss", forward(torch.float32, 32768, False, 0.0, NONE)
