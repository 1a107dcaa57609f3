"""Optimizer steps as CUDA graphs: about three launches a step, for steps that wait for the host.

The host of one H200 needed 34 to 60 ms for a step of 6+6 layers in bf16; the GPU computed it in 5.3 to 7.6 ms
(benchmarks/results/h200.json, 2,000 to 4,000 tokens a side). From graphs the steps were 11 and 8.6 times as fast with
random and with bucketed batches, in fp32 2.5 and 1.7 times. So each part of a step is captured:

- forward and backward of a batch, once for each shape (`FixedBatch`); one op adds the new gradients to the
  accumulated ones: 186 launches fewer, for the memory of the gradients once more;
- the norm of the gradients;
- clipping and the optimizer, whose learning rate is a tensor.

Each part runs eagerly the first time, which compiles kernels and allocates gradients and the optimizer's moments. The
second time it is captured, and replayed from then on. The numbers are those of eager steps up to rounding: sums over a
batch's tokens include padding, which adds zeros. Gradients are zeroed, not dropped: weight decay and moments continue
for a parameter that a later batch does not use.

After its capture, a graph does not notice hooks, new dropout rates, `requires_grad` or new buffers of a module. It also
does not notice changed optimizer options other than the learning rate, another backend or precision, or control
flow in Python that differs from step to step. New addresses of parameters and gradients are noticed.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fastformer.apps.text import Side
from fastformer.apps.train.config import TrainConfig
from fastformer.apps.train.processes import Processes
from fastformer.apps.train.update import Update
from fastformer.host.cuda_graphs import Recorded, Recorder, Step, capture_or_warn, memory_for_graphs, recorder
from fastformer.modes import capturing
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder
from fastformer.packing import Layout
from fastformer.packing.sizes import filler_lengths, power_of_two

_PER_OCTAVE = 16  # numbers of tokens between 2,048 and 4,096, say
_FEWEST_TOKENS = 16  # and their unit below 512, because matrix units take rows by 16
_SHORTEST = 64  # rows of the tallest tile of attention's kernels: shorter sequences take as many programs
_ALIGNMENT = 16  # int64s: 128 bytes, what torch's own tensors begin at
_PADDING_ID, _IGNORED = 0, -100  # the second is the losses' ignore_index


def new_update(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], config: TrainConfig, processes: Processes
) -> Update:
    """Return the `Update` of a configuration, with CUDA graphs if it allows them and the device has them.

    Raises ValueError if activations are to be checkpointed and the model has no stack.
    """
    if config.checkpoint_activations:
        stacks = [each for each in model.modules() if isinstance(each, TransformerEncoder | TransformerDecoder)]
        if not stacks:
            raise ValueError(
                "checkpoint_activations=True is for models with fastformer's TransformerEncoder or TransformerDecoder; "
                f"{type(model).__name__} has none"
            )
        for stack in stacks:
            stack.checkpoint_activations = True
    device = next(model.parameters()).device
    graphs = config.cuda_graphs is not False and config.graphs_obstacle(processes.world) is None
    graph_recorder = recorder(device, keeps_memory=False) if graphs else None
    if graph_recorder is None:
        return Update(model, loss, config, processes)
    return GraphedUpdate(model, loss, config, processes, graph_recorder)


class GraphedUpdate(Update):
    """An `Update` whose parts are captured and replayed as CUDA graphs.

    If a part cannot be captured, a warning is issued and all later steps run eagerly. The loss takes batches whose
    lengths are a `Layout`. With `cuda_graphs=None`, steps run eagerly, without a warning, if graphs may not repeat all
    that they do (code other than torch's and fastformer's, hooks, batches that `shape_of` refuses), or if eager steps
    take more than half of the device's memory.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        config: TrainConfig,
        processes: Processes,
        recorder: Recorder,
    ) -> None:
        super().__init__(model, loss, config, processes)
        self._recorder: Recorder | None = recorder
        self._longest = getattr(getattr(model, "config", None), "longest", None)  # by learned positions
        self._memory: dict[Hashable, FixedBatch] = {}
        self._warm: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[Recorded, list[Tensor]]] = {}
        self._addresses: list[int] = []
        # Inputs and results that change from step to step.
        self._tokens, self._rate, self._total, self._norm = torch.zeros(4, device=self.device).unbind()

    def gradients(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor, int]:
        """Run forward and backward as in `Update`; the next step overwrites both returned tensors."""
        shapes = self._shapes(batches)
        if shapes is None:
            return super().gradients(batches)
        self._check_addresses()
        tokens = sum(batch.tokens for batch in batches)
        self._tokens.fill_(max(tokens, 1))
        self._total.zero_()
        for batch, shape in zip(batches, shapes, strict=True):
            if shape not in self._memory:
                self._memory[shape] = FixedBatch(batch, shape, self.device)
            memory = self._memory[shape]
            memory.load(batch)
            self._run(shape, partial(self._add, memory))
        self._run("norm", lambda: self._norm.copy_(self.norm()))
        return self._total, self._norm, tokens

    def _shapes(self, batches: Sequence[Any]) -> "list[Shape] | None":
        """Return the shapes of a step's batches; None if this step and all later ones run eagerly."""
        required = self._config.cuda_graphs
        if self._recorder is not None and (required or self.runs_known_code()):
            try:
                return [shape_of(batch, self._longest) for batch in batches]
            except TypeError:
                if required:
                    raise
        self._recorder = None
        self._forget()
        return None

    def apply(self, norm: Tensor, rate: float) -> None:
        """Clip the gradients of the last `gradients`, and change the parameters by them at the learning rate `rate`."""
        if self._recorder is None:
            super().apply(norm, rate)
            return
        self._rate.fill_(rate)
        self._run("optimizer", self._optimize)
        for group in self.optimizer.param_groups:
            group["lr"] = rate  # checkpoints hold a number, not a tensor
            if "capturable" in group:
                group["capturable"] = False

    def load_state_dict(self, optimizer: dict[int, dict[str, Any]], scaler: dict[str, Any]) -> None:
        """Continue from saved states, as in `Update`."""
        super().load_state_dict(optimizer, scaler)
        self._forget()

    def backward(self, batch: Any, tokens: float | Tensor) -> Tensor:
        """Add the gradients as in `Update`, but with one op for all, which needs the memory of the gradients twice."""
        if self._recorder is None:
            return super().backward(batch, tokens)
        accumulated = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        try:
            loss = super().backward(batch, tokens)
            grads = zip(accumulated, (p.grad for p in self.parameters), strict=True)
            pairs = [(a, b) for a, b in grads if a is not None and b is not None]
            if pairs:
                torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
        finally:
            for old, p in zip(accumulated, self.parameters, strict=True):
                p.grad = p.grad if old is None else old
        return loss

    def _add(self, memory: "FixedBatch") -> None:
        self._total.add_(self.backward(memory.batch(), self._tokens))

    def _optimize(self) -> None:
        if self.device.type == "cuda":
            captured = capturing(self._norm)
            for group in self.optimizer.param_groups:
                if "capturable" in group:  # else Adam warns of eager steps, or refuses captured ones
                    group["capturable"] = captured
        self.step(self._norm, self._rate)
        self.optimizer.zero_grad(set_to_none=False)

    def _run(self, name: Hashable, step: Step) -> None:
        """Run a part of a step: eagerly the first time, as a graph later."""
        if name not in self._recorded:
            if self._recorder is not None and name not in self._warm:
                self._recorder.warm_up(step)
                self._check_addresses()  # this step may have allocated gradients
                self._warm.add(name)
                return
            recorded = None
            if self._recorder is not None and (self._config.cuda_graphs or self._may_capture()):
                recorded = capture_or_warn(self._recorder, step, "training")
            if recorded is None:
                self._recorder = None
                self._forget()
                step()
                return
            # The graph still reads these buffers after the module replaces them, such as a growing table of positions.
            self._recorded[name] = recorded, list(self.module.buffers())
        self._recorded[name][0].replay()

    def _may_capture(self) -> bool:
        """Return whether parameters have no hooks, and eager steps took at most half of the device's memory."""
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return not hooked and peak <= memory_for_graphs(self.device) / 2  # validations cannot use graphs' memory

    def _check_addresses(self) -> None:
        """Drop all graphs if parameters or gradients have new addresses, or any capture has failed."""
        tensors = [*self.parameters, *(p.grad for p in self.parameters if p.grad is not None)]
        addresses = [x.data_ptr() for x in tensors]
        addresses.append(0 if self._recorder is None else self._recorder.failures)
        if addresses != self._addresses:
            self._forget()
            self._addresses = addresses

    def _forget(self) -> None:
        self._recorded.clear()
        self._warm.clear()


class Shape(NamedTuple):
    """Rounded sizes of a batch; `tokens` and `longest` have a number for each side.

    Sequences of padding fill the batch: at most 15 tokens or a sixteenth of a side. Padding has no targets and no real
    token attends to it, so the loss and all gradients stay the same. Multi30k en-de in 4 epochs has 19 shapes with
    random batches of 128 sentences, 8 with random ones of 4,096 tokens, 31 with bucketed ones of 4,096 tokens.
    """

    sequences: int  # B
    tokens: tuple[int, ...]
    longest: tuple[int, ...]


def shape_of(batch: Any, longest: int | None = None) -> Shape:
    """Return the shape that a batch on the CPU is rounded up to; the same for every batch of the same sizes.

    longest: tokens of the longest sequence that the model takes; None: any. Raises TypeError if the sides of the batch
    do not name all fields, or ids are not packed or not on the CPU.
    """
    sides: tuple[Side, ...] = getattr(batch, "SIDES", ())
    ids = [getattr(batch, name) for side in sides for name in side.inputs + side.targets]
    packed, on_cpu = all(x.dim() == 1 for x in ids), all(x.device.type == "cpu" for x in ids)
    named = {name for side in sides for name in (side.lengths, *side.inputs, *side.targets)}
    if not sides or not packed or not on_cpu or {each.name for each in fields(batch)} != named:
        raise TypeError(
            "cuda_graphs=True needs batches of packed ids on the CPU whose SIDES name all fields, as those of "
            "fastformer.apps.text.Batch and LanguageBatch; not "
            f"{type(batch).__name__}{' with padded ids' if sides and not packed else ''}"
        )
    totals, limits, fillers = [], [], [0]
    for side in sides:
        lengths = getattr(batch, side.lengths)
        count, most = int(lengths.sum()), int(lengths.max()) if len(lengths) else 0
        unit = max(power_of_two(count) // (2 * _PER_OCTAVE), _FEWEST_TOKENS)
        totals.append(max(-(-count // unit), 1) * unit)
        rounded = max(power_of_two(most), _SHORTEST)
        limits.append(rounded if longest is None else max(min(rounded, longest), most, 1))
        fillers.append(len(filler_lengths(totals[-1] - count, limits[-1])))
    return Shape(power_of_two(len(lengths) + max(fillers)), tuple(totals), tuple(limits))


class FixedBatch:
    """Device memory for batches of one shape: call `load`, then pass `batch()` to the model, any number of times."""

    def __init__(self, like: Any, shape: Shape, device: torch.device) -> None:
        self._like, self._shape = like, shape
        spans, end = {}, 0
        for key, values in self._arrays(like).items():
            spans[key] = slice(end, end + len(values))
            end += -(-len(values) // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros(end, dtype=torch.int64, device=device)
        self._spans, self._views = spans, {key: self._memory[span] for key, span in spans.items()}

    def load(self, batch: Any) -> None:
        """Copy a batch from the CPU in one transfer, without waiting for the device."""
        # torch reuses freed pinned memory only after its copies have ended.
        staged = torch.empty_like(self._memory, device="cpu", pin_memory=self._memory.is_cuda)
        for key, values in self._arrays(batch).items():
            staged[self._spans[key]] = torch.from_numpy(values)
        self._memory.copy_(staged, non_blocking=True)

    def batch(self) -> Any:
        """Return the batch that was loaded last, with layouts in place of lengths; its tensors are always the same."""
        values: dict[str, Any] = {}
        for number, side in enumerate(self._like.SIDES):
            offsets, positions, slots = (self._views[number, name] for name in ("offsets", "positions", "slots"))
            values[side.lengths] = Layout.from_static_tensors(offsets, positions, slots, self._shape.longest[number])
            values |= {name: self._views[number, name] for name in side.inputs + side.targets}
        return replace(self._like, **values)

    def _arrays(self, batch: Any) -> dict[tuple[int, str], NDArray[np.int64]]:
        """Return offsets, positions, slots, ids and targets of each side, with padding at the end."""
        arrays: dict[tuple[int, str], NDArray[np.int64]] = {}
        for number, (side, total, longest) in enumerate(zip(batch.SIDES, *self._shape[1:], strict=True)):
            real = getattr(batch, side.lengths).tolist()
            filled = [*real, *filler_lengths(total - sum(real), longest)]
            lengths = np.array(filled + [0] * (self._shape.sequences - len(filled)), np.int64)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            rows = np.repeat(np.arange(self._shape.sequences), lengths)
            positions = np.arange(total) - offsets[rows]
            arrays |= {(number, "offsets"): offsets, (number, "positions"): positions}
            arrays[number, "slots"] = rows * longest + positions
            for names, fill in ((side.inputs, _PADDING_ID), (side.targets, _IGNORED)):
                for name in names:
                    ids = getattr(batch, name).numpy()
                    arrays[number, name] = np.concatenate([ids, np.full(total - len(ids), fill, np.int64)])
        return arrays
