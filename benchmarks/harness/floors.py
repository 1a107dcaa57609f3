"""How fast the machine could do the work at most: its two ceilings, measured in the same run, and the floor they set.

The floor of a call is the longer of two times: the operations that its useful work needs over the rate of a large
matrix product, and the bytes that it must move at least (each input read once, each output written once) over the
bandwidth of a large copy.
"""

import statistics
from dataclasses import dataclass

import torch

from benchmarks.harness.clock import Stopwatch

_REPETITIONS = 5


@dataclass(frozen=True)
class Work:
    """What a call must do at least: floating-point operations of its matrix products, and bytes read and written."""

    operations: float
    bytes: float


class Ceilings:
    """Matrix-product rate by dtype, and copy bandwidth, measured when first asked for."""

    def __init__(self, watch: Stopwatch, tiny: bool = False) -> None:
        """See the fixture `ceilings`; `tiny`: products and copies that take no time, and say nothing."""
        self._watch, self._tiny = watch, tiny
        self._rates: dict[torch.dtype, float] = {}
        self._bandwidth: float | None = None

    def matmul_rate(self, dtype: torch.dtype) -> float:
        """Operations a second of a product of square random matrices; fp32 without TF32, as torch has it by default."""
        if dtype not in self._rates:
            self._rates[dtype] = matmul_rate(self._watch, dtype, 64 if self._tiny else None)
        return self._rates[dtype]

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a copy, those read and those written."""
        if self._bandwidth is None:
            # Beyond every cache: 1 GiB on a GPU, 256 MiB on a CPU.
            size = 1 << (10 if self._tiny else 29 if self._watch.on_gpu else 27)
            source = torch.empty(size, dtype=torch.int8, device=self._watch.device).random_()
            target = torch.empty_like(source)
            target.copy_(source)  # its pages exist from here on
            seconds = statistics.median(self._watch(lambda: target.copy_(source)) for _ in range(_REPETITIONS))
            self._bandwidth = 2 * size / max(seconds, 1e-9)
        return self._bandwidth

    def floor(self, work: Work, dtype: torch.dtype) -> float:
        """Seconds below which this machine does not do the work."""
        return max(work.operations / self.matmul_rate(dtype), work.bytes / self.bandwidth)

    def measured(self) -> dict[str, float]:
        """What has been measured: name -> operations or bytes a second."""
        rates = {f"matmul_{str(dtype).removeprefix('torch.')}": rate for dtype, rate in self._rates.items()}
        return rates if self._bandwidth is None else {**rates, "copy": self._bandwidth}


def matmul_rate(watch: Stopwatch, dtype: torch.dtype = torch.float32, size: int | None = None) -> float:
    """Operations a second of matrix products just now; on a shared machine it says how much of it is there."""
    n = size or (1024 if not watch.on_gpu else 4096 if dtype == torch.float32 else 8192)
    x, y = (torch.randn(n, n, device=watch.device, dtype=dtype) for _ in range(2))
    x @ y
    return 2 * n**3 / max(1e-9, statistics.median(watch(lambda: x @ y) for _ in range(3)))
