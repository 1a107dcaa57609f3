"""A stand-in for CUDA graphs on a CPU: it repeats the recorded operations on the recorded tensors, and nothing else.

What a graph cannot know is not known here either: numbers and tensors that the host would choose anew at the next step
are those of the capture. As on a GPU, a capture changes no tensor and no generator, and reading a value on the host
ends it.

Beside it, the steps of a static and of a growing state, fed alike.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastformer import modes
from fastformer.apps.translation.model import TranslationModel
from fastformer.host.cuda_graphs import Recorded, Recorder, ReplayedStep
from tests.support.translation_task import BOS
from tests.support.uncached_search import cached_decoder, sources

WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "_unique", "_unique2"}
WAITS |= {"unique_dim", "unique_consecutive"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host would wait for a device that runs this operation."""
    name = func.overloadpacket.__name__
    if name == "repeat_interleave":
        return func._overloadname == "Tensor" and kwargs.get("output_size") is None
    if name in INDEXING:  # by a mask: as many rows as it has ones
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]))
    return name in WAITS


class _Tape(TorchDispatchMode):
    """Records every operation; `rewind` takes back what they wrote into tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[place] if place < len(args) else kwargs.get(argument.name)
                self.written.extend((x, x.clone()) for x in tree_leaves(target) if isinstance(x, Tensor))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def rewind(self) -> None:
        for target, before in reversed(self.written):
            target.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for recorded, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                # Views, and what was written in place, are in the recorded memory already.
                if isinstance(recorded, Tensor) and recorded.data_ptr() != new.data_ptr():
                    recorded.copy_(new)


class TapeRecorder:
    """Takes the place of `CudaRecorder`; counts what it is asked for."""

    def __init__(self) -> None:
        self.warmed_up = self.captured = self.replayed = self.failures = 0

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        self.warmed_up += 1
        return step()

    def capture(self, step: Callable[[], Tensor]) -> Recorded:
        tape = _Tape()
        try:
            with torch.random.fork_rng(devices=[]), tape:
                output = step()
        except BaseException:
            self.failures += 1
            raise
        finally:
            tape.rewind()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return Recorded(replay, output)


def read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no check look at values, as on a GPU."""
    readable = modes.readable
    for name, module in list(sys.modules.items()):
        packages = ("fastformer.functional", "fastformer.nn", "fastformer.host", "fastformer.apps.translation")
        if name.startswith(packages) and vars(module).get("readable") is readable:
            monkeypatch.setattr(module, "readable", lambda x: False)


def taped(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> TapeRecorder:
    """Have what a module captures repeated by a tape, while nothing looks at values, as on a GPU."""
    recorder = TapeRecorder()
    monkeypatch.setattr(module, "recorder", lambda device, keeps_memory: recorder)
    read_nothing(monkeypatch)
    return recorder


def steps_of_both(
    model: TranslationModel,
    lengths: list[int],
    steps: int,
    recorder: Recorder,
    hypotheses: int = 1,
    leave_at: Collection[int] = (),
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits of a static and of a growing state, step by step, for the same random tokens.

    The static state's steps are replayed. Hypotheses of a sentence change places after every step, and after the steps
    `leave_at` the first sentence leaves.
    """
    device = model.output.weight.device
    source, lengths_ = sources(lengths)
    arguments = model, source.to(device), lengths_, hypotheses
    static, static_step = cached_decoder(*arguments, capacity=steps)
    growing, growing_step = cached_decoder(*arguments)
    generator = torch.Generator().manual_seed(1)
    B, N = len(lengths), hypotheses
    fed, parents = torch.full((B * N,), BOS, device=device), torch.arange(B * N, device=device)

    def run() -> Tensor:
        static.gather(parents)
        return static_step(fed)

    replayed = ReplayedStep(recorder, model, run, "decoding")
    for t in range(steps):
        yield replayed(), growing_step(fed)
        swap = torch.cat([torch.randint(b * N, b * N + N, (N,), generator=generator) for b in range(B)]).to(device)
        growing.reorder(swap)
        if t in leave_at:
            static.reorder(swap)
            stay = torch.arange(1, B, device=device)
            static.keep(stay)
            growing.keep(stay)
            B -= 1
            fed, parents = fed[: B * N].clone(), torch.arange(B * N, device=device)
            replayed.reset()
        else:
            parents.copy_(swap)
        fed.copy_(torch.randint(4, 17, (B * N,), generator=generator))
