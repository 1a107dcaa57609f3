"""`fastformer evaluate`."""

from pathlib import Path

from fastformer.apps.cli.console import MAIN_RUN, Checkpoint, Device, RunFolder, Weights, app, choose_device
from fastformer.apps.cli.help import USE
from fastformer.apps.cli.parts import Parts, shared
from fastformer.settings import check_value


@shared(app, USE)
def evaluate(
    run: RunFolder = MAIN_RUN,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    weights: Weights = "fp32",
    *,
    parts: Parts,
) -> None:
    """Print how good a run's model is, on its own test data or on a file, and what was compared or counted."""
    parts.of(run)(run=run, checkpoint=checkpoint, device=choose_device(device, weights), weights=weights)


def split_of(split: str | None, source: Path | None) -> str:
    """The part of a run's data that --split names, unless --source is a file; raises ValueError for both or another."""
    if split is not None and source is not None:
        raise ValueError("give --split or --source, not both")
    split = split or "test"
    check_value("split", split, str, choices=("test", "valid"))
    return split
