"""The settings that a run keeps when it goes on, as data.json has them: config.toml may have been edited since.

A checkpoint says at which batch of an epoch it was written, which means nothing where the batches are others.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from fastformer.apps.settings import Settings, declared, facts, to_plain


def kept_settings(data: Settings, train: Settings) -> dict[str, Any]:
    """Those of the data, and those of training that are fixed.

    Not where the text stands, which may have been moved, and no lists: the labels are in the data's fingerprint.
    """
    names = [
        item.name for item, hint in declared(type(data)) if item.name != "dataset" and not {Path, tuple} & _kinds(hint)
    ]
    fixed = [item.name for item, _ in declared(type(train)) if facts(item)["fixed"]]
    return to_plain({name: vars(each)[name] for each, some in ((data, names), (train, fixed)) for name in some})


def check_kept(config: Path, before: Any, now: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first setting that is another one than `before`; older runs do not say."""
    stated = before if isinstance(before, Mapping) else {}
    for name, value in now.items():
        if stated.get(name, value) != value:
            raise ValueError(
                f"{config}: {name} cannot change when a run goes on: it was {stated[name]!r} at its begin, and is "
                f"{value!r}; put it back, or start a new run"
            )


def _kinds(hint: Any) -> set[Any]:
    return {getattr(each, "__origin__", each) for each in (hint, *get_args(hint))}
