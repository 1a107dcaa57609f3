"""The model of several processes: DistributedDataParallel, or FSDP2, where each process holds its part of it.

Sharded parameters, gradients and optimizer states are DTensors; all else here is a plain tensor that every process has.

With FSDP2 each layer of a stack is gathered by itself, while the layer before it computes, and what is left
(embeddings, output, last norms) at once before the first. In 16 bits, fastformer's layers are gathered in 16 bits: half
the communication, and of their matrices the very numbers that autocast would make. Gains and biases of their norms,
which autocast reads in fp32, are rounded, too: FSDP2 has one dtype a unit. The rest is gathered in fp32, as are other
layers, which only autocast knows how to mix. Gradients are added up in fp32, and what the optimizer changes is fp32.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
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
        step: holds the model; its forward calls all that uses parameters.
        how: "ddp", each process holds everything (DistributedDataParallel); "fsdp", each holds its part of
            parameters, gradients and optimizer state, and gathers a layer where it is needed (FSDP2).
        processes: that train it; one process alone gets `step` itself.
        dtype: of autocast; None: it is off.
        compiled: whether torch.compile has the model: all of it is then gathered at once, since a graph would end at
            each layer (11 graphs of 2 layers, each layer compiled for itself).
    """
    if processes.world == 1:
        return step
    processes.wait()
    with processes.contact():
        if how == "fsdp":
            _shard(step, [] if compiled else _layers(step), processes.world, dtype)
            return step
        wrapped = nn.parallel.DistributedDataParallel(step)
        # Position tables grow with the longest sentence seen, so they may differ between processes. The argument
        # of this name is deprecated in torch 2.13.
        wrapped.broadcast_buffers = False
        return wrapped


def _shard(step: Any, layers: Sequence[Any], world: int, dtype: torch.dtype | None) -> None:
    """Shard each of these layers by itself, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    tensors = (*step.parameters(), *step.buffers())
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(tensors[0].device.type, (world,))
    for layer in reversed(layers):  # what lies within another first
        known = isinstance(layer, TransformerEncoderLayer | TransformerDecoderLayer)
        low = known and dtype is not None and all(p.dtype == torch.float32 for p in layer.parameters())
        # Without casts of its inputs: sums of layers stay in fp32, as autocast has them.
        policy = (
            MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False) if low else MixedPrecisionPolicy()
        )
        # Backward begins with the last one, which stays gathered until then.
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layer is not layers[-1])
    fully_shard(step, mesh=mesh)
    for unit, following in pairwise((step, *layers)):
        unit.set_modules_to_forward_prefetch([following])  # backward finds its order by itself


def _layers(step: nn.Module) -> list[Any]:
    """Return the layers of all stacks, but those that share a parameter with something outside of them."""

    def holders(module: nn.Module) -> Counter[int]:
        return Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))

    everywhere = holders(step)
    stacks = [each for each in step.modules() if isinstance(each, nn.TransformerEncoder | nn.TransformerDecoder)]
    layers = dict.fromkeys(layer for stack in stacks for layer in stack.layers)
    return [layer for layer in layers if all(everywhere[p] == count for p, count in holders(layer).items())]


@contextmanager
def exchange(step: nn.Module, processes: Processes, last: bool) -> Iterator[None]:
    """Exchange gradients of the block's forward and backward only after the `last` batch of a step."""
    if processes.world == 1:
        yield
        return
    with processes.contact():
        if not isinstance(step, nn.parallel.DistributedDataParallel):
            step.set_requires_gradient_sync(last)  # type: ignore[operator]
            yield
            return
        with nullcontext() if last else step.no_sync():
            yield


@contextmanager
def gathered(step: nn.Module, processes: Processes) -> Iterator[None]:
    """Let every process hold all parameters for the block, so that one of them may use the model alone."""
    units: list[Any] = [unit for unit in step.modules() if hasattr(unit, "unshard")]
    with processes.contact():
        for unit in units:
            unit.unshard()
    try:
        with _unhooked(units):
            yield
    finally:
        for unit in units:
            unit.reshard()


@contextmanager
def _unhooked(units: Sequence[nn.Module]) -> Iterator[None]:
    """Take FSDP2's hooks off the units for the block.

    FSDP2 notes each call of a layer, without gradients too, and gathers in backward by what it noted: a process that
    validated alone would gather something else than the others.
    """
    hooks = [(unit, name) for unit in units for name in ("_forward_pre_hooks", "_forward_hooks")]
    before = [getattr(unit, name) for unit, name in hooks]
    try:
        for (unit, name), installed in zip(hooks, before, strict=True):
            owners = {key: type(getattr(hook, "__self__", None)).__name__ for key, hook in installed.items()}
            others = {key: hook for key, hook in installed.items() if owners[key] != "FSDPState"}
            setattr(unit, name, OrderedDict(others))
        yield
    finally:
        for (unit, name), installed in zip(hooks, before, strict=True):
            setattr(unit, name, installed)


def whole_norm(norm: Tensor, processes: Processes) -> Tensor:
    """Return a norm of gradients as a plain tensor, whether all processes hold them or each its part."""
    if not hasattr(norm, "full_tensor"):
        return norm
    with processes.contact():
        whole: Tensor = norm.full_tensor()
    return whole


def whole_weights(model: nn.Module, processes: Processes) -> dict[str, Tensor]:
    """Return the state dict with whole tensors; tied parameters stay one tensor. See `whole_tensors`."""
    owners: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    whole: dict[int, Tensor] = {}
    found = {}
    for name, tensor in model.state_dict().items():
        owner = id(owners.get(name, tensor))
        if owner not in whole:
            whole[owner] = whole_tensors(tensor, processes)
        found[name] = whole[owner]
    return found


def whole_tensors(value: Any, processes: Processes) -> Any:
    """Gather the sharded tensors of a nested state: on the CPU of process 0, empty ones in the others."""
    if isinstance(value, Mapping):
        return {key: whole_tensors(each, processes) for key, each in value.items()}
    if not hasattr(value, "full_tensor"):
        return value
    with processes.contact():
        tensor = value.full_tensor()
    return tensor.cpu() if processes.is_main else tensor.new_empty(0)


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a tensor that all have, sharded as `like` is; the tensor if `like` is not."""
    if not hasattr(like, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
