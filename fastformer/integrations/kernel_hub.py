"""The library in the form that Hugging Face's `kernels` package loads, from its hub or from a folder.

Write it with `python -m fastformer.integrations.kernel_hub FOLDER`, and load it::

    library = kernels.get_local_kernel(Path("FOLDER"), trust_remote_code=True)
    library.convert(model)

`kernels` imports a package from any folder, under a name with its version, beside other versions: so the package must
not import its own modules by absolute name. `write` copies the sources of this installation, makes their imports
relative, and puts the kernels inside the package; torch ops take their namespace from the name of the loaded package.
Applications and integrations are left out, because they need more than torch and Triton.
"""

import argparse
import ast
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fastformer

VARIANT = Path("build", "torch-universal")  # sources alone, for any torch and GPU
_EXCLUDED = ("apps", "integrations", "__main__.py")
_PACKAGES = ("fastformer", "fastformer_kernels")


def write(folder: Path, version: int = 1) -> Path:
    """Write the layout `build/torch-universal` into a folder.

    Args:
        folder: created if it does not exist; may hold other files, but no `build/torch-universal`.
        version: the kernel's version on the hub, which is its branch `v1`, `v2`, ….

    Returns:
        The folder of the package and its `metadata.json`.

    Raises:
        FileExistsError: `build/torch-universal` exists.
        ValueError: the version is below 1.
    """
    if version < 1:
        raise ValueError(f"version must be at least 1, not {version}")
    variant = folder / VARIANT
    files = dict(_sources())
    digest = hashlib.sha256("".join(f"{path}\0{text}\0" for path, text in files.items()).encode()).hexdigest()
    metadata = {
        "id": f"fastformer_{digest[:16]}",
        "name": "fastformer",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    if os.path.lexists(variant):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(variant))
    variant.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=variant.parent) as temporary:  # `variant` is never incomplete
        unfinished = Path(temporary) / variant.name
        for path, text in {**files, Path("metadata.json"): json.dumps(metadata, indent=2) + "\n"}.items():
            (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / path).write_text(text, encoding="utf-8")
        unfinished.rename(variant)
    return variant


def _sources() -> Iterator[tuple[Path, str]]:
    """Yield the files of the layout: path in the package, and text."""
    import fastformer_kernels

    for package, inside in ((fastformer, Path()), (fastformer_kernels, Path("fastformer_kernels"))):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            place = file.relative_to(root)
            if inside.parts or place.parts[0] not in _EXCLUDED:
                yield inside / place, relative_imports(file.read_text(encoding="utf-8"), inside / place)


def relative_imports(source: str, place: Path) -> str:
    """Return the source of a file with relative imports of the package, on the same lines.

    Args:
        source: Python, which imports by absolute names.
        place: the file's path in the package, which contains `fastformer_kernels`.

    Raises:
        ValueError: an import of the package has no relative form, such as `import fastformer.nn`.
    """
    lines = source.splitlines(keepends=True)
    dots = "." * len(place.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in _PACKAGES:
            inside = node.module.removeprefix("fastformer.") if node.module != "fastformer" else ""
            old, new = f"from {node.module} import", f"from {dots}{inside} import"
        elif isinstance(node, ast.Import) and any(name.name.split(".")[0] in _PACKAGES for name in node.names):
            old, new = "import fastformer_kernels", f"from {dots} import fastformer_kernels"
            if ast.unparse(node) != old:
                raise ValueError(f"{place}:{node.lineno}: `{ast.unparse(node)}` cannot be relative")
        else:
            continue
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(old, new, 1)
    return "".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Write the layout into the folder that the command line names."""
    parser = argparse.ArgumentParser(
        "python -m fastformer.integrations.kernel_hub", description="Write the library as the kernels package loads it."
    )
    parser.add_argument("folder", type=Path, help="where build/torch-universal is to be written")
    parser.add_argument("--version", type=int, default=1, help="the kernel's version on the hub")
    options = parser.parse_args(argv)
    try:
        write(options.folder, options.version)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
