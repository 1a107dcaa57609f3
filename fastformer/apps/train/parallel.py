"""The model of several processes: DistributedDataParallel, or FSDP2, where each process holds its part of it.

Sharded parameters, gradients and optimiser states are DTensors; all else here is a plain tensor that every process has.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastformer.apps.train.processes import Processes


def wrap(step: nn.Module, how: str, processes: Processes) -> nn.Module:
    """The module that computes the loss of a share, such that its gradients become the mean over all processes.

    Parameters start from process 0's.

    Args:
        step: holds the model; its forward calls all that uses parameters.
        how: "ddp", each process holds everything (DistributedDataParallel); "fsdp", each holds its part of
            parameters, gradients and optimiser state, and the whole model during forward and backward (FSDP2).
            One unit, because a stack whose layers gather their own parameters must run with padding.
        processes: that train it; one process alone gets `step` itself.
    """
    if processes.world == 1:
        return step
    processes.wait()
    with processes.contact():
        if how == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            tensors = (*step.parameters(), *step.buffers())
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)
            fully_shard(step, mesh=init_device_mesh(tensors[0].device.type, (processes.world,)))
            return step
        wrapped = nn.parallel.DistributedDataParallel(step)
        # Position tables grow with the longest sentence seen, so they may differ between processes. The argument
        # of this name is deprecated in torch 2.13.
        wrapped.broadcast_buffers = False
        return wrapped


@contextmanager
def exchange(step: nn.Module, processes: Processes, last: bool) -> Iterator[None]:
    """Forward and backward of one of a step's batches; gradients are exchanged after the `last` only."""
    if processes.world == 1:
        yield
        return
    with processes.contact():
        if isinstance(step, nn.parallel.DistributedDataParallel):
            if last:
                yield
            else:
                with step.no_sync():
                    yield
        else:
            step.set_requires_gradient_sync(last)  # type: ignore[operator]
            yield


@contextmanager
def gathered(step: nn.Module, processes: Processes) -> Iterator[None]:
    """Every process holds all parameters within the block, so that one of them may use the model alone."""
    if not hasattr(step, "unshard"):
        yield
        return
    with processes.contact():
        step.unshard()  # type: ignore[operator]
    try:
        yield
    finally:
        step.reshard()  # type: ignore[operator]


def whole_norm(norm: Tensor, processes: Processes) -> Tensor:
    """A norm of gradients that all processes hold, or of which each holds its part, as a plain tensor."""
    if not hasattr(norm, "full_tensor"):
        return norm
    with processes.contact():
        whole: Tensor = norm.full_tensor()
    return whole


def whole_weights(model: nn.Module, processes: Processes) -> dict[str, Tensor]:
    """The state dict with whole tensors (parts stay in processes other than 0); tied ones share memory."""
    tensors, copies = distinct_weights(model)
    whole = {name: whole_tensors(tensor, processes) for name, tensor in tensors.items()}
    return {name: whole[copies.get(name, name)] for name in model.state_dict()}


def distinct_weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict with each tied parameter under its first name only, and {another name: first name}."""
    owners = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    tensors, copies = {}, {}
    for name, tensor in model.state_dict().items():
        kept = first.setdefault(id(owners.get(name, tensor)), name)
        if kept == name:
            tensors[name] = tensor
        else:
            copies[name] = kept
    return tensors, copies


def whole_tensors(value: Any, processes: Processes) -> Any:
    """A nested state with its sharded tensors put together; process 0 gets them on the CPU, others only send."""
    if isinstance(value, Mapping):
        return {key: whole_tensors(each, processes) for key, each in value.items()}
    if not hasattr(value, "full_tensor"):
        return value
    with processes.contact():
        tensor = value.full_tensor()
    return tensor.cpu() if processes.is_main else tensor.new_empty(0)


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Take the part of this process of a tensor that all have, sharded as `like` is; all of it where that is not."""
    if not hasattr(like, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def empty_part(shape: torch.Size, dtype: torch.dtype, like: Tensor) -> Tensor:
    """An uninitialised tensor of `shape`, of which this process holds the part that it holds of `like`."""
    if not hasattr(like, "device_mesh"):
        return torch.empty(shape, dtype=dtype, device=like.device)
    from torch.distributed.tensor import DTensor, empty

    assert isinstance(like, DTensor)
    return empty(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)
