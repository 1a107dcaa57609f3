"""What people run: translation, language models, classifiers and what they share. The library imports none of it.

Its rooms are imported when they are first used, as those of `fastformer` are.
"""

import importlib
import importlib.util
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    module = f"fastformer.apps.{name}"
    if name.startswith("_") or importlib.util.find_spec(module) is None:
        raise AttributeError(f"module 'fastformer.apps' has no attribute {name!r}")
    return importlib.import_module(module)
