"""Find missing fences between the two proxies of shared memory on sm_90 and sm_100, in PTX.

Threads write shared memory through the generic proxy (st.shared, and cp.async, complete at its cp.async.wait_group);
wgmma and tcgen05.mma read their operands through the async proxy. PTX requires a `fence.proxy.async` between (PTX ISA,
"Async proxy"); without one a product may read old contents. Counted is each product that some path reaches after such a
write and without the fence.

Memory that threads read back (ld.shared, ldmatrix) converts a layout or reduces a row and is no operand: stores before
such a load are not counted. An operand stored before it, unfenced, would be missed; cp.async is not.
"""

import re
from typing import NamedTuple

from benchmarks.codegen.checks.flow import blocks

_WAIT = re.compile(r"\bcp\.async\.wait_(?:group|all)\b")
_STORE = re.compile(r"\b(?:st\.shared|stmatrix)\b")
_LOAD = re.compile(r"\b(?:ld\.shared|ldmatrix)\b")
_FENCE = re.compile(r"\bfence\.proxy\.async\b")
_PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma)\b")


class _Unfenced(NamedTuple):
    """Writes since the last fence."""

    copied: bool = False
    stored: bool = False

    def after(self, line: str) -> "_Unfenced":
        if _FENCE.search(line):
            return _Unfenced()
        if _WAIT.search(line):
            return self._replace(copied=True)
        if _STORE.search(line) or _LOAD.search(line):
            return self._replace(stored=bool(_STORE.search(line)))
        return self


def unfenced(ptx: str) -> int:
    """Return how many products may read shared memory that was written since the last fence."""
    code = blocks(ptx)
    counted: set[tuple[int, int]] = set()
    seen: set[tuple[int, _Unfenced]] = set()
    ahead = [(0, _Unfenced())]
    while ahead:
        number, state = position = ahead.pop()
        if position in seen:
            continue
        seen.add(position)
        for index, line in enumerate(code[number].instructions):
            state = state.after(line)
            if any(state) and _PRODUCT.search(line):
                counted.add((number, index))
        ahead += [(successor, state) for successor in code[number].successors]
    return len(counted)
