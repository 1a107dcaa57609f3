"""The documentation site: Markdown pages, and the API reference from docstrings; `make docs` builds it, offline.

A name between single backticks in a docstring is a link where it names something of ours, and code elsewhere.
"""

import fnmatch
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import fastformer
import fastformer.apps.cli  # registers the commands
from benchmarks.codegen.budget import BUDGET
from benchmarks.codegen.checks.loops import Loop
from benchmarks.report import BEGIN, END
from fastformer.apps.cli.console import app as app_of_commands
from fastformer.apps.cli.options import GROUPS, options_by_group, walk
from fastformer.apps.settings import Settings, help_line, typed_fields

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LONG = 24  # characters

PAGES_OF_FILES = {
    "contributing": "CONTRIBUTING.md",
    "design": "DESIGN.md",
    "changelog": "CHANGELOG.md",
    "security": "SECURITY.md",
    "conduct": "CODE_OF_CONDUCT.md",
    "results": "benchmarks/RESULTS.md",
    "gpu-todo": "benchmarks/GPU_TODO.md",
}

project = "fastformer"
author = copyright = "The fastformer authors"
release = version = fastformer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "py:obj"
add_module_names = False
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

autodoc_inherit_docstrings = False  # torch documents its own methods
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", r".*"),  # the default role: code, where it names nothing of ours
    ("py:class", r"Tensor|Figure|.*\.[VMT]|.*\.(Value|Model)|dict\[object"),  # of type checking only; type variables
    ("py:.*", r"(torch|np|numpy|io|pathlib|collections|typing|rich|matplotlib|sentencepiece|safetensors)\b.*"),
]

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "fastformer"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_theme_options = {"footer_icons": []}


def visit_math(self: HTML5Translator, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers draw without scripts or fonts from the network."""
    block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=block)
    self.body.append(f'<div class="formula">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def from_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Put files of the repository, and what is generated, where pages have a comment that asks for it."""
    if page in PAGES_OF_FILES:
        file = ROOT / PAGES_OF_FILES[page]
        source[0] = with_links(file.read_text(encoding="utf-8"), file.parent)
    elif page == "benchmarks":
        file = ROOT / "README.md"
        generated = file.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
        source[0] = source[0].replace("% README: benchmarks", with_links(generated, ROOT))
    elif page == "command-line":
        source[0] = source[0].replace("% command line", command_line())
        return
    elif page.startswith("kernels/"):
        file = BUDGET
        source[0] = re.sub(r"^% compiled: (.*)$", lambda found: compiled(found[1].split()), source[0], flags=re.M)
        source[0] = re.sub(r"^% loops: (.*)$", lambda found: loops(found[1]), source[0], flags=re.M)
    else:
        return
    app.env.note_dependency(str(file))


def command_line() -> str:
    """List every command with its arguments and options, read from the command line's own definitions."""
    lines = []
    commands = walk(typer.main.get_command(app_of_commands), "fastformer")
    order = {group: i for i, group in enumerate(GROUPS)}
    for path, command in sorted(commands, key=lambda each: order.get(each[1].rich_help_panel, -1)):
        context = type(command).context_class(command, info_name=path)
        lines += [f"## `{path}`", "", "```text", " ".join([path, *command.collect_usage_pieces(context)]), "```", ""]
        lines += [escaped(inspect.cleandoc(command.help or "")), ""]
        for group, rows in options_by_group(command, context).items():
            lines += [f"**{group}**", ""]
            for name, help in rows:
                lines += [f"`{name}`", f": {escaped(help)}", ""]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Text in which Markdown sees nothing but code: what stands between backticks, and flags."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*_$<\[\]{}|])", r"\\\1", parts[i])
        parts[i] = re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", parts[i])
    return "`".join(parts)


def newest() -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the newest version of Triton in the committed budget, and its rows."""
    rows = json.loads(BUDGET.read_text(encoding="utf-8"))["triton"]
    version = max(rows, key=lambda text: [int(part) for part in text.split(".")])
    return version, rows[version]


def loops(pattern: str) -> str:
    """Return a table of the costs of the loops of some cases, from the committed budget."""
    lines = ["| case | kernel | for | times | instructions | exponentials | cycles |", "|---" * 7 + "|"]
    for name, row in sorted(newest()[1].items(), key=lambda item: [part.zfill(4) for part in item[0].split()]):
        case, kernel, architecture = name.split(" | ")
        if not fnmatch.fnmatchcase(case, pattern) or not row["loops"]:
            continue
        columns = (", ".join(f"{loop[each]:.4g}" for loop in row["loops"]) for each in Loop._fields)
        shown = (case.partition("/")[2], f"`{kernel.rpartition('.')[2]}`", architecture, f"{row['replication']:.3g}")
        lines.append(f"| {' | '.join((*shown, *columns))} |")
    return "\n".join(lines)


def compiled(ops: list[str]) -> str:
    """Return a table of the compiled kernels of some ops, from the committed budget."""
    version, rows = newest()
    by_kernel: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, row in rows.items():
        case, kernel, architecture = name.split(" | ")
        if case.partition("/")[0] in ops:
            by_kernel.setdefault(kernel, {}).setdefault(architecture, []).append(row)
    lines = [
        f"The smallest and the largest value over all configurations of a kernel, compiled by Triton {version}:",
        "registers a thread, bytes of stack (spilled registers), KB of shared memory, blocks a multiprocessor.",
        "",
    ]
    lines += ["| kernel | for | configurations | registers | stack | shared | blocks |", "|---" * 7 + "|"]
    for kernel, architectures in sorted(by_kernel.items()):
        for architecture, each in sorted(architectures.items(), key=lambda entry: int(entry[0][3:])):
            columns = (between(each, name) for name in ("registers", "stack", "shared", "ctas"))
            lines.append(f"| `{kernel.rpartition('.')[2]}` | {architecture} | {len(each)} | {' | '.join(columns)} |")
    return "\n".join(lines)


def between(rows: list[dict[str, Any]], name: str) -> str:
    """Return the smallest and the largest value of a column; shared memory in KB."""
    values = sorted({row[name] >> 10 if name == "shared" else row[name] for row in rows})
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def with_links(markdown: str, folder: Path) -> str:
    """Lead relative links of a file in `folder` to the page that holds their target, or to the file."""

    def from_here(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        page = {(ROOT / file).resolve(): f"{page}.md" for page, file in PAGES_OF_FILES.items()}.get(target)
        return f"]({page or os.path.relpath(target, DOCS)}"

    return re.sub(r"\]\((?![a-z]+:|#)([^)#\s]+)", from_here, markdown)


def say_settings(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Write down settings, whose help, bounds and conditions are declared in their fields."""
    if isinstance(thing, type) and issubclass(thing, Settings):
        each = [f"    {item.name}: {help_line(item, [thing])}." for item, _ in typed_fields(thing)]
        lines += ["", "Attributes:", *each, ""] * bool(each)
    elif what in ("attribute", "property"):
        lines[:0] = [
            "..",
            "",
        ]  # an empty comment: Napoleon takes what stands before a colon in the first line for a type


def without_metadata(signature: str) -> str:
    """Write `Annotated[X, …]`, in which settings hold their bounds, as X."""
    while annotated := re.search(r"[~\w.]*\bAnnotated\[", signature):
        depth, commas, end = 1, [], annotated.end()
        while depth:
            depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(signature[end], 0)
            if depth == 1 and signature[end] == ",":
                commas.append(end)
            end += 1
        signature = signature[: annotated.start()] + signature[annotated.end() : commas[0]] + signature[end:]
    return signature


def say_signature(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leave out the constructor of a protocol, which nobody calls; a default that is made anew each time is `...`."""
    if getattr(thing, "_is_protocol", False):
        return "", returns
    return signature and without_metadata(signature.replace("<factory>", "...")), returns


def mark_long_words(app: Sphinx, page: nodes.document) -> None:
    """Give code in a line whose words do not fit into a table on a telephone a class of its own."""
    for literal in page.findall(nodes.literal):
        if any(len(word) > LONG for word in literal.astext().split()):
            literal["classes"].append("long")


def setup(app: Sphinx) -> None:
    """Pages of files; formulas are drawn by the browser; settings are documented where they are declared."""
    app.connect("autodoc-process-signature", say_signature)
    app.connect("source-read", from_repository)
    app.connect("doctree-read", mark_long_words)
    app.connect("autodoc-process-docstring", say_settings, priority=400)  # before Napoleon's 500
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
