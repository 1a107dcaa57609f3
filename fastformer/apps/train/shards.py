"""Tensors in parts: each process writes the parts that it holds, and any number of processes reads them again.

torch.distributed.checkpoint with safetensors files as its storage; each tells which part of which tensor it holds. The
library's other format has its table of contents as a pickle, which an untrusted checkpoint could use to run code.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.apps.train.weights import CheckpointError, apart

SUFFIX = ".safetensors"  # of every file in the folder that is read

# What reading a safetensors file with a wrong header, or with another list of parts than promised, may end in.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, RuntimeError, AssertionError)


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: Any = None) -> None:
    """Write the parts of tensors that this process holds; all processes of `group` do so together.

    Plain tensors, of which several processes have the same, are written by one of them.

    Args:
        folder: a new one, the same for all processes.
        tensors: DTensors, of which each process holds a part, or plain ones.
        group: of processes, for what is on the CPU; None: one process alone.

    Raises:
        OSError: in every process, naming the one that could not write and why.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    plain = apart({name: tensor for name, tensor in tensors.items() if not hasattr(tensor, "device_mesh")})
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _quiet():
            save({**tensors, **plain}, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        who = f"process {rank}: " if group is not None else ""
        raise OSError(f"{folder.name}: {who}{type(cause).__name__}: {' '.join(str(cause).split())}") from None


class Shards:
    """What `write_shards` wrote to a folder, from any number of processes.

    `tensors` says of each tensor its whole shape and its dtype.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files' headers.

        Raises:
            CheckpointError: they do not fit together.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.folder = folder
        self.files = sorted(folder.glob(f"*{SUFFIX}"))
        with self._readable():
            read = HuggingFaceStorageReader(str(folder)).read_metadata()
        tensors = read.state_dict_metadata.items()
        found = {name: each for name, each in tensors if isinstance(each, TensorStorageMetadata)}
        self.tensors = {name: (each.size, each.properties.dtype) for name, each in found.items()}
        for index, part in (read.storage_data or {}).items():
            if part.dtype != (dtype := self.tensors[index.fqn][1]):
                raise CheckpointError(f"{folder}: is damaged (parts of {index.fqn} are of {dtype} and {part.dtype})")
        # Shapes come from where the parts say that they lie, which may be anywhere.
        claimed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())
        stored = sum(path.stat().st_size for path in self.files)
        if claimed > stored:
            raise CheckpointError(f"{folder}: is damaged (tensors of {claimed:,} bytes in {stored:,} bytes of files)")
        for name, each in found.items():
            if sum(math.prod(part.sizes) for part in each.chunks) != math.prod(each.size):
                raise CheckpointError(f"{folder}: is damaged (the parts of {name} are not the whole of it)")

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors, on the CPU."""
        found = {name: torch.empty(self.tensors[name][0], dtype=self.tensors[name][1]) for name in names}
        self.read_into(found)
        return found

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors in place, each of the shape of the one stored under its name; of a DTensor, the part held."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with self._readable(), _quiet(), torch.no_grad():
            # Each process reads for itself, so nobody waits for anybody.
            load(dict(targets), storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        from safetensors import SafetensorError
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            yield
        except CheckpointException as error:
            causes = [f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()]
            raise CheckpointError(f"{self.folder}: is damaged ({' '.join(causes[0].split())})") from None
        except (SafetensorError, *_DAMAGED) as error:
            raise CheckpointError(f"{self.folder}: is damaged ({type(error).__name__}: {error})") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning of torch.distributed.checkpoint that it runs in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
