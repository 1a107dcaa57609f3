"""Generated folders of transformers: settings, indices and weights changed at any place; see `tests.fuzz`.

Whatever comes, a model that computes finite numbers, or an error of one line, in bounded time and memory.
"""

import json
import shutil
from pathlib import Path
from random import Random

import pytest

from fastformer.apps.pretrained import from_transformers
from tests.apps.pretrained.test_foreign_folders import INDEX, WEIGHTS, in_parts
from tests.apps.pretrained.tiny_models import build
from tests.fuzz import fuzz
from tests.fuzz.fuzz_commands import memory_limit

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("gpt2", "llama", "marian", "bert", "qwen3")
SHARE = 15  # of the inputs of other tests, since one takes 0.1 s


def test_folders(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for name in NAMES:
        build(name).save_pretrained(tmp_path / name)
    read = 0
    for number in range(0, request.config.getoption("--fuzz"), SHARE):
        random = Random(number)
        folder = shutil.copytree(tmp_path / random.choice(NAMES), tmp_path / "changed", dirs_exist_ok=True)
        if random.random() < 0.3:
            in_parts(folder, "part.safetensors")
        there = [name for name in ("config.json", INDEX, WEIGHTS, "part.safetensors") if (folder / name).exists()]
        for name in dict.fromkeys(
            ("config.json" if random.random() < 0.6 else random.choice(there), random.choice(there))
        ):
            data = (folder / name).read_bytes()
            changed = fuzz.changed_json(random, json.loads(data)) if name.endswith(".json") else None
            (folder / name).write_bytes(fuzz.damaged(random, data) if changed is None else changed)
        with memory_limit():
            read += (
                fuzz.attempt(lambda folder=folder: from_transformers(folder), (ValueError, OSError), number) is not None
            )
        shutil.rmtree(folder)
    assert read
