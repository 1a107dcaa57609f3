"""Docstrings as an embedded corpus: found without importing, each once, split by file."""

from pathlib import Path

import pytest

from fastformer.apps.text import TextError, docstring_corpora
from tests.support.python import python

SENTENCE = "This docstring number {} has more than the eight words that are needed."


def write_package(folder: Path, files: int = 120) -> dict[str, Path]:
    """One file a number, each with a module's, a class's, a method's and a nested function's docstring."""
    for i in range(files):
        (folder / f"m{i}.py").write_text(
            f'"""{SENTENCE.format(f"{i}-module")}"""\n'
            "raise RuntimeError('imported')\n"
            f'class C:\n    """{SENTENCE.format(f"{i}-class")}\n\n    Over two lines."""\n'
            f"    def f(self):\n        '''{SENTENCE.format(f'{i}-method')}'''\n"
            "        if True:\n"
            f'            async def g():\n                """{SENTENCE.format(f"{i}-nested")}"""\n'
            '        def short():\n            """Return self."""\n'
            f'x = """{SENTENCE.format(f"{i}-no-docstring")}"""\n'
        )
    return {"package": folder}


def numbers(corpus) -> set[str]:
    return {line.split()[3] for line in corpus.lines}


def test_each_docstring_is_one_line_in_the_part_of_its_file(tmp_path: Path) -> None:
    roots = write_package(tmp_path)
    parts = docstring_corpora(10**9, roots)
    found = [numbers(part) for part in parts]
    assert set.union(*found) == {f"{i}-{kind}" for i in range(120) for kind in ("module", "class", "method", "nested")}
    files = [{name.split("-")[0] for name in part} for part in found]
    assert sum(map(len, files)) == 120
    assert not files[0] & files[1]
    assert len(files[1]) + len(files[2]) < 40
    assert all(len(document) == 1 for part in parts for document in part.documents)
    (line,) = (line for part in parts for line in part.lines if " 7-class " in line)
    assert line == SENTENCE.format("7-class") + " Over two lines."


def test_it_is_the_same_every_time_and_a_prefix_when_limited(tmp_path: Path) -> None:
    roots = write_package(tmp_path)
    whole = docstring_corpora(10**9, roots)
    assert whole == docstring_corpora(10**9, roots)
    size = sum(len(line) for part in whole for line in part.lines) * 2 // 3
    limited = docstring_corpora(size, roots)
    for part, all_of_it in zip(limited, whole, strict=True):
        assert part.documents == all_of_it.documents[: len(part)]
    read = sum(len(line) for part in limited for line in part.lines)
    assert size <= read < size + 200


def test_copies_count_once_tests_and_broken_files_do_not_and_no_part_changes(tmp_path: Path) -> None:
    roots = write_package(tmp_path)
    before = docstring_corpora(10**9, roots)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_text(f'"""{SENTENCE.format("of-a-test")}"""\n')
    (tmp_path / "copy.py").write_bytes((tmp_path / "m3.py").read_bytes())
    (tmp_path / "broken.py").write_text(f'"""{SENTENCE.format("broken")}"""\ndef (\n')
    (tmp_path / "binary.py").write_bytes(b"\x00\xff")
    text = f'"""{SENTENCE.format("café")}"""\n'
    (tmp_path / "latin.py").write_bytes(text.encode("latin-1"))
    (tmp_path / "unknown.py").write_bytes(b"# coding: klingon\n" + text.encode())
    (tmp_path / "stated.py").write_bytes(b"# -*- coding: latin-1 -*-\n" + text.encode("latin-1"))
    (tmp_path / "odd.py").write_text(f'"""{SENTENCE.format("odd")} \\ud800 and \\0 end."""\n')
    after = docstring_corpora(10**9, roots)
    assert set.union(*map(numbers, after)) == set.union(*map(numbers, before)) | {"café", "odd"}
    assert sum(map(len, after)) == sum(map(len, before)) + 2
    for old, new in zip(before, after, strict=True):  # no file moves to another part
        assert numbers(new) - {"café", "odd"} == numbers(old)
    with pytest.raises(TextError, match=r"no docstring for .* within 10 characters of .*; raise the size"):
        docstring_corpora(10, roots)


def test_the_installed_python_and_torch_are_read_without_importing_torch() -> None:
    # The file alone, since the rest of the package imports torch.
    code = (
        "import sys, types\n"
        "for name in ('fastformer', 'fastformer.apps.text'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__path__ = [name.replace('.', '/')]\n"
        "from fastformer.apps.text.docstrings import docstring_corpora\n"
        "parts = docstring_corpora(200_000)\n"
        "assert 'torch' not in sys.modules\n"
        "print(*map(len, parts), parts[0].words)\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    train, valid, test, words = map(int, done.stdout.split())
    assert train > 5 * (valid + test) > 0
    assert words > 15_000
