"""Distribute a model over several processes: DistributedDataParallel, or FSDP2, which shards it.

Sharded parameters, gradients and optimizer states are DTensors; all other tensors are plain, and in every process.
With FSDP2 each layer of a stack is gathered by itself, while the layer before it computes. All other parameters
(embeddings, output, last norms) are gathered at once before the first layer.

In 16 bits, fastformer's layers are gathered in 16 bits: half the communication, and the same matrices as autocast would
compute. Gains and biases of their norms, which autocast reads in fp32, are rounded, too, because FSDP2 has one dtype a
unit. All else is gathered in fp32. Gradients are reduced in fp32, and the optimizer updates fp32 parameters.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastformer.apps.train.processes import Processes
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer


def wrap(
    step: nn.Module, how: str, processes: Processes, dtype: torch.dtype | None = None, compiled: bool = False
) -> nn.Module:
    """Return the module that computes the loss of a share, such that its gradients become the mean over all processes.

    Parameters start from those of process 0.

    Args:
        step: module that holds the model and uses parameters only in its forward.
        how: "ddp", each process holds everything (DistributedDataParallel); "fsdp", each holds its shard of
            parameters, gradients and optimizer state, and gathers a layer where it is needed (FSDP2).
        processes: that train the model; one process alone gets `step` itself.
        dtype: of autocast; None: autocast is off.
        compiled: whether the model is compiled. It is then gathered at once, because a graph would end at each layer
            (11 graphs for 2 layers, each layer compiled separately).
    """
    if processes.world == 1:
        return step
    processes.wait()
    if how == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(step)
        # Position tables grow with the longest sentence seen, so they may differ between processes. The constructor's
        # argument broadcast_buffers is deprecated in torch 2.13.
        wrapped.broadcast_buffers = False
        return wrapped
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for tensor in (*step.parameters(), *step.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(next(step.parameters()).device.type, (processes.world,))
    for layer in [] if compiled else reversed(_layers(step)):  # nested layers first
        known = isinstance(layer, TransformerEncoderLayer | TransformerDecoderLayer)
        low = known and dtype is not None and all(p.dtype == torch.float32 for p in layer.parameters())
        # Inputs are not cast: residual sums stay in fp32, as under autocast.
        in_16_bits = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        fully_shard(layer, mesh=mesh, mp_policy=in_16_bits if low else MixedPrecisionPolicy())
    fully_shard(step, mesh=mesh)
    return step


def _layers(step: nn.Module) -> list[nn.Module]:
    """Return the layers of all stacks, except those that share a parameter with a module outside of them."""

    def uses(module: nn.Module) -> Counter[int]:
        return Counter(id(p) for child in module.modules() for p in child.parameters(recurse=False))

    all_uses = uses(step)
    stacks = [each for each in step.modules() if isinstance(each, nn.TransformerEncoder | nn.TransformerDecoder)]
    layers = dict.fromkeys(layer for stack in stacks for layer in stack.layers)
    return [layer for layer in layers if all(all_uses[p] == count for p, count in uses(layer).items())]


def set_gradient_sync(step: Any, last: bool) -> None:
    """Let the next forward and backward exchange gradients only if it is of the `last` batch of a step."""
    if isinstance(step, nn.parallel.DistributedDataParallel):
        step.require_backward_grad_sync = last  # as `no_sync` sets it
    elif hasattr(step, "set_requires_gradient_sync"):
        step.set_requires_gradient_sync(last)


@contextmanager
def unsharded_parameters(step: nn.Module) -> Iterator[None]:
    """Gather all parameters in every process for the block, so that one process may use the model alone.

    FSDP2's hooks are removed meanwhile. They record each call of a layer, even without gradients, and gather in
    backward in the recorded order: a process that validated alone would gather other layers than the other processes.
    """
    units: list[Any] = [unit for unit in step.modules() if hasattr(unit, "unshard")]
    all_hooks = [(hooks, dict(hooks)) for unit in units for hooks in (unit._forward_pre_hooks, unit._forward_hooks)]
    for unit in units:
        unit.unshard()
    try:
        for hooks, saved in all_hooks:
            for key, hook in saved.items():
                if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
                    del hooks[key]
        yield
    finally:
        for hooks, saved in all_hooks:
            hooks.clear()  # so that their order stays
            hooks.update(saved)
        for unit in units:
            unit.reshard()


def whole_weights(model: nn.Module, processes: Processes) -> dict[str, Tensor]:
    """Return the state dict with whole tensors; tied parameters stay one tensor. See `whole_tensors`."""
    tensors = model.state_dict(keep_vars=True)  # tied parameters are one object
    whole = {id(tensor): whole_tensors(tensor.detach(), processes) for tensor in tensors.values()}
    return {name: whole[id(tensor)] for name, tensor in tensors.items()}


def whole_tensors(value: Any, processes: Processes) -> Any:
    """Gather the sharded tensors of a nested state: on the CPU of process 0, empty ones in the others."""
    if isinstance(value, Mapping):
        return {key: whole_tensors(each, processes) for key, each in value.items()}
    if not hasattr(value, "full_tensor"):
        return value
    tensor = value.full_tensor()
    return tensor.cpu() if processes.is_main else tensor.new_empty(0)


def local_shard(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a whole tensor, sharded as `like`; the tensor itself if `like` is not sharded."""
    if not hasattr(like, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
