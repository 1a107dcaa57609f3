"""A file imports only from layers of imports below its own, and the package itself is light to import."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import fastformer
from fastformer import functional
from tests.support.python import ROOT, python

PACKAGE = ROOT / "fastformer"
KERNELS = ROOT / "kernels" / "fastformer_kernels"

# From the lowest layer on; packages of one layer do not import one another. The files of `nn` have layers of their own.
LAYERS = (
    {"modes", "settings"},
    {"host", "apps.system", "apps.settings"},
    {"packing", "backend"},
    {"functional"},
    {"nn.activations", "nn.inspection", "nn.rotary", "nn.position_bias", "nn.packed_input", "nn.sdpa_calls"},
    {"nn.modules", "nn.options", "nn.kv_write", "nn.compiled_stack"},
    {"nn.projections"},
    {"nn.multihead_attention", "nn.packed_weights"},
    {"nn.fast_path"},
    {"nn.layers", "nn.cache"},
    {"nn.layer_stack"},
    {"nn.stacks"},
    {"nn.transformer", "nn.conversion"},
    {"nn"},
    {"integrations"},
    {"apps.plots"},
    {"apps.text"},
    {"apps.models", "apps.train"},
    {"apps.runs"},
    {"apps.export", "apps.serve"},
    APPLICATIONS := {f"apps.{path.parent.name}" for path in (PACKAGE / "apps").glob("*/model.py")},
    {"apps.pretrained"},
    {"apps.cli"},
    {"__main__"},
)
LEVEL = {name: level for level, packages in enumerate(LAYERS) for name in packages}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
COMMANDS = "commands"  # of an application: they register with the command line


def part(module: str) -> str:
    """`fastformer.packing.layout` -> `packing`; of `apps` and `nn` the package within: `apps.text`, `nn.layers`."""
    _, *parts = module.split(".")
    if parts[0] == "apps" and parts[-1] == COMMANDS:
        return "apps.cli"
    return ".".join(parts[:2]) if parts[0] in ("apps", "nn") else parts[0]


def imports(path: Path, module: str, is_package: bool) -> list[tuple[int, str]]:
    """The line and name of every one of our modules that a file imports, inside functions too.

    What only a type checker reads (`if TYPE_CHECKING`) is no import.
    """
    actual = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            actual.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                parents = here[: len(here) - node.level + is_package]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            if base == "fastformer":
                actual.extend((node.lineno, f"fastformer.{alias.name}") for alias in node.names)
            else:
                actual.append((node.lineno, base))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return [(line, name) for line, name in actual if name.startswith("fastformer.")]


def name_of(path: Path) -> tuple[str, bool]:
    parts = ["fastformer", *path.relative_to(PACKAGE).with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_layers_below(path):
    module, is_package = name_of(path)
    if module in ("fastformer.apps", "fastformer.nn"):  # which export names of theirs
        return
    here = part(module)
    assert here in LEVEL, f"fastformer/{here} is in no layer"
    for line, imported in imports(path, module, is_package):
        there = part(imported)
        assert there in LEVEL, f"{path.name}:{line} imports {imported}, which is in no layer"
        below = LEVEL[there] < LEVEL[here] or there == here
        assert below, f"{path.name}:{line}: {here} must not import {there}, which is not below it"


OPS = sorted(path.parent for path in (PACKAGE / "functional").glob("*/__init__.py"))


@pytest.mark.parametrize("folder", OPS, ids=lambda folder: folder.name)
def test_the_package_of_an_op_imports_no_other(folder):
    """It has kernels under its name, and `fused.py` does not import the reference."""
    assert (KERNELS / folder.name / "__init__.py").is_file()
    for path in folder.glob("*.py"):
        for line, imported in imports(path, *name_of(path)):
            inside = re.match(r"fastformer\.functional\.(\w+)", imported)
            other = inside is not None and inside[1] != folder.name and (PACKAGE / "functional" / inside[1]).is_dir()
            assert not other, f"{path.name}:{line} imports {imported}"
            assert path.name != "fused.py" or "reference" not in imported, f"{path.name}:{line} imports {imported}"


def test_an_op_hides_the_package_of_its_name():
    """The function stays under the name after every module of its package is imported."""
    for folder in OPS:
        for path in folder.glob("[a-z]*.py"):
            importlib.import_module(f"fastformer.functional.{folder.name}.{path.stem}")
    names = [folder.name for folder in OPS if folder.name != "norms"]
    assert all(callable(getattr(functional, name)) for name in (*names, "layer_norm", "dropout"))


@pytest.mark.parametrize("folder", ["fastformer", "kernels", "benchmarks", "tests"])
def test_no_folder_has_more_than_25_files(folder):
    for each in [ROOT / folder, *(path for path in (ROOT / folder).rglob("*") if path.is_dir())]:
        files = [path.name for path in each.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 25, f"{each.relative_to(ROOT)} has {len(files)}"


QUESTIONS = re.compile(
    r"torch\._C|is_compiling|is_tracing|is_current_stream_capturing|_functorch|torch\.autograd\.forward_ad"
)


def test_only_modes_reads_the_state_of_torchs_compilers():
    """`cuda_graphs` captures, which is no question."""
    allowed = {PACKAGE / "modes.py", PACKAGE / "host" / "cuda_graphs.py"}
    asking = {path for path in PACKAGE.rglob("*.py") if QUESTIONS.search(path.read_text(encoding="utf-8"))}
    assert asking <= allowed, asking - allowed


def test_the_kernels_import_nothing_of_the_package():
    for path in KERNELS.rglob("*.py"):
        assert not imports(path, "fastformer_kernels", False), path


EXTRAS = {
    "filelock", "pydantic", "sacrebleu", "sentencepiece", "safetensors", "rich", "matplotlib", "tomli_w", "typer",
    "tensorboard", "transformers", "triton", "ctranslate2",
}  # fmt: skip


def test_imports_load_no_more_than_they_need(tmp_path):
    """In one process, one statement after the other; a folder that comes later on the path has a package `kernels`.

    Hugging Face's `kernels`, which transformers imports, must win over the folder of that name in the repository.
    """
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    statements = (
        "import fastformer",
        "fastformer.Transformer, fastformer.functional, fastformer.packing",
        "import fastformer.apps.models, fastformer.apps.train",
        "sys.path.append(sys.argv[1]); import kernels; print(kernels.__file__)",
    )
    names = "print(*{name.split('.')[0] for name in sys.modules})"
    run = python("-c", "\n".join(["import sys", *(f"{each}\n{names}" for each in statements)]), tmp_path)
    assert run.returncode == 0, run.stderr
    package, modules, _, origin, _ = run.stdout.splitlines()
    assert not set(package.split()) & (EXTRAS | {"torch", "numpy", "fastformer_kernels"})
    assert not set(modules.split()) & EXTRAS
    assert origin == str(tmp_path / "kernels" / "__init__.py")


def test_every_public_name_is_there():
    for name in fastformer.__all__:
        assert getattr(fastformer, name) is not None
    with pytest.raises(AttributeError, match="'fastformer' has no attribute 'nonsense'"):
        fastformer.nonsense  # noqa: B018
