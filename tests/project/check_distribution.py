"""Build the sdist and from it the wheel, look into both, and use the wheel in a clean environment. Run by `make dist`.

The wheel holds `fastformer` and `fastformer_kernels` and nothing else: no tests, no benchmarks, and no top-level
`kernels`, which is the name of another distribution.
"""

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
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "fastformer",
    "kernels",
    "tests",
    "benchmarks",
    "examples",
    "docs",
}
USE = """
import sys, torch, fastformer, fastformer_kernels
assert sys.prefix in fastformer.__file__, fastformer.__file__
layer = fastformer.TransformerEncoderLayer(8, 2, 16, batch_first=True)
hidden = torch.tensor([[False, False, True]])
out = layer(torch.randn(1, 3, 8), src_key_padding_mask=hidden)
out.sum().backward()
print("fastformer", fastformer.__version__, "from", fastformer.__file__)
"""


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
        found = {top for top in tops if not top.endswith(".dist-info")}
        if found != IN_WHEEL:
            sys.exit(f"the wheel holds {sorted(found)}, not {sorted(IN_WHEEL)}")
        with tarfile.open(sdist) as archive:
            inside = {entry.partition("/")[2].partition("/")[0] for entry in archive.getnames()}
        if not inside >= IN_SDIST:
            sys.exit(f"the sdist lacks {sorted(IN_SDIST - inside)}")
        venv.create(folder / "clean", with_pip=True)
        python = folder / "clean" / "bin" / "python"
        constraints = ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}[apps]", cwd=folder)
        run(python, "-c", USE, cwd=folder)
        run(python.with_name("fastformer"), "--help", cwd=folder)
        run(python.with_name("fastformer"), "demo", "--help", cwd=folder)
    print("sdist and wheel are complete, and the wheel works in a clean environment")


if __name__ == "__main__":
    main()
