"""The floors: a file imports only from floors below it, and the package itself is light to import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.python import ROOT, python

PACKAGE = ROOT / "fastformer"
KERNELS = ROOT / "kernels" / "fastformer_kernels"

# From the ground up; what stands together knows nothing of one another. The files of `nn` stand on floors of their own.
FLOORS = (
    {"modes", "settings"},
    {"host", "apps.system", "apps.settings"},
    {"packing", "backend"},
    {"functional"},
    {"nn.activations", "nn.inspection", "nn.rotary", "nn.position_bias", "nn.packed_input"},
    {"nn.modules", "nn.options", "nn.kv_write"},
    {"nn.projections", "nn.sublayers", "nn.inference_weights"},
    {"nn.multihead_attention", "nn.fast_path"},
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
    {"apps.export", "apps.pretrained"},
    APPLICATIONS := {f"apps.{path.parent.name}" for path in (PACKAGE / "apps").glob("*/model.py")},
    {"apps.cli"},
    {"__main__"},
)
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
COMMANDS = "commands"  # of an application: they register with the command line


def part(module: str) -> str:
    """`fastformer.packing.layout` -> `packing`; of `apps` and `nn` the room within: `apps.text`, `nn.layers`."""
    _, *parts = module.split(".")
    if parts[0] == "apps" and parts[-1] == COMMANDS:
        return "apps.cli"
    return ".".join(parts[:2]) if parts[0] in ("apps", "nn") else parts[0]


def imports(path: Path, module: str, is_package: bool) -> list[tuple[int, str]]:
    """The line and name of every one of our modules that a file imports, inside functions too.

    What only a type checker reads (`if TYPE_CHECKING`) is no import.
    """
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                parents = here[: len(here) - node.level + is_package]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            if base == "fastformer":
                found.extend((node.lineno, f"fastformer.{alias.name}") for alias in node.names)
            else:
                found.append((node.lineno, base))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return [(line, name) for line, name in found if name.startswith("fastformer.")]


def name_of(path: Path) -> tuple[str, bool]:
    parts = ["fastformer", *path.relative_to(PACKAGE).with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_floors_below(path):
    module, is_package = name_of(path)
    if module in ("fastformer.apps", "fastformer.nn"):  # a room's face
        return
    here = part(module)
    assert here in LEVEL, f"fastformer/{here} is on no floor"
    for line, imported in imports(path, module, is_package):
        there = part(imported)
        assert there in LEVEL, f"{path.name}:{line} imports {imported}, which is on no floor"
        below = LEVEL[there] < LEVEL[here] or there == here
        assert below, f"{path.name}:{line}: {here} must not import {there}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_library_knows_no_application(path):
    module, is_package = name_of(path)
    imported = {part(name) for _, name in imports(path, module, is_package)}
    if not module.startswith(("fastformer.apps", "fastformer.__main__")):
        assert not [name for name in imported if name.startswith("apps")]
    if part(module) not in ("apps.cli", "__main__"):
        assert "apps.cli" not in imported


ROOMS = sorted(path.parent for path in (PACKAGE / "functional").glob("*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_stands_by_itself(room):
    """It has kernels under its name, knows no other room, and its way to them knows no reference."""
    assert (KERNELS / room.name / "__init__.py").is_file()
    for path in room.glob("*.py"):
        for line, imported in imports(path, *name_of(path)):
            inside = re.match(r"fastformer\.functional\.(\w+)", imported)
            other = inside is not None and inside[1] != room.name and (PACKAGE / "functional" / inside[1]).is_dir()
            assert not other, f"{path.name}:{line} imports {imported}"
            assert path.name != "fused.py" or "reference" not in imported, f"{path.name}:{line} imports {imported}"


@pytest.mark.parametrize("first", ["attention.rules", "norms.op", "linear_cross_entropy.reference", "dropout"])
def test_an_op_hides_the_room_of_its_name(first):
    """Whatever is imported first or later: the function is what people mean by the name."""
    inside = [f"{room.name}.{path.stem}" for room in ROOMS for path in room.glob("[a-z]*.py")]
    names = [room.name for room in ROOMS if room.name != "norms"]
    lines = [f"import fastformer.functional.{name}" for name in (first, *inside)]
    lines += ["from fastformer.functional.attention import packed_reference"]
    lines += [f"assert callable(fastformer.functional.{name}), '{name}'" for name in (*names, "layer_norm", "dropout")]
    run = python("-c", "\n".join(lines))
    assert run.returncode == 0, run.stderr


def test_no_application_imports_another():
    for path in FILES:
        module, is_package = name_of(path)
        home = next((each for each in APPLICATIONS if module.startswith(f"fastformer.{each}")), None)
        for line, imported in imports(path, module, is_package) if part(module) != "apps.cli" or home else ():
            room = ".".join(imported.split(".")[1:3])
            assert room not in APPLICATIONS - {home}, f"{path}:{line} imports {imported}"


def test_no_file_is_loose():
    loose = {path.stem for path in PACKAGE.glob("*.py")}
    assert loose <= {"__init__", "__main__", "backend", "modes", "settings"}


@pytest.mark.parametrize("folder", ["fastformer", "kernels", "benchmarks", "tests"])
def test_no_folder_has_more_than_25_files(folder):
    for room in [ROOT / folder, *(path for path in (ROOT / folder).rglob("*") if path.is_dir())]:
        files = [path.name for path in room.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 25, f"{room.relative_to(ROOT)} has {len(files)}"


# Packages of benchmarks/; each imports only from packages before it.
BENCHMARKS = ({"codegen", "harness"}, {"competitors"}, {"comparisons"}, {"host", "report", "tuning"})


def test_a_room_of_the_benchmarks_imports_only_from_rooms_below():
    level = {name: number for number, floor in enumerate(BENCHMARKS) for name in floor}
    for room, here in level.items():
        for path in (ROOT / "benchmarks" / room).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                there = node.module.split(".")[1:2] if isinstance(node, ast.ImportFrom) and node.module else []
                if there and node.module.startswith("benchmarks.") and there[0] in level:
                    assert level[there[0]] < here or there[0] == room, f"{path}:{node.lineno}"


QUESTIONS = re.compile(
    r"torch\._C|is_compiling|is_tracing|is_current_stream_capturing|_functorch|torch\.autograd\.forward_ad"
)


def test_only_modes_asks_who_is_looking():
    """`cuda_graphs` captures, which is no question."""
    allowed = {PACKAGE / "modes.py", PACKAGE / "host" / "cuda_graphs.py"}
    asking = {path for path in PACKAGE.rglob("*.py") if QUESTIONS.search(path.read_text(encoding="utf-8"))}
    assert asking <= allowed, asking - allowed


MAKERS = {
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "tensor",
    "zeros",
    *("rand", "randn", "randint"),
}
ON_ANY_DEVICE = {
    "fastformer/functional/choice.py": "stands for a module without parameters",
    "fastformer/nn/position_bias.py": "is a module's own, as a parameter is",
}
OF_COMMANDS = ("fastformer/apps/train/", "fastformer/apps/export/")  # run by nobody who has set a default


def test_every_tensor_is_made_on_a_device_that_is_named():
    """Callers may have set another default device, of which tensors of the CPU must not know."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{maker}" for maker in MAKERS}
            if made and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                found.append(f"{name}:{node.lineno}")
    assert [x for x in found if not x.startswith((*ON_ANY_DEVICE, *OF_COMMANDS))] == []
    assert all(any(x.startswith(name) for x in found) for name in ON_ANY_DEVICE)


def test_the_kernels_import_nothing_of_the_package():
    for path in KERNELS.rglob("*.py"):
        assert not imports(path, "fastformer_kernels", False), path


def test_the_walk_sees_every_form_of_import(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import fastformer.cli\n"
        "from fastformer import layers as x\n"
        "from ..train.loop import y\n"
        "from . import sibling\n"
        "def f():\n"
        "    from fastformer.models import z\n"
        "if TYPE_CHECKING:\n"
        "    from fastformer.plots import w\n"
        "else:\n"
        "    import fastformer.convert\n"
    )
    assert imports(path, "fastformer.text.module", False) == [
        (1, "fastformer.cli"),
        (2, "fastformer.layers"),
        (3, "fastformer.train.loop"),
        (4, "fastformer.text"),
        (6, "fastformer.models"),
        (10, "fastformer.convert"),
    ]


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


EXTRAS = {
    "filelock",
    "pydantic",
    "sacrebleu",
    "sentencepiece",
    "safetensors",
    "rich",
    "matplotlib",
    "tomli_w",
    "typer",
    "tensorboard",
    "transformers",
    "triton",
    "ctranslate2",
}


def test_import_fastformer_is_light():
    assert not loaded_by("import fastformer") & (EXTRAS | {"torch", "numpy", "fastformer_kernels"})


def test_the_modules_need_no_extra():
    assert (
        not loaded_by("import fastformer; fastformer.Transformer, fastformer.functional, fastformer.packing") & EXTRAS
    )


def test_every_public_name_is_there():
    import fastformer

    for name in fastformer.__all__:
        assert getattr(fastformer, name) is not None
    with pytest.raises(AttributeError, match="'fastformer' has no attribute 'nonsense'"):
        fastformer.nonsense  # noqa: B018


def test_a_room_of_the_applications_is_there_when_it_is_named():
    assert "torch" in loaded_by("import fastformer; fastformer.apps.models.Embedding; fastformer.apps.train.Trainer")
    import fastformer

    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        fastformer.apps.nonsense  # noqa: B018


def test_the_folder_of_the_kernels_shadows_no_package_of_that_name(tmp_path):
    """Hugging Face's `kernels`, which transformers imports, must win over ours where Python runs in the repository."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    program = "import sys; sys.path.append(sys.argv[1]); import kernels; print(kernels.__file__)"
    run = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == str(tmp_path / "kernels" / "__init__.py"), run.stderr


def kernel_parameters(path: Path) -> dict[str, list[str]]:
    """The parameters of each kernel of a file: the functions that `launch` starts, and those that they call."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and any("tl.constexpr" in ast.unparse(x) for x in node.args.args):
            found[node.name] = [argument.arg for argument in node.args.args]
    return found


def unexplained(parameters: list[str], legend: str, launched: bool) -> list[str]:
    """The parameters whose letters a legend does not have, and, of a kernel, the strides of no tensor of its own."""
    letters = set(re.findall(r"\b([A-Za-z]) \w{2}", legend.split("Letters:", 1)[-1].split("\n\n")[0]))
    wrong = []
    for name in parameters:
        stride = re.fullmatch(r"stride_(\w+)_([a-z])", name)
        if stride:
            known = stride[2].upper() in letters and (not launched or f"{stride[1]}_ptr" in parameters)
        else:
            letter = re.fullmatch(r"(?:\w+_)?([A-Z])|([a-z])_ptr", name)
            known = not ("stride" in name and launched) if letter is None else (letter[1] or letter[2]) in letters
        if not known:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    "path", sorted(KERNELS.glob("*/[a-z]*.py")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_every_letter_of_a_kernel_is_in_the_legend_of_its_room(path):
    legend = ast.get_docstring(ast.parse((path.parent / "__init__.py").read_text(encoding="utf-8"))) or ""
    text = path.read_text(encoding="utf-8")
    for kernel, parameters in kernel_parameters(path).items():
        launched = re.search(rf"launch\(\s*{kernel}\b", "".join(p.read_text() for p in path.parent.glob("*.py")))
        assert not unexplained(parameters, legend, launched is not None), f"{path.name}: {kernel}"
    assert not re.search(r"\bstride_[a-z]{2}\b", text), "a stride that does not say whose it is"


def test_the_legend_is_asked_for_every_letter():
    legend = "Letters: B batch, T queries; q queries."
    assert unexplained(["q_ptr", "stride_q_b", "stride_q_t", "T", "BLOCK_T", "tiles"], legend, True) == []
    assert unexplained(["stride_q_b", "stride"], legend, True) == ["stride_q_b", "stride"]  # of which tensor?
    assert unexplained(["q_ptr", "stride_q_h", "stride_qb", "k_ptr", "S"], legend, True) == [
        "stride_q_h", "stride_qb", "k_ptr", "S",
    ]  # fmt: skip
