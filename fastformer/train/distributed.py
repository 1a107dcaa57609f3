"""Several processes that train one model, started by torchrun; the only module of the loop that knows of them.

Every process goes through the same batches and takes its share of the sentences of each. The loss of a step is the sum
over all shares, divided by the tokens of all, so the gradient is that of one process, however unequal the shares are.
What follows from the data alone (its order, tokens, position) is computed everywhere and never sent; what follows from
the clock, from signals or from validation is decided by process 0 and sent to the others.

There are two groups of connections. Gradients go over torch's default group (NCCL between GPUs, gloo between CPUs), on
which a process that does not answer for `TIMEOUT` ends the run. Decisions go over a gloo group of our own, so that no
GPU is waited for; there, others may wait as long as a process reads data, learns a vocabulary, validates or saves.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

# Between two steps, processes differ by the length of a batch and by what one of them compiles.
TIMEOUT = timedelta(seconds=60)
_PATIENCE = timedelta(days=7)

# What gloo and NCCL say when the other end is gone.
_LOST = ("Connection closed", "Connection reset", "Broken pipe", "imed out", "remote process")

Value = TypeVar("Value")


class ProcessError(RuntimeError):
    """Processes that do not work together: another one is gone, or failed and has said why itself (`reported`)."""

    def __init__(self, message: str, reported: bool = False) -> None:
        super().__init__(message)
        self.reported = reported


class Processes:
    """The processes that train one model: `rank` of `world`. Made without arguments, it is one process alone.

    Use `Processes.current()`. Every method is to be called by all processes, in the same order: whether it is called
    must never depend on what is on the disk, which process 0 may have changed before another looks.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        self._group: Any = None
        self._control: Any = None

    @classmethod
    def current(cls) -> "Processes":
        """The processes of torch's default group; one alone where there is none.

        Raises:
            ProcessError: torchrun started several, but they were not joined: each would train a model of its own.
        """
        global _joined
        if not dist.is_available() or not dist.is_initialized():
            if _launched():
                raise ProcessError("torchrun started several processes: train within `fastformer.train.join_processes`")
            return cls()
        if dist.get_world_size() == 1:
            return cls()
        if _joined._group is not dist.group.WORLD:
            _joined = cls(dist.get_rank(), dist.get_world_size())
            _joined._group = dist.group.WORLD
            with _joined._contact():
                _joined._control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        return _joined

    @property
    def is_main(self) -> bool:
        """Whether this is the process that validates, writes and shows."""
        return self.rank == 0

    def on_main(self, function: Callable[[], Value]) -> Value:
        """What `function` gives in process 0, where alone it runs; a small value. Where it raises, nobody goes on.

        Raises:
            ProcessError: in the others, when it raised in process 0.
        """
        if self.world == 1:
            return function()
        answer: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_main:
            try:
                answer[0] = function()
            except Exception as error:
                failure, answer[1] = error, f"{type(error).__name__}: {error}"
        with self._contact():
            dist.broadcast_object_list(answer, src=0, group=self._control)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            raise ProcessError(f"process 0 failed: {answer[1]}", reported=True)
        result: Value = answer[0]
        return result

    def agree(self, seconds: float, stop: bool) -> tuple[float, bool]:
        """The seconds of process 0, and whether any process was asked to stop."""
        if self.world == 1:
            return seconds, stop
        said = torch.tensor([seconds if self.is_main else 0.0, float(stop)], dtype=torch.float64)
        with self._contact():
            work = dist.all_reduce(said, group=self._control, async_op=True)
            assert work is not None
            work.wait(TIMEOUT)
        return float(said[0]), bool(said[1])

    def wait(self) -> None:
        """Wait until all processes are here, for as long as one reads its data."""
        if self.world > 1:
            with self._contact():
                dist.barrier(group=self._control)

    def sum(self, x: Tensor) -> None:
        """Add up a tensor of all processes, in place; on a GPU, nothing is waited for."""
        if self.world > 1:
            with self._contact():
                dist.all_reduce(x)

    def total(self, norm: Tensor) -> Tensor:
        """A norm of gradients that all processes hold, or of which each holds its part, as a plain tensor."""
        if not hasattr(norm, "full_tensor"):
            return norm
        with self._contact():
            whole: Tensor = norm.full_tensor()
        return whole

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes in process 0, an empty list in the others."""
        if self.world == 1:
            return [value]
        values: list[Any] | None = [None] * self.world if self.is_main else None
        with self._contact():
            dist.gather_object(value, values, dst=0, group=self._control)
        return values or []

    def share(self, batch: Any) -> Any:
        """Take the share of this process of a batch; None where it gets no sentence.

        Raises:
            TypeError: the batch cannot be shared.
        """
        if self.world == 1:
            return batch
        if not hasattr(batch, "share"):
            raise TypeError(
                f"batches: {type(batch).__name__} has no method share(rank, world), which {self.world} processes need"
            )
        return batch.share(self.rank, self.world)

    def seed(self, seed: int, step: int = 0) -> int:
        """The seed of this process's own generators: `seed` itself in process 0, another one in each of the others."""
        return seed if self.is_main else int(np.random.SeedSequence((seed, self.rank, step)).generate_state(1)[0])

    def wrap(self, step: nn.Module, parallel: str) -> nn.Module:
        """The module that computes the loss of a share, such that its gradients become the mean over all processes.

        Parameters start from process 0's.

        Args:
            step: holds the model; its forward calls all that uses parameters.
            parallel: "ddp", each process holds everything (DistributedDataParallel); "fsdp", each holds its part of
                parameters, gradients and optimiser state, and the whole model during forward and backward (FSDP2).
                One unit, because a stack whose layers gather their own parameters must run with padding.
        """
        if self.world == 1:
            return step
        self.wait()
        with self._contact():
            if parallel == "fsdp":
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import fully_shard

                tensors = (*step.parameters(), *step.buffers())
                for tensor in tensors:
                    dist.broadcast(tensor.detach(), src=0)
                fully_shard(step, mesh=init_device_mesh(tensors[0].device.type, (self.world,)))
                return step
            wrapped = nn.parallel.DistributedDataParallel(step)
            # Position tables grow with the longest sentence seen, so they may differ between processes. The argument
            # of this name is deprecated in torch 2.13.
            wrapped.broadcast_buffers = False
            return wrapped

    @contextmanager
    def gradients(self, step: nn.Module, last: bool) -> Iterator[None]:
        """Forward and backward of one of a step's batches; gradients are exchanged after the `last` only."""
        if self.world == 1:
            yield
            return
        with self._contact():
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
    def whole(self, step: nn.Module) -> Iterator[None]:
        """Every process holds all parameters within the block, so that one of them may use the model alone."""
        if not hasattr(step, "unshard"):
            yield
            return
        with self._contact():
            step.unshard()  # type: ignore[operator]
        try:
            yield
        finally:
            step.reshard()  # type: ignore[operator]

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The state dict with whole tensors (parts stay in processes other than 0); tied ones share memory."""
        owners = dict(model.named_parameters(remove_duplicate=False))
        found: dict[int, Any] = {}
        weights = {}
        for name, tensor in model.state_dict().items():
            key = id(owners.get(name, tensor))
            weights[name] = found[key] if key in found else found.setdefault(key, self.full(tensor))
        return weights

    def full(self, value: Any) -> Any:
        """A nested state with its sharded tensors put together; process 0 gets them on the CPU, others only send."""
        if isinstance(value, Mapping):
            return {key: self.full(each) for key, each in value.items()}
        if not hasattr(value, "full_tensor"):
            return value
        with self._contact():
            tensor = value.full_tensor()
        return tensor.cpu() if self.is_main else tensor.new_empty(0)

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """Turn torch's many errors of lost connections into one that says what happened."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if not isinstance(error, dist.DistNetworkError) and not any(words in text for words in _LOST):
                raise
            what = f"did not answer for {TIMEOUT.seconds} s" if "imed out" in text else "ended"
            raise ProcessError(
                f"another process of this run {what}; --resume goes on from the last checkpoint "
                f"({text.splitlines()[0][:160]})"
            ) from error


_joined = Processes()


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Take the part of this process of a tensor that all have, sharded as `like` is; all of it where that is not."""
    if not hasattr(like, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _launched() -> bool:
    """Whether torchrun, or another launcher that speaks its language, started several processes."""
    return all(name in os.environ for name in ("RANK", "MASTER_ADDR")) and int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_device(device: str) -> str:
    """The device of this process: under torchrun, "cuda" is the GPU of its number on this machine (LOCAL_RANK).

    Raises:
        ValueError: one GPU was named for several processes, or there are fewer GPUs than processes.
    """
    if not _launched() or torch.device(device).type != "cuda":
        return device
    if torch.device(device).index is not None:
        raise ValueError(f"device {device!r} is one GPU, but torchrun started several processes; say cuda")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"process {index} of this machine has no GPU of its own: torch sees {count}; start fewer")
    return f"cuda:{index}"


@contextmanager
def join_processes(device: torch.device | str = "cpu") -> Iterator[Processes]:
    """Connect the processes that torchrun started, for the block; without torchrun, it is one process alone.

    Args:
        device: of this process. NCCL connects GPUs, gloo CPUs.

    Raises:
        ProcessError: the others do not answer.
        ValueError: this torch cannot do it.
    """
    if not _launched():
        yield Processes()
        return
    if not dist.is_available():
        raise ValueError("torchrun started several processes, but this torch was built without torch.distributed")
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    yield Processes.current()
    # Not after an error: the others may be anywhere, and the end of this process closes its connections.
    dist.destroy_process_group()


def describe_process() -> str:
    """Who speaks, for messages: empty in a process alone and in process 0."""
    rank = os.environ.get("RANK", "0") if _launched() else "0"
    return "" if rank == "0" else f"process {rank} on {socket.gethostname()}: "
