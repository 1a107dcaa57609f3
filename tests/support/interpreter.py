"""Triton's interpreter, with its preparations made once a launch, and what it looks up at each operation kept.

A kernel that is interpreted calls `triton.language` functions that have been replaced by NumPy's. Triton replaces them
when a kernel is launched, and again, with the same functions, at each call of a jitted function from the kernel:
`tl.sum`, `tl.cdiv` and our own helpers alike. That took 71 of the 181 CPU-seconds of
tests/kernels/test_fused_attention.py. A table of all dtypes that it makes to look up one took a twelfth of the rest;
checks of integers for overflow, whose result nobody reads, and shapes computed anew for each tensor, a third of that.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


def replace_once_a_launch() -> None:
    """Leave out the replacements of modules that this launch has replaced before; all launches of this process."""
    from triton.runtime import interpreter

    _keep_dtypes(interpreter)
    _leave_out_overflow_checks(interpreter)
    _keep_attributes(interpreter.tl.tensor, lambda handle, type: type.name, "handle", "type")
    _keep_attributes(interpreter.tl.block_type, lambda element_ty, shape: (element_ty.name, *shape))
    tl, launch, replace = interpreter.tl, interpreter.GridExecutor.__call__, interpreter._patch_lang
    replaced: set[int] | None = None  # modules of the launch under way
    modules_of: dict[Any, set[int]] = {}  # by function

    def replace_once(fn: Any) -> Any:
        nonlocal replaced
        if fn not in modules_of:
            modules_of[fn] = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        modules = modules_of[fn]
        if replaced is None or not modules <= replaced:
            if replaced is not None:
                replaced |= modules
            return replace(fn)
        return None

    def launch_with_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal replaced
        before, replaced = replaced, set()
        try:
            return launch(self, *args, **kwargs)
        finally:
            replaced = before

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_with_memory


def _keep_dtypes(interpreter: Any) -> None:
    look_up, known = interpreter._get_np_dtype, {}

    def np_dtype(of: Any) -> Any:
        scalar = of.scalar.name
        if scalar not in known:
            known[scalar] = look_up(of)
        return known[scalar]

    interpreter._get_np_dtype = np_dtype


def _leave_out_overflow_checks(interpreter: Any) -> None:
    """Each sum of integers is computed again in 64 bits and compared, for an assertion that only `debug` turns on."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _keep_attributes(of: type, key: Callable[..., Any], *own: str) -> None:
    """Compute the attributes of a class' objects once for each key that is made of the arguments.

    Args:
        of: the class.
        key: a function of the arguments.
        own: attributes that are not kept, but are the first arguments themselves.
    """
    initialise: Callable[..., None] = of.__init__
    known: dict[Any, dict[str, Any]] = {}

    def initialise_once(self: Any, *args: Any) -> None:
        attributes = known.get(actual := key(*args))
        if attributes is None:
            initialise(self, *args)
            known[actual] = {name: value for name, value in vars(self).items() if name not in own}
        else:
            vars(self).update(attributes, **dict(zip(own, args, strict=False)))

    of.__init__ = initialise_once
