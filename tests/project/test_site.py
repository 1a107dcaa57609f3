"""The documentation site, built as `make docs` builds it: whole, strict, and with nothing from a network."""

import contextlib
import html
import importlib
import inspect
import io
import pkgutil
import pydoc
import re
import types
import warnings
from pathlib import Path

import pytest

pytest.importorskip("furo", reason="the site needs the extra `docs`")
pytest.importorskip("transformers", reason="its integration is on the site")

import sphinx.cmd.build
import typer
from sphinx.util.inventory import InventoryFile

import fastformer
from fastformer.apps.cli.console import app
from fastformer.apps.cli.options import walk
from tests.support.python import ROOT

pytestmark = pytest.mark.slow


# The pages that the tests below read, and one of each kind: pictures, formulas, tables from files, a tutorial.
READ = (
    "api/functional.md", "api/train.md", "command-line.md", "index.md", "benchmarks.md", "look-inside.md",
    "kernels/attention.md", "tutorials/walkthrough.md",
)  # fmt: skip


def build(*arguments: str) -> None:
    """Run Sphinx in this process."""
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()) as printed:
        status = sphinx.cmd.build.main(list(arguments))
    assert status == 0, printed.getvalue()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site: every page is read, with warnings as errors, and those of READ are written."""
    folder = tmp_path_factory.mktemp("site")
    recipe = re.search(r"^\t\$\(PYTHON\) -m sphinx (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert recipe is not None
    assert {"-W", "-n", "--keep-going", "-E"} <= set(recipe[1].split())
    doctrees, docs = ("-d", str(folder / "doctrees")), str(ROOT / "docs")
    build("-E", "-W", "--keep-going", "-n", "-q", "-b", "dummy", *doctrees, docs, str(folder / "none"))
    build("-q", *doctrees, docs, str(folder / "site"), *(str(ROOT / "docs" / page) for page in READ))
    return folder / "site"


@pytest.fixture(scope="module")
def described(site: Path) -> set[str]:
    """The dotted names that the reference describes."""
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {name for kind, entries in inventory.data.items() if kind.startswith("py:") for name in entries}


def public_names() -> list[tuple[str, str]]:
    """(module, name) of all that our modules offer; the command line is for typing."""
    walked = [module.name for module in pkgutil.walk_packages(fastformer.__path__, "fastformer.")]
    assert "fastformer.functional.choice" in walked
    modules = ["fastformer", *(name for name in walked if not re.search(r"\.(__main__|cli)\b", name))]
    return [(module, name) for module in modules for name in getattr(importlib.import_module(module), "__all__", ())]


def test_every_public_name_is_in_the_reference(described: set[str]) -> None:
    """At the place that offers it, or at another that offers the same thing."""
    things = {id(thing) for name in described if (thing := pydoc.locate(name)) is not None}
    missing = [
        f"{module}.{name}"
        for module, name in public_names()
        if not isinstance(thing := getattr(importlib.import_module(module), name), types.ModuleType)
        if f"{module}.{name}" not in described and id(thing) not in things
    ]
    assert missing == []


def test_every_documented_name_has_a_docstring(described: set[str]) -> None:
    """Classes and functions by docstrings of their own, not torch's; for the rest pages have words."""
    things = {name: pydoc.locate(name) for name in described}
    mute = [
        name
        for name, thing in things.items()
        if (inspect.isclass(thing) or inspect.isroutine(thing)) and not vars(thing).get("__doc__", thing.__doc__)
    ]
    assert mute == []


def test_shapes_errors_and_settings_are_shown(site: Path) -> None:
    entry = (site / "api" / "functional.html").read_text("utf-8").partition('id="fastformer.functional.attention"')[2]
    words = re.sub(r"<[^>]*>", "", entry).partition("attention_with_weights(")[0]
    for word in ("[B, H, T, K]", "causal: bool = False", "Returns", "Raises", "fastformer.backend.BackendError"):
        assert word in words
    settings = re.sub(r"<[^>]*>", "", (site / "api" / "train.html").read_text(encoding="utf-8"))
    assert "optimizer: adamw, adam, sgd" in settings
    assert re.search(r"end after this many optimizer steps \(.*1.*\)", settings)


def test_every_command_and_option_is_on_its_page(site: Path) -> None:
    text = html.unescape(re.sub(r"<[^>]*>", " ", (site / "command-line.html").read_text(encoding="utf-8")))
    for path, command in walk(typer.main.get_command(app), "fastformer"):
        assert f"{path} [" in text  # the line of its usage
        options = {name for each in command.params for name in each.opts if name.startswith("--")}
        assert {name for name in options if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)} == set(), path


def test_nothing_is_fetched_from_elsewhere_and_code_is_set_as_code(site: Path) -> None:
    """Links may lead out; scripts, styles, pictures and fonts are in the site."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<blockquote" not in text, f"{page.name}: code after a line without :: is set as a quotation"
        assert not re.search(r"<ol class=\"(?:upper|lower)", text), f"{page.name}: a letter with a dot is set as a list"
        fetched = re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", text)
        assert fetched
        for address in fetched:
            assert not re.match(r"(?:[a-z]+:)?//", address), f"{page.name} fetches {address}"
            if address.endswith(".html"):  # the next page, which is not among READ
                continue
            assert (page.parent / address.partition("?")[0].partition("#")[0]).exists(), f"{page.name}: {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet
