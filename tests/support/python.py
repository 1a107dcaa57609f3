"""Python in a process of its own: our packages are found where they are, and pytest's variables are not handed on."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def variables(*paths: Path, **changes: str | None) -> dict[str, str]:
    """Return the environment of this process with changes; None removes a variable. `paths` come before our packages.

    Without what workers of pytest tell one another: in a worker pytest-benchmark switches itself off.
    """
    places = [*map(str, paths), str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    merged = {**inherited, "PYTHONPATH": os.pathsep.join(places), **changes}
    return {name: value for name, value in merged.items() if value is not None}


def python(
    *arguments: str | Path, paths: tuple[Path, ...] = (), timeout: float = 900, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, in the root of the repository."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT,
        env=variables(*paths, **changes),
    )  # fmt: skip
