"""Stacks under torch.compile without padding: packing stays eager, and the layers are one graph on packed tokens.

Whether a batch can be packed, and how many tokens it has, depends on the values of its mask, which a graph cannot read.

Letters: B batch, T packed tokens, D model width.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastformer.packing import Layout
from fastformer.packing.sizes import filler_lengths, power_of_two

_GRAPHS = 256  # recompile_limit, as accumulated_recompile_limit; torch's default of 8 is for two stacks of 4 graphs


class CompiledStack:
    """The compiled functions of a stack; `nn.Module.__call__` calls it in place of the stack's own forward.

    Attributes:
        buckets: whether the sizes of packed batches are rounded up (`fill_bucket`).
    """

    def __init__(self, stack: Any, buckets: bool, options: dict[str, Any]) -> None:
        self.buckets = buckets
        self._stack = stack
        self._padded = torch.compile(stack.run, **options)
        self._packed = torch.compile(stack._run_packed, **({"dynamic": False} if buckets else {}) | options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the stack with its hooks, without compilation: `Stack.run` calls the compiled functions."""
        return self._stack._call_impl(*arguments, **options)

    def run(self, *arguments: Any) -> Any:
        """Run a padded batch; arguments as of `Stack.run`."""
        return _call(self._padded, *arguments)

    def takes(self, layout: Layout, causal: bool, mask: Tensor | None, *memory: Any) -> bool:
        """Return whether `run_packed` takes a packed batch: with buckets, none with a mask `[L, L]`."""
        return not self.buckets or (mask is None and all(x is None for x in memory[2:]))

    def run_packed(self, tokens: Tensor, layout: Layout, causal: bool, mask: Tensor | None, *memory: Any) -> Tensor:
        """Run the layers and the norm on packed sequences; arguments as of `Stack._run_packed`."""
        sides = [(tokens, layout), *([memory[:2]] if memory else [])]
        for layer in self._stack.layers:
            for attention, (_, keys) in zip(layer.attentions, sides, strict=True):
                attention.check_layouts(layout, keys)
        if self.buckets and all(layout.known for _, layout in sides):
            sides = fill_bucket(sides)
        else:  # layers would check the positions again, which a graph cannot
            sides = [(x, replace(layout, _of_mask=False, _memory={})) for x, layout in sides]
        others = [x for side in sides[1:] for x in (*side, memory[2])]
        out: Tensor = _call(self._packed, *sides[0], causal, mask, *others)
        return out[: tokens.shape[0]]


def _call(compiled: Any, *arguments: Any) -> Any:
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=_GRAPHS):
        return compiled(*arguments)


def fill_bucket(sides: Sequence[tuple[Tensor, Layout]]) -> list[tuple[Tensor, Layout]]:
    """Round up the sizes of packed batches of the same sequences, so that few sizes occur.

    The number of tokens becomes a multiple of an eighth of the power of two below it, so at most an eighth is added.
    The numbers of sequences and of positions become powers of two, which costs kernels only empty blocks. The added
    tokens are copies of the first ones: no values occur that the layers do not get anyway. They are sequences of their
    own, as long as the bucket allows.
    """
    steps = [max(power_of_two(layout.total) // 16, 1) for _, layout in sides]
    longest = [power_of_two(layout.max_length) for _, layout in sides]
    added = max((step - 1) // length + 1 for step, length in zip(steps, longest, strict=True))
    batch = power_of_two(sides[0][1].batch) + added
    filled = []
    for (tokens, layout), step, length in zip(sides, steps, longest, strict=True):
        count = -layout.total % step
        lengths = [*layout.lengths.tolist(), *filler_lengths(count, length)]
        lengths += [0] * (batch - len(lengths))
        full = Layout.from_lengths(lengths, tokens.device, length)
        static = Layout.from_static_tensors(full.offsets, full.positions, full.origin, length)
        filled.append((torch.cat([tokens, tokens[:count].detach()]), static))
    return filled
