"""A step of the optimizer from CUDA graphs: three launches or so, where the host is what a step waits for.

The host needs 15 to 30 ms for the launches of a step of 6+6 layers, whatever the batch; an H200 computes one of
4,096 tokens in 2 to 4 (a prediction: none of this is measured on a GPU). So each part of a step is captured:

- forward and backward of a batch, once for each shape (`fixed_batch`), whose gradients one op adds to those that stay
  where they are: 186 launches less, for the memory of the gradients once more;
- the norm of the gradients;
- clipping and the optimizer, whose learning rate is a tensor.

Each runs eagerly for the first time, which compiles kernels and makes what is kept: gradients and the optimizer's
moments. The second time it is captured, and repeated from then on. The numbers are those of eager steps but for
rounding, since sums over the tokens of a batch are over those of padding, too, which are zero. Gradients are zeroed,
not dropped: weight decay and moments go on where a later batch does not use a parameter.

What a graph cannot see, after its capture: hooks, new rates of dropout, `requires_grad`, a module's new buffers, other
settings of the optimizer than its rate, another backend or precision, and what the model's Python chooses from step to
step. New places of parameters and gradients are noticed.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.train.compilation import check_compiler, compiled_loss
from fastformer.apps.train.config import TrainConfig
from fastformer.apps.train.fixed_batch import FixedBatch, shape_of
from fastformer.apps.train.processes import Processes
from fastformer.apps.train.update import Update
from fastformer.host.cuda_graphs import Recorded, Recorder, Step, capture_or_warn, recorder
from fastformer.modes import capturing
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder


def new_update(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    config: TrainConfig,
    processes: Processes,
    longest: int | None = None,
) -> Update:
    """Return the `Update` of a configuration, with CUDA graphs (on a device that has them) or compiled if it asks so.

    longest: tokens of the longest sequence of all batches; None: unknown.

    Raises:
        ValueError: CUDA graphs for several processes; the compiler or the stacks that it needs are missing.
    """
    device = next(model.parameters()).device
    if config.checkpoint_activations:
        stacks = [each for each in model.modules() if isinstance(each, TransformerEncoder | TransformerDecoder)]
        if not stacks:
            raise ValueError(
                "checkpoint_activations=True is for models with fastformer's TransformerEncoder or TransformerDecoder; "
                f"{type(model).__name__} has none"
            )
        for stack in stacks:
            stack.checkpoint_activations = True
    if config.compile is not None:
        check_compiler(config.compile, device)
        loss = compiled_loss(model, loss, config.compile)
    if config.cuda_graphs and processes.world > 1:
        raise ValueError(f"cuda_graphs=True is for one process, not for {processes.world}")
    found = recorder(device, keeps_memory=False) if config.cuda_graphs else None
    if found is None:
        return Update(model, loss, config, processes)
    return GraphedUpdate(model, loss, config, processes, found, longest)


class GraphedUpdate(Update):
    """An `Update` whose parts are captured and repeated; after one that cannot be captured, with a warning, eager.

    The loss takes batches whose lengths are a `Layout`. longest: see `new_update`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        config: TrainConfig,
        processes: Processes,
        recorder: Recorder,
        longest: int | None,
    ) -> None:
        super().__init__(model, loss, config, processes)
        self._recorder: Recorder | None = recorder
        self._longest = longest
        self._memory: dict[Hashable, FixedBatch] = {}
        self._warm: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[Recorded, list[Tensor]]] = {}
        self._places: list[int] = []
        # What changes from step to step, and what comes of it.
        self._tokens, self._rate, self._total, self._norm = torch.zeros(4, device=self.device).unbind()

    def gradients(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor, int]:
        """Forward and backward; as in `Update`, but the next step overwrites both tensors."""
        if self._recorder is None:
            return super().gradients(batches)
        self._check_places()
        tokens = sum(batch.tokens for batch in batches)
        self._tokens.fill_(max(tokens, 1))
        self._total.zero_()
        for batch in batches:
            self._add(batch)
        self._run("norm", lambda: self._norm.copy_(self.norm()))
        return self._total, self._norm, tokens

    def apply(self, norm: Tensor, rate: float) -> None:
        """Clip the gradients of the last `gradients`, and change the parameters by them at the learning rate `rate`."""
        if self._recorder is None:
            super().apply(norm, rate)
            return
        self._rate.fill_(rate)
        self._run("optimizer", self._optimize)
        for group in self.optimizer.param_groups:
            group["lr"] = rate  # what is saved is a number
            if "capturable" in group:
                group["capturable"] = False

    def load_state_dict(self, optimizer: dict[int, dict[str, Any]], scaler: dict[str, Any]) -> None:
        """Continue from saved states, as in `Update`."""
        super().load_state_dict(optimizer, scaler)
        self._forget()

    def backward(self, batch: Any, tokens: float | Tensor) -> Tensor:
        """Add the gradients as in `Update`, but with one op for all of them. Takes their memory twice, meanwhile."""
        kept = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        try:
            loss = super().backward(batch, tokens)
            new = [p.grad for p in self.parameters]
            both = [(old, grad) for old, grad in zip(kept, new, strict=True) if old is not None and grad is not None]
            if both:
                torch._foreach_add_(*map(list, zip(*both, strict=True)))
        finally:
            for old, p in zip(kept, self.parameters, strict=True):
                p.grad = p.grad if old is None else old
        return loss

    def _add(self, batch: Any) -> None:
        """Add the gradients of a batch."""
        shape = shape_of(batch, self._longest)
        if shape not in self._memory:
            self._memory[shape] = FixedBatch(batch, shape, self.device)
        memory = self._memory[shape]
        memory.load(batch)
        self._run(shape, lambda: self._total.add_(self.backward(memory.batch(), self._tokens)))

    def _optimize(self) -> None:
        if self.device.type == "cuda":
            captured = capturing(self._norm)
            for group in self.optimizer.param_groups:
                if "capturable" in group:  # else Adam warns of eager steps, or refuses captured ones
                    group["capturable"] = captured
        self.step(self._norm, self._rate)
        self.optimizer.zero_grad(set_to_none=False)

    def _run(self, name: Hashable, step: Step) -> None:
        """Run a part: eagerly for the first time, from a graph later."""
        if name not in self._recorded:
            if self._recorder is not None and name not in self._warm:
                self._recorder.warm_up(step)
                self._check_places()  # it may be the first to bring a gradient
                self._warm.add(name)
                return
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # a capture can take no memory that eager steps have left in the cache
            recorded = None if self._recorder is None else capture_or_warn(self._recorder, step, "training")
            if recorded is None:
                self._recorder = None
                self._forget()
                step()
                return
            # Buffers that are replaced later, as a table of positions that grows, are still those that it reads.
            self._recorded[name] = recorded, list(self.module.buffers())
        self._recorded[name][0].replay()

    def _check_places(self) -> None:
        """Forget all graphs where parameters or gradients have moved, or any capture has failed."""
        tensors = [*self.parameters, *(p.grad for p in self.parameters if p.grad is not None)]
        places = [x.data_ptr() for x in tensors]
        places.append(0 if self._recorder is None else self._recorder.failures)
        if places != self._places:
            self._forget()
            self._places = places

    def _forget(self) -> None:
        self._recorded.clear()
        self._warm.clear()
