"""Build the sdist and from it the wheel, check their contents, and use the wheel in a clean environment: `make dist`.

The wheel holds `fastformer` and `fastformer_kernels` and nothing else: no tests, no benchmarks, and no top-level
`kernels`, which is the name of another distribution. The environment has no Triton, and first no extra either: then
`convert` runs, with the extra `apps` the demo, and with pytest the tests in TESTS, from the sdist against the wheel.

    python tests/project/check_distribution.py [FOLDER that receives both files]
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IN_WHEEL = {"fastformer", "fastformer_kernels"}
IN_SDIST = {
    "pyproject.toml", "README.md", "LICENSE", "fastformer", "kernels", "tests", "benchmarks", "examples", "docs",
}  # fmt: skip
USE = """
import importlib.util, sys, torch, fastformer, fastformer_kernels
assert sys.prefix in fastformer.__file__, fastformer.__file__
assert not any(map(importlib.util.find_spec, ("triton", "sentencepiece", "pydantic")))
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
x, padding = torch.randn(1, 3, 8), torch.tensor([[False, False, True]])
expected = model(x, src_key_padding_mask=padding)[:, :2]
assert not fastformer.convert(model).left
out = model(x, src_key_padding_mask=padding)[:, :2]
torch.testing.assert_close(out, expected)
out.sum().backward()
print("fastformer", fastformer.__version__, "from", fastformer.__file__)
"""
TESTS = (
    "tests/nn/test_conversion.py",
    "tests/nn/test_layers.py",
    "tests/functional/test_norms.py",
    "tests/functional/test_packing.py",
)


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command to its end, or end with its exit code."""
    print("+", *command, flush=True)
    done = subprocess.run([str(part) for part in command], cwd=cwd)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Build, look, install, use; the first thing that is wrong ends it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=ROOT)
        (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
        with zipfile.ZipFile(wheel) as archive:
            tops = {entry.partition("/")[0] for entry in archive.namelist()}
        actual = {top for top in tops if not top.endswith(".dist-info")}
        if actual != IN_WHEEL:
            sys.exit(f"the wheel holds {sorted(actual)}, not {sorted(IN_WHEEL)}")
        with tarfile.open(sdist) as archive:
            inside = {entry.partition("/")[2].partition("/")[0] for entry in archive.getnames()}
        if not inside >= IN_SDIST:
            sys.exit(f"the sdist lacks {sorted(IN_SDIST - inside)}")
        venv.create(folder / "clean", with_pip=True)
        python = folder / "clean" / "bin" / "python"
        install = python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"
        run(*install, wheel, cwd=folder)
        run(python, "-c", USE, cwd=folder)
        run(*install, f"{wheel}[apps]", "pytest", "hypothesis", cwd=folder)
        run(python.with_name("fastformer"), "demo", cwd=folder)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = folder / sdist.name.removesuffix(".tar.gz")
        for package in ("fastformer", "kernels"):
            shutil.rmtree(source / package)
        run(python, "-m", "pytest", "-o", "pythonpath=.", "--quick", *TESTS, cwd=source)
        for target in map(Path, sys.argv[1:]):
            target.mkdir(exist_ok=True)
            for file in (wheel, sdist):
                shutil.copy(file, target)
    print("sdist and wheel are complete, and the wheel works in a clean environment")


if __name__ == "__main__":
    main()
