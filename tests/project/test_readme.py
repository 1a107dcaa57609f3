"""The README's Python runs, in order, as one program."""

from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def python_of(markdown: str) -> str:
    """The lines of the Python blocks, each at its place, so that an error names it."""
    lines, inside = [], False
    for line in markdown.splitlines():
        inside = inside and line != "```"
        lines.append(line if inside else "")
        inside = inside or line == "```python"
    return "\n".join(lines)


def test_every_snippet_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    markdown = README.read_text(encoding="utf-8")
    needs_a_run = next(block for block in markdown.split("```") if 'load_translator("demo")' in block)
    # What tests/apps/translation/test_demo.py does; its lines stay, empty.
    program = python_of(markdown.replace(needs_a_run, "text" + "\n" * needs_a_run.count("\n")))
    names: dict = {}
    exec(compile(program, README, "exec"), names)
    assert not names["padded"][1, 3:].any()
    assert names["padded"][1, :3].all()
    assert names["bert"].config._attn_implementation == "fastformer"
    assert (tmp_path / "runs" / "by-hand" / "config.toml").is_file()
