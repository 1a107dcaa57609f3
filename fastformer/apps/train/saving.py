"""How processes write one checkpoint: process 0 all of it, or, in a sharded one, each the tensors that it holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fastformer.apps.train.checkpoint import (
    IN_MODEL,
    IN_OPTIMIZER,
    SHARDS,
    file_facts,
    flat_state,
    write_checkpoint,
)
from fastformer.apps.train.checkpoint_folder import AVERAGE, CheckpointFolder, name_of
from fastformer.apps.train.parallel import distinct_weights, whole_tensors, whole_weights
from fastformer.apps.train.processes import Processes
from fastformer.apps.train.shards import SUFFIX, write_shards
from fastformer.apps.train.update import Update
from fastformer.apps.train.weights import check_storable


class CheckpointWriter:
    """Writes model and optimizer into `folder`; all processes call it. `architecture` is stored in each checkpoint.

    Raises ValueError for a model whose state no checkpoint can hold (`get_extra_state`), before it is trained.
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
        """Write a checkpoint, and return its folder.

        Args:
            step: of the run.
            state: plain values that resuming needs besides model and optimizer; None: the model is an average.
            metrics: of its validation, if there was one.
            best: the metric's value, if it is the best so far.
            name: of its folder; None: "average" or that of its step.
            sharded: each process writes its part.

        Raises:
            OSError: it could not be written; the earlier ones are as they were.
        """
        name = name or (AVERAGE if state is None else name_of(step))
        if sharded:
            return self._save_parts(step, state, metrics, best, name)
        weights = whole_weights(self._model, self._processes)
        if state is not None:
            optimizer = whole_tensors(self._update.optimizer.state_dict()["state"], self._processes)
            state = {**state, "optimizer": optimizer}
        return self._processes.on_main(
            lambda: self._folder.save(step, weights, state, self._architecture, metrics, best, name)
        )

    def _save_parts(
        self, step: int, state: Mapping[str, Any] | None, metrics: Any, best: float | None, name: str
    ) -> Path:
        processes, folder = self._processes, self._folder

        def begin() -> Path:
            with folder.explained(name):
                return folder.begin(name)

        def complete(failure: OSError | None, shards: dict[str, Any]) -> Path:
            with folder.explained(name):
                if failure is not None:
                    raise failure
                write_checkpoint(new, step, None, state, self._architecture, metrics, shards, copies)
                return folder.complete(new, best)

        new = processes.on_main(begin)
        weights, copies = distinct_weights(self._model)
        if not processes.is_main:  # buffers may differ between processes; those of process 0 count
            parameters = dict(self._model.named_parameters())
            weights = {key: tensor for key, tensor in weights.items() if key in parameters}
        tensors: dict[str, Tensor] = {IN_MODEL + key: tensor for key, tensor in weights.items()}
        if state is not None:
            optimizer = flat_state(self._update.optimizer.state_dict()["state"])
            tensors |= {IN_OPTIMIZER + key: tensor for key, tensor in optimizer.items()}
        failure, shards = None, {}
        try:
            with processes.contact():
                write_shards(new / SHARDS, tensors, processes.control)
        except OSError as error:  # in all processes
            failure = error
        else:
            files = sorted((new / SHARDS).glob(f"*{SUFFIX}"))[processes.rank :: processes.world]
            facts = {f"{SHARDS}/{path.name}": file_facts(path) for path in files}
            shards = {key: fact for each in processes.gather(facts) for key, fact in each.items()}
        return processes.on_main(lambda: complete(failure, shards))
