"""Write a notebook from a script whose cells are separated by `# %%` and `# %% [markdown]`.

The script is the source; the notebook holds no output, so that both are small and say the same.

    python examples/notebook.py                    # examples/walkthrough.py -> examples/walkthrough.ipynb
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

WALKTHROUGH = Path(__file__).with_name("walkthrough.py")
_CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)


def cells_of(script: str) -> list[tuple[str, str]]:
    """Return the cells of a script as ("markdown" or "code", text); the first cell is its docstring, with a heading.

    Raises:
        ValueError: a Markdown cell has a line that is no comment, or a cell is of another kind.
    """
    head, *parts = _CELL.split(script)
    title, _, rest = (ast.get_docstring(ast.parse(head)) or "").partition("\n")
    cells = [("markdown", f"# {title.removesuffix('.')}\n{rest}" if title else "")]
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        if kind.strip() == "[markdown]":
            lines = text.strip("\n").split("\n")
            wrong = [line for line in lines if not line.startswith("#")]
            if wrong:
                raise ValueError(f"a line of a Markdown cell must begin with #: {wrong[0]!r}")
            cells.append(("markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)))
        elif not kind.strip():
            cells.append(("code", text.strip("\n")))
        else:
            raise ValueError(f"a cell must be '# %%' or '# %% [markdown]', not '# %%{kind}'")
    return [(kind, text) for kind, text in cells if text]


def notebook_of(script: str) -> dict[str, Any]:
    """Return a notebook in Jupyter's format 4.5."""
    cells = []
    for number, (kind, text) in enumerate(cells_of(script)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def text_of(script: str) -> str:
    """Return the text of the notebook file."""
    return json.dumps(notebook_of(script), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else WALKTHROUGH
    if path.suffix != ".py":
        sys.exit(f"{path} is no script (.py), from which the notebook beside it is written")
    path.with_suffix(".ipynb").write_text(text_of(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {path.with_suffix('.ipynb')}")
