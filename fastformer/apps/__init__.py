"""Applications: translation, language models, classifiers and shared modules. The library imports none of them.

Subpackages are imported at first use, like those of `fastformer`.
"""

import importlib
import importlib.util
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    module = f"fastformer.apps.{name}"
    if name.startswith("_") or importlib.util.find_spec(module) is None:
        raise AttributeError(f"module 'fastformer.apps' has no attribute {name!r}")
    return importlib.import_module(module)
