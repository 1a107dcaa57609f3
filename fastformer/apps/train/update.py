"""`Update`: one step of the optimizer, from a group of batches to new parameters.

The gradient is that of the mean over all real tokens of the step's batches, in all processes. It does not depend on how
tokens are divided into batches, accumulated and shared between processes.

precision="fp16" multiplies the loss by a scale that keeps small gradients above fp16's smallest number
(torch.amp.GradScaler; Micikevicius et al. 2018, Mixed Precision Training, section 3.2): a step whose gradients overflow
is skipped, and the scale halved.

compile compiles the model's forward and backward as one graph for batches of all shapes. Only training steps call the
compiled model, so a run may be resumed with or without compilation. The loss is not compiled: its large product is a
fused op already.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.train.config import TrainConfig
from fastformer.apps.train.parallel import local_shard, set_gradient_sync, wrap
from fastformer.apps.train.processes import Processes
from fastformer.host.autocast import cast_parameters_together
from fastformer.host.autograd_function import draw_seeds_together
from fastformer.nn.inspection import has_hooks
from fastformer.packing import Layout

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Step(nn.Module):
    """Model and loss as one module, whose forward contains every use of a parameter."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], backend: str | None) -> None:
        super().__init__()
        self.model, self._loss = model, loss
        # A list, whose module is no second submodule.
        self._compiled: list[Any] = [] if backend is None else [torch.compile(model, dynamic=True, backend=backend)]

    def forward(self, batch: Any) -> Tensor:
        """Return the summed loss."""
        if not self._compiled:
            return self._loss(self.model, batch)
        sides = getattr(batch, "SIDES", ())
        lengths = {each.lengths: getattr(batch, each.inputs[0]).device for each in sides}
        # In place of lengths, which the compiler cannot read.
        layouts = {name: Layout.from_lengths(getattr(batch, name), device) for name, device in lengths.items()}
        return self._loss(self._compiled[0], replace(batch, **layouts) if layouts else batch)


class Update:
    """The optimizer and the computation of its gradients: call `gradients`, check the returned norm, then `apply`.

    `module` computes the loss of a batch, wrapped for several processes; `parameters` in the optimizer's order;
    `scaler`: of the loss, with fp16.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Any], Tensor], config: TrainConfig, processes: Processes
    ) -> None:
        self.device = next(model.parameters()).device
        self._known = _runs_known_code(model, loss)  # before `wrap` changes classes
        dtype, compiled = _PRECISIONS.get(config.precision), config.compile is not None
        self.module = wrap(_Step(model, loss, config.compile), config.parallel, processes, dtype, compiled)
        self.optimizer = build_optimizer(model, config)
        self.parameters: list[Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._config, self._processes = config, processes
        # Several processes exchange gradients parameter by parameter; a compiler casts on its own.
        together = self._known and processes.world == 1 and not compiled
        self._cast = [x for x in model.modules() if together and isinstance(x, nn.Linear | nn.MultiheadAttention)]
        self._called = list(model.modules())
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss, with fp16; waits for the device."""
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the configured precision, for training and for validation."""
        precision = self._config.precision
        return torch.autocast(self.device.type, _PRECISIONS.get(precision), enabled=precision in _PRECISIONS)

    def gradients(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor, int]:
        """Run forward and backward of the batches of a step.

        Returns:
            The summed loss, the norm of the gradient (both of all processes, scalars on the device) and the tokens.
        """
        tokens = sum(batch.tokens for batch in batches)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            share, counts = self._processes.share(batch)
            set_gradient_sync(self.module, last=number == len(batches))
            loss = self.backward(share.to(self.device, non_blocking=True), max(tokens, 1) if counts else math.inf)
            total += loss if counts else 0.0
        self._processes.sum(total)
        self.scaler.unscale_(self.optimizer)
        return total, self.norm(), tokens

    def backward(self, batch: Any, tokens: float | Tensor) -> Tensor:
        """Add the gradients of a batch's loss, divided by the tokens of the step; return the loss without a gradient.

        tokens: at least 1; infinity for gradients of 0.
        """
        with ExitStack() as stack:
            stack.enter_context(self.autocast())
            if self.runs_known_code():
                stack.enter_context(cast_parameters_together(self._cast, _PRECISIONS.get(self._config.precision)))
                stack.enter_context(draw_seeds_together())
            loss: Tensor = self.module(batch)
        # DDP and FSDP2 average the gradients of the processes, but a step needs the sum.
        self.scaler.scale(loss * self._processes.world / tokens).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def runs_known_code(self) -> bool:
        """Return whether only code of torch and fastformer runs in the model, and no hook."""
        return self._known and not has_hooks(self._called)  # 40 us for 158 modules; hooks can be added at any time

    def norm(self) -> Tensor:
        """Return the norm of the gradients of all processes, a scalar."""
        norm: Any = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]

    def apply(self, norm: Tensor, rate: float) -> None:
        """Clip the gradients, whose norm is `norm`, and change the parameters by them at the learning rate `rate`."""
        self.step(norm, rate)
        self.optimizer.zero_grad()

    def step(self, norm: Tensor, rate: float | Tensor) -> None:
        """Clip and change the parameters as `apply`, but keep the gradients."""
        if self._config.clip_norm:
            nn.utils.clip_grads_with_norm_(self.parameters, self._config.clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def load_state_dict(self, optimizer: dict[int, dict[str, Any]], scaler: dict[str, Any]) -> None:
        """Continue from `Checkpoint.optimizer_state` and `scaler`'s; a process takes its shard of whole tensors.

        Learning rate, weight decay and other options are those of the current configuration, not of the saved one.
        """
        for index, p in enumerate(self.parameters):
            for key, x in optimizer.get(index, {}).items():
                # The parameter's strides: fused optimizers read in memory order. The count of steps is a scalar.
                strides = torch.empty(p.shape, device="meta").stride() if hasattr(p, "device_mesh") else p.stride()
                if x.dim() and x.stride() != strides:
                    x = torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)
                optimizer[index][key] = local_shard(x, p) if x.dim() else x
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": optimizer, "param_groups": groups})
        _fill_momentum(self.optimizer)
        if scaler and self.scaler.is_enabled():
            self.scaler.load_state_dict(scaler)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW (decoupled weight decay), Adam (decay added to the gradient) or SGD with momentum.

    Weight decay applies to parameters of two and more dimensions, embeddings included, not to biases and norms.
    PyTorch's fused implementations are used on every device: one AdamW step over 3.4 M parameters took 2.9 ms on one
    CPU core, 12.6 ms with the for-each and the plain loop implementations (torch 2.13).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("model has no parameter that requires a gradient")
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        sharded = any(hasattr(p, "device_mesh") for p in parameters)  # torch 2.13 has no fused SGD for DTensors
        sgd = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=not sharded)
        _fill_momentum(sgd)
        return sgd
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Set momenta of SGD that do not exist yet to 0.

    torch's fused step (2.13) allocates them uninitialised, and leaves them so if fp16 skips it. It also fails if only
    some of the parameters have one.
    """
    for group in optimizer.param_groups:
        for p in group["params"] if group.get("momentum") else ():
            optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))


def _runs_known_code(model: nn.Module, loss: Any) -> bool:
    """Return whether only code of torch and fastformer runs in a forward pass, by classes, functions and the loss.

    Other code may write to a parameter's `.data` in the middle of a forward pass, freeze the parameter for a while, or
    seed the generator to drop the same elements twice.
    """
    functions = [loss, *(value for module in model.modules() for value in vars(module).values() if callable(value))]
    functions = [function.func if isinstance(function, partial) else function for function in functions]
    modules = [getattr(function, "__module__", None) for function in (*functions, *map(type, model.modules()))]
    return all(str(name).partition(".")[0] in ("fastformer", "torch") for name in modules)
