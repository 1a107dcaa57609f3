"""Names, docstrings and pages, as far as a program can tell: `CONTRIBUTING.md` has the rules."""

import ast
import re
from pathlib import Path

import pytest

from tests.project.documents import DOCUMENTS, ROOT, sentences

FILES = [
    path
    for folder in ("fastformer", "kernels", "benchmarks", "examples", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Words in place of a noun: a variable says what it holds.
VAGUE_NAMES = {"found", "kept", "given", "wanted", "its", "theirs", "ours", "made", "said", "told", "asked"}
NOT_VERBS = {
    "a", "all", "an", "as", "at", "both", "by", "each", "every", "for", "how", "if", "in", "no", "of", "on", "one",
    "several", "that", "the", "these", "those", "what", "when", "where", "whether", "which", "who", "why", "with",
}  # fmt: skip
METAPHORS = re.compile(r"\b(rooms?|floors?|doors?|strangers?|houses?|neighbours?)\b", re.I)
LONGEST_SENTENCE = 30  # words; code between backticks is one
# A list, and a term of the benchmarks that is also a metaphor.
NO_PROSE = {"hugging-face-models.md", "glossary.md"}
OTHER_PAGES = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
PAGES = [path for path in sorted({*DOCUMENTS, *OTHER_PAGES}) if path.name not in NO_PROSE]


def properties(tree: ast.AST) -> set[ast.AST]:
    return {
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Name) and each.id.endswith("property") for each in node.decorator_list)
    }


def faults(source: str) -> list[str]:
    tree, lines = ast.parse(source), []
    nouns = properties(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node not in nouns:
            first = re.match(r"\W*(\w+)", ast.get_docstring(node) or "")
            if first and (first[1].lower() in NOT_VERBS or first[1][0].islower()):
                lines.append(f"{node.lineno}: the docstring of {node.name} begins with {first[1]!r}, not with a verb")
            parameters = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            stored = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
            lines += [f"{node.lineno}: {name} in {node.name}" for name in sorted(stored & VAGUE_NAMES - parameters)]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            lines += [f"{word[0]!r} in a docstring" for word in METAPHORS.finditer(ast.get_docstring(node) or "")]
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_verb_and_names_say_what_they_hold(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


VAGUE_IN_TEST_NAMES = {
    "ours", "theirs", "nobody", "somebody", "anybody", "somebodys", "stranger", "strangers", "room", "rooms", "house",
    "told", "asked", "neighbours",
}  # fmt: skip


def test_names_of_tests_are_literal() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.M):
            assert not VAGUE_IN_TEST_NAMES.intersection(name.split("_")), f"{path.relative_to(ROOT)}: {name}"


def test_faults_are_seen() -> None:
    source = 'def f(kept):\n    """What a room holds."""\n    found = kept = 1\n    return found\n'
    assert faults(source) == [
        "1: the docstring of f begins with 'What', not with a verb", "1: found in f", "'room' in a docstring",
    ]  # fmt: skip
    assert faults('@property\ndef f():\n    """The size."""\n') == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_pages_are_short_and_literal(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [each for each in sentences(text) if len(each.split()) > LONGEST_SENTENCE or METAPHORS.search(each)] == []


def test_sentences_of_a_page() -> None:
    page = "# A title\n\nOne `x y z`: two [three](four.md).\nFive!\n\n- six\n- seven\n\n| a | b |\n\n```text\nno\n```\n"
    assert list(sentences(page)) == ["One X:", "two three.", "Five!", "- six", "- seven"]
