"""How processes write one checkpoint: process 0 all of it, or, in a sharded one, each the tensors that it holds.

Either way process 0 writes what is small, and the rename that completes the checkpoint.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fastformer.apps.train.checkpoint import MODEL, OPTIMIZER, SHARDS, file_facts
from fastformer.apps.train.checkpoint_folder import AVERAGE, CheckpointFolder, name_of
from fastformer.apps.train.parallel import distinct_weights, whole_tensors, whole_weights
from fastformer.apps.train.processes import Processes
from fastformer.apps.train.shards import write_shards
from fastformer.apps.train.update import Update
from fastformer.apps.train.weights import check_storable


class CheckpointWriter:
    """Writes model and optimiser into `folder`; all processes call it. `architecture` is stored in each checkpoint.

    Raises ValueError for a model that keeps what they cannot hold (`get_extra_state`), before it is trained.
    """

    def __init__(
        self, folder: CheckpointFolder, model: nn.Module, update: Update, processes: Processes, architecture: Any
    ) -> None:
        self._folder, self._model, self._update = folder, model, update
        self._processes, self._architecture = processes, architecture
        check_storable(model.state_dict())

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | None,
        metrics: Mapping[str, float],
        best: float | None = None,
        name: str | None = None,
        sharded: bool = False,
    ) -> Path:
        """Write a checkpoint.

        Args:
            step: of the run.
            state: what resuming needs besides the model and the optimiser; None: weights alone, an average.
            metrics: of its validation, if there was one.
            best: the metric's value, if it is the best so far.
            name: of its folder; None: "average" or that of its step.
            sharded: each process writes its part.

        Returns:
            The checkpoint's folder.

        Raises:
            OSError: it could not be written; the earlier ones are as they were.
        """
        write = self._save_parts if sharded else self._save_whole
        return write(name or (AVERAGE if state is None else name_of(step)), step, state, metrics, best)

    def _save_whole(
        self, name: str, step: int, state: Mapping[str, Any] | None, metrics: Any, best: float | None
    ) -> Path:
        weights = whole_weights(self._model, self._processes)
        if state is not None:
            state = {**state, "optimizer": whole_tensors(self._update.optimizer.state_dict(), self._processes)}
        return self._processes.on_main(
            lambda: self._folder.save(step, weights, state, self._architecture, metrics, best, name)
        )

    def _save_parts(
        self, name: str, step: int, state: Mapping[str, Any] | None, metrics: Any, best: float | None
    ) -> Path:
        processes, folder = self._processes, self._folder

        def begin() -> Path:
            with folder.explained(name):
                return folder.begin(name)

        def complete(failure: OSError | None, shards: dict[str, Any]) -> Path:
            with folder.explained(name):
                if failure is not None:
                    raise failure
                return folder.complete(new, step, state, self._architecture, metrics, best, shards, copies)

        new = processes.on_main(begin)
        tensors, copies = self._parts()
        if state is not None:
            optimizer, more = _without_tensors(self._update.optimizer.state_dict())
            state, tensors = {**state, "optimizer": optimizer}, tensors | more
        failure, shards = None, {}
        try:
            with processes.contact():
                write_shards(new / SHARDS, tensors, processes.control)
        except OSError as error:  # in all processes
            failure = error
        else:
            files = sorted((new / SHARDS).glob("*.safetensors"))[processes.rank :: processes.world]
            facts = {f"{SHARDS}/{path.name}": file_facts(path) for path in files}
            shards = {name: fact for each in processes.gather(facts) for name, fact in each.items()}
        return processes.on_main(lambda: complete(failure, shards))

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The weights to write, under their names in the shards, and the copies of tied ones."""
        tensors, copies = distinct_weights(self._model)
        if not self._processes.is_main:  # buffers may differ between processes; those of process 0 count
            parameters = dict(self._model.named_parameters())
            tensors = {name: tensor for name, tensor in tensors.items() if name in parameters}
        return {MODEL + name: tensor for name, tensor in tensors.items()}, copies


def _without_tensors(optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An optimiser's state without its larger tensors, and those under their names in the shards."""
    rest: dict[int, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for index, entries in optimizer["state"].items():
        rest[index] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim():
                tensors[f"{OPTIMIZER}{index}.{key}"] = value
            else:
                rest[index][key] = value
    return {**optimizer, "state": rest}, tensors
