"""The texts that a run holds out from training: data.json has their checksums, by which they are known again.

What is held out of a corpus is drawn by the number of its texts: where one has come, most of what would be called the
test data was trained on.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from fastformer.apps.runs.own_files import DATA
from fastformer.apps.system.foreign_files import check_path
from fastformer.apps.text import read_json

NAMES = {"valid": "validation", "test": "test"}  # in data.json, and in words


def checksum(texts: list[Any]) -> str:
    """Of lists, strings and numbers."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def check_held_out(folder: Path | str, part: str, texts: list[Any]) -> None:
    """Compare what a run would be evaluated on with what it held out; runs of earlier versions do not say.

    Args:
        folder: of the run.
        part: "valid" or "test".
        texts: what is there now, as the run's `texts_of` has it.

    Raises:
        ValueError: they differ, or data.json is damaged.
    """
    path = Path(folder) / DATA
    before = read_json(path, path.parent) if check_path(path, path.parent) else {}
    if not isinstance(before, dict):
        raise ValueError(f"{path}: damaged; it is no report of a run's data")
    if before.get(NAMES[part], now := checksum(texts)) != now:
        raise ValueError(
            f"{folder}: the {NAMES[part]} data differs from what this run was started with, and may hold what it was "
            "trained on; bring the files back, or name others with --source"
        )
