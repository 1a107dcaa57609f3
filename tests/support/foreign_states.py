"""Training states of a stranger, whose hash is right: what stands at each place, and other files instead of it."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from fastformer.apps.train.checkpoint import STATE, file_facts, write_state

JUNK: list[Any] = [
    None, -1, 2**70, float("nan"), float("inf"), "x" * 99, b"x", (), [], {}, {"a": 1}, [[[[1]]]], True,
    torch.zeros(3), torch.zeros(0), torch.zeros((), dtype=torch.complex64), torch.zeros(2, 2).to_sparse(),
    torch.zeros(1).expand(2**40), torch.empty(2**50, device="meta"), torch.nn.Parameter(torch.zeros(2)),
]  # fmt: skip


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a nested state, but of long tuples of numbers the first alone."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list | tuple) and value:
        for index in range(len(value) if len(value) < 6 else 1):
            yield from paths(value[index], (*path, index))


def replaced(value: Any, path: tuple[Any, ...], new: Callable[[Any], Any]) -> Any:
    """A copy with another value at a place."""
    if not path:
        return new(value)
    if isinstance(value, dict):
        return {key: replaced(x, path[1:], new) if key == path[0] else x for key, x in value.items()}
    return type(value)(replaced(x, path[1:], new) if i == path[0] else x for i, x in enumerate(value))


def without(value: Any, path: tuple[Any, ...]) -> Any:
    return replaced(value, path[:-1], lambda found: {k: x for k, x in found.items() if k != path[-1]})


# What a state may lack.
MAY_MISS = {
    "metric", "scaler", "random_of_others", "epoch_loss", "epoch_tokens", "skips", "momentum_buffer",
    "validation_due", "share", "reserve",
}  # fmt: skip


def compared(path: tuple[Any, ...]) -> bool:
    """Whether what stands there must be this run's: the settings of groups are the configuration's."""
    return path[:2] != ("optimizer", "param_groups") or path[-1] == "params"


def needed(path: tuple[Any, ...]) -> bool:
    """Whether a state without that entry is damaged."""
    return bool(path) and isinstance(path[-1], str) and path[-1] not in MAY_MISS and path[0] != "scaler"


def drawn(random: Random, state: dict[str, Any]) -> tuple[Any, bool]:
    """A foreign state, and whether it must be refused."""
    if random.random() < 0.25:
        return OTHERS[random.choice(list(OTHERS))](state), True
    path = random.choice(list(paths(state)))
    if needed(path) and compared(path) and random.random() < 0.2:
        return without(state, path), True
    junk = random.choice(JUNK)
    return replaced(state, path, lambda _: junk), compared(path) and not fits(path, junk)


def put(checkpoint: Path, content: bytes | Any) -> None:
    """Another state, and its hash."""
    path = checkpoint / STATE
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        write_state(path, content)
    else:
        torch.save(content, path)
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["files"][STATE] = file_facts(path)
    (checkpoint / "meta.json").write_text(json.dumps(meta))


def fits(path: tuple[Any, ...], junk: Any) -> bool:
    """Whether this run could have written it."""
    last = path[-1] if path else None
    if isinstance(junk, Tensor | bytes | tuple):
        return False
    return (
        (junk == {} and path in ((), ("scaler",), ("optimizer", "state")) and path != ())
        or (junk == {} and path[:2] == ("optimizer", "state"))
        or (junk == [] and last in ("random_of_others", "cuda"))
        or (junk is None and last in ("decay_start", "best_value", "momentum_buffer"))
        or (junk is None and path in (("random", "python", 2),))
        or (
            isinstance(junk, int | float)
            and abs(junk) < 9
            and last in ("decay_start", "seconds", "best_value", "best_loss", "reserve")
        )
        or (junk == float("inf") and last in ("best_loss", "best_value"))
        or (junk in (-1, 2**70) and path in (("random", "python", 2), ("random", "numpy", 4)))
        or (junk is True and last == "validation_due")
    )


OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda state: b"",
    "text": lambda state: b"not a state",
    "a list": lambda state: [state],
    "None": lambda state: None,
    "a tensor": lambda state: torch.zeros(3),
    "a pickle of code": lambda state: pickle.dumps(print),
    "the old format": lambda state: _old(state),
    "cut off": lambda state: _bytes(state)[:-100],
    "without an end": lambda state: _bytes(state)[:1000],
    "compressed": lambda state: _compressed(_bytes({**state, "zeros": torch.zeros(1 << 22)})),
    "nested": lambda state: {**state, "position": _nested(300)},
    "numpy reads beyond its words": lambda state: replaced(state, ("random", "numpy", 2), lambda _: 2**30),
    "a negative step": lambda state: replaced(state, ("optimizer", "state", 0, "step"), lambda _: torch.tensor(-1.0)),
    "a step that is none": lambda state: replaced(
        state, ("optimizer", "state", 0, "step"), lambda _: torch.tensor(float("nan"))
    ),
    "sums that are none": lambda state: replaced(state, ("sums", "loss"), lambda _: torch.tensor(float("nan"))),
    "another step": lambda state: replaced(state, ("position", "step"), lambda _: 3),
    "words that torch cannot take": lambda state: replaced(state, ("random", "torch"), lambda x: x * 0 + 255),
    "fewer parameters": lambda state: replaced(state, ("optimizer", "param_groups"), lambda groups: groups[:1]),
    "parameters twice": lambda state: replaced(
        state, ("optimizer", "param_groups"), lambda groups: [groups[0], groups[0]]
    ),
    "parameters that are tensors": lambda state: replaced(
        state, ("optimizer", "param_groups", 0, "params"), lambda found: [torch.zeros(2)] * len(found)
    ),
    "parameters that are one tensor each": lambda state: replaced(
        state, ("optimizer", "param_groups", 0, "params"), lambda found: list(map(torch.tensor, found))
    ),
}


def _bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _old(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _compressed(archive: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for each in old.infolist():
            new.writestr(each.filename, old.read(each))
    return file.getvalue()


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"step": value}
    return value
