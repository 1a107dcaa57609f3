"""Triton's interpreter, with its preparations made once a launch, and what it looks up at each operation kept.

A kernel that is interpreted calls `triton.language` functions that have been replaced by NumPy's. Triton replaces them
when a kernel is launched, and again, with the same functions, at each call of a jitted function from the kernel:
`tl.sum`, `tl.cdiv` and our own helpers alike. That took 71 of the 181 CPU-seconds of
tests/kernels/test_fused_attention.py. A table of all dtypes that it makes to look up one took a twelfth of the rest.
"""

from typing import Any


def replace_once_a_launch() -> None:
    """Leave out the replacements of modules that this launch has replaced before; all launches of this process."""
    from triton.runtime import interpreter

    _keep_dtypes(interpreter)
    tl, launch, replace = interpreter.tl, interpreter.GridExecutor.__call__, interpreter._patch_lang
    replaced: set[int] | None = None  # modules of the launch under way

    def replace_once(fn: Any) -> Any:
        nonlocal replaced
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
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
